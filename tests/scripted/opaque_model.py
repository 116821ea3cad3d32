"""A model behind a door, and its backend: it answers, and shows no stage, block or expert."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from experiment_core_utils.config.parts import ModelConfig
from experiment_core_utils.engines.answer_ends import AnswerEnds
from experiment_core_utils.knobs.interface import KnobLimits
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import CropRange
from experiment_core_utils.models.common.preferences import Preferences
from experiment_core_utils.models.request_work import PlannedRequests, UncountedRequests
from experiment_core_utils.models.source import ModelSource, RequestedModel
from experiment_core_utils.primitives.device import Marks
from experiment_core_utils.records.requests import KnobProof, PreparedRequest, RequestShape, StageFlops, TimedTokens
from experiment_core_utils.tasks.interface import PromptFamily, Sample, Task

EOS = 9


def text_of(token_ids: Sequence[int]) -> str:
    return " ".join(str(token) for token in token_ids if token != EOS)


@dataclass
class OpaqueModel:
    """Implements `Runnable` and nothing beside it; every answer is `script`.

    Attributes:
        batches: how many requests came together, each time.
    """

    script: tuple[int, ...] = (1, 2, EOS)
    name: str = "opaque"
    prompt_family: PromptFamily = "plain"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    ends: AnswerEnds = field(default_factory=lambda: AnswerEnds(frozenset({EOS}), text_of=text_of))
    batches: list[int] = field(default_factory=list)

    def prepare(self, sample: Sample, prompt: str, crops: CropRange | None) -> PreparedRequest:
        inputs = {"input_ids": torch.zeros(1, len(prompt), dtype=torch.long)}
        return PreparedRequest(inputs, RequestShape(None, None, 0, 0, len(prompt), 0.0))

    def to_device(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        return inputs

    def apply(self, setting: Setting) -> AbstractContextManager[object]:
        return nullcontext()

    def warm_up(self, inputs: Mapping[str, Any], max_new_tokens: int) -> None:
        return None

    def generate_timed(self, inputs: Mapping[str, Any], max_new_tokens: int, marks: Marks) -> TimedTokens:
        tokens = self.script[:max_new_tokens]
        for _ in range(len(tokens) + 1):
            marks.mark()
        return TimedTokens(tokens, ("prefill", *("decode" for _ in tokens[1:])))

    def answer_batch(self, inputs_list: Sequence[Mapping[str, Any]], max_new_tokens: int) -> list[tuple[int, ...]]:
        self.batches.append(len(inputs_list))
        return [self.script[:max_new_tokens] for _ in inputs_list]

    def decode_text(self, token_ids: tuple[int, ...]) -> str:
        return self.ends.text(token_ids)

    def prove(self, setting: Setting, inputs: Mapping[str, Any]) -> KnobProof:
        return KnobProof(None, None, None, None)

    def count_flops(self, setting: Setting, shape: RequestShape, output_tokens: int) -> StageFlops | None:
        return None

    def end_answers_at(self, stop: Sequence[str], ignore_eos: bool) -> None:
        self.ends = replace(self.ends, stop=tuple(stop), are_ignored=ignore_eos)

    def describe(self) -> Mapping[str, Any]:
        stages = {"vision": "opaque", "prefill": "opaque", "decode": "opaque"}
        return {"model_class": "OpaqueModel", "dtype": "float32", "execution_stages": stages}


@dataclass(frozen=True)
class OpaqueSource(ModelSource):
    """What a run asks before the model is loaded."""

    model_type = "opaque"
    takes_pictures = True
    has_chat_template = False
    chat_template_use = "none"
    score_folder = None
    weight_files = ()
    place = "behind a door"

    @property
    def prompt_family(self) -> PromptFamily:
        return "plain"

    def digest(self) -> str:
        return "opaque 1"

    def decoding_preferences(self) -> Preferences:
        return Preferences()

    def planned_requests(self, task: Task, sample_ids: Sequence[int], limit: int) -> PlannedRequests:
        return UncountedRequests(task, sample_ids, self.prompt_family, "the model shows no architecture")

    def load(self, config: ModelConfig, device: torch.device, *, is_profiled: bool = False) -> OpaqueModel:
        return OpaqueModel(device=device)


def opaque_source(requested: RequestedModel) -> OpaqueSource | None:
    """The `Backend` of `--model_path opaque`: 4 blocks and the best 2 of 4 experts, as its maker says."""
    if requested.path != "opaque":
        return None
    limits = KnobLimits(4, 4, 2, {"vision": "the model cuts pictures itself"})
    return OpaqueSource("opaque", limits, revision=None)
