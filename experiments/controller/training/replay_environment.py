"""An environment that replays a full measured grid with recorded states of its samples.

The grid's settings ran at one top-k in all blocks after the first. An adaptive run with a pause after more than one
block has run the blocks before the pause with the model's own top-k: the time of that is in the replay, as `pause_s`
estimates it, but not what it changes in the answer, nor is the time of the networks.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from experiment_core_utils.knobs.interface import Knob
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.primitives.grids import distinct
from experiment_core_utils.primitives.texts import counted
from experiments.controller.knob_choices import CHOSEN, KnobSpace
from experiments.controller.measured_grid import MeasuredGrid
from experiments.controller.networks.two_stage import ActionSpace
from experiments.controller.provenance import fingerprints
from experiments.controller.training.recorded_states import RecordedStates
from experiments.controller.training.tabled_environment import TabledEnvironment, Tables


def grid_space(grid: MeasuredGrid, num_total_blocks: int, first_top_k: int) -> KnobSpace:
    """The values of the knobs in the grid; raises ResultsError where combinations of them are missing."""
    tiers, experts, counts = (_ascending(knob, grid.choices) for knob in CHOSEN)
    space = KnobSpace(tiers, experts, counts, num_total_blocks, first_top_k)
    missing = set(space.choices()) - set(grid.choices)
    if missing:
        names = ", ".join(sorted(choice.key for choice in missing)[:3])
        raise ResultsError(
            f"the grid lacks {counted(len(missing), 'combination')} of its own values, such as {names}; profile them "
            "too"
        )
    return space


def _ascending(knob: Knob[Any], choices: Sequence[Setting]) -> tuple[Any, ...]:
    """The levels of a knob among choices, each once, the cheapest first."""
    values = sorted((choice.value(knob.name) for choice in choices), key=knob.order)
    return distinct([knob.level(value) for value in values])


def has_states(grid: MeasuredGrid, states: RecordedStates) -> np.ndarray:
    """Whether each request [N] of the grid has states."""
    recorded = set(states.keys)
    return np.array([key in recorded for key in grid.keys], dtype=bool)


def with_states(grid: MeasuredGrid, states: RecordedStates) -> MeasuredGrid:
    """The samples that have states; raises ResultsError for none."""
    used = grid.take(has_states(grid, states))
    if not len(used):
        raise ResultsError("none of the grid's samples has recorded states; record those of its tasks and split")
    return used


def pause_s(grid: MeasuredGrid, space: ActionSpace) -> np.ndarray:
    """Seconds [P, T, K, C] that a pause adds, in the mean over the samples; 0 for a pause after block 0 alone.

    Of n blocks after the first, those m before the pause ran at the highest top-k of the grid in place of the chosen
    one: m / n of the difference that the grid shows between the two. It is an upper estimate, because the decode steps,
    which run at the chosen top-k, are in that difference.
    """
    tiers, _, top_ks, counts = space.sizes
    means = grid.total_s.mean(axis=1).reshape(tiers, top_ks, counts)
    more = np.maximum(means[:, -1:] - means, 0.0)
    share = (np.array(space.pauses)[:, None] - 1) / np.maximum(np.array(space.knobs.block_counts) - 1, 1)
    return np.asarray(share[:, None, None, :] * more)


def replay_environment(grid: MeasuredGrid, states: RecordedStates) -> TabledEnvironment:
    """The environment of the usable samples.

    Raises:
        ResultsError: there are none, or the states are of other knobs than the grid.
    """
    knobs = states.space.knobs
    if grid_space(grid, knobs.num_total_blocks, knobs.first_top_k) != knobs:
        raise ResultsError("the states were recorded for other values of the knobs than the grid's; record them again")
    used = with_states(grid.complete(), states)
    recorded = {key: place for place, key in enumerate(states.keys)}
    places = torch.tensor([recorded[key] for key in used.keys])
    tiers, _, top_ks, counts = states.space.sizes
    shape = len(used), tiers, top_ks, counts
    tables = Tables(
        prompts=states.prompts[places],
        last=states.last[places],
        tokens=states.tokens[places],
        budgets_s=states.budgets_s,
        accuracy=torch.tensor(used.shares.T.reshape(shape)),
        latency_s=torch.tensor(used.total_s.T.reshape(shape)),
        pause_s=torch.tensor(pause_s(used, states.space)),
    )
    described = {
        "kind": "replay",
        "tasks": sorted(set(used.tasks)),
        "num_samples": len(used),
        "samples": fingerprints(used),
        "budgets_ms": [1000 * float(budget) for budget in states.budgets_s],
        "model": dict(states.model),
        # Absent from older states, so that a training on them can still be resumed.
        **({} if states.splits is None else {"splits": {task: states.splits[task] for task in set(used.tasks)}}),
        "mean_latency_ms": 1000 * float(used.total_s.mean()),
        "mean_accuracy": float(used.shares.mean()),
    }
    return TabledEnvironment(states.space, tables, described, budget_token_is_fixed=True)
