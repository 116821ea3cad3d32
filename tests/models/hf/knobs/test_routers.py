"""Routers of hand-made blocks: a number that two modules keep is changed in both, one that nothing reads counts not."""

import torch
from torch import nn

from experiment_core_utils.models.hf.knobs.patches import AttributeChanges
from experiment_core_utils.models.hf.knobs.routers import Routers


class Router(nn.Module):
    def __init__(self, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k

    def forward(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, chosen = scores.topk(self.top_k, dim=-1)
        return weights, chosen


class Block(nn.Module):
    """Its own `top_k` is a copy that comes before the router's, as in several families."""

    def __init__(self, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = Router(top_k)

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        return self.router(scores)[0]


class Config:
    num_local_experts = 5
    num_experts_per_tok = 4


def test_every_module_with_the_number_gets_it_but_those_of_the_first_block() -> None:
    blocks: list[nn.Module] = [nn.Linear(5, 5), Block(3), Block(2), Block(4)]
    routers = Routers(blocks, Config())
    scores = torch.tensor([[0.1, 0.5, 0.2, 0.4, 0.3]] * 7)
    routers.learn(lambda: [block(scores) for block in blocks], 7)
    assert (routers.routed_blocks, routers.adjustable_blocks, routers.num_experts) == ((1, 2, 3), (2, 3), 5)
    assert [routers.own_top_k(block) for block in range(4)] == [None, 3, 2, 4]
    assert routers.default_top_k == 3
    with AttributeChanges().in_place(routers.changes(1)), routers.counted() as counted:
        assert [(block.top_k, block.router.top_k) for block in blocks[1:]] == [(3, 3), (1, 1), (1, 1)]
        for block in reversed(blocks):
            block(scores)
    assert (counted.blocks_run, counted.experts_per_token) == ([3, 2, 1, 0], {1: 3, 2: 1, 3: 1})
    assert [block.router.top_k for block in blocks[1:]] == [3, 2, 4]
