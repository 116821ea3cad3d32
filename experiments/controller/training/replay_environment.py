"""The replay of a measured grid with recorded states of its samples, by which networks are trained.

The grid's settings ran at one top-k in all blocks after the first. An adaptive run with a pause after more than one
block has run the blocks before the pause with the model's own top-k: the time of that is in the replay, as `pause_s`
estimates it, but not what it changes in the answer, nor is the time of the networks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from experiment_core_utils.c_prompt_processing import fingerprint_of_ids
from experiment_core_utils.knobs.interface import Knob
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.primitives.grids import distinct
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.primitives.units import check_within
from experiments.controller.knob_choices import CHOSEN, KnobSpace
from experiments.controller.measured_grid import MeasuredGrid
from experiments.controller.networks.two_stage import ActionSpace, TwoStageNetworks
from experiments.controller.training.recorded_states import RecordedStates


@dataclass(frozen=True)
class BudgetedRequests:
    """The places of B requests, with a budget each."""

    samples: torch.Tensor  #: [B], places in the environment
    levels: torch.Tensor  #: [B], places among the budgets that the environment answers at
    budgets_s: torch.Tensor  #: [B], float64


# Of parts of a reward or an objective: beyond it single precision keeps nothing of the others.
MOST_WEIGHT = 1e6


@dataclass(frozen=True)
class RewardRecipe:
    """The reward: score - latency_weight * latency / budget within the budget; over it the score counts for nothing.

    Over the budget it is -over_budget_penalty - latency_weight * latency / budget, so that among choices that are all
    over it the fastest is best. Without a penalty lateness counts as in the reported accuracy in time.
    The latency's weight is small by default: within the budget accuracy counts, and of equally accurate choices the
    faster one is better.
    """

    latency_weight: float = 0.02
    over_budget_penalty: float = 0.0

    def __post_init__(self) -> None:
        check_within("latency_weight", self.latency_weight, 0.0, MOST_WEIGHT)
        check_within("over_budget_penalty", self.over_budget_penalty, 0.0, MOST_WEIGHT)


def rewards(
    recipe: RewardRecipe, accuracy: torch.Tensor, latency_s: torch.Tensor, budgets_s: torch.Tensor
) -> torch.Tensor:
    """Rewards, for shapes that broadcast; `accuracy` is a fraction of the metric's best score."""
    fraction = latency_s / budgets_s
    gained = torch.where(fraction <= 1.0, accuracy, torch.full_like(accuracy, -recipe.over_budget_penalty))
    return gained - recipe.latency_weight * fraction


@dataclass(frozen=True)
class Tables:
    """Tables of S samples, T tiers, P pauses, L budgets, K values of top-k, C numbers of blocks; all on the host."""

    prompts: torch.Tensor  #: [S, H]
    last: torch.Tensor  #: [S, T, P, H], the prompt's last token at the pause
    tokens: torch.Tensor  #: [S, T, P, L, H], the budget token there
    budgets_s: torch.Tensor  #: [L], float64, ascending
    accuracy: torch.Tensor  #: [S, T, K, C], fractions of the metric's best score
    latency_s: torch.Tensor  #: [S, T, K, C]
    #: [P, T, K, C], seconds that a pause adds: the blocks before it ran before top-k was chosen
    pause_s: torch.Tensor


