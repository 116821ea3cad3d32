"""In: a request and a setting in force, or all prompts of a text run; out: tokens and times from marks of the run."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator

from experiment_core_utils.meters.instruments import Instruments
from experiment_core_utils.models.interface import StagedModel
from experiment_core_utils.primitives.clock import HostClock
from experiment_core_utils.primitives.collectives import outcome_of_all
from experiment_core_utils.primitives.device import new_marks, synchronize
from experiment_core_utils.primitives.distributions import rate
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.interruption import StopRequest
from experiment_core_utils.primitives.records import (
    BatchRecord,
    InferenceResults,
    MarkedTokens,
    QueryRecord,
    StagedRun,
    StageName,
    TokenisedPrompts,
)
from experiment_core_utils.primitives.text_config import judged
from experiment_core_utils.tasks.sampling import shard_of_process
from experiment_core_utils.text_generation import TextGenerator, check_context, generation_values
from experiment_core_utils.text_share import OwnPrompts, TextShare


def run_staged(model: StagedModel, inputs: Mapping[str, Any], max_new_tokens: int) -> StagedRun:
    """Greedy decoding of one request, with a mark between the stages.

    Marks: request handed over | features ready | first token | second token | … | last token. The choice of a token
    and its copy to the host belong to the interval that it ends. The knobs must be in force already. A model that
    encodes pictures somewhere inside its prefill has marks around that; its prefill is what lies before and behind.

    Args:
        inputs: tensors on the model's device.
    """
    synchronize(model.device)
    marks = new_marks(model.device)
    generated = model.generate_marked(inputs, max_new_tokens, marks)
    return staged_run(generated, marks.seconds(), generated.token_ids[-1] in model.eos_token_ids)


def staged_run(generated: MarkedTokens, seconds: Sequence[float], ended: bool) -> StagedRun:
    """Name the intervals between the marks; their sum is the total by construction."""
    spans = list(zip(generated.spans, seconds, strict=True))

    def of(stage: StageName) -> list[float]:
        return [span_s for name, span_s in spans if name == stage]

    vision, inter_token_s = of("vision"), tuple(of("decode"))
    return StagedRun(
        token_ids=generated.token_ids,
        vision_s=sum(vision) if vision else None,
        prefill_s=sum(of("prefill")),
        decode_s=sum(inter_token_s) if inter_token_s else None,
        total_s=sum(seconds),
        inter_token_s=inter_token_s,
        ended=ended,
    )


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
    one; an error in one of them is raised in all. Batches hold neighbours in the order given, each padded to its own
    longest prompt. Measured is `generate()`, from the prompts on the device to the tokens on the host: neither
    simulated waiting, nor decoding to text, nor attempts that ran out of memory. Only real tokens count: no padding,
    nothing after the first end-of-sequence, which itself counts. See `TextGenerator` for what drawn tokens depend on.

    Before, batches are warmed up as `TextShare.warm_up` says.

    Args:
        model: with transformers' `generate()`; what `accelerator.prepare` made of it will do.
        tokenised_prompts: all prompts, the same in every process, padded on the left.
        experiment_config: anything that `judged` takes.
        stop: asked between two batches and while waiting; None never stops.

    Raises:
        ConfigurationError: a value is not allowed, the prompts are not as above, or one of them together with
            `max_output_tokens` is longer than the model's context; nothing has run then.
        OutOfMemory: a batch does not fit (one prompt alone, with `halve_on_out_of_memory`).
        Stopped: someone asked for it.
        WorkerLost: another process is gone or late.
    """
    share = prepare_gen_inference(model, tokeniser, tokenised_prompts, experiment_config, accelerator)
    return run_prepared(share, accelerator, stop)


def prepare_gen_inference(
    model: Any,
    tokeniser: Any,
    tokenised_prompts: TokenisedPrompts,
    experiment_config: Any,
    accelerator: Accelerator,
    power: Instruments | None = None,
) -> TextShare:
    """The first half of `run_gen_inference`: everything judged and warmed up, so that a meter may open its window.

    Args:
        power: reads the power of the devices of this process, for the energy of its batches; None measures none.
    """
    return outcome_of_all(
        lambda: _warm_share(model, tokeniser, tokenised_prompts, experiment_config, accelerator, power), accelerator
    )


def run_prepared(share: TextShare, accelerator: Accelerator, stop: StopRequest | None = None) -> InferenceResults:
    """The second half: every batch is measured."""
    return outcome_of_all(lambda: run_share(share, stop or StopRequest()), accelerator)


