"""Operations of an architecture without formulas, counted on a few sample sizes of its config.

The model is built without weights, in a process of its own that can be ended when its time is up. Text only. What
counts is what `counters.py` has formulas for: an operator without one (a custom kernel) counts as nothing, and so does
elementwise work, of which a recurrent scan is made.
"""

import copy
import inspect
import logging
import multiprocessing
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from multiprocessing.connection import Connection
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from experiment_core_utils.models.common.vendor_errors import HF_CODE_ERRORS
from experiment_core_utils.models.costs.counters import count_flops, countable, without_padding_warning
from experiment_core_utils.primitives.errors import MeterUnavailable, first_line
from experiment_core_utils.records.requests import FlopsFigure, RequestFlops, RequestSize, StageFlops


def counted_flops(config: Any, sizes: Sequence[RequestSize], timeout_s: float) -> list[FlopsFigure]:
    """Operations of text requests to a model of this config, at the setting that the config says; packed weights count
    as full precision.

    Args:
        config: of a causal language model that transformers knows.
        timeout_s: for all of it; several seconds go into starting the process.

    Returns:
        One figure for each size; all None with the reason where time is up, or where the model cannot be built or run
        without weights.
    """
    if any(size.crops or size.patches for size in sizes):
        reason = f"no formula is known for {config.model_type!r}, and pictures are not counted without one"
        return _absent(reason, sizes)
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_count_and_send, args=(sending, config, sizes), daemon=True)
    with receiving:
        process.start()
        sending.close()
        try:
            if not receiving.poll(timeout_s):
                return _absent(f"counting {config.model_type!r} took longer than {timeout_s:g} s", sizes)
            figures: list[FlopsFigure] = receiving.recv()
            return figures
        except EOFError:
            process.join()
            reason = f"the process that counted {config.model_type!r} ended with exit code {process.exitcode}"
            return _absent(reason, sizes)
        finally:
            process.kill()
            process.join()
            process.close()


def _absent(reason: str, sizes: Sequence[RequestSize]) -> list[FlopsFigure]:
    return [FlopsFigure(None, "counted", reason) for _ in sizes]


def _count_and_send(sending: Connection, config: Any, sizes: Sequence[RequestSize]) -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        figures = [FlopsFigure(flops, "counted", None) for flops in count_requests(config, sizes)]
    except MeterUnavailable as error:
        figures = _absent(str(error), sizes)
    sending.send(figures)
    sending.close()


def count_requests(config: Any, sizes: Sequence[RequestSize]) -> list[RequestFlops]:
    """FLOPs of prefill and decode steps of text requests, counted in this process; see `counted_flops`.

    Prompts are counted at four lengths, steps at three, and at every one where these are not on a parabola and on a
    line.

    Raises:
        MeterUnavailable: the model cannot be built or run without weights.
    """
    try:
        # Built from its config alone, a model does not pack its weights.
        auto = AutoModelForCausalLM.from_config
        run = _LastOnly(countable(lambda: auto(copy.deepcopy(config), attn_implementation="eager")))
        prefill = _counted_at(
            (size.prompt_tokens for size in sizes), lambda tokens: count_flops(lambda: run(tokens, None)), 2
        )
        contexts = {context for size in sizes for context in _contexts(size)}
        step = _counted_at(contexts, lambda context: _count_step(run, context), 1)
    except HF_CODE_ERRORS as error:
        raise MeterUnavailable(
            f"{config.model_type!r} cannot be counted without weights: {type(error).__name__}: {first_line(error)}"
        ) from error
    return [_request(size, prefill[size.prompt_tokens], [step[each] for each in _contexts(size)]) for size in sizes]


def _contexts(size: RequestSize) -> range:
    """The number of keys that each decode step attends to, its own among them."""
    return range(size.prompt_tokens + 1, size.prompt_tokens + size.output_tokens)


def _request(size: RequestSize, prefill: int, steps: Sequence[int]) -> RequestFlops:
    decode = size.requests * sum(steps)
    return RequestFlops(StageFlops(None, size.requests * prefill, decode / len(steps) if steps else None), decode)


class _LastOnly:
    """Forward passes with the head on the last position only, where the model can do so, as in `generate()`."""

    def __init__(self, model: Any) -> None:
        taken = inspect.signature(model.forward).parameters
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}
        self._model = without_padding_warning(model)

    def __call__(self, tokens: int, cache: Any) -> Any:
        ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
        return self._model(input_ids=ids, past_key_values=cache, use_cache=True, **self._options)


def _count_step(run: _LastOnly, context: int) -> int:
    """FLOPs of a token that attends to `context` keys, its own among them."""
    with torch.inference_mode():
        cache = run(context - 1, None).past_key_values
    if cache is None:
        raise TypeError("it keeps no cache of keys")
    return count_flops(lambda: run(1, cache))


def _counted_at(places: Iterable[int], count: Callable[[int], int], degree: int) -> Mapping[int, int]:
    """The count at every place, by a polynomial of `degree` where it agrees with one count more than it is made of."""
    ordered = sorted(set(places))
    if len(ordered) <= degree + 2:
        return {place: count(place) for place in ordered}
    nodes = [ordered[number * (len(ordered) - 1) // (degree + 1)] for number in range(degree + 2)]
    counts = {node: count(node) for node in nodes}
    checked, made_of = nodes[1], [node for place, node in enumerate(nodes) if place != 1]
    if _interpolated(checked, made_of, counts) == counts[checked]:
        return {place: int(_interpolated(place, made_of, counts)) for place in ordered}
    return {place: counts[place] if place in counts else count(place) for place in ordered}


def _interpolated(place: int, nodes: Sequence[int], values: Mapping[int, int]) -> Fraction:
    """Lagrange's polynomial through the nodes, exactly."""
    total = Fraction(0)
    for node in nodes:
        term = Fraction(values[node])
        for other in nodes:
            if other != node:
                term *= Fraction(place - other, node - other)
        total += term
    return total
