import itertools
import math
from collections import Counter
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiment_core_utils.knobs.active_blocks import RunningBlocks, num_blocks_of
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.strategies import (
    Strategy,
    edges_of_grid,
    ends_and_middle,
    latin_hypercube,
    plan_settings,
    thin,
)
from experiment_core_utils.knobs.top_k import experts_of
from experiment_core_utils.knobs.vision_tokens import VisionTarget, tier_target, token_target, vision_of
from experiment_core_utils.primitives.errors import ConfigurationError

TARGETS = [tier_target("low"), tier_target("high")]

token_lists = st.lists(st.sampled_from([432, 720, 1008, 1440, 1872, 2016]), min_size=1, max_size=7)
value_lists = st.lists(st.integers(1, 9), min_size=1, max_size=8)
grids = st.lists(st.integers(1, 7), min_size=3, max_size=3)


def values_of(targets: list[VisionTarget], top_k: list[int], blocks: list[int]) -> dict[str, list[Any]]:
    return {"vision": targets, "top_k": top_k, "num_active_blocks": [RunningBlocks.of(range(each)) for each in blocks]}


def keys(planned: tuple[Setting, ...]) -> list[str]:
    return [setting.key for setting in planned]


def test_full_is_every_combination_once() -> None:
    settings = plan_settings("full", values_of(TARGETS, [2, 4, 6, 8, 10], [1, 2]))
    assert len(settings) == len({setting.key for setting in settings}) == 2 * 5 * 2
    assert settings[0].key == "tier-low_topk2_blocks1"


def test_balanced_is_full_up_to_four_values_a_knob() -> None:
    values = values_of(TARGETS, [8, 4], [1, 2])
    assert {s.key for s in plan_settings("balanced", values)} == {s.key for s in plan_settings("full", values)}


def test_balanced_thins_longer_lists_evenly() -> None:
    settings = plan_settings("balanced", values_of(TARGETS[:1], [7, 1, 2, 3, 4, 5, 6], [16]))
    assert [experts_of(setting) for setting in settings] == [1, 3, 5, 7]


def test_thinning_keeps_both_ends() -> None:
    assert thin((0, 1, 2, 3, 4)) == (0, 1, 3, 4)
    assert thin((0, 1, 2)) == (0, 1, 2)


def test_stratified_takes_smallest_middle_and_largest() -> None:
    tiers = [tier_target(name) for name in ("high", "low", "medium")]
    planned = plan_settings("stratified", values_of(tiers, [8, 1, 2, 4, 16], [16, 10, 12, 14]))
    assert len(planned) == 27
    assert {vision_of(setting).tier for setting in planned} == {"low", "medium", "high"}
    assert {experts_of(setting) for setting in planned} == {1, 4, 16}
    assert {num_blocks_of(setting) for setting in planned} == {10, 12, 16}  # 12 is the lower of the two middles
    assert ends_and_middle((5,)) == (5,)
    assert ends_and_middle((5, 6)) == (5, 6)


def test_boundary_is_the_corners_and_the_edges_between_them() -> None:
    assert edges_of_grid((3, 3)) == [(r, c) for r in range(3) for c in range(3) if (r, c) != (1, 1)]
    assert len(edges_of_grid((3, 3, 3))) == 27 - 1 - 6  # neither the centre nor the middles of the six faces
    assert len(edges_of_grid((5, 5, 5))) == 8 + 12 * 3
    # A knob of one or two values is always at an end: what is left is the outline of the other two.
    assert len(edges_of_grid((1, 4, 5))) == 2 * 4 + 2 * 5 - 4
    assert len(edges_of_grid((2, 4, 5))) == 2 * (2 * 4 + 2 * 5 - 4)
    assert edges_of_grid((1, 1, 6)) == [(0, 0, place) for place in range(6)]


@given(strategy=st.sampled_from(get_args(Strategy)), tokens=token_lists, top_k=value_lists, blocks=value_lists)
@settings(max_examples=150, deadline=None)
def test_every_strategy_chooses_points_of_the_grid_without_duplicates(
    strategy: Strategy, tokens: list[int], top_k: list[int], blocks: list[int]
) -> None:
    targets = [token_target(each) for each in tokens]
    values = values_of(targets, top_k, blocks)
    planned = plan_settings(strategy, values)
    assert planned
    assert len(set(keys(planned))) == len(planned)
    everything = set(keys(plan_settings("full", values)))
    assert set(keys(planned)) <= everything
    assert keys(planned) == keys(plan_settings(strategy, values))
    if strategy != "full" and strategy != "balanced":  # these keep the order in which targets were given
        other_way_round = plan_settings(strategy, values_of(targets[::-1], top_k[::-1], blocks[::-1] * 2))
        assert keys(planned) == keys(other_way_round)
    if strategy != "lhs":
        ends = itertools.product(*((min(each), max(each)) for each in (tokens, top_k, blocks)))
        if tokens == sorted(tokens):
            assert {f"tokens{v}_topk{k}_blocks{b}" for v, k, b in ends} <= set(keys(planned))


@given(sizes=grids, share=st.floats(0, 1), seed=st.integers(0, 10**6))
@settings(max_examples=200, deadline=None)
def test_a_latin_hypercube_covers_every_value_as_evenly_as_its_size_allows(
    sizes: list[int], share: float, seed: int
) -> None:
    count = max(1, round(share * math.prod(sizes)))
    points = latin_hypercube(sizes, count, seed)
    assert len(points) == len(set(points)) == count
    assert points == sorted(points) == latin_hypercube(sizes, count, seed)
    for axis, size in enumerate(sizes):
        counts = Counter(point[axis] for point in points)
        occurrences = [counts[value] for value in range(size)]
        assert sum(occurrences) == count
        assert set(occurrences) <= {count // size, -(-count // size)}


@given(size=st.integers(2, 60), share=st.floats(0.02, 1), seed=st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_fewer_settings_than_values_are_spread_evenly(size: int, share: float, seed: int) -> None:
    count = max(1, int(share * size))
    values = sorted(point[0] for point in latin_hypercube([size, 1, 1], count, seed))
    assert all(abs((b - a) - size / count) < 1 for a, b in itertools.pairwise(values))


def test_seeds_draw_different_hypercubes() -> None:
    drawn = {tuple(latin_hypercube((4, 5, 6), 12, seed)) for seed in range(20)}
    assert len(drawn) == 20


def test_a_hypercube_is_not_the_regular_design_that_it_starts_from() -> None:
    points = latin_hypercube((10, 10, 10), 10, 42)
    assert len({(b - a) % 10 for a, b, _ in points}) > 3  # a slipped diagonal would have one or two differences


def test_the_size_of_a_hypercube_can_be_requested() -> None:
    grid = values_of(TARGETS, [1, 2, 3, 4, 5, 6], [1, 2, 3, 4])
    assert len(plan_settings("lhs", grid, num_configs=11)) == 11
    assert len(plan_settings("lhs", grid)) == 27
    assert len(plan_settings("lhs", values_of(TARGETS, [1, 2], [1]))) == 4
    with pytest.raises(ConfigurationError, match="--num_configs 49 is not possible: .* 48 settings; give 1 to 48"):
        plan_settings("lhs", grid, num_configs=49)


def test_a_knob_without_values_is_in_no_setting() -> None:
    assert keys(plan_settings("full", values_of(TARGETS, [], [3]))) == ["tier-low_blocks3", "tier-high_blocks3"]
