"""What E1, E2 and E3 find in the folders of a run, or why one of them finds nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pandas as pd

from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.records.conclusion import Conclusion
from experiments.analyses.knobs.analysis import KnobAnalysis, analyse_knobs
from experiments.analyses.knobs.conclusion import conclude
from experiments.analyses.knobs.grid import TaskGrid, grids_of
from experiments.analyses.knobs.objectives import (
    ENERGY,
    FLOPS,
    LATENCY_MEAN,
    LATENCY_P95,
    MEMORY,
    PERCENT,
    NoObjectives,
)
from experiments.analyses.knobs.records import FrontAnalysis, TaskAnalysis, present
from experiments.analyses.latency.analysis import LatencyModel, analyse_latency
from experiments.analyses.limits import MOST_SETTINGS, Steps
from experiments.analyses.stages.analysis import StageAnalysis, analyse_stages
from experiments.analyses.sweeps import StoredSetting, Sweep, joint_settings_frame, load_sweeps, samples_frame
from experiments.fitting.verdicts import TAIL, fewest_for


@dataclass(frozen=True)
class Missing:
    """The reason why the results do not allow an analysis."""

    reason: str


@dataclass(frozen=True)
class SweepAnalyses:
    """E1 and E3 of one sweep."""

    sweep: Sweep
    stages: StageAnalysis | Missing
    model: LatencyModel | Missing


@dataclass(frozen=True)
class Analyses:
    """Analyses of sweeps side by side: E1 and E3 of each, E2 of all together, and the frame of all settings."""

    sweeps: Sequence[SweepAnalyses]
    settings: pd.DataFrame
    knobs: KnobAnalysis

    @property
    def stored(self) -> list[StoredSetting]:
        """The settings of all sweeps, in the order of the frame."""
        return [setting for own in self.sweeps for setting in own.sweep.settings]

    @cached_property
    def conclusions(self) -> list[Conclusion]:
        """The conclusion of each task."""
        return [conclude(task, self.stored) for task in self.knobs.tasks]

    @property
    def random_weights(self) -> bool:
        """Whether a model's weights are random, so that accuracy means nothing."""
        return any(own.sweep.provenance.random_weights for own in self.sweeps)


def analyse(results_dirs: Sequence[Path]) -> Analyses:
    """Read the folders and compute all analyses; E3 takes most of the time.

    Raises:
        ResultsError: no results, broken ones, a folder of several sweeps, or sweeps of different samples.
    """
    steps = Steps()
    sweeps = load_sweeps(*results_dirs)
    count = sum(len(sweep.settings) for sweep in sweeps)
    steps.say(count, f"{counted(count, 'setting')} read; what the knobs buy (E2)")
    knobs = _analyse_knobs(grids_of(*sweeps))
    steps.say(count, "where the time goes (E1), and how well latency is predicted (E3)")
    own = [_analyse_sweep(sweep) for sweep in sweeps]
    steps.say(count, "the page is written")
    return Analyses(own, joint_settings_frame(sweeps), knobs)


def _analyse_knobs(grids: Sequence[TaskGrid]) -> KnobAnalysis:
    """E2 against every cost of a page; P95 only in tasks with pictures enough for a setting to be surely on a front."""
    has_tails = any(len(grid.points) <= MOST_SETTINGS and len(set(grid.pictures)) >= _fewest(grid) for grid in grids)
    tails = [LATENCY_P95] if has_tails else []
    found = analyse_knobs(grids, (LATENCY_MEAN, *tails, ENERGY, FLOPS, MEMORY))
    return replace(found, tasks=[_with_sure_tails(task) for task in found.tasks])


def _fewest(grid: TaskGrid) -> int:
    """Pictures that the P95 of one of the settings needs, to be told from all others."""
    return fewest_for(PERCENT["p95"], TAIL / (2 * max(len(grid.points) - 1, 1)))


def _with_sure_tails(analysis: TaskAnalysis) -> TaskAnalysis:
    """The analysis, with the reason in place of a front by P95 on which no setting could surely be."""
    # Pictures with a time at all settings.
    numbers = (each.found.num_cost_pictures for each in present(analysis) if each.found.of == LATENCY_MEAN)
    least, timed = _fewest(analysis.grid), next(numbers, 0)
    if timed >= least and len(analysis.grid.points) <= MOST_SETTINGS:
        return analysis
    reason = f"a verdict on P95 needs {least} {analysis.grid.independent} with times, and there are {timed}"
    missing = NoObjectives(analysis.grid.task, LATENCY_P95, reason)
    costs = [front.found.of if isinstance(front, FrontAnalysis) else front.of for front in analysis.fronts]
    fronts = [each for each, of in zip(analysis.fronts, costs, strict=True) if of != LATENCY_P95]
    return replace(analysis, fronts=[*fronts[:1], missing, *fronts[1:]])


def _analyse_sweep(sweep: Sweep) -> SweepAnalyses:
    samples = samples_frame(sweep)
    stages = analyse_stages(sweep, samples) or Missing(
        "no sample has stages with times: all were answered in batches, or by a server"
    )
    try:
        model: LatencyModel | Missing = analyse_latency(sweep, samples)
    except ResultsError as error:
        model = Missing(str(error))
    return SweepAnalyses(sweep, stages, model)
