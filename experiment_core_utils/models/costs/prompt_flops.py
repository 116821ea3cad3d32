"""Operations of one forward pass of each prompt: by formula, or counted while one prompt of each length runs."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import nn

from experiment_core_utils.models.common.vendor_errors import HF_CODE_ERRORS
from experiment_core_utils.models.costs.active_shapes import architecture_in_force
from experiment_core_utils.models.costs.architecture import Architecture, UnknownArchitecture, architecture_of
from experiment_core_utils.models.costs.counters import (
    count_flops,
    count_with_ptflops,
    has_packed_weights,
    meta_twin,
    without_padding_warning,
)
from experiment_core_utils.primitives.device import out_of_memory_named
from experiment_core_utils.primitives.errors import (
    ConfigurationError,
    MeterUnavailable,
    OutOfMemory,
    SampleTimedOut,
    first_line,
)
from experiment_core_utils.primitives.interruption import time_limit
from experiment_core_utils.records.requests import TokenisedPrompts
from experiment_core_utils.records.text import FlopCount

FlopMethod = Literal["formula", "counter", "ptflops"]
_METHODS = ("formula", "counter", "ptflops")


def count_prompt_flops(
    model: nn.Module,
    tokenised: torch.Tensor | TokenisedPrompts,
    timeout_per_sample: float | None = 10,
    method: FlopMethod = "formula",
) -> FlopCount:
    """Operations of one forward pass of each prompt by itself, summed: no padding, logits at every position.

    By formula they take no time and count what is in force in the model: its active blocks, its experts per token.
    Otherwise one prompt of each length is run, and counts as often as the length occurs. Not counted: tokens that are
    generated afterwards, elementwise work, norms, look-ups. Attention counts as the full rectangle. Packed weights have
    the FLOPs of full precision; the counters count such a model on a twin of its architecture without weights. A model
    that cannot be run has None with the reason.

    Args:
        model: anything with `forward(input_ids=[1, T])`.
        tokenised: ids and mask, both [N, T], of which masked positions are left out; or ids [N, T] alone, of which
            `padding_at_the_ends` is left out. Without a padding token in the model's config they all count.
        timeout_per_sample: seconds for one length, where prompts are run, more than 0; None sets no limit. It ends a
            run between two operators: one that hangs runs on.
        method: `formula` for architectures that formulas are known for (`docs/compute.md`), and `counter` for others;
            `counter` is torch's with the formulas that it lacks; `ptflops` leaves out fused attention and experts.

    Raises:
        ConfigurationError: another method, a time limit of 0 or less, ids that are not [N, T], a prompt without a
            token, or a time limit outside the main thread where prompts are run.
    """
    if method not in _METHODS:
        raise ConfigurationError(f"FLOPs cannot be counted by {method!r}; choose one of {', '.join(_METHODS)}")
    if timeout_per_sample is not None and not timeout_per_sample > 0:
        raise ConfigurationError(
            f"a prompt cannot be counted in {timeout_per_sample} s; give more than 0, or None for no limit"
        )
    ids, mask = _ids_and_mask(model, tokenised)
    lengths = [int(length) for length in mask.sum(dim=1)]
    if method == "formula":
        architecture = architecture_in_force(model)
        if not isinstance(architecture, UnknownArchitecture):
            total = float(sum(times * architecture.forward_flops(each) for each, times in Counter(lengths).items()))
            return _flop_count(total, method, "config", lengths, None)
        method = "counter"
    flops, reason = None, None
    if lengths:
        samples = {length: ids[row][mask[row]].unsqueeze(0) for row, length in enumerate(lengths)}
        try:
            flops = _count_lengths(model, samples, Counter(lengths), timeout_per_sample, method)
        except (MeterUnavailable, OutOfMemory, SampleTimedOut) as error:
            reason = str(error)
    return _flop_count(flops, method, "meta_twin" if has_packed_weights(model) else "model", lengths, reason)


def _flop_count(
    flops: float | None, method: FlopMethod, counted_on: str, lengths: Sequence[int], reason: str | None
) -> FlopCount:
    if not lengths:
        flops, reason = None, "there is no prompt"
    return FlopCount(flops, method, counted_on, len(lengths), sum(lengths), reason)


def _ids_and_mask(model: nn.Module, tokenised: torch.Tensor | TokenisedPrompts) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(tokenised, Mapping):
        ids, mask = tokenised["input_ids"], tokenised["attention_mask"].bool()
    else:
        ids, mask = tokenised, ~padding_at_the_ends(model, tokenised)
    if ids.dim() != 2 or mask.shape != ids.shape:
        raise ConfigurationError(
            f"ids and mask of shape [N, T] were expected, found {list(ids.shape)} and {list(mask.shape)}"
        )
    empty = [str(row) for row, any_token in enumerate(mask.any(dim=1)) if not any_token]
    if empty:
        raise ConfigurationError(f"prompt {', '.join(empty)} has no token; leave it out")
    return ids, mask


def padding_at_the_ends(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Where ids [N, T] are padding: the padding token before a prompt's first other token or after its end.

    The token is the generation config's, else the config's. Where it also begins or ends texts, as many of it stay
    at each end as every prompt has there: of prompts that are all padded to a fixed length, these count too.
    """
    configs = [getattr(model, "generation_config", None), getattr(model, "config", None)]
    configs.append(getattr(configs[1], "text_config", None))
    pad = next((found for each in configs if (found := getattr(each, "pad_token_id", None)) is not None), None)
    if pad is None or ids.dim() != 2 or not ids.numel():
        return torch.zeros_like(ids, dtype=torch.bool)
    of_texts: set[int | None] = set()
    for name in ("bos_token_id", "eos_token_id"):
        for each in configs:
            found = getattr(each, name, None)
            of_texts.update(found if isinstance(found, list | tuple) else [found])
    is_pad = ids == pad
    padding = torch.zeros_like(is_pad)
    for from_end in (False, True):
        run = (is_pad.flip(1) if from_end else is_pad).long().cumprod(dim=1)
        if pad in of_texts:
            run = run * (run.cumsum(dim=1) > run.sum(dim=1).min())
        padding |= (run.flip(1) if from_end else run).bool()
    return padding


