"""An environment that looks up what every sample shows, scores and takes at every choice."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn.functional import layer_norm

from experiment_core_utils.knobs.block_choice import BlockChoice
from experiments.controller.knob_choices import KnobSpace
from experiments.controller.networks.two_stage import ActionSpace, TwoStageNetworks, action_space
from experiments.controller.training.environment import BudgetedRequests, RewardRecipe, RollOut, drawn, rewards

Teacher = Literal["per_sample", "per_budget", "per_neighbours"]
# Fraction of the samples whose mean reward decides what is best for a prompt like theirs.
NEIGHBOURHOOD = 0.2


@dataclass(frozen=True)
class Tables:
    """Tables of S samples, T tiers, P pauses, L budgets, K values of top-k, C numbers of blocks; all on the host."""

    prompts: torch.Tensor  #: [S, H]
    last: torch.Tensor  #: [S, T, P, H], the prompt's last token at the pause
    tokens: torch.Tensor  #: [S, T, P, L, H], the budget token there
    budgets_s: torch.Tensor  #: [L], float64, ascending
    accuracy: torch.Tensor  #: [S, T, K, C], fractions of the metric's best score
    latency_s: torch.Tensor  #: [S, T, K, C]
    #: [P, T, K, C], seconds that a pause adds: the blocks before it ran before top-k was chosen; None for none
    pause_s: torch.Tensor | None = None


class TabledEnvironment:
    """Answers by look-up, exact and fast. The time that the networks take is not in its latencies.

    Args:
        described: for the record.
        budget_token_is_fixed: the tables' budget tokens are those of certain networks.
    """

    def __init__(
        self, space: ActionSpace, tables: Tables, described: Mapping[str, Any], budget_token_is_fixed: bool
    ) -> None:
        self.space = space
        self.tables = tables
        self.hidden_size = tables.prompts.shape[1]
        self.budget_token_is_fixed = budget_token_is_fixed
        self._described = described

    def describe(self) -> Mapping[str, Any]:
        """A description (JSON values only), by which a resumed training recognises the environment."""
        return self._described

    def draw(self, count: int, generator: torch.Generator) -> BudgetedRequests:
        """Requests and budgets, independent and evenly over samples and budgets."""
        samples = torch.randint(len(self.tables.prompts), (count,), generator=generator)
        levels = torch.randint(len(self.tables.budgets_s), (count,), generator=generator)
        return BudgetedRequests(samples, levels, self.tables.budgets_s[levels])

    def every_ask(self) -> BudgetedRequests:
        """Each sample at each budget once."""
        samples, levels = len(self.tables.prompts), len(self.tables.budgets_s)
        at = torch.arange(levels).repeat(samples)
        return BudgetedRequests(torch.arange(samples).repeat_interleave(levels), at, self.tables.budgets_s[at])

    def states(self, budgeted: BudgetedRequests, tiers: torch.Tensor, pauses: torch.Tensor) -> torch.Tensor:
        """The states [B, 2, H] that stage 2 sees."""
        last = self.tables.last[budgeted.samples, tiers, pauses]
        return torch.stack([last, self.tables.tokens[budgeted.samples, tiers, pauses, budgeted.levels]], dim=1)

    @torch.no_grad()
    def roll_out(
        self, networks: TwoStageNetworks, budgeted: BudgetedRequests, generator: torch.Generator | None
    ) -> RollOut:
        """Answer each request once with actions that the networks draw; None takes the likeliest."""
        prompts = self.tables.prompts[budgeted.samples]
        tier_log_probs, pause_log_probs = networks.split_first(
            networks.first(prompts, networks.code_of(budgeted.budgets_s))
        )
        tiers, pauses = drawn(tier_log_probs, generator), drawn(pause_log_probs, generator)
        states = self.states(budgeted, tiers, pauses)
        second = networks.second(states, torch.stack([tiers, pauses], dim=1))
        top_ks, blocks = (drawn(part, generator) for part in networks.split_second(second))
        at = budgeted.samples, tiers, top_ks, blocks
        actions = torch.stack([tiers, pauses, top_ks, blocks], dim=1)
        latency_s = self.tables.latency_s[at]
        if self.tables.pause_s is not None:
            latency_s = latency_s + self.tables.pause_s[pauses, tiers, top_ks, blocks]
        return RollOut(budgeted, prompts, states, actions, self.tables.accuracy[at], latency_s)

    def outcomes_of_all(self, budgeted: BudgetedRequests) -> tuple[torch.Tensor, torch.Tensor]:
        """Accuracy and latency [B, T, P, K, C] of every choice after every pause for each request."""
        pauses = self.tables.last.shape[2]
        shape = (len(budgeted.samples), self.tables.accuracy.shape[1], pauses, *self.tables.accuracy.shape[2:])
        accuracy, latency_s = (
            each[budgeted.samples][:, :, None].expand(shape) for each in (self.tables.accuracy, self.tables.latency_s)
        )
        if self.tables.pause_s is None:
            return accuracy, latency_s
        return accuracy, latency_s + self.tables.pause_s.transpose(0, 1)

    def reward_of_all(self, budgeted: BudgetedRequests, recipe: RewardRecipe) -> torch.Tensor:
        """The rewards [B, T, P, K, C] of every choice after every pause for each request."""
        return rewards(recipe, *self.outcomes_of_all(budgeted), budgeted.budgets_s[:, None, None, None, None])

    def reward_table(self, budgeted: BudgetedRequests, recipe: RewardRecipe) -> torch.Tensor:
        """The rewards [B, T, K, C] of every choice for each request."""
        budgets = budgeted.budgets_s[:, None, None, None]
        return rewards(recipe, self.tables.accuracy[budgeted.samples], self.tables.latency_s[budgeted.samples], budgets)

    def trained_choices(self, recipe: RewardRecipe, teacher: Teacher) -> torch.Tensor:
        """Places [S, L, 3] of tier, top-k and blocks that a teacher has for each sample at each budget.

        `per_sample`: the sample's own best choice, by reward. `per_budget`: the one with the highest mean reward over
        all samples, as a lookup table would have it. `per_neighbours`: see `best_for_prompts`.
        """
        samples, levels = len(self.tables.prompts), len(self.tables.budgets_s)
        if teacher == "per_neighbours":
            return self.best_for_prompts(self.tables.prompts, recipe)
        every = self._rewards_at_budgets(recipe)
        if teacher == "per_budget":
            every = every.mean(dim=0, keepdim=True)
        return _places(every).expand(samples, levels, -1)

    def best_for_prompts(
        self, prompts: torch.Tensor, recipe: RewardRecipe, neighbourhood: float = NEIGHBOURHOOD
    ) -> torch.Tensor:
        """The choice [N, L, 3] with the highest mean reward over the samples with the prompts nearest to [N, H].

        Nearest by Euclidean distance of the normalised prompts; `neighbourhood` is the fraction of samples, above 0.
        One sample's score is mostly luck; samples with the same kind of question need the same.
        """
        own, wanted = (layer_norm(each.float(), each.shape[-1:]) for each in (self.tables.prompts, prompts))
        nearest = torch.cdist(wanted, own).topk(math.ceil(neighbourhood * len(own)), largest=False).indices
        every = self._rewards_at_budgets(recipe)
        return torch.cat([_places(every[places].mean(dim=0, keepdim=True)) for places in nearest])

    def _rewards_at_budgets(self, recipe: RewardRecipe) -> torch.Tensor:
        """The rewards of every choice, [S, L, T, K, C]."""
        return self.reward_table(self.every_ask(), recipe).unflatten(0, (-1, len(self.tables.budgets_s)))


def _places(rewards_of_choices: torch.Tensor) -> torch.Tensor:
    """Places [..., 3] of the highest values in [..., T, K, C]."""
    best = rewards_of_choices.flatten(-3).argmax(dim=-1)
    return torch.stack(torch.unravel_index(best, rewards_of_choices.shape[-3:]), dim=-1)


HIDDEN_SIZE = 16
KNOBS = KnobSpace(("low", "medium", "high"), (4, 5, 6, 7, 8), (12, 13, 14, 15, 16), 16, 8)
# Seconds of a choice: a base for each tier, and some for each expert in each block.
TIER_S = (0.10, 0.20, 0.30)
EXPERT_BLOCK_S = 0.001
EASY, SEE, THINK = range(3)
NOISE = 0.3


def synthetic_environment(num_samples: int, num_budgets: int, seed: int, fresh: int | None = None) -> TabledEnvironment:
    """A third of the samples of each kind; budgets evenly from 0.12 s, which no choice meets, to 0.45 s.

    The kind shows in what both stages see, the budget in the budget token's state; both with noise.

    Args:
        seed: of how kinds and budgets show, and of the noise of these samples.
        fresh: seed of the noise of other samples, whose kinds and budgets show as they do by `seed` alone.
    """
    generator = torch.Generator().manual_seed(seed)
    space = action_space(KNOBS, BlockChoice())
    tiers, pauses, top_ks, counts = space.sizes
    kinds = torch.arange(num_samples) % 3
    directions = torch.randn(3, HIDDEN_SIZE, generator=generator)
    budget_direction = torch.randn(HIDDEN_SIZE, generator=generator)
    budgets_s = torch.linspace(0.12, 0.45, num_budgets, dtype=torch.float64)
    noise = generator if fresh is None else torch.Generator().manual_seed(fresh)

    def noisy(values: torch.Tensor) -> torch.Tensor:
        return values + NOISE * torch.randn(values.shape, generator=noise)

    shown = directions[kinds]
    heights = torch.linspace(-2.0, 2.0, num_budgets)[:, None] * budget_direction
    right = torch.zeros(3, tiers, top_ks, counts, dtype=torch.float64)
    right[EASY] = 1.0
    right[SEE, -1] = 1.0
    right[THINK, :, -1, -1] = 1.0
    work = torch.tensor(KNOBS.top_ks)[:, None] * torch.tensor(KNOBS.block_counts)[None]
    latency_s = torch.tensor(TIER_S, dtype=torch.float64)[:, None, None] + EXPERT_BLOCK_S * work
    tables = Tables(
        prompts=noisy(shown),
        last=noisy(shown[:, None, None].expand(-1, tiers, pauses, -1)),
        tokens=noisy(heights.expand(num_samples, tiers, pauses, -1, -1)),
        budgets_s=budgets_s,
        accuracy=right[kinds],
        latency_s=latency_s.expand(num_samples, -1, -1, -1),
    )
    described = {"kind": "synthetic", "num_samples": num_samples, "num_budgets": num_budgets, "seed": seed}
    if fresh is not None:
        described["fresh"] = fresh
    return TabledEnvironment(space, tables, described, budget_token_is_fixed=False)
