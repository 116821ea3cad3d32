"""Other forms of experts in loops give what the loops give, and only where these cannot be captured."""

from typing import Any

import torch
from torch import nn

from experiment_core_utils.models.hf.looped_experts import MOST_ROWS, LoopedExperts
from tests.models.recorded_replays import RecordedReplays


class Looped(nn.Module):
    """Expert e multiplies a token by e + 1; the last one of three gives it as it is."""

    num_experts = 3

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        total = torch.zeros_like(hidden_states)
        chosen = nn.functional.one_hot(top_k_index, 3).permute(2, 1, 0)
        for expert in chosen.sum(dim=(1, 2)).nonzero():
            column, token = torch.where(chosen[int(expert)].squeeze(0))
            factor = 1 if int(expert) == 2 else int(expert) + 1
            total.index_add_(0, token, hidden_states[token] * factor * top_k_weights[token, column, None])
        return total


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[[1.0]], [[10.0]], [[100.0]]]))

    def forward(self, input: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
        parts = input.split(tokens_per_expert.tolist())
        return torch.cat([part @ each for part, each in zip(parts, self.weight, strict=True)])


@torch.inference_mode()
def test_all_experts_with_the_weights_of_those_that_were_chosen() -> None:
    experts, states = Looped(), torch.tensor([[1.0], [4.0]])
    chosen, weights = torch.tensor([[2, 1], [0, 1]]), torch.tensor([[0.5, 0.25], [0.75, 0.5]])
    capturer = LoopedExperts(experts, RecordedReplays())
    replay = capturer.capture(lambda: experts(states, chosen, weights))
    assert capturer.reason is not None and "all experts" in capturer.reason
    # 1 * 1 * 0.5 + 1 * 2 * 0.25, then 4 * 1 * 0.75 + 4 * 2 * 0.5.
    assert replay().tolist() == [[1.0], [7.0]]
    chosen.copy_(torch.tensor([[0, 2], [1, 2]]))
    # 1 * 1 * 0.5 + 1 * 1 * 0.25, then 4 * 2 * 0.75 + 4 * 1 * 0.5.
    assert replay().tolist() == [[0.75], [8.0]]


@torch.inference_mode()
def test_rows_by_the_weights_of_their_expert() -> None:
    experts, rows = Grouped(), torch.tensor([[1.0], [2.0], [3.0]])
    sizes = torch.tensor([0, 2, 1])
    found: Any = LoopedExperts(experts, RecordedReplays())._forms[0][1]
    assert found(rows, sizes).tolist() == experts(rows, sizes).tolist() == [[10.0], [20.0], [300.0]]
    # More rows than are copied for are left to the vendor's loop.
    many = torch.ones(MOST_ROWS + 1, 1)
    assert found(many, torch.tensor([MOST_ROWS, 0, 1])).sum() == MOST_ROWS + 100
