"""The networks of the two-stage controller: the logits of tier, pause, top-k and blocks at a budget.

Stage 1 reads the prompt's embedding and the budget, before the vision encoder: it chooses the tier, and how many blocks
run before stage 2. Stage 2 reads the states of the prompt's last token and of the budget token after it, which has seen
the whole prompt: it chooses top-k and the number of blocks among those that are still possible.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from experiment_core_utils.knobs.block_choice import BlockChoice
from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.controller.knob_choices import KnobSpace

FREQUENCIES = 12
# Of the natural logarithm of the budget in ms: a period of 32 distinguishes 1 ms from a day, one of 0.25 steps of 3 %.
LONGEST_PERIOD, SHORTEST_PERIOD = 32.0, 0.25
CODE_WIDTH = 24


def sinusoidal_features(budgets_s: torch.Tensor) -> torch.Tensor:
    """Features [B, 2 * FREQUENCIES] of seconds [B]: sines, then cosines, of ln(ms) at geometrically falling periods."""
    steps = torch.linspace(0.0, 1.0, FREQUENCIES, dtype=torch.float64, device=budgets_s.device)
    periods = LONGEST_PERIOD * (SHORTEST_PERIOD / LONGEST_PERIOD) ** steps
    angles = 2 * math.pi * torch.log(budgets_s.double() * 1e3)[:, None] / periods
    return torch.cat([angles.sin(), angles.cos()], dim=-1).float()


class BudgetToken(nn.Module):
    """Sinusoidal features -> code [B, CODE_WIDTH] -> embedding [B, H] of the budget, as long as the model's own ones.

    The embedding is a fixed random projection of the code: the model's blocks lie between it and every choice, and no
    gradient goes through them.

    Args:
        hidden_size: H.
        embedding_rms: root mean square of the model's token embeddings; the budget's has the same.
    """

    embedding_rms: torch.Tensor

    def __init__(self, hidden_size: int, embedding_rms: float) -> None:
        super().__init__()
        self.encode = nn.Linear(2 * FREQUENCIES, CODE_WIDTH)
        self.embed = nn.Linear(CODE_WIDTH, hidden_size).requires_grad_(False)
        self.register_buffer("embedding_rms", torch.tensor(embedding_rms))

    def code(self, features: torch.Tensor) -> torch.Tensor:
        """The code [B, CODE_WIDTH] of features [B, 2 * FREQUENCIES], which stage 1 reads."""
        return nn.functional.gelu(self.encode(features))

    def token(self, code: torch.Tensor) -> torch.Tensor:
        """The budget token [B, H] (float32) of a code [B, CODE_WIDTH], which is appended to the prompt."""
        raw = self.embed(code)
        return raw * torch.rsqrt(raw.pow(2).mean(dim=-1, keepdim=True) + 1e-8) * self.embedding_rms


PAUSES = (1, 2, 3, 4, 5)
MOST_PARAMETERS = 250_000
WIDEST, WIDTH_STEP = 64, 4
# Columns of a tensor of actions [B, 4], places in the space's tuples.
TIER, PAUSE, TOP_K, BLOCKS = range(4)


@dataclass(frozen=True)
class ActionSpace:
    """The values that the two stages choose from."""

    knobs: KnobSpace
    pauses: tuple[int, ...]  #: numbers of blocks that may run before stage 2, block 0 counted, ascending
    #: [pauses][block counts], whether the count's blocks contain all that have run by then
    possible: tuple[tuple[bool, ...], ...]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The number of values of each action."""
        return len(self.knobs.tiers), len(self.pauses), len(self.knobs.top_ks), len(self.knobs.block_counts)


def action_space(knobs: KnobSpace, blocks: BlockChoice, pauses: Sequence[int] = PAUSES) -> ActionSpace:
    """The action space with the pauses after which some number of blocks is possible: what has run is not left out.

    Raises:
        ConfigurationError: there is no such pause, or scores that do not fit the model's blocks.
    """
    sets = [blocks.blocks(count, knobs.num_total_blocks) for count in knobs.block_counts]
    possible = {pause: tuple(block_set[:pause] == tuple(range(pause)) for block_set in sets) for pause in pauses}
    left = tuple(pause for pause in pauses if any(possible[pause]))
    if not left:
        raise ConfigurationError(
            f"after a pause at {list(pauses)} none of {list(knobs.block_counts)} blocks is possible; pause earlier"
        )
    return ActionSpace(knobs, left, tuple(possible[pause] for pause in left))


