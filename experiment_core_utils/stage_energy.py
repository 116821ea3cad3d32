"""In: a request on its device and a setting in force; out: the energy of each stage, and of the whole beside their sum.

A stage takes milliseconds and a counter advances ten times a second, so each stage is repeated alone in windows of its
own. The sum of the stages is then held against windows of the whole request, which are independent of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from experiment_core_utils.e_inference import generate_greedily
from experiment_core_utils.meters.energy_statistics import closure, energy_figure, summed_act, summed_idle
from experiment_core_utils.meters.instruments import Instruments
from experiment_core_utils.meters.windows import WindowGoal, energy_of_act, idle_power
from experiment_core_utils.models.interface import Stages
from experiment_core_utils.primitives.device import NoMarks, synchronize
from experiment_core_utils.primitives.energy_records import (
    ActEnergy,
    Closure,
    EnergyFigure,
    EnergyOrigin,
    IdlePower,
    StageEnergies,
)
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.stability import shuffled

END_TO_END = "end_to_end"
REPEATS = 5
IDLE_S = 5.0

Act = Callable[[], object]
Windows = Sequence[ActEnergy]
# Takes the state behind the last of so many decode steps back to where it was before the first.
Rewind = Callable[[Any, int], None]


@dataclass(frozen=True)
class StageMeasurement:
    """How stages are measured.

    Attributes:
        using: calibrated.
        goal: of every window.
        repeats: windows of each stage; rounds of all stages one after the other, each in an order of its own.
        idle_s: length of the windows without work, before the first round and after the last.
        seed: of the orders.
    """

    using: Instruments
    goal: WindowGoal
    repeats: int = REPEATS
    idle_s: float = IDLE_S
    seed: int = 42

    def __post_init__(self) -> None:
        if self.repeats < 2:
            raise ConfigurationError(f"{self.repeats} windows of a stage say nothing of their spread; give 2 or more")


def stage_energies(
    model: Stages, inputs: Mapping[str, Any], max_new_tokens: int, rewind: Rewind, how: StageMeasurement
) -> StageEnergies:
    """Measure every stage of one request; model, request and setting are warm already.

    Args:
        inputs: tensors on the model's device.
        max_new_tokens: end-of-sequence ends an answer before; every repetition gives the same tokens.

    Raises:
        MeterUnavailable: there is nothing to measure with.
    """
    how.using.require_any()
    output_tokens, acts = stage_acts(model, inputs, max_new_tokens, rewind)
    names = list(acts)
    rounds: dict[str, list[list[ActEnergy]]] = {name: [] for name in names}
    before = idle_power(how.using, how.idle_s)
    for repeat in range(how.repeats):
        for name in shuffled(names, how.seed + repeat):
            rounds[name].append(energy_of_act(acts[name], how.using, how.goal))
    idle = tuple(zip(before, idle_power(how.using, how.idle_s), strict=True))
    figures = {name: tuple(_figure(windows, idle) for windows in zip(*rounds[name], strict=True)) for name in names}
    totals = {name: _totals(rounds[name], idle) for name in names}
    return StageEnergies(
        output_tokens=output_tokens,
        figures={name: figures[name] + tuple(_sums(totals[name])) for name in names},
        closures=_closures(totals),
        source_ratios={name: _source_ratio(totals[name]) for name in names},
        idle=idle,
    )


def stage_acts(
    model: Stages, inputs: Mapping[str, Any], max_new_tokens: int, rewind: Rewind
) -> tuple[int, dict[str, Act]]:
    """The number of output tokens, and one act for each stage, all synchronised.

    `vision` is left out without a picture, `decode` where there is one token. Stages begin and end as in
    `StagedRun`: the choice of a token and its copy to the host belong to the stage that it ends.
    """
    with torch.inference_mode():
        features = model.encode_image(inputs)
        first, state = _first_token(model, inputs, features)
    token_ids, has_vision = generate_greedily(model, inputs, max_new_tokens, NoMarks())
    steps = len(token_ids) - 1

    @torch.inference_mode()
    def vision() -> None:
        model.encode_image(inputs)
        synchronize(model.device)

    @torch.inference_mode()
    def prefill() -> None:
        _first_token(model, inputs, features)
        synchronize(model.device)

    @torch.inference_mode()
    def decode() -> None:
        token = first
        for _ in range(steps):
            token = model.decode_step(token, state).argmax(dim=-1, keepdim=True)
            int(token)
        rewind(state, steps)
        synchronize(model.device)

    def whole() -> None:
        generate_greedily(model, inputs, max_new_tokens, NoMarks())
        synchronize(model.device)

    acts: dict[str, Act] = {}
    if has_vision:
        acts["vision"] = vision
    acts["prefill"] = prefill
    if steps:
        acts["decode"] = decode
    acts[END_TO_END] = whole
    return len(token_ids), acts


def _first_token(model: Stages, inputs: Mapping[str, Any], features: Any) -> tuple[torch.Tensor, Any]:
    logits, state = model.prefill(inputs, features)
    token = logits.argmax(dim=-1, keepdim=True)
    int(token)
    return token, state


def _figure(windows: Windows, idle: Sequence[tuple[IdlePower, IdlePower]]) -> EnergyFigure:
    """With the idle power that the same source tells of the same device."""
    for before, after in idle:
        if before.origin == windows[0].origin:
            return energy_figure(windows, before, after)
    return energy_figure(windows)


def _totals(
    rounds: Sequence[Windows], idle: Sequence[tuple[IdlePower, IdlePower]]
) -> dict[tuple[str, str], tuple[int, EnergyFigure]]:
    """Of each component and basis the number of its devices and the figure of their sum, window by window."""
    totals = {}
    for component, basis in dict.fromkeys(_group(each.origin) for each in rounds[0]):
        windows = [
            summed_act([each for each in window if _group(each.origin) == (component, basis)]) for window in rounds
        ]
        pairs = [pair for pair in idle if _group(pair[0].origin) == (component, basis)]
        sums = (summed_idle([before for before, _ in pairs]), summed_idle([after for _, after in pairs]))
        totals[component, basis] = (len(pairs), energy_figure(windows, *sums))
    return totals


def _group(origin: EnergyOrigin) -> tuple[str, str]:
    return origin.component, origin.basis


def _sums(totals: Mapping[tuple[str, str], tuple[int, EnergyFigure]]) -> list[EnergyFigure]:
    """Those of several devices; that of one is its own figure."""
    return [figure for num_devices, figure in totals.values() if num_devices > 1]


def _closures(
    totals: Mapping[str, Mapping[tuple[str, str], tuple[int, EnergyFigure]]],
) -> tuple[Closure, ...]:
    found = []
    for group, (_, whole) in totals[END_TO_END].items():
        stages = {name: totals[name][group][1] for name in totals if name != END_TO_END}
        found.append(closure(whole, stages))
    return tuple(found)


def _source_ratio(totals: Mapping[tuple[str, str], tuple[int, EnergyFigure]]) -> float | None:
    """Integrated power over counter of the GPUs; their devices have to be the same ones."""
    counted = [
        (num, each.gross_j) for (kind, basis), (num, each) in totals.items() if (kind, basis) == ("gpu", "counter")
    ]
    integrated = [
        (num, each.gross_j) for (kind, basis), (num, each) in totals.items() if kind == "gpu" and basis != "counter"
    ]
    if len(counted) != 1 or len(integrated) != 1 or counted[0][0] != integrated[0][0]:
        return None
    first, second = counted[0][1], integrated[0][1]
    return second.mean / first.mean if first is not None and second is not None and first.mean else None
