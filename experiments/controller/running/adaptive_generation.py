"""Adaptive generation: the answer to a request at knobs that the two stages choose on the way, with its times.

stage 1 -> crops of the tier -> vision -> first blocks of the prefill, the budget token after the prompt -> stage 2 ->
the other chosen blocks -> decode at the chosen setting. The budget token leaves the cache before stage 2 decides: no
token of the prompt or of the answer sees it, and the answer is that of the setting, whatever the budget.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from experiment_core_utils.engines.answer_ends import AnswerEnds
from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.greedy import generate_async, generate_greedily
from experiment_core_utils.engines.paused_runner import EnginePausedPrefill, PausedPrefillShape, PausedPrefillStages
from experiment_core_utils.engines.request_slot import PrefilledRequest
from experiment_core_utils.knobs.active_blocks import RunningBlocks, blocks_of, num_blocks_of
from experiment_core_utils.knobs.block_choice import BlockChoice
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import tier_target
from experiment_core_utils.models.pausable import PausableModel
from experiment_core_utils.primitives.device import Marks, new_marks, synchronize
from experiment_core_utils.primitives.errors import SettingError
from experiment_core_utils.primitives.finite_logits import failure_named
from experiment_core_utils.records.requests import PreparedRequest
from experiment_core_utils.records.stages import Component
from experiment_core_utils.tasks.interface import Sample
from experiments.controller.knob_choices import chosen_experts
from experiments.controller.policies.interface import check_budget
from experiments.controller.running.deciders import Decider, FirstDecision
from experiments.controller.running.live import LiveRequest

Choose = Callable[[torch.Tensor], EngineKnobs]


class PausedStages:
    """The `Stages` of one request, in whose prefill the remaining knobs are chosen.

    Args:
        appended: row [1, 1, H] after the prompt in the first blocks; None for none.
        choose: states at the pause -> the knobs; see `PausedPrefillStages.begin` for those states.
    """

    def __init__(
        self,
        split: PausedPrefillStages,
        device: torch.device,
        ends: AnswerEnds,
        pause: int,
        appended: torch.Tensor | None,
        max_new_tokens: int,
        choose: Choose,
    ) -> None:
        #: device, ends: as of `Stages`
        self.device = device
        self.ends = ends
        self._split = split
        self._requested = pause, appended, max_new_tokens
        self._choose = choose
        self._chosen: EngineKnobs | None = None

    @property
    def chosen(self) -> EngineKnobs:
        """The knobs chosen at the pause; raises SettingError before the prefill."""
        if self._chosen is None:
            raise SettingError("the knobs are chosen inside the prefill; run that first")
        return self._chosen

    def components(self) -> Mapping[Component, Sequence[nn.Module]]:
        """They are not known before the choice."""
        return {}

    def encode_image(self, inputs: Mapping[str, Any]) -> Any:
        return self._split.encode_image(inputs)

    def prefill(self, inputs: Mapping[str, Any], features: Any) -> tuple[torch.Tensor, Any]:
        states = self._split.begin(inputs, features, *self._requested)
        self._chosen = self._choose(states)
        return self._split.finish(self._chosen)

    def decoding(self) -> AbstractContextManager[None]:
        return self._split.decoding()

    def decode_step(self, token: torch.Tensor, state: Any) -> torch.Tensor:
        return self._split.decode_step(token, state)


class AsyncPausedStages(PausedStages):
    """The paused stages as `AsyncStages`, for steps that choose their token on the device."""

    runs_ahead = True

    def __init__(self, split: EnginePausedPrefill, *arguments: Any) -> None:
        super().__init__(split, *arguments)
        self._engine_stages = split
        self._state: PrefilledRequest[EngineKnobs] | None = None

    @property
    def last_tokens(self) -> torch.Tensor:
        return self._engine_stages.last_tokens

    def begin(self, inputs: Mapping[str, Any], features: Any) -> None:
        logits, self._state = self.prefill(inputs, features)
        self._engine_stages.first_token(logits)

    def advance(self) -> None:
        assert self._state is not None
        self._engine_stages.advance(self._state)


@dataclass(frozen=True)
class AdaptiveRequest:
    """A sample as a request."""

    sample: Sample
    prompt: str  #: without image tokens
    max_new_tokens: int
    #: tier -> tensors on the host, where that is done already; at another tier they are made when it is chosen
    prepared: Mapping[str, PreparedRequest] = field(default_factory=dict)


def request_of(request: LiveRequest, max_new_tokens: int) -> AdaptiveRequest:
    """A sample prepared at every tier as such a request."""
    return AdaptiveRequest(request.sample, request.prompt, max_new_tokens, request.prepared)


@dataclass(frozen=True)
class AdaptiveTimes:
    """The times of one request, in seconds, by marks of that run. `total_s` is the sum of all but the last two."""

    #: prompt's ids -> tier and pause, both on the host; where modules run, their knobs are reset in it
    first_stage_s: float
    vision_s: float | None  #: None without a picture
    prefill_s: float  #: both parts, first token on the host; stage 2 is not in it
    second_stage_s: float  #: states at the pause -> top-k and blocks on the host
    decode_s: float | None  #: None for fewer than 2 tokens
    preprocess_s: float  #: host time for cutting and tokenising at the chosen tier; outside the total, as in plain runs
    transfer_s: float  #: host to device; outside the total

    @property
    def controller_s(self) -> float:
        """Seconds of both stages of the controller."""
        return self.first_stage_s + self.second_stage_s

    @property
    def total_s(self) -> float:
        """Seconds from the request handed over to the last token on the host, the controller's own time counted."""
        return self.controller_s + (self.vision_s or 0.0) + self.prefill_s + (self.decode_s or 0.0)


