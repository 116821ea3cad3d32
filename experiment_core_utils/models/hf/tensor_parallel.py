"""A model whose weights several processes share (tensor parallelism of transformers): every call is made by all.

The first process has the run and a `LeadingModel`; the others `follow` it with the same model. Each call takes with it
the knobs that are in force. A timed call begins when all are ready for it.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partialmethod
from operator import attrgetter
from typing import Any

from experiment_core_utils.engines.likelihood import ScoredRequest
from experiment_core_utils.models.hf.adapter import TransformersModel
from experiment_core_utils.primitives.device import NoMarks
from experiment_core_utils.primitives.errors import EngineRefused, ProfilerError
from experiment_core_utils.primitives.in_step import Crew
from experiment_core_utils.records.requests import FollowedAnswer

Inputs = Mapping[str, Any]
# Messages beside calls.
LOAD, END = "load", "end"


class LeadingModel:
    """The model of the first process: `Runnable`, `Inspectable`, `Shared` and `Served`.

    Its stages do not run one by one: what each would have to say to the other processes is no part of it.
    """

    def __init__(self, model: TransformersModel, crew: Crew) -> None:
        self._model, self._crew = model, crew
        self.num_sharing = crew.size

    def _in_step(self, call: str, *arguments: Any) -> Any:
        """Make a call with the others as soon as all are ready; marks are set here alone."""
        told = [*map(_on_host, arguments[:-1] if call in _TIMED else arguments)]
        self._crew.tell((call, self._model.turned_knobs.in_force, told))
        self._crew.meet()
        return getattr(self._model, call)(*arguments)

    @property
    def server_pids(self) -> Sequence[int]:
        """They are the other processes."""
        return self._crew.pids

    def warm_up(self, inputs: Inputs, max_new_tokens: int) -> None:
        """The modules prepare nothing."""

    def warm_up_batch(self, inputs_list: Sequence[Inputs], max_new_tokens: int) -> None:
        """The modules prepare nothing."""

    def follow_exactly(self, inputs: Inputs, answer: tuple[int, ...]) -> FollowedAnswer:
        raise EngineRefused("whether it is right cannot be judged: weights that processes share stay as they are")

    def describe(self) -> Mapping[str, Any]:
        return {**self._model.describe(), "tensor_parallel": self._crew.size}


# What the first process does by itself; requests go to the others with the call that needs them, and FLOPs and bytes
# are of all processes together. `isinstance` of the interface finds members of the class alone.
for _name in (
    "apply", "batch_kind", "count_bytes", "count_flops", "decode_text", "decoder_blocks", "default_top_k", "device",
    "ends", "expected_experts", "name", "num_experts", "num_total_blocks", "prepare", "prompt_family", "to_device",
):  # fmt: skip
    setattr(LeadingModel, _name, property(attrgetter(f"_model.{_name}")))
_TIMED = ("generate_timed", "generate_batch_timed")
for _name in (*_TIMED, "answer_batch", "end_answers_at", "follow_batch", "prove"):
    setattr(LeadingModel, _name, partialmethod(LeadingModel._in_step, _name))


def _on_host(argument: Any) -> Any:
    """An argument with its requests, one or several of them, on the host."""
    if isinstance(argument, Mapping):
        continuations = argument.host if isinstance(argument, ScoredRequest) else {}
        return {name: tensor.cpu() for name, tensor in argument.items()} | continuations
    is_batch = isinstance(argument, Sequence) and bool(argument) and isinstance(argument[0], Mapping)
    return [*map(_on_host, argument)] if is_batch else argument


def follow(model: TransformersModel, crew: Crew) -> None:
    """Make the calls of the first process until it ends; errors that a call means to have are reported there."""
    while (heard := crew.hear()) != END:
        call, in_force, arguments = heard
        sent = [_sent(model, each) for each in arguments]
        model.turned_knobs.put(in_force)
        crew.meet()
        with suppress(ProfilerError):
            getattr(model, call)(*sent, *([NoMarks()] if call in _TIMED else []))


def _sent(model: TransformersModel, argument: Any) -> Any:
    """An argument with its requests, one or a list of them, on the model's device."""
    if isinstance(argument, dict):
        return model.to_device(argument)
    is_batch = isinstance(argument, list) and all(isinstance(each, dict) for each in argument)
    return [model.to_device(each) for each in argument] if is_batch else argument
