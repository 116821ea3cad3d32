"""A staged model that answers and sleeps by its script, and remembers its calls."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from experiment_core_utils.engines.answer_ends import AnswerEnds
from experiment_core_utils.engines.greedy import generate_greedily
from experiment_core_utils.knobs.active_blocks import blocks_of, num_blocks_of
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.top_k import experts_of
from experiment_core_utils.knobs.vision_tokens import CropRange
from experiment_core_utils.models.costs.memory import ModelBytes
from experiment_core_utils.primitives.device import Marks
from experiment_core_utils.records.requests import (
    FollowedAnswer,
    KnobProof,
    PreparedRequest,
    RequestShape,
    StageFlops,
    TimedBatch,
    TimedTokens,
)
from experiment_core_utils.records.stages import Component
from experiment_core_utils.tasks.interface import PromptFamily, Sample

EOS = 9
VOCABULARY = 10


def scripted_text(token_ids: Sequence[int]) -> str:
    return " ".join(str(token) for token in token_ids if token != EOS)


@dataclass
class ScriptedModel:
    """Implements `StagedModel`; the n-th token of every generation is `script[n]`.

    Attributes:
        calls: what was called, in order; marks may be written into it too.
        vision_s, prefill_s, decode_s: how long each stage takes at least.
        largest_batch, batch_s: requests that memory is there for together, and how long each takes in a batch.
    """

    script: tuple[int, ...] = (1, 2, EOS)
    vision_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    largest_batch: int = 1000
    batch_s: float = 0.0
    calls: list[str] = field(default_factory=list)
    name: str = "scripted"
    prompt_family: PromptFamily = "molmo"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    num_total_blocks: int = 2
    num_experts: int = 4
    default_top_k: int = 2
    ends: AnswerEnds = field(default_factory=lambda: AnswerEnds(frozenset({EOS}), text_of=scripted_text))
    decoder_blocks: tuple[torch.nn.Module, ...] = ()
    active_setting: tuple[int, tuple[int, ...]] = (2, (0, 1))
    has_next_way: bool = False

    def prepare(self, sample: Sample, prompt: str, crops: CropRange | None) -> PreparedRequest:
        allowed = "own" if crops is None else f"{crops.min_crops}-{crops.max_crops}"
        self.calls.append(f"prepare {prompt!r} {allowed}")
        inputs = {"input_ids": torch.zeros(1, len(prompt), dtype=torch.long)}
        return PreparedRequest(inputs, RequestShape(None, None, 0, 0, len(prompt), 0.0))

    def to_device(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        return inputs

    @contextmanager
    def restored_afterwards(self) -> Iterator[None]:
        before = self.active_setting
        try:
            yield
        finally:
            self.active_setting = before

    def apply(self, setting: Setting) -> None:
        self.calls.append(f"apply {setting.key}")
        self.active_setting = (experts_of(setting), blocks_of(setting))

    def samples_per_round(self, num_settings: int) -> int:
        return 1

    def release_prepared(self) -> None:
        self.calls.append("release_prepared")

    def components(self) -> Mapping[Component, Sequence[torch.nn.Module]]:
        return {}

    def warm_up(self, inputs: Mapping[str, Any], max_new_tokens: int) -> None:
        self.calls.append(f"warm_up for {max_new_tokens}")

    def refuse_setting(self) -> None:
        pass

    def run_next_way(self, reason: str) -> None:
        self.has_next_way = False

    def fix_execution(self) -> None:
        self.calls.append("fix_execution")

    def encode_image(self, inputs: Mapping[str, Any]) -> str | None:
        self.calls.append("encode_image")
        if "pixel_values" not in inputs:
            return None
        time.sleep(self.vision_s)
        return "features"

    def prefill(self, inputs: Mapping[str, Any], features: str | None) -> tuple[torch.Tensor, list[int]]:
        self.calls.append(f"prefill {features}")
        time.sleep(self.prefill_s)
        state = [self.script[0]]
        return self._logits(state[0]), state

    def decoding(self) -> AbstractContextManager[None]:
        return nullcontext()

    def decode_step(self, token: torch.Tensor, state: list[int]) -> torch.Tensor:
        assert token.shape == (1, 1)
        assert int(token) == state[-1], "a step must be given the token before it"
        self.calls.append(f"decode_step {int(token)}")
        time.sleep(self.decode_s)
        state.append(self.script[len(state)])
        return self._logits(state[-1])

    def generate_timed(self, inputs: Mapping[str, Any], max_new_tokens: int, marks: Marks) -> TimedTokens:
        return generate_greedily(self, inputs, max_new_tokens, marks)

    def expected_experts(self, setting: Setting) -> tuple[int | None, ...]:
        return tuple(self.default_top_k if block == 0 else experts_of(setting) for block in blocks_of(setting))

    def rewind(self, state: list[int], steps: int) -> None:
        del state[len(state) - steps :]

    def batch_kind(self, inputs: Mapping[str, Any]) -> bool:
        return "pixel_values" in inputs

    def warm_up_batch(self, inputs_list: Sequence[Mapping[str, Any]], max_new_tokens: int) -> None:
        self.calls.append(f"warm_up_batch of {len(inputs_list)}")

    def generate_batch_timed(
        self, inputs_list: Sequence[Mapping[str, Any]], max_new_tokens: int, marks: Marks
    ) -> TimedBatch:
        marks.mark()
        answers = tuple(self.answer_batch(inputs_list, max_new_tokens))
        for _ in answers[0]:
            marks.mark()
        return TimedBatch(answers, ("prefill", *["decode"] * (len(answers[0]) - 1)))  # type: ignore[arg-type]

    def answer_batch(self, inputs_list: Sequence[Mapping[str, Any]], max_new_tokens: int) -> list[tuple[int, ...]]:
        self.calls.append(f"answer_batch of {len(inputs_list)}")
        if len(inputs_list) > self.largest_batch:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        time.sleep(self.batch_s * len(inputs_list))
        return [self.script[:max_new_tokens] for _ in inputs_list]

    def follow_batch(
        self, inputs_list: Sequence[Mapping[str, Any]], answers: Sequence[tuple[int, ...]]
    ) -> list[FollowedAnswer]:
        self.calls.append(f"follow_batch of {len(inputs_list)}")
        scripts = [self.script[: len(answer)] for answer in answers]
        return [FollowedAnswer(script, torch.cat([self._logits(token) for token in script])) for script in scripts]

    def follow_exactly(self, inputs: Mapping[str, Any], answer: tuple[int, ...]) -> FollowedAnswer:
        return ScriptedModel.follow_batch(self, [inputs], [answer])[0]

    def decode_text(self, token_ids: tuple[int, ...]) -> str:
        return self.ends.text(token_ids)

    def end_answers_at(self, stop: Sequence[str], ignore_eos: bool) -> None:
        self.ends = replace(self.ends, stop=tuple(stop), are_ignored=ignore_eos)

    def prove(self, setting: Setting, inputs: Mapping[str, Any]) -> KnobProof:
        experts = tuple(self.default_top_k if block == 0 else experts_of(setting) for block in blocks_of(setting))
        return KnobProof(experts, blocks_of(setting), blocks_of(setting), num_blocks_of(setting))

    def count_flops(self, setting: Setting, shape: RequestShape, output_tokens: int) -> StageFlops | None:
        return None

    def count_bytes(self, setting: Setting) -> ModelBytes | None:
        return None

    def describe(self) -> Mapping[str, Any]:
        return {"model_class": "ScriptedModel", "execution_stages": {"prefill": "modules", "decode": "modules"}}

    def _logits(self, token: int) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor([token]), VOCABULARY).float()
