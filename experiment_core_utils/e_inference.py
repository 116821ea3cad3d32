"""In: a request and a setting in force, or all prompts of a text run; out: tokens and times from marks of the run."""

from collections.abc import Sequence
from typing import Any

from accelerate import Accelerator

from experiment_core_utils.c_prompt_processing import checked_prompts
from experiment_core_utils.config.text import validated
from experiment_core_utils.measuring.execution import settle_way
from experiment_core_utils.measuring.text_generator import TextGenerator
from experiment_core_utils.measuring.text_shard import OwnPrompts, TextShard, Window
from experiment_core_utils.models.common.preferences import preferences_of, values_of
from experiment_core_utils.models.common.text_generation import (
    check_context,
    describe_decoding,
    generation_values,
    results_of_records,
    text_ends,
)
from experiment_core_utils.models.text_model import staged_language_model
from experiment_core_utils.primitives.clock import Clock, HostClock
from experiment_core_utils.primitives.collectives import all_or_raise
from experiment_core_utils.primitives.interruption import StopRequest
from experiment_core_utils.records.requests import TokenisedPrompts
from experiment_core_utils.records.text import InferenceResults
from experiment_core_utils.tasks.sampling import shard_of_process


def run_gen_inference(
    model: Any,
    tokeniser: Any,
    tokenised_prompts: TokenisedPrompts,
    experiment_config: Any,
    accelerator: Accelerator,
    stop: StopRequest | None = None,
) -> InferenceResults:
    """What this process generates: of all prompts every `num_processes`-th one from its own rank on, batch by batch.

    The processes wait for each other before the first measured batch (warm-ups are done by then) and after the last
    one; an error in one of them is raised in all. Batches contain neighbours in the order given, each padded to its own
    longest prompt. Measured is from the prompts on the device to the tokens on the host: neither simulated waiting, nor
    decoding to text, nor attempts that ran out of memory. Only real tokens count: no padding, nothing after the first
    end-of-sequence, which itself counts. See `TextGenerator` for what drawn tokens depend on.

    Before, batches are warmed up as `TextShard.warm_up` says.

    Args:
        model: with transformers' `generate()`; what `accelerator.prepare` made of it will do.
        tokenised_prompts: all prompts, the same in every process, padded on the left.
        experiment_config: anything that `validated` takes.
        stop: checked between two batches and while waiting; None never stops.

    Raises:
        ConfigurationError: a value is not allowed, the prompts are not as above, or one of them together with
            `max_output_tokens` is longer than the model's context; nothing has run then.
        OutOfMemory: a batch does not fit (one prompt alone, with `halve_on_out_of_memory`).
        GenerationFailed: the model broke off, or the logits of a prompt are not finite.
        Stopped: a stop was requested.
        WorkerLost: another process is gone or late.
    """
    prompts = all_or_raise(lambda: checked_prompts(tokenised_prompts), accelerator)
    shard = prepare_gen_inference(model, tokeniser, prompts, experiment_config, accelerator)
    return all_or_raise(lambda: run_shard(shard, stop or StopRequest())[0], accelerator)


def prepare_gen_inference(
    model: Any,
    tokeniser: Any,
    prompts: TokenisedPrompts,
    experiment_config: Any,
    accelerator: Accelerator,
    clock: Clock | None = None,
    names: Sequence[int] | None = None,
) -> TextShard:
    """Validate and warm up everything that `run_gen_inference` runs, so that a meter may open its window; all processes
    run their prompts in one way.

    Args:
        prompts: all of the run, as `checked_prompts` returns them.
        clock: of the batches' windows; None takes the host's.
        names: what messages call the prompts; None for their places.
    """

    def unprepared() -> TextShard:
        config = validated(experiment_config)
        ids, mask = prompts["input_ids"], prompts["attention_mask"]
        own = accelerator.unwrap_model(model)
        check_context(prompts, config.max_output_tokens, own.config)
        places = shard_of_process(range(len(ids)), accelerator.process_index, accelerator.num_processes)
        preferences = preferences_of(values_of(own.generation_config), tokeniser, config.model_name)
        values = generation_values(config, own, tokeniser, preferences)
        ends = text_ends(config, own, tokeniser, preferences)[0]
        staged = staged_language_model(config, own, tokeniser)
        generator = TextGenerator(own, values, config.random_seed, ends, clock or HostClock(), preferences, *staged)
        part = OwnPrompts(places, ids[list(places)], mask[list(places)], names)
        return TextShard(generator, part, config, accelerator.process_index, accelerator.num_processes)

    shard = all_or_raise(unprepared, accelerator)
    staged = shard.generator.staged
    settle_way(staged, lambda: all_or_raise(shard.stages_refusal, accelerator), "prompts", accelerator)
    if staged is not None:
        staged.fix_execution()
    all_or_raise(shard.warm_up, accelerator)
    return shard


def run_shard(shard: TextShard, stop: StopRequest) -> tuple[InferenceResults, list[Window]]:
    """What one process generates of its own prompts, and when its batches ran; errors as `TextShard.run`."""
    queries, batches, windows = shard.run(stop)
    generator, preferences = shard.generator, shard.generator.preferences
    if generator.staged is not None:
        generator.staged.release_prepared()
    decoding = {
        **describe_decoding(shard.config, generator.generation),
        **generator.execution,
        "stop": list(generator.ends.stop),
        "ignore_eos": generator.ends.are_ignored,
        "preferences_kept": dict(preferences.kept),
        "preferences_left_out": dict(preferences.left_out),
    }
    return results_of_records(queries, batches, decoding, shard.process_index, shard.num_processes), windows