def _count_lengths(
    model: nn.Module,
    samples: Mapping[int, torch.Tensor],
    times: Mapping[int, int],
    timeout_s: float | None,
    method: FlopMethod,
) -> float:
    """Raises MeterUnavailable, OutOfMemory or SampleTimedOut."""
    device, run = _to_run(model)
    total = 0
    for length, sample in samples.items():
        try:
            with out_of_memory_named(), time_limit(timeout_s, "timeout_per_sample=None"):
                total += times[length] * _count(run, sample.to(device or sample.device), method)
        except SampleTimedOut as error:
            raise SampleTimedOut(f"a prompt of {length} tokens was {error}") from error
        except HF_CODE_ERRORS as error:
            raise MeterUnavailable(
                f"{type(model).__name__} cannot be run to be counted: {type(error).__name__}: {first_line(error)}"
            ) from error
    return float(total)


def _to_run(model: nn.Module) -> tuple[torch.device | None, Callable[..., object]]:
    """What is run, and where its ids must be, None anywhere; of packed weights the twin without weights.

    Raises:
        MeterUnavailable: there is no such twin, or it would not be what runs.
    """
    if not has_packed_weights(model):
        return next((parameter.device for parameter in model.parameters()), None), model
    twin = meta_twin(model)
    by_config, in_force = architecture_of(twin.config), architecture_in_force(model)
    if isinstance(by_config, Architecture):
        if isinstance(in_force, UnknownArchitecture):
            raise MeterUnavailable(f"weights are packed, and the config does not describe what runs: {in_force.reason}")
        if by_config.forward_flops(1) != in_force.forward_flops(1):
            raise MeterUnavailable("weights are packed, and other experts or blocks run than the config says")
    return torch.device("meta"), without_padding_warning(twin)


def _count(model: Callable[..., object], sample: torch.Tensor, method: FlopMethod) -> int:
    if method == "ptflops":
        return count_with_ptflops(model, sample)
    return count_flops(lambda: model(input_ids=sample))
