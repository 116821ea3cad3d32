"""In: a config of an architecture without formulas and a request's sizes; out: operations, counted on one sample.

The model is built without weights, in a process of its own that can be ended when its time is up. Text only. What
counts is what `flop_counter` has formulas for: an operator without one (a custom kernel) counts as nothing, and so does
elementwise work, of which a recurrent scan is made.
"""

import copy
import inspect
import logging
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from experiment_core_utils.meters.flop_counter import count_flops
from experiment_core_utils.primitives.errors import MeterUnavailable, first_line
from experiment_core_utils.primitives.records import FlopsFigure, RequestFlops, RequestSize, StageFlops

# What code of an unknown architecture raises where it cannot be built or run without weights.
_FOREIGN_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


def counted_flops(config: Any, size: RequestSize, timeout_s: float) -> FlopsFigure:
    """Operations of a text request to a model of this config, at the setting that the config says; packed weights count
    as full precision.

    Args:
        config: of a causal language model that transformers knows.
        timeout_s: for all of it; several seconds go into starting the process.

    Returns:
        None with the reason where time is up, or where the model cannot be built or run without weights.
    """
    if size.crops or size.patches:
        return _absent(f"no formula is known for {config.model_type!r}, and pictures are not counted without one")
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_count_and_send, args=(sending, config, size), daemon=True)
    with receiving:
        process.start()
        sending.close()
        try:
            if not receiving.poll(timeout_s):
                return _absent(f"counting {config.model_type!r} took longer than {timeout_s:g} s")
            figure: FlopsFigure = receiving.recv()
            return figure
        except EOFError:
            process.join()
            return _absent(f"the process that counted {config.model_type!r} ended with exit code {process.exitcode}")
        finally:
            process.kill()
            process.join()
            process.close()


def _absent(reason: str) -> FlopsFigure:
    return FlopsFigure(None, "counted", reason)


def _count_and_send(sending: Connection, config: Any, size: RequestSize) -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        figure = FlopsFigure(count_request(config, size), "counted", None)
    except MeterUnavailable as error:
        figure = _absent(str(error))
    sending.send(figure)
    sending.close()


def count_request(config: Any, size: RequestSize) -> RequestFlops:
    """Prefill and decode steps of a text request, counted in this process; see `counted_flops`.

    Decode is the sum of an arithmetic series where first, middle and last step lie on a line, and otherwise of every
    step counted by itself.

    Raises:
        MeterUnavailable: the model cannot be built or run without weights.
    """
    try:
        model = _without_weights(config)
        prefill = count_flops(lambda: _run(model, size.prompt_tokens, None))
        steps = max(size.output_tokens - 1, 0)
        decode = _sum_of_steps(lambda context: _count_step(model, context), size.prompt_tokens + 1, steps)
    except _FOREIGN_ERRORS as error:
        raise MeterUnavailable(
            f"{config.model_type!r} cannot be counted without weights: {type(error).__name__}: {first_line(error)}"
        ) from error
    stages = StageFlops(None, size.requests * prefill, size.requests * decode / steps if steps else None)
    return RequestFlops(stages, size.requests * decode)


def _without_weights(config: Any) -> Any:
    # Built from its config alone, a model does not pack its weights. Unfused attention and batched experts: their
    # operators are known, and no shape depends on what was routed.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager")
    try:
        model.set_experts_implementation("batched_mm")
    except ValueError as error:
        # Some architectures without experts refuse; one with experts fails when it runs.
        logging.getLogger(__name__).debug("%s keeps its experts: %s", config.model_type, error)
    return model.eval()


def _run(model: Any, tokens: int, cache: Any) -> Any:
    """One forward pass; the head on the last position where the model can do so, as in `generate()`."""
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    last_only = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    return model(input_ids=ids, past_key_values=cache, use_cache=True, **last_only)


def _count_step(model: Any, context: int) -> int:
    """A token that attends to `context` keys, its own among them."""
    with torch.inference_mode():
        cache = _run(model, context - 1, None).past_key_values
    if cache is None:
        raise TypeError("it keeps no cache of keys")
    return count_flops(lambda: _run(model, 1, cache))


def _sum_of_steps(count: Callable[[int], int], first: int, steps: int) -> int:
    contexts = range(first, first + steps)
    if steps <= 3:
        return sum(map(count, contexts))
    last, middle = contexts[-1], contexts[steps // 2]
    at_first, at_middle, at_last = map(count, (first, middle, last))
    if (at_middle - at_first) * (last - first) == (at_last - at_first) * (middle - first):
        return steps * (at_first + at_last) // 2
    return sum(map(count, contexts))
