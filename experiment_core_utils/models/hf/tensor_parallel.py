"""A model whose weights several processes share (tensor parallelism of transformers): every call is made by all.

The first process has the run and a `LeadingModel`; the others `follow` it with the same model. Each call takes with it
the knobs that are in force. A timed call begins when all are ready for it.
"""

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import nn

from experiment_core_utils.engines.answer_ends import AnswerEnds
from experiment_core_utils.engines.likelihood import ScoredRequest
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import CropRange
from experiment_core_utils.models.costs.memory import ModelBytes
from experiment_core_utils.models.hf.adapter import TransformersModel
from experiment_core_utils.primitives.device import Marks, NoMarks
from experiment_core_utils.primitives.errors import EngineRefused, ProfilerError
from experiment_core_utils.primitives.in_step import Crew
from experiment_core_utils.records.requests import (
    FollowedAnswer,
    KnobProof,
    PreparedRequest,
    RequestShape,
    StageFlops,
    TimedBatch,
    TimedTokens,
)
from experiment_core_utils.tasks.interface import PromptFamily, Sample

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
        self.name, self.device = model.name, model.device
        self.num_total_blocks, self.num_experts = model.num_total_blocks, model.num_experts
        self.default_top_k = model.default_top_k
        self.decoder_blocks: Sequence[nn.Module] = model.decoder_blocks

    def _in_step(self, call: str, *arguments: Any) -> None:
        """Have the others make a call as soon as all are ready."""
        self._crew.tell((call, self._model.turned_knobs.in_force, arguments))
        self._crew.meet()

    @property
    def ends(self) -> AnswerEnds:
        return self._model.ends

    @property
    def server_pids(self) -> Sequence[int]:
        """They are the other processes."""
        return self._crew.pids

    @property
    def prompt_family(self) -> PromptFamily:
        return self._model.prompt_family

    def prepare(self, sample: Sample, prompt: str, crops: CropRange | None) -> PreparedRequest:
        return self._model.prepare(sample, prompt, crops)

    def to_device(self, inputs: Inputs) -> Inputs:
        """The other processes get a request with the call that needs it."""
        return self._model.to_device(inputs)

    def apply(self, setting: Setting) -> AbstractContextManager[object]:
        return self._model.apply(setting)

    def warm_up(self, inputs: Inputs, max_new_tokens: int) -> None:
        """The modules prepare nothing."""

    def generate_timed(self, inputs: Inputs, max_new_tokens: int, marks: Marks) -> TimedTokens:
        self._in_step("generate_timed", _on_host(inputs), max_new_tokens)
        return self._model.generate_timed(inputs, max_new_tokens, marks)

    def batch_kind(self, inputs: Inputs) -> Hashable:
        return self._model.batch_kind(inputs)

    def warm_up_batch(self, inputs_list: Sequence[Inputs], max_new_tokens: int) -> None:
        """The modules prepare nothing."""

    def generate_batch_timed(self, inputs_list: Sequence[Inputs], max_new_tokens: int, marks: Marks) -> TimedBatch:
        self._in_step("generate_batch_timed", [*map(_on_host, inputs_list)], max_new_tokens)
        return self._model.generate_batch_timed(inputs_list, max_new_tokens, marks)

    def answer_batch(self, inputs_list: Sequence[Inputs], max_new_tokens: int) -> list[tuple[int, ...]]:
        self._in_step("answer_batch", [*map(_on_host, inputs_list)], max_new_tokens)
        return self._model.answer_batch(inputs_list, max_new_tokens)

    def follow_batch(self, inputs_list: Sequence[Inputs], answers: Sequence[tuple[int, ...]]) -> list[FollowedAnswer]:
        self._in_step("follow_batch", [*map(_on_host, inputs_list)], answers)
        return self._model.follow_batch(inputs_list, answers)

    def follow_exactly(self, inputs: Inputs, answer: tuple[int, ...]) -> FollowedAnswer:
        raise EngineRefused("whether it is right cannot be judged: weights that processes share stay as they are")

    def decode_text(self, token_ids: tuple[int, ...]) -> str:
        return self._model.decode_text(token_ids)

    def prove(self, setting: Setting, inputs: Inputs) -> KnobProof:
        self._in_step("prove", setting, _on_host(inputs))
        return self._model.prove(setting, inputs)

    def end_answers_at(self, stop: Sequence[str], ignore_eos: bool) -> None:
        self._in_step("end_answers_at", stop, ignore_eos)
        self._model.end_answers_at(stop, ignore_eos)

    def expected_experts(self, setting: Setting) -> tuple[int | None, ...]:
        return self._model.expected_experts(setting)

    def count_flops(self, setting: Setting, shape: RequestShape, output_tokens: int) -> StageFlops | None:
        """The figure is of all processes together."""
        return self._model.count_flops(setting, shape, output_tokens)

    def count_bytes(self, setting: Setting) -> ModelBytes | None:
        """The figure is of all processes together."""
        return self._model.count_bytes(setting)

    def describe(self) -> Mapping[str, Any]:
        return {**self._model.describe(), "tensor_parallel": self._crew.size}


def _on_host(inputs: Inputs) -> dict[str, torch.Tensor]:
    given = inputs.host if isinstance(inputs, ScoredRequest) else {}
    return {name: tensor.cpu() for name, tensor in inputs.items()} | given


def follow(model: TransformersModel, crew: Crew) -> None:
    """Make the calls of the first process until it ends; errors that a call means to have are reported there."""
    while (heard := crew.hear()) != END:
        call, in_force, arguments = heard
        sent = [_sent(model, each) for each in arguments]
        model.turned_knobs.put(in_force)
        crew.meet()
        with suppress(ProfilerError):
            getattr(model, call)(*sent, *([NoMarks()] if call in ("generate_timed", "generate_batch_timed") else []))


def _sent(model: TransformersModel, argument: Any) -> Any:
    """An argument with its requests, one or a list of them, on the model's device."""
    if isinstance(argument, dict):
        return model.to_device(argument)
    is_batch = isinstance(argument, list) and all(isinstance(each, dict) for each in argument)
    return [model.to_device(each) for each in argument] if is_batch else argument