@dataclass(frozen=True)
class AdaptiveRun:
    """The answer to one request at the knobs that its controller chose."""

    token_ids: tuple[int, ...]
    text: str
    choice: Setting  #: tier, top-k and number of blocks
    pause: int  #: blocks that had run when stage 2 decided
    setting: Setting  #: what the choice is for this model; the decode ran at it
    #: experts per token of each block of the setting in the prefill: those before the pause ran with the model's own
    #: number, before top-k was chosen
    prefill_experts: tuple[int, ...]
    request: PreparedRequest  #: as it was prepared at the tier, for its sizes
    times: AdaptiveTimes
    ended: bool  #: whether end-of-sequence came before the limit


class AdaptiveModel:
    """MolmoE with a controller; one request at a time.

    Args:
        blocks: which blocks run for a number of them.
    """

    def __init__(self, model: PausableModel, decider: Decider, blocks: BlockChoice) -> None:
        self._staged = model
        self._decider = decider
        self._active = cache(partial(blocks.blocks, total=model.num_total_blocks))

    def warm_up(self, requests: Sequence[AdaptiveRequest]) -> None:
        """Prepare for these requests, at least one, at all possible decisions, before they are timed.

        Where modules run there is nothing to do.
        """
        if not self._staged.split.runs_by_engines:
            return
        choices: dict[str, list[tuple[int, EngineKnobs]]] = {}
        for first, second in self._decider.possible():
            choices.setdefault(first.tier, []).append((first.pause, self._engine_knobs(second)))
        self._staged.warm_up_paused_prefill(
            [
                _shape(self._prepared(request, tier).inputs, request.max_new_tokens, own)
                for request in requests
                for tier, own in choices.items()
            ]
        )

    @torch.inference_mode()
    def adaptive_generate(self, request: AdaptiveRequest, budget_s: float) -> AdaptiveRun:
        """The greedy answer at the knobs that the stages choose.

        Raises:
            ConfigurationError: a budget that is not a finite number above 0; or the decider chose a tier, a pause or
                blocks that are not possible.
            SampleError: a picture that cannot be used.
            GenerationFailed: logits are not finite.
        """
        check_budget(budget_s)
        device = self._staged.device
        ids = self._staged.prompt_ids(request.prompt)
        with self._staged.restored_afterwards():
            before, after = new_marks(device), new_marks(device)
            synchronize(device)
            before.mark()
            self._staged.split.reset()
            first, token = self._decider.first(ids, budget_s)
            before.mark()
            prepared = self._prepared(request, first.tier)
            started = time.perf_counter()
            inputs = self._staged.to_device(prepared.inputs)
            synchronize(device)
            transfer_s = time.perf_counter() - started
            with failure_named(f"sample {request.sample.sample_id}", self._staged.describe):
                found = self._answer(inputs, first, token, request.max_new_tokens, after)
            times = _times(found, before.seconds()[0], after.seconds(), prepared.shape.preprocess_s, transfer_s)
        own = self._staged.default_top_k
        assert own is not None
        return AdaptiveRun(
            token_ids=found.token_ids,
            text=self._staged.decode_text(found.token_ids),
            choice=found.choice,
            pause=first.pause,
            setting=found.setting,
            prefill_experts=tuple(
                own if block < first.pause else chosen_experts(found.choice) for block in blocks_of(found.setting)
            ),
            request=prepared,
            times=times,
            ended=self._staged.ends.up_to_end(found.token_ids)[1],
        )

    def _prepared(self, request: AdaptiveRequest, tier: str) -> PreparedRequest:
        if tier in request.prepared:
            return request.prepared[tier]
        return self._staged.prepare(request.sample, request.prompt, tier_target(tier).crops)

    def _answer(
        self, inputs: Mapping[str, Any], first: FirstDecision, token: torch.Tensor | None, limit: int, marks: Marks
    ) -> "_Answered":
        """The answer, with marks: start | features ready (with a picture) | pause | stage 2's decision | first token |
        … | last one.
        """
        split, ends, device = self._staged.split, self._staged.ends, self._staged.device

        seconds: list[Setting] = []

        def choose(states: torch.Tensor) -> EngineKnobs:
            marks.mark()
            self._decider.rehearse()
            seconds.append(self._decider.second(states))
            knobs = self._engine_knobs(seconds[-1])
            marks.mark()
            return knobs

        arguments = first.pause, token, limit, choose
        stages: PausedStages
        if isinstance(split, EnginePausedPrefill) and split.is_graphed:
            stages = ahead = AsyncPausedStages(split, device, ends, *arguments)
            token_ids = generate_async(ahead, inputs, limit, ends, marks).token_ids
        else:
            stages = PausedStages(split, device, ends, *arguments)
            token_ids = generate_greedily(stages, inputs, limit, marks).token_ids
        choice = seconds[-1].replaced(vision=tier_target(first.tier))
        setting = choice.replaced(num_active_blocks=RunningBlocks.of(stages.chosen.blocks))
        return _Answered(token_ids, choice, setting, "pixel_values" in inputs)

    def _engine_knobs(self, second: Setting) -> EngineKnobs:
        return EngineKnobs(chosen_experts(second), self._active(num_blocks_of(second)))


def _shape(inputs: Mapping[str, Any], limit: int, choices: Sequence[tuple[int, EngineKnobs]]) -> PausedPrefillShape:
    crops = inputs["pixel_values"].shape[1] if "pixel_values" in inputs else None
    return PausedPrefillShape(inputs["input_ids"].shape[1], crops, limit, tuple(choices))


@dataclass(frozen=True)
class _Answered:
    token_ids: tuple[int, ...]
    choice: Setting
    setting: Setting
    has_picture: bool


def _times(
    found: _Answered, first_stage_s: float, seconds: list[float], preprocess_s: float, transfer_s: float
) -> AdaptiveTimes:
    """The times of the intervals of `_answer` by name."""
    vision, rest = (seconds[0], seconds[1:]) if found.has_picture else (None, seconds)
    before_pause, second_stage, after_pause, *steps = rest
    return AdaptiveTimes(
        first_stage_s=first_stage_s,
        vision_s=vision,
        prefill_s=before_pause + after_pause,
        second_stage_s=second_stage,
        decode_s=sum(steps) if steps else None,
        preprocess_s=preprocess_s,
        transfer_s=transfer_s,
    )
