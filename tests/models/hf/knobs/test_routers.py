"""Routers of hand-made blocks: a number that two modules keep is changed in both, one that nothing reads counts not;
numbers of their own are left alone; experts that a router excludes are refused.
"""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig

from experiment_core_utils.models.hf.knobs.patches import AttributeChanges
from experiment_core_utils.models.hf.knobs.routers import Counted, Routers, refuse_without_effect
from experiment_core_utils.primitives.errors import ConfigurationError, KnobDidNotAct


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
    assert (routers.first_top_k, routers.default_top_k) == (3, 4)
    with AttributeChanges().in_place(routers.changes(1)), routers.counted() as counted:
        assert [(block.top_k, block.router.top_k) for block in blocks[1:]] == [(3, 3), (1, 1), (1, 1)]
        for block in reversed(blocks):
            block(scores)
    assert (counted.blocks_run, counted.experts_per_token) == ([3, 2, 1, 0], {1: 3, 2: 1, 3: 1})
    assert [block.router.top_k for block in blocks[1:]] == [3, 2, 4]


class Reading(nn.Module):
    """A router that reads its number from the config that its block has too."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, chosen = scores.topk(self.config.top_k_experts, dim=-1)
        return weights, chosen


def test_a_number_that_all_blocks_read_from_one_config_is_changed_in_copies() -> None:
    config = PreTrainedConfig()
    config.num_experts, config.top_k_experts = 5, 3
    blocks: list[Any] = [nn.ModuleDict({"router": Reading(config), "experts": nn.Identity()}) for _ in range(3)]
    routers = Routers(blocks, config)
    scores = torch.tensor([[0.1, 0.5, 0.2, 0.4, 0.3]] * 7)
    routers.learn(lambda: [block["router"](scores) for block in blocks], 7)
    assert (routers.blocks_without_top_k, routers.num_experts, routers.default_top_k) == ((), 5, 3)
    routers.put(2)
    with routers.counted() as counted:
        for block in blocks:
            block["router"](scores)
    assert counted.experts_per_token == {0: 3, 1: 2, 2: 2}
    assert config.top_k_experts == 3 and blocks[0]["router"].config is config
    routers.put(None)
    assert all(block["router"].config is config for block in blocks)


def test_blocks_with_numbers_of_their_own_keep_them_and_never_get_more() -> None:
    blocks: list[Any] = [Block(3), Block(2), Block(4), Block(1)]
    routers = Routers(blocks, Config())

    def numbers() -> list[int]:
        return [block.router.top_k for block in blocks]

    for top_k, expected in ((4, [3, 2, 4, 1]), (3, [3, 2, 3, 1]), (1, [3, 1, 1, 1]), (None, [3, 2, 4, 1])):
        routers.put(top_k)
        assert numbers() == expected
    assert routers.limit == (4, "its blocks choose 3, 2, 4, 1 experts by themselves, and a top-k only lowers these")
    words = "top-k 5 is not possible: its blocks choose 3, 2, 4, 1 experts by themselves, .* give 1 to 4"
    with pytest.raises(ConfigurationError, match=words):
        routers.put(5)


class Own(int):
    """A number that is known again where it was left alone."""


def test_the_models_own_number_is_not_written() -> None:
    blocks = [Block(2), Block(Own(2))]
    routers = Routers(blocks, Config())
    for top_k, is_own in ((2, True), (3, False), (2, True)):
        routers.put(top_k)
        assert (type(blocks[1].router.top_k) is Own) == is_own


def test_groups_limit_what_can_be_chosen() -> None:
    blocks = [Block(2), Block(2)]
    vars(blocks[1].router).update(num_experts=5 * 4, num_group=5, topk_group=2)
    routers = Routers(blocks, Config())
    assert routers.limit == (8, "a token may use 2 of 5 groups of 4 experts")
    # DeepSeek-V2 keeps the numbers where it does not use them.
    vars(blocks[1].router).update(topk_method="greedy")
    assert routers.limit is None


@pytest.mark.parametrize("excluded", [0.0, -torch.inf, torch.finfo(torch.float32).min])
def test_an_excluded_expert_is_refused(excluded: float) -> None:
    scores = torch.tensor([[excluded, 0.5, excluded, 0.4, 0.3], [0.3, excluded, excluded, excluded, 0.1]])
    refuse_without_effect(3, Counted(), [scores])
    with pytest.raises(KnobDidNotAct, match="top-k 4: a router excludes all but 3 experts"):
        refuse_without_effect(4, Counted(), [scores])


class Weightless(nn.Module):
    """A router that gives the experts after the second a weight of 0."""

    def __init__(self) -> None:
        super().__init__()
        self.top_k = 2

    def forward(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, chosen = scores.topk(self.top_k, dim=-1)
        weights[:, 2:] = 0
        return weights, chosen


def test_experts_of_weight_0_are_refused() -> None:
    first, second = Block(2), Block(2)
    second.router = Weightless()  # type: ignore[assignment]
    routers = Routers([first, second], Config())
    scores = torch.rand(7, 5, generator=torch.Generator().manual_seed(0))
    routers.learn(lambda: [first(scores), second.router(scores)], 7)
    for top_k in (2, 3):
        routers.put(top_k)
        with routers.counted() as counted:
            first(scores)
            second.router(scores)
        assert (counted.experts_per_token, counted.weighted_experts) == ({0: 2, 1: top_k}, {0: 2, 1: 2})
        if top_k == 3:
            with pytest.raises(KnobDidNotAct, match="top-k 3: the router of block 1 gives at most 2 of the experts"):
                refuse_without_effect(top_k, counted, [])
        else:
            refuse_without_effect(top_k, counted, [])


@pytest.mark.parametrize(("shape", "axis"), [((1, 7, 2, 5), 1), ((4, 1, 7, 5), 2), ((7, 5), 0), ((1, 7, 7, 5), None)])
def test_tokens_are_counted_along_the_axis_that_follows_the_prompt(shape: tuple[int, ...], axis: int | None) -> None:
    """Hyper-connections have several streams behind the positions, Gemma 3n before them."""
    block = nn.Identity()
    routers = Routers([block], Config())
    routers.learn(lambda: block(torch.zeros(shape)), 7)
    longer = [23 if size == 7 else size for size in shape]
    last = [1 if size == 7 else size for size in shape]
    with routers.counted() as counted:
        block(torch.zeros(longer))
        # Blocks of Gemma 4 that use the keys of others compute the last position alone.
        block(torch.zeros(last))
    assert counted.tokens == (None if axis is None else 23)
