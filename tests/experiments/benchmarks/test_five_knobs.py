"""The table of five knobs: fronts, verdicts and ratios of a few settings, worked out by hand."""

import numpy as np
import pytest

from experiment_core_utils.primitives.contrasts import PairedContrasts
from experiments.benchmarks.five_knobs import FEWER, REFERENCE, Costs, Scores, joint_front

KEYS = (REFERENCE, FEWER, "own_topk4_blocks12", "own_topk4_blocks16")
PICTURES = tuple(f"picture {at}" for at in range(400))


def scores(fewer: int = 296) -> Scores:
    """Of 400 answers the settings have 300, `fewer`, 100 and 200 right; what another has right, the first has."""
    rows = [np.arange(400) < right for right in (300, fewer, 100, 200)]
    return Scores(KEYS, np.array(rows, dtype=float), PICTURES)


def costs() -> Costs:
    """Times of 40, 30, 20 and 35 ms at each of twelve requests, which take 1 to 12 times as long."""
    milliseconds = np.outer((40.0, 30.0, 20.0, 35.0), np.arange(1.0, 13.0))
    return Costs(
        KEYS,
        milliseconds.mean(axis=1),
        {"vision": milliseconds.mean(axis=1)},
        np.array([4e12, 3e12, 2e12, 3.5e12]),
        np.array([170e6, 128e6, 128e6, 170e6]),
        PairedContrasts.of(np.log(milliseconds), PICTURES[:12], reference=0),
        {REFERENCE: (25.0, 24.0, 26.0)},
    )


def test_the_front_has_no_setting_that_another_beats_in_time_and_accuracy() -> None:
    lines, front = joint_front(scores(), costs())
    # 35 ms with 200 right is beaten by 30 ms with 296.
    assert front == ["own_topk4_blocks12", FEWER, REFERENCE]
    assert [line.split(" | ")[0] for line in lines[2:5]] == [f"| `{key}`" for key in front]


def test_a_front_says_how_many_times_as_long_a_setting_takes() -> None:
    lines, _ = joint_front(scores(), costs())
    assert lines[2].endswith("| no | 130.0 | 0.500 [0.500, 0.500] |")
    assert lines[4].endswith("| – | – | 260.0 | 1 |")


@pytest.mark.parametrize(("fewer", "cheapest"), [(296, REFERENCE), (299, f"{FEWER}, time 0.750")])
def test_the_cheapest_setting_that_is_surely_as_accurate_is_named(fewer: int, cheapest: str) -> None:
    # Of 400 answers 4 are lost: down to 0.025 less. With 1 lost it is down to 0.015.
    lines, _ = joint_front(scores(fewer), costs())
    assert lines[-1].startswith(f"the cheapest that is surely not worse by 0.02: {cheapest}")
