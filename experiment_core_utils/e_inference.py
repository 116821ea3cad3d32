"""In: a request and a setting in force, or all prompts of a text run; out: tokens and times from marks of the run."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator

from experiment_core_utils.a_distributed import outcome_of_all
from experiment_core_utils.c_prompt_processing import share_of_process
from experiment_core_utils.meters.instruments import Instruments
from experiment_core_utils.models.interface import StagedModel
from experiment_core_utils.primitives.clock import HostClock
from experiment_core_utils.primitives.device import new_marks, synchronize
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.interruption import StopRequest
from experiment_core_utils.primitives.records import (
    InferenceResults,
    MarkedTokens,
    StagedRun,
    StageName,
    TokenisedPrompts,
)
from experiment_core_utils.primitives.text_config import TextConfig, judged
from experiment_core_utils.text_generation import TextGenerator, context_length, generation_values
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
    return outcome_of_all(lambda: share.run(stop or StopRequest()), accelerator)


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
    _check_context(mask.sum(dim=1).tolist(), config, plain_model)
    own = share_of_process(range(len(ids)), accelerator.process_index, accelerator.num_processes)
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


def _check_context(lengths: list[int], config: TextConfig, model: Any) -> None:
    limit, wanted = context_length(model.config), config.max_output_tokens
    longest = max(lengths)
    if limit is not None and longest + wanted > limit:
        raise ConfigurationError(
            f"prompt {lengths.index(longest)} has {longest} tokens, with max_output_tokens {wanted} more than the "
            f"model's {limit} positions; lower max_output_tokens or max_input_tokens"
        )