@dataclass(frozen=True)
class ReplayEnvironment:
    """Answers by look-up, exact and fast. The time that the networks take is not in its latencies."""

    space: ActionSpace
    tables: Tables
    described: Mapping[str, Any]  #: for the record, JSON values only; a resumed training recognises its own by it

    def draw(self, count: int, generator: torch.Generator) -> BudgetedRequests:
        """Requests and budgets, independent and evenly over samples and budgets."""
        samples = torch.randint(len(self.tables.prompts), (count,), generator=generator)
        levels = torch.randint(len(self.tables.budgets_s), (count,), generator=generator)
        return BudgetedRequests(samples, levels, self.tables.budgets_s[levels])

    def every_request(self) -> BudgetedRequests:
        """Each sample at each budget once."""
        samples, levels = len(self.tables.prompts), len(self.tables.budgets_s)
        at = torch.arange(levels).repeat(samples)
        return BudgetedRequests(torch.arange(samples).repeat_interleave(levels), at, self.tables.budgets_s[at])

    def states(self, budgeted: BudgetedRequests, tiers: torch.Tensor, pauses: torch.Tensor) -> torch.Tensor:
        """The states [B, 2, H] that stage 2 sees."""
        last = self.tables.last[budgeted.samples, tiers, pauses]
        return torch.stack([last, self.tables.tokens[budgeted.samples, tiers, pauses, budgeted.levels]], dim=1)

    @torch.no_grad()
    def likeliest(self, networks: TwoStageNetworks, budgeted: BudgetedRequests) -> torch.Tensor:
        """The likeliest actions [B, 4] of the networks, columns TIER, PAUSE, TOP_K and BLOCKS."""
        prompts = self.tables.prompts[budgeted.samples]
        first = networks.split_first(networks.first(prompts, networks.code_of(budgeted.budgets_s)))
        tiers, pauses = (each.argmax(dim=-1) for each in first)
        states = self.states(budgeted, tiers, pauses)
        second = networks.split_second(networks.second(states, torch.stack([tiers, pauses], dim=1)))
        return torch.stack([tiers, pauses, *(each.argmax(dim=-1) for each in second)], dim=1)

    def outcomes_of_all(self, budgeted: BudgetedRequests) -> tuple[torch.Tensor, torch.Tensor]:
        """Accuracy and latency [B, T, P, K, C] of every choice after every pause for each request."""
        tables, samples = self.tables, budgeted.samples
        latency_s = tables.latency_s[samples][:, :, None] + tables.pause_s.transpose(0, 1)
        return tables.accuracy[samples][:, :, None].expand_as(latency_s), latency_s

    def reward_table(self, budgeted: BudgetedRequests, recipe: RewardRecipe) -> torch.Tensor:
        """The rewards [B, T, K, C] of every choice for each request, without a pause."""
        budgets_s = budgeted.budgets_s[:, None, None, None]
        tables = self.tables
        return rewards(recipe, tables.accuracy[budgeted.samples], tables.latency_s[budgeted.samples], budgets_s)

    def best_per_sample(self, recipe: RewardRecipe) -> torch.Tensor:
        """Places [S, L, 3] of tier, top-k and blocks with each sample's highest reward at each budget."""
        return _places(self._rewards_at_budgets(recipe))

    def best_per_budget(self, recipe: RewardRecipe) -> torch.Tensor:
        """Places [L, 3] with the highest mean reward over all samples, as a lookup table would have it."""
        return _places(self._rewards_at_budgets(recipe).mean(dim=0))

    def _rewards_at_budgets(self, recipe: RewardRecipe) -> torch.Tensor:
        """The rewards of every choice, [S, L, T, K, C]."""
        return self.reward_table(self.every_request(), recipe).unflatten(0, (-1, len(self.tables.budgets_s)))


def _places(rewards_of_choices: torch.Tensor) -> torch.Tensor:
    """Places [..., 3] of the highest values in [..., T, K, C]."""
    best = rewards_of_choices.flatten(-3).argmax(dim=-1)
    return torch.stack(torch.unravel_index(best, rewards_of_choices.shape[-3:]), dim=-1)


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


def fingerprints(grid: MeasuredGrid) -> dict[str, str]:
    """Task -> digest of its samples, as a training records it."""
    return {
        task: fingerprint_of_ids([sample_id for name, sample_id in grid.keys if name == task])
        for task in sorted(set(grid.tasks))
    }


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


def replay_environment(grid: MeasuredGrid, states: RecordedStates) -> ReplayEnvironment:
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
        "splits": {task: states.splits[task] for task in set(used.tasks)},
        "mean_latency_ms": 1000 * float(used.total_s.mean()),
        "mean_accuracy": float(used.shares.mean()),
    }
    return ReplayEnvironment(states.space, tables, described)
