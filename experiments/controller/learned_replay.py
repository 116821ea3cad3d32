"""In: a checkpoint of the two-stage controller, recorded states; out: the policy of a replay, and its caveats."""

from dataclasses import dataclass
from pathlib import Path

from experiment_core_utils.primitives.errors import ResultsError
from experiments.controller.learned_policy import RecordedTwoStage
from experiments.controller.measured_grid import MeasuredGrid
from experiments.controller.origins import refuse_other_source, refuse_other_weights, split_caveats
from experiments.controller.recorded_states import STATES, RecordedStates, lacking_lines, load_states, without_states
from experiments.controller.replay_environment import has_states
from experiments.controller.seen_samples import replay_leaks
from experiments.controller.training_run import load_networks
from experiments.controller.two_stage_networks import TwoStageNetworks

NOT_IN_A_REPLAY = (
    "two_stage: the time of its networks is in no latency, and its first blocks are assumed to have run at the "
    "top-k that is chosen after them; only --mode live measures both"
)


@dataclass(frozen=True)
class LearnedReplay:
    """A trained policy and the grid's requests that it has states of.

    Attributes:
        grid: without the requests that have no states.
        num_without_states: how many those are.
    """

    policy: RecordedTwoStage
    grid: MeasuredGrid
    caveats: tuple[str, ...]
    num_without_states: int


def learned_replay(
    checkpoint: Path, states_file: Path | None, calibration: MeasuredGrid, grid: MeasuredGrid
) -> LearnedReplay:
    """The checkpoint's policy on a grid.

    Args:
        states_file: None for `states.pt` beside the checkpoint.

    Raises:
        ConfigurationError: checkpoint or states are of another model than the grid, or the states of another split.
        ResultsError: a file is no such file, the states are of other networks, or the grid has none of their samples.
    """
    networks = load_networks(checkpoint)
    path = states_file or checkpoint.with_name(STATES.usual_name)
    states = load_states(path)
    refuse_other_source(grid, states.splits or {}, states.model["name"], path)
    refuse_other_weights(checkpoint, path, states.model)
    _refuse_other_networks(checkpoint, networks, states)
    known = with_states(grid, states)
    lacking = without_states(states, grid.tasks, grid.sample_ids)
    usable = calibration.take(calibration.is_complete & has_states(calibration, states))
    caveats = [
        NOT_IN_A_REPLAY,
        *[f"{line}; no policy is evaluated on them" for line in lacking_lines(lacking, len(grid))],
        *split_caveats(grid, states.splits),
        *replay_leaks(checkpoint, usable, known),
    ]
    return LearnedReplay(RecordedTwoStage(networks, states), known, tuple(caveats), len(lacking))


def _refuse_other_networks(checkpoint: Path, networks: TwoStageNetworks, states: RecordedStates) -> None:
    own = networks.budget.state_dict()
    if networks.space != states.space or any(not own[name].cpu().equal(states.budget[name]) for name in own):
        raise ResultsError(
            f"the states were recorded with another budget token or other knobs than {checkpoint} has; give the "
            "states.pt of its training"
        )


def with_states(grid: MeasuredGrid, states: RecordedStates) -> MeasuredGrid:
    """The requests of the grid that have states; raises ResultsError where there are none."""
    has = has_states(grid, states)
    if not has.any():
        raise ResultsError("none of the grid's samples has recorded states; record those of its tasks and split")
    return grid.take(has)
