"""What E1, E2 and E3 find in the folders of a run, or why one of them finds nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from experiment_core_utils.primitives.errors import ResultsError
from experiments.analyses.files import Steps
from experiments.analyses.knobs.analysis import KnobAnalysis, analyse_knobs
from experiments.analyses.knobs.grid import grids_of
from experiments.analyses.knobs.objectives import ENERGY, FLOPS, LATENCY_MEAN, LATENCY_P95
from experiments.analyses.latency.analysis import LatencyModel, analyse_latency
from experiments.analyses.stages.analysis import StageAnalysis, analyse_stages
from experiments.analyses.sweeps import Sweep, load_sweep, runs_frame, samples_frame, settings_frame

COSTS = (LATENCY_P95, LATENCY_MEAN, ENERGY, FLOPS)


@dataclass(frozen=True)
class Missing:
    """The reason why the results do not allow an analysis."""

    reason: str


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
    """Read the folders and compute all analyses; E3 takes most of the time.

    Raises:
        ResultsError: no results, broken ones, or ones of different sweeps.
    """
    steps = Steps()
    sweep = load_sweep(*results_dirs)
    count = len(sweep.settings)
    steps.say(count, f"{count} settings are read; where the time goes (E1)")
    samples = samples_frame(sweep)
    stages = analyse_stages(sweep, samples) or Missing("no sample has times: all were answered in batches")
    steps.say(count, "what the knobs buy (E2)")
    knobs = analyse_knobs(grids_of(sweep), COSTS)
    steps.say(count, "how well latency is predicted (E3)")
    try:
        model: LatencyModel | Missing = analyse_latency(samples, runs=runs_frame(sweep))
    except ResultsError as error:
        model = Missing(str(error))
    steps.say(count, "the page is written")
    return Analyses(sweep, settings_frame(sweep), samples, stages, knobs, model)