def run_share(share: TextShare, stop: StopRequest) -> InferenceResults:
    """What one process generates of its own prompts; errors as `TextShare.run`."""
    queries, batches = share.run(stop)
    return results_of_records(queries, batches, share.decoding, share.process_index, share.num_processes)


def results_of_records(
    queries: Iterable[QueryRecord],
    batches: Iterable[BatchRecord],
    decoding: dict[str, Any],
    process_index: int | None,
    num_processes: int,
) -> InferenceResults:
    """Counts, tokens and rates that the records come to; times are those of the process that took longest.

    Args:
        decoding: with `pad_token_id`, which fills the rows of `output_tokens`.
        process_index: None for the records of all processes.
    """
    queries = sorted(queries, key=lambda query: query["prompt_index"])
    batches = sorted(batches, key=lambda batch: (batch["process_index"], batch["batch_index"]))
    texts = [query["output_text"] for query in queries]
    output_tokens = sum(query["output_tokens"] for query in queries)
    time_s = _longest((batch["process_index"], batch["inference_time_s"]) for batch in batches)
    return InferenceResults(
        output_tokens=_padded([query["output_token_ids"] for query in queries], decoding["pad_token_id"]),
        output_text=None if None in texts else [text for text in texts if text is not None],
        total_inference_time_s=time_s,
        total_input_tokens=sum(query["input_tokens"] for query in queries),
        total_output_tokens=output_tokens,
        num_prompts_processed=len(queries),
        tokens_per_second=rate(output_tokens, time_s),
        queries_per_second=rate(len(queries), time_s),
        latency_per_query_s=rate(time_s, len(queries)),
        process_index=process_index,
        num_processes=num_processes,
        queries=queries,
        batches=batches,
        decoding=decoding,
        simulated_delay_s=_longest((batch["process_index"], batch["simulated_delay_s"]) for batch in batches),
    )


def _longest(seconds: Iterable[tuple[int, float]]) -> float:
    """The largest sum of one process; 0 where there is nothing."""
    sums: dict[int, float] = defaultdict(float)
    for process, duration in seconds:
        sums[process] += duration
    return max(sums.values(), default=0.0)


def _padded(rows: Sequence[Sequence[int]], pad_token_id: int) -> torch.Tensor:
    """[N, longest] on the host, filled to the right."""
    tokens = torch.full((len(rows), max(map(len, rows), default=0)), pad_token_id, dtype=torch.long)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = torch.tensor(row, dtype=torch.long)
    return tokens


def _warm_share(
    model: Any,
    tokeniser: Any,
    tokenised_prompts: TokenisedPrompts,
    experiment_config: Any,
    accelerator: Accelerator,
    power: Instruments | None,
) -> TextShare:
    """This process's part, judged and warmed up."""
    config = judged(experiment_config)
    ids, mask = _checked_prompts(tokenised_prompts)
    plain_model = accelerator.unwrap_model(model)
    check_context(TokenisedPrompts(input_ids=ids, attention_mask=mask), config.max_output_tokens, plain_model.config)
    own = shard_of_process(range(len(ids)), accelerator.process_index, accelerator.num_processes)
    clock = HostClock() if power is None else power.clock
    generator = TextGenerator(plain_model, generation_values(config, plain_model, tokeniser), config.random_seed, clock)
    prompts = OwnPrompts(own, ids[list(own)], mask[list(own)])
    share = TextShare(
        generator, tokeniser, prompts, config, accelerator.process_index, accelerator.num_processes, power
    )
    share.warm_up()
    return share


def _checked_prompts(tokenised_prompts: TokenisedPrompts) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask on the host; raises ConfigurationError unless they are [N, T] with the padding on the left."""
    try:
        ids, mask = (torch.as_tensor(tokenised_prompts[name]).cpu() for name in ("input_ids", "attention_mask"))
    except KeyError as error:
        raise ConfigurationError(f"the tokenised prompts have no {error}; make them with tokenise_prompts") from None
    if ids.dim() != 2 or ids.shape != mask.shape or not ids.numel():
        raise ConfigurationError(
            f"input_ids {list(ids.shape)} and attention_mask {list(mask.shape)} must both be [prompts, tokens] and "
            "hold at least one prompt; make them with tokenise_prompts"
        )
    if not (mask[:, 1:] >= mask[:, :-1]).all() or not mask[:, -1].all():
        raise ConfigurationError("the prompts are not padded on the left; make them with tokenise_prompts")
    return ids, mask
