"""Operations of an architecture without formulas, counted on a few sample sizes of its config.

The model is built without weights; `counted_flops` does so in a process of its own that can be ended when its time is
up. Text only. What counts is what `counters.py` has formulas for: an operator without one (a custom kernel) counts as
nothing, and so does elementwise work, of which a recurrent scan is made.
"""

import copy
import functools
import inspect
import logging
import math
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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

    Raises:
        MeterUnavailable: the model cannot be built or run without weights.
    """
    # Built from its config alone, a model does not pack its weights.
    auto = AutoModelForCausalLM.from_config
    with _named_by(config):
        model = countable(lambda: auto(copy.deepcopy(config), attn_implementation="eager"))
    decoder = CountedDecoder(model)
    return [decoder.request(size) for size in sizes]


@contextmanager
def _named_by(config: Any) -> Iterator[None]:
    try:
        yield
    except HF_CODE_ERRORS as error:
        raise MeterUnavailable(
            f"{config.model_type!r} cannot be counted without weights: {type(error).__name__}: {first_line(error)}"
        ) from error


class CountedDecoder:
    """Operations and cache of a decoder at one setting, by runs of text prompts of a few lengths.

    Args:
        model: of `countable`; at the setting whenever a method is called. Positions of pictures count as those of text.
    """

    def __init__(self, model: Any) -> None:
        self._config = model.config
        with _named_by(self._config):
            run = _LastOnly(model)
        lengths = _CountedLengths(run)
        self._prefill = CountedCurve(lambda tokens: lengths.prefill(tokens)[0])
        self._step, self._cache = CountedCurve(lengths.step), CountedCurve(lengths.cache_elements)

    def request(self, size: RequestSize) -> RequestFlops:
        """FLOPs of all requests of a size, without their pictures' encoder; raises MeterUnavailable."""
        lengths = range(size.prompt_tokens, size.prompt_tokens + size.output_tokens - 1)
        with _named_by(self._config):
            prefill, steps = self._prefill(size.prompt_tokens), [self._step(each) for each in lengths]
        decode = size.requests * sum(steps)
        stages = StageFlops(None, size.requests * prefill, decode / len(steps) if steps else None)
        return RequestFlops(stages, decode)

    def cache_elements(self, tokens: int) -> int:
        """Numbers that a cache of one row of `tokens` positions has, states of recurrent layers among them; raises
        MeterUnavailable.
        """
        with _named_by(self._config):
            return self._cache(tokens)


class _LastOnly:
    """Forward passes with the head on the last position only, where the model can do so, as in `generate()`."""

    def __init__(self, model: Any) -> None:
        taken = inspect.signature(model.forward).parameters
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}
        self._model = without_padding_warning(model)

    def __call__(self, tokens: int, cache: Any) -> Any:
        ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
        return self._model(input_ids=ids, past_key_values=cache, use_cache=True, **self._options)


class _CountedLengths:
    """Counts at each length of a prompt, of which one run serves all."""

    def __init__(self, run: _LastOnly) -> None:
        self._run = run
        self._prefilled: dict[int, tuple[int, Any]] = {}
        self._elements: dict[int, int] = {}

    def prefill(self, tokens: int) -> tuple[int, Any]:
        """FLOPs, and the cache that it leaves; None where it leaves none."""
        if tokens not in self._prefilled:
            outputs: list[Any] = []
            flops = count_flops(lambda: outputs.append(self._run(tokens, None)))
            self._prefilled[tokens] = flops, getattr(outputs[0], "past_key_values", None)
        return self._prefilled[tokens]

    def cache_elements(self, tokens: int) -> int:
        """Numbers in the cache after the prompt."""
        if tokens not in self._elements:
            _, cache = self.prefill(tokens)
            if cache is None:
                raise TypeError("it keeps no cache of keys")
            tensors = (each for layer in cache.layers for each in tensors_of(layer))
            self._elements[tokens] = sum(each.numel() for each in tensors if each.is_floating_point())
        return self._elements[tokens]

    def step(self, tokens: int) -> int:
        """FLOPs of the token behind the prompt, which attends to its own key too."""
        self.cache_elements(tokens)  # before the step makes the cache longer
        _, cache = self.prefill(tokens)
        return count_flops(lambda: self._run(1, cache))


def tensors_of(layer: Any) -> Iterator[torch.Tensor]:
    """What a layer of a cache contains; a recurrent one has numbered states in place of keys."""
    for value in vars(layer).values():
        found = value.values() if isinstance(value, dict) else [value]
        yield from (each for each in found if isinstance(each, torch.Tensor))


class CountedCurve:
    """A count at any length from 1 on, of few counts: between two powers of 2 it is a polynomial of degree 2 where that
    agrees with one count more than it is made of; else each half by itself, as where a window ends.
    """

    def __init__(self, count: Callable[[int], int]) -> None:
        self._count = functools.cache(count)
        self._checked: dict[tuple[int, int], list[int] | None] = {}

    def __call__(self, place: int) -> int:
        low = 1 << (place.bit_length() - 1)
        first, last = low, 2 * low - 1
        while last - first > 3:
            nodes = self._nodes_of(first, last)
            if nodes is not None:
                return int(_interpolated(place, nodes, self._count))
            middle = (first + last) // 2
            first, last = (first, middle) if place <= middle else (middle + 1, last)
        return self._count(place)

    def _nodes_of(self, first: int, last: int) -> list[int] | None:
        """What the polynomial of these lengths is made of; None where it is none."""
        if (first, last) not in self._checked:
            start, checked, *others = [first + number * (last - first) // 3 for number in range(4)]
            agrees = _interpolated(checked, [start, *others], self._count) == self._count(checked)
            self._checked[first, last] = [start, *others] if agrees else None
        return self._checked[first, last]


def _interpolated(place: int, nodes: Sequence[int], count: Callable[[int], int]) -> Fraction:
    """Lagrange's polynomial through the nodes, exactly."""
    total = Fraction(0)
    for node in nodes:
        others = (Fraction(place - other, node - other) for other in nodes if other != node)
        total += count(node) * math.prod(others, start=Fraction(1))
    return total
