"""A budget that requests share, with the price worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.controller.lookup import build, main, save
from experiments.controller.policies.shared_budget import price_of
from tests.experiments.controller.hand_made_requests import FAST, MIDDLE, SLOW, grid, request

GAINS, COSTS = np.array([[0.5, 0.9]]), np.array([[1.0, 2.0]])


def test_two_settings_are_mixed_so_that_the_limit_is_met() -> None:
    # The dear one gains 0.4 for a unit of cost: that is the price; 1.75 is three quarters of the way to it.
    price = price_of(GAINS, COSTS, COSTS, 1.75)
    assert (price.low, price.high) == pytest.approx((0.4, 0.4))
    assert price.shares(GAINS[0], COSTS[0]) == pytest.approx({1: 0.75, 0: 0.25})


def test_a_limit_that_all_keep_or_none_can_keep() -> None:
    assert price_of(GAINS, COSTS, COSTS, 2.0).shares(GAINS[0], COSTS[0]) == {1: 1.0}
    assert price_of(GAINS, COSTS, COSTS, 0.5).shares(GAINS[0], COSTS[0]) == {0: 1.0}


def test_requests_that_gain_more_get_more() -> None:
    # The first gains nothing by the dear setting, the second 0.4: at a mean of 1.5 that one alone gets it.
    gains, costs = np.array([[0.5, 0.5], [0.5, 0.9]]), np.array([[1.0, 2.0]] * 2)
    price = price_of(gains, costs, costs, 1.5)
    assert price.shares(gains[0], costs[0]) == {0: 1.0}
    assert price.shares(gains[1], costs[1])[1] == pytest.approx(1.0)


def test_a_stream_mixes_settings_of_a_table(tmp_path, capsys) -> None:
    # Fast 0.5 at 125 ms, slow 0.75 at 550 ms; the middle one costs more than fast and gains nothing. 337.5 ms is half
    # of each.
    lookup = build(grid(), "stream")
    mixed = {entry.choice: share for entry, share in lookup.mixture(337.5)}
    assert mixed == {SLOW: pytest.approx(0.5), FAST: pytest.approx(0.5)}
    drawn = [lookup.choose(request(at), 0.3375) for at in range(200)]
    # Of 200 evenly drawn ones 100 are expected; outside 70 to 130 is a chance of about 1 in 50 000.
    assert 70 <= drawn.count(SLOW) <= 130
    assert set(drawn) == {SLOW, FAST}
    save(lookup, tmp_path / "stream.json")
    assert main(["predict", str(tmp_path / "stream.json"), "--budget_ms", "600", "100"]) == 0
    # Each behind what fits of the single settings.
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("a controller")] == [
        "a controller by lookup_stream: 100 % tier-high_topk8_blocks16; 550.0 ms by mean over the stream",
        "a controller by lookup_stream: 100 % tier-low_topk4_blocks12; 125.0 ms by mean over the stream; none fits, "
        "this is the nearest",
    ]


def test_a_stream_may_be_late_a_stated_fraction_of_the_time() -> None:
    # At 450 ms the slow setting is late in 3 of 4, the others never. A limit of 0.3 lets 0.4 of the requests have it.
    lookup = build(grid(), "stream", max_late=0.3)
    mixed = {entry.choice: share for entry, share in lookup.mixture(450)}
    assert mixed[SLOW] == pytest.approx(0.4)
    with pytest.raises(ConfigurationError, match="--confidence is of single requests"):
        build(grid(), "stream", max_late=0.3, confidence=0.9)


def test_a_stream_distinguishes_similar_prompts() -> None:
    made = replace(grid(), prompts=("read the sign", "read the word", "count the cars", "count the dogs"))
    lookup = build(made, "stream", neighbourhood=0.5)
    # Readings are right at middle, 200 ms, countings gain nothing beyond fast, 150 ms.
    assert lookup.choose(replace(request(7), prompt="read it"), 0.175) == MIDDLE
    assert lookup.choose(replace(request(8), prompt="count it"), 0.175) == FAST
