"""In: a checkpoint of the two-stage controller, recorded states; out: the policy of a replay, and its caveats."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiment_core_utils.c_prompt_processing import fingerprint_of_ids
from experiment_core_utils.primitives.errors import ResultsError
from experiments.controller.learned_policy import RecordedTwoStage
from experiments.controller.measured_grid import MeasuredGrid
from experiments.controller.recorded_states import STATES, RecordedStates, load_states
from experiments.controller.tensor_file import read_tensor_file
from experiments.controller.training_run import TRAINING, load_networks

NOT_IN_A_REPLAY = (
    "two_stage: the time of its networks is in no latency, and its first blocks are taken to have run at the top-k "
    "that is chosen behind them; only --mode live measures both"
)


@dataclass(frozen=True)
class LearnedReplay:
    """A trained policy and the grid's requests that it has states of.

    Attributes:
        grid: without the requests that have no states.
    """

    policy: RecordedTwoStage
    grid: MeasuredGrid
    caveats: tuple[str, ...]


def learned_replay(
    checkpoint: Path, states_file: Path | None, calibration: MeasuredGrid, grid: MeasuredGrid
) -> LearnedReplay:
    """The checkpoint's policy on a grid.

    Args:
        states_file: None for `states.pt` beside the checkpoint.

    Raises:
        ResultsError: a file is no such file, the states are of other networks, or the grid has none of their samples.
    """
    networks = load_networks(checkpoint)
    states = load_states(states_file or checkpoint.with_name(STATES.usual_name))
    own = networks.budget.state_dict()
    if networks.space != states.space or any(not own[name].cpu().equal(states.budget[name]) for name in own):
        raise ResultsError(
            f"the states were recorded with another budget token or other knobs than {checkpoint} has; give the "
            "states.pt of its training"
        )
    known = with_states(grid, states)
    trained_on = read_tensor_file(checkpoint, TRAINING)["environment"].get("samples")
    caveats = [NOT_IN_A_REPLAY]
    if trained_on != fingerprints(with_states(calibration.complete(), states)):
        caveats.append(
            "two_stage was trained on other samples than the calibration ones, and may have seen those that it is "
            "judged on"
        )
    return LearnedReplay(RecordedTwoStage(networks, states), known, tuple(caveats))


def with_states(grid: MeasuredGrid, states: RecordedStates) -> MeasuredGrid:
    """The requests of the grid that have states; raises ResultsError where there are none."""
    recorded = set(states.keys)
    has = np.array([key in recorded for key in zip(grid.tasks, grid.sample_ids, strict=True)])
    if not has.any():
        raise ResultsError("none of the grid's samples has recorded states; record those of its tasks and split")
    return grid.take(has)


def fingerprints(grid: MeasuredGrid) -> dict[str, str]:
    """Task -> digest of its samples, as a training notes it."""
    pairs = list(zip(grid.tasks, grid.sample_ids, strict=True))
    return {
        task: fingerprint_of_ids([sample_id for name, sample_id in pairs if name == task])
        for task in sorted(set(grid.tasks))
    }
