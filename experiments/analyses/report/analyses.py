"""What E1, E2 and E3 find in the folders of a run, or why one of them finds nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from experiment_core_utils.primitives.errors import ResultsError
from experiments.analyses.files import Steps
from experiments.analyses.generations import generations_of
from experiments.analyses.knobs.fronts import TaskDifference
from experiments.analyses.knobs.grid import grids_of
from experiments.analyses.knobs.objectives import ENERGY, FLOPS, LATENCY_P95
from experiments.analyses.knobs.records import TaskAnalysis
from experiments.analyses.latency.estimator import LEVEL, LatencyEstimator
from experiments.analyses.latency.features import TimedSamples, of_fewer_settings, timed_samples
from experiments.analyses.latency.guardrail import GuardrailCounts, guardrail_curve
from experiments.analyses.latency.validation import Validation, validate
from experiments.analyses.stages import operations as flops_latency
from experiments.analyses.stages.fractions import Generation, Regime, display_lengths, regimes, settings_fractions
from experiments.analyses.stages.operations import StagePoint
from experiments.analyses.stages.profiles import ProfiledRequest, load_profiles
from experiments.analyses.stages.scaling import StageLine, stage_lines
from experiments.analyses.sweeps import Sweep, load_sweep, samples_frame, settings_frame
from experiments.core_exp.e2_knob_pareto import analyse_task, compare

COSTS = (LATENCY_P95, ENERGY, FLOPS)


NUM_DRAWS = 1000


@dataclass(frozen=True)
class Missing:
    """An analysis that the results do not allow."""

    reason: str


@dataclass(frozen=True)
class StageAnalysis:
    """What E1 finds; `profiles_reason` where nothing was profiled."""

    generations: Sequence[Generation]
    by_regime: Sequence[Regime]
    by_setting: Sequence[Regime]
    lines: Sequence[StageLine]
    points: Sequence[StagePoint]
    profiles: Sequence[ProfiledRequest]
    profiles_reason: str | None


@dataclass(frozen=True)
class KnobAnalysis:
    """What E2 finds: each task's, and by the cost's name what is on one task's front and off another's."""

    tasks: Sequence[TaskAnalysis]
    differences: Mapping[str, Sequence[TaskDifference]]


@dataclass(frozen=True)
class LatencyModel:
    """What E3 finds; `left_out` says of which settings, where not of all."""

    samples: TimedSamples
    estimator: LatencyEstimator
    validation: Validation
    curve: Sequence[GuardrailCounts]
    left_out: str | None = None


@dataclass(frozen=True)
class Analyses:
    """Analyses of one sweep; `settings` and `samples` are its frames."""

    sweep: Sweep
    settings: pd.DataFrame
    samples: pd.DataFrame
    stages: StageAnalysis | Missing
    knobs: KnobAnalysis
    model: LatencyModel | Missing


def analyse(results_dirs: Sequence[Path]) -> Analyses:
    """Read and compute; E3 takes most of the time.

    Raises:
        ResultsError: no results, broken ones, or ones of different sweeps.
    """
    steps = Steps()
    sweep = load_sweep(*results_dirs)
    count = len(sweep.settings)
    steps.say(count, f"{count} settings are read; where the time goes (E1)")
    samples = samples_frame(sweep)
    stages = _stages(sweep, samples)
    steps.say(count, "what the knobs buy (E2)")
    knobs = _knobs(sweep)
    steps.say(count, "how well latency is predicted (E3)")
    model = _model(samples)
    steps.say(count, "the page is written")
    return Analyses(sweep, settings_frame(sweep), samples, stages, knobs, model)


def _stages(sweep: Sweep, samples: pd.DataFrame) -> StageAnalysis | Missing:
    generations = generations_of(sweep)
    if not generations:
        return Missing("no sample has times: all were answered in batches")
    found = [load_profiles(folder) for folder in dict.fromkeys(each.path.parent for each in sweep.settings)]
    profiles = [profile for each, _ in found for profile in each]
    return StageAnalysis(
        generations=generations,
        by_regime=regimes(generations, display_lengths(generations)),
        by_setting=settings_fractions(generations),
        lines=stage_lines(generations),
        points=flops_latency.stage_points(samples, sweep.provenance.peak_flops_per_s),
        profiles=profiles,
        profiles_reason=None if profiles else found[0][1],
    )


def _knobs(sweep: Sweep) -> KnobAnalysis:
    tasks = [analyse_task(grid, COSTS, NUM_DRAWS, seed=0) for grid in grids_of(sweep)]
    differences = {of.name: compare(tasks, of) for of in COSTS} if len(tasks) > 1 else {}
    return KnobAnalysis(tasks, differences)


def _model(frame: pd.DataFrame) -> LatencyModel | Missing:
    try:
        samples, left_out = of_fewer_settings(timed_samples(frame))
        estimator = LatencyEstimator(LEVEL).fit(samples)
        validation = validate(samples, LEVEL)
    except ResultsError as error:
        return Missing(str(error))
    curve = guardrail_curve(validation.left_out.times["T_total"], samples.times["T_total"])
    return LatencyModel(samples, estimator, validation, curve, left_out)