class TwoStageNetworks(nn.Module):
    """The networks of both stages and the budget token, at most MOST_PARAMETERS in all.

    Args:
        hidden_size: H of the language model; wide ones get narrower networks.
        embedding_rms: see `BudgetToken`.
        seed: of the initial weights, which nothing else draws from.
    """

    possible: torch.Tensor

    def __init__(self, space: ActionSpace, hidden_size: int, embedding_rms: float, seed: int) -> None:
        super().__init__()
        self.space = space
        self.hidden_size = hidden_size
        tiers, pauses, top_ks, counts = space.sizes
        width = width_for(hidden_size, space)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.budget = BudgetToken(hidden_size, embedding_rms)
            self.prompt_in = nn.Linear(hidden_size, width)
            self.code_in = nn.Linear(CODE_WIDTH, width, bias=False)
            self.first_out = nn.Linear(width, tiers + pauses)
            self.states_in = nn.Linear(2 * hidden_size, width)
            self.chosen_in = nn.Embedding(tiers + pauses, width)
            self.second_out = nn.Linear(width, top_ks + counts)
            for head in (self.first_out, self.second_out):
                # All choices equally likely at first, nearly.
                head.weight.data.mul_(0.1)
                head.bias.data.zero_()
        self.register_buffer("possible", torch.tensor(space.possible), persistent=False)

    def code_of(self, budgets_s: torch.Tensor) -> torch.Tensor:
        """The codes [B, CODE_WIDTH], where the networks are, of budgets [B] on the host."""
        return self.budget.code(sinusoidal_features(budgets_s).to(self.first_out.weight.device))

    def budget_token(self, budgets_s: torch.Tensor) -> torch.Tensor:
        """The budget tokens [B, H], float32, of budgets [B] on the host."""
        return self.budget.token(self.code_of(budgets_s))

    def first(self, prompts: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
        """Stage 1: logits [B, tiers + pauses] from prompts [B, H] and the budgets' codes [B, CODE_WIDTH]."""
        return self.first_out(nn.functional.gelu(self.prompt_in(_normed(prompts)) + self.code_in(code)))

    def second(self, states: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Stage 2: logits [B, top_ks + counts] from states [B, 2, H] and stage 1's actions [B, 2].

        What is no longer possible has -inf.
        """
        tiers, _, top_ks, _ = self.space.sizes
        known = self.chosen_in(chosen[:, 0]) + self.chosen_in(chosen[:, 1] + tiers)
        inner = nn.functional.gelu(self.states_in(_normed(states).flatten(1)) + known)
        logits = self.second_out(inner)
        counts = logits[:, top_ks:].masked_fill(~self.possible[chosen[:, 1]], float("-inf"))
        return torch.cat([logits[:, :top_ks], counts], dim=1)

    def log_probs(
        self, prompts: torch.Tensor, budgets_s: torch.Tensor, states: torch.Tensor, chosen: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Normalised log-probabilities of each action's values: four of [B, values]."""
        first, second = self.first(prompts, self.code_of(budgets_s)), self.second(states, chosen)
        return (*self.split_first(first), *self.split_second(second))

    def split_first(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of tiers and pauses."""
        tiers, pauses, _, _ = self.space.sizes
        tier, pause = logits.split([tiers, pauses], dim=-1)
        return tier.log_softmax(dim=-1), pause.log_softmax(dim=-1)

    def split_second(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of top-k and numbers of blocks."""
        _, _, top_ks, counts = self.space.sizes
        top_k, blocks = logits.split([top_ks, counts], dim=-1)
        return top_k.log_softmax(dim=-1), blocks.log_softmax(dim=-1)


def width_for(hidden_size: int, space: ActionSpace) -> int:
    """The widest inner layer that keeps all parameters within MOST_PARAMETERS.

    Raises:
        ConfigurationError: a model so wide that even the narrowest does not.
    """
    for width in range(WIDEST, 0, -WIDTH_STEP):
        if num_parameters(hidden_size, width, space) <= MOST_PARAMETERS:
            return width
    raise ConfigurationError(
        f"a controller for a model of width {hidden_size} takes more than {MOST_PARAMETERS} parameters; "
        "give a narrower model"
    )


def num_parameters(hidden_size: int, width: int, space: ActionSpace) -> int:
    """The number of the networks' parameters, by arithmetic."""
    tiers, pauses, top_ks, counts = space.sizes
    code = CODE_WIDTH * (CODE_WIDTH + 1)
    budget = code + (CODE_WIDTH + 1) * hidden_size
    first = (hidden_size + 1) * width + CODE_WIDTH * width + (width + 1) * (tiers + pauses)
    second = (2 * hidden_size + 1) * width + (tiers + pauses) * width + (width + 1) * (top_ks + counts)
    return budget + first + second


def _normed(states: torch.Tensor) -> torch.Tensor:
    return nn.functional.layer_norm(states.float(), states.shape[-1:])
