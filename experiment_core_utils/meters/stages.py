"""The energy of each stage of a request, and of the whole request beside their sum.

A stage takes milliseconds and a counter advances ten times a second, so each stage is repeated alone in windows of its
own. The sum of the stages is then compared with windows of the whole request, which are independent of them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from experiment_core_utils.engines.greedy import generate_greedily
from experiment_core_utils.engines.likelihood import ScoredRequest, ScoringStages, score_encoded, score_timed
from experiment_core_utils.meters.energy_statistics import (
    act_figures,
    act_totals,
    closure,
    gpu_source_ratio,
    source_group,
)
from experiment_core_utils.meters.instruments import Instruments
from experiment_core_utils.meters.stability import shuffled
from experiment_core_utils.meters.windows import WARM_AGAIN_S, WARM_UP_S, WindowGoal, energy_of_act
from experiment_core_utils.models.interface import Stages, devices_of
from experiment_core_utils.primitives.device import NoMarks, synchronize
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.interruption import StopRequest
from experiment_core_utils.primitives.statistics import Distribution, describe, half_of_interval
from experiment_core_utils.records.energy import (
    END_TO_END,
    PREFERRED_SOURCES,
    ActEnergy,
    Closure,
    EnergyFigure,
    IdlePower,
    StageEnergies,
)
from experiment_core_utils.records.requests import TimedTokens

REPEATS = 5
# Student's t interval of fewer windows is mostly wider than any goal.
LEAST_REPEATS = 3
IDLE_S = 2.0
Act = Callable[[], object]
Windows = Sequence[ActEnergy]
# Takes the state after the last of so many decode steps back to where it was before the first.
Rewind = Callable[[Any, int], None]


@dataclass(frozen=True)
class StageMeasurement:
    """How stages are measured."""

    using: Instruments  #: calibrated
    goal: WindowGoal  #: of every window
    #: windows of each stage at most; rounds of all stages one after the other, each in an order of its own
    repeats: int = REPEATS
    #: rounds end after as many or more, once the interval over windows of every stage is within the goal's relative
    #: error
    least_repeats: int = LEAST_REPEATS
    idle_s: float = IDLE_S  #: length of the windows without work, before the first round and after the last
    seed: int = 42  #: of the orders
    stop: StopRequest = field(default_factory=StopRequest)  #: looked at before every repetition

    def __post_init__(self) -> None:
        if self.repeats < 2:
            raise ConfigurationError(f"{self.repeats} windows of a stage have no spread; give 2 or more")


class StageRounds:
    """The windows of a request's stages, in rounds of all stages one after the other.

    Attributes:
        windows: of each stage in order of time, each by every source and device.
    """

    def __init__(self, how: StageMeasurement) -> None:
        self.windows: dict[str, list[list[ActEnergy]]] = {}
        self._how = how
        self._output_tokens = 0

    def measure(self, request: "StagedRequest", repeat: int) -> None:
        """A window of each stage, in an order that is drawn for this repeat; raises Stopped for a request to stop."""
        how, acts = self._how, request.acts
        self._output_tokens = request.output_tokens
        for name in acts:
            self.windows.setdefault(name, [])
        warm_up_s = WARM_AGAIN_S if repeat else WARM_UP_S
        for name in shuffled(list(acts), how.seed + repeat):
            self.windows[name].append(energy_of_act(_stoppable(acts[name], how.stop), how.using, how.goal, warm_up_s))

    def energies(self, idle: tuple[tuple[IdlePower, IdlePower], ...]) -> StageEnergies:
        """What the windows come to.

        Args:
            idle: power at rest before the first round and after the last, for each source and device.
        """
        totals = {name: act_totals(windows, idle) for name, windows in self.windows.items()}
        return StageEnergies(
            output_tokens=self._output_tokens,
            figures={name: act_figures(windows, idle)[0] for name, windows in self.windows.items()},
            closures=_closures(totals),
            source_ratios={name: gpu_source_ratio(totals[name]) for name in totals},
            idle=idle,
            error_goal=self._how.goal.relative_error,
        )


def are_narrow(rounds: Iterable[Sequence[Windows]], relative: float) -> bool:
    """Whether half of the interval over windows is at most this fraction of the mean, of every act and every device.

    The source whose figures the setting reports decides.

    Args:
        rounds: the windows of each act, each by every source and device.
    """
    return all(
        spread is not None
        and spread.ci_low is not None
        and spread.ci_high is not None
        and half_of_interval(spread.mean, spread.ci_low, spread.ci_high) <= relative * spread.mean
        for windows in rounds
        for spread in _spreads(windows)
    )


def _spreads(windows: Sequence[Windows]) -> list[Distribution | None]:
    """Spread of each device by the source that represents the setting; None where a window has no figure."""
    groups = [source_group(each.origin) for each in windows[0]]
    chosen = next((group for group in PREFERRED_SOURCES if group in groups), groups[0])
    found = [
        [each.joules for each in same] for same in zip(*windows, strict=True) if source_group(same[0].origin) == chosen
    ]
    return [None if None in joules else describe([each for each in joules if each is not None]) for joules in found]


def _stoppable(act: Act, stop: StopRequest) -> Act:
    def inspected() -> None:
        stop.raise_if_requested("while a stage's energy was measured")
        act()

    return inspected


class StagedRequest:
    """A request whose stages can be done again and again, each by itself; all are synchronised.

    Stages begin and end as in `StagedRun`: the choice of a token and its copy to the host belong to the stage that it
    ends.

    Attributes:
        output_tokens: of the whole request, the same every time.

    Raises:
        SettingError: the model's cache cannot be taken back to where it was after the prefill.
    """

    def __init__(self, model: Stages, inputs: Mapping[str, Any], max_new_tokens: int, rewind: Rewind) -> None:
        self._model = model
        self._inputs = inputs
        self._max_new_tokens = max_new_tokens
        self._rewind = rewind
        generated = self._generated()
        self._has_vision = "vision" in generated.spans
        self.output_tokens = len(generated.token_ids)
        with torch.inference_mode():
            self._features = model.encode_image(inputs)
            self._first_token, self._state = self._prefilled()
        if self.output_tokens > 1:
            # A cache that cannot be taken back is found before any window is open.
            self.decode()

    @property
    def acts(self) -> Mapping[str, Act]:
        """The stages' acts by name; `vision` is left out without a picture, `decode` where there is one token."""
        acts: dict[str, Act] = {"vision": self.vision} if self._has_vision else {}
        acts["prefill"] = self.prefill
        if self.output_tokens > 1:
            acts["decode"] = self.decode
        return {**acts, END_TO_END: self.whole}

    @torch.inference_mode()
    def vision(self) -> None:
        """Crops on the device -> features ready."""
        self._model.encode_image(self._inputs)
        synchronize(*devices_of(self._model))

    @torch.inference_mode()
    def prefill(self) -> None:
        """Features and prompt on the device -> first token, or the scores of continuations, on the host."""
        if isinstance(self._inputs, ScoredRequest):
            score_encoded(cast(ScoringStages, self._model), self._inputs, self._features)
        else:
            self._prefilled()
        synchronize(*devices_of(self._model))

    @torch.inference_mode()
    def decode(self) -> None:
        """First token -> last token, always from the state after the prefill."""
        token, steps = self._first_token, self.output_tokens - 1
        with self._model.decoding():
            for _ in range(steps):
                token = self._model.decode_step(token, self._state).argmax(dim=-1, keepdim=True)
                int(token)
        self._rewind(self._state, steps)
        synchronize(*devices_of(self._model))

    def whole(self) -> None:
        """Request handed over -> last token."""
        self._generated()
        synchronize(*devices_of(self._model))

    def _generated(self) -> TimedTokens:
        if isinstance(self._inputs, ScoredRequest):
            return score_timed(cast(ScoringStages, self._model), self._inputs, NoMarks())
        return generate_greedily(self._model, self._inputs, self._max_new_tokens, NoMarks())

    def _prefilled(self) -> tuple[torch.Tensor, Any]:
        logits, state = self._model.prefill(self._inputs, self._features)
        token = logits.argmax(dim=-1, keepdim=True)
        int(token)
        return token, state


def _closures(
    totals: Mapping[str, Mapping[tuple[str, str], tuple[int, EnergyFigure]]],
) -> tuple[Closure, ...]:
    return tuple(
        closure(whole, {name: found[group][1] for name, found in totals.items() if name != END_TO_END})
        for group, (_, whole) in totals[END_TO_END].items()
    )
