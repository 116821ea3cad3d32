"""A table with feedback on a machine that becomes slower, worked out by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.controller.evaluation.replay import replay
from experiments.controller.lookup import Lookup, build
from experiments.controller.measured_grid import MeasuredGrid
from experiments.controller.policies.feedback import FeedbackPolicy
from experiments.controller.policies.interface import StaticPolicy
from tests.experiments.controller.hand_made_requests import FAST, MIDDLE, SLOW, grid, request

BUDGET_S = 0.5


def stream(slowness: list[float]) -> MeasuredGrid:
    """Requests that take 0.1 s at the fast setting, half right, and 0.4 s at the slow one, times what is given."""
    number = len(slowness)
    return replace(
        grid(),
        choices=(FAST, SLOW),
        tasks=("signs",) * number,
        sample_ids=tuple(range(number)),
        pictures=tuple(f"signs {place}" for place in range(number)),
        scores=np.array([[0.5] * number, [1.0] * number]),
        best=np.ones(number),
        total_s=np.outer([0.1, 0.4], slowness),
        requests=tuple(request(place) for place in range(number)),
    )


def with_feedback(table: Lookup, half_life: float = 5.0) -> FeedbackPolicy:
    return FeedbackPolicy(table, table.typical_s, half_life)


def test_a_machine_that_becomes_slower_and_recovers() -> None:
    """1.5 times as slow from request 20 to 39.

    The slow setting fits while 0.5 s / ratio is 0.4 s or more: a logarithm, rounded to 0.01, of 0.22 at most. After n
    slow answers it is ln 1.5 x (1 - 2^(-n / 5)), which is 0.203 after 5 and 0.229 after 6, the first above 0.225: six
    answers are late. After all 20 it is 0.380, and m answers of the recovered machine make it 0.380 x 2^(-m / 5): 0.251
    after 3, 0.218 after 4.
    """
    slowness = [1.0] * 20 + [1.5] * 20 + [1.0] * 20
    table = build(stream([1.0] * 8))
    # At the second budget nothing changes: 5 s are enough for the slow setting on either machine.
    found = replay(with_feedback(table), stream(slowness), (BUDGET_S, 5.0))
    assert found.choices[0] == (SLOW,) * 26 + (FAST,) * 18 + (SLOW,) * 16
    assert np.flatnonzero(found.latency_s[0] > BUDGET_S).tolist() == [20, 21, 22, 23, 24, 25]
    assert found.choices[1] == (SLOW,) * 60
    static = replay(table, stream(slowness), (BUDGET_S,))
    assert np.flatnonzero(static.latency_s[0] > BUDGET_S).tolist() == list(range(20, 40))


def test_a_shorter_half_life_is_faster() -> None:
    # ln 1.5 x (1 - 2^(-n)) is 0.203 after one answer, and 0.304 after two.
    found = replay(with_feedback(build(stream([1.0] * 8)), 1.0), stream([1.5] * 4), (BUDGET_S,))
    assert found.choices[0] == (SLOW, SLOW, FAST, FAST)


def test_each_budget_of_a_replay_is_a_stream_of_its_own() -> None:
    found = replay(with_feedback(build(stream([1.0] * 8))), stream([1.5] * 9), (BUDGET_S, BUDGET_S))
    assert found.choices[0] == found.choices[1] == (SLOW,) * 6 + (FAST,) * 3


@pytest.mark.parametrize(("seconds", "log_ratio"), [(100.0, 0.69), (0.001, -0.69), (2.0, 0.35)])
def test_one_answer_counts_as_four_times_its_prediction_at_most(seconds: float, log_ratio: float) -> None:
    # Half of ln 4 = 1.386, and of ln 2 = 0.693.
    policy = FeedbackPolicy(StaticPolicy(FAST), {FAST: 1.0}, half_life=1.0)
    policy.observe(FAST, seconds)
    assert policy.ratio == math.exp(log_ratio)
    policy.restart()
    assert policy.ratio == 1.0


def test_the_name_and_what_is_refused() -> None:
    policy = with_feedback(build(grid()))
    assert policy.name == "lookup_few_knobs_feedback"
    with pytest.raises(ConfigurationError, match="a latency budget of 0 ms"):
        policy.choose(request(), 0.0)
    with pytest.raises(ConfigurationError, match="half_life 0 is not possible"):
        with_feedback(build(grid()), 0.0)


def test_a_table_predicts_the_geometric_mean_of_its_samples() -> None:
    # 0.1, 0.1, 0.1, 0.2; 0.2, 0.2, 0.3, 0.4 and 0.4, 0.5, 0.6, 0.7 s.
    table = build(grid())
    found = [table.typical_s[choice] for choice in (FAST, MIDDLE, SLOW)]
    assert found == pytest.approx([0.1 * 2**0.25, 0.0048**0.25, 0.084**0.25])
    # The one sample that was not measured is in no mean.
    first = table.entries[0]
    holed = replace(table, entries=(first.model_copy(update={"latencies_ms": (100.0, None, 400.0)}),))
    assert holed.typical_s == pytest.approx({FAST: 0.2})
