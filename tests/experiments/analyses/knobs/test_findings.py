"""E2's findings of one grid in sentences."""

import numpy as np

from experiments.analyses.knobs.analysis import analyse_knobs
from experiments.analyses.knobs.findings import conclusion, front_places, front_sentences
from experiments.analyses.knobs.grid import TaskGrid
from experiments.analyses.knobs.objectives import LATENCY_MEAN
from experiments.analyses.knobs.records import TaskAnalysis
from tests.experiments.hand_made_grid import grid, point

POINTS = [point(vision, top_k) for vision in ("low", "high") for top_k in (1, 2)]


def four_settings(num_samples: int, right: tuple[float, ...], milliseconds: tuple[float, ...]) -> TaskGrid:
    """Each setting is right on the first fraction of the samples; its times spread by 5 % around their mean."""
    scores = np.array([np.arange(num_samples) < fraction * num_samples for fraction in right], dtype=float)
    return grid(POINTS, scores, np.outer(milliseconds, np.linspace(0.95, 1.05, num_samples)))


def analysed(made: TaskGrid) -> TaskAnalysis:
    (found,) = analyse_knobs([made], (LATENCY_MEAN,), num_draws=200).tasks
    return found


def test_the_fastest_setting_near_the_best_is_named_with_what_knobs_change() -> None:
    # top-k 2 costs 10 ms and buys nothing; `high` costs 100 ms and buys 50 points.
    found = analysed(four_settings(200, (0.5, 0.5, 1.0, 1.0), (100.0, 110.0, 200.0, 210.0)))
    taken, knobs, unknown = conclusion(found, random_weights=False)
    assert taken == (
        "conclusion: the fastest within 0.01 of the best accuracy (1.000) is tier-high_topk1_blocks12 with 1.000 and "
        "200 ms a request, 95 % of the slowest setting's time"
    )
    assert knobs == (
        "knobs: vision low → high: +100 ms, accuracy +50.0 points; top-k 1 → 2: +10 ms, accuracy +0.0 points (noise)"
    )
    # Of the 6 pairs 4 differ on half of the samples: (1.96 sqrt(.5) + .84 sqrt(.5 - .14^2))^2 / .14^2 = 196.2 <= 200.
    assert unknown == "not shown: differences below 0.14 in accuracy, with 200 samples (0.05 takes about 1568)"
    assert front_places(found) == {
        "tier-low_topk1_blocks12": "established",
        "tier-low_topk2_blocks12": "-",
        "tier-high_topk1_blocks12": "established",
        "tier-high_topk2_blocks12": "-",
    }


def test_a_loss_that_few_samples_do_not_show_is_named() -> None:
    # One of 16 samples is wrong at `low`.
    found = analysed(four_settings(16, (15 / 16, 15 / 16, 1.0, 1.0), (100.0, 110.0, 200.0, 200.0)))
    taken, _, unknown = conclusion(found, random_weights=False)
    assert taken.endswith("a request, and no setting is slower; 1 of 1 others as accurate are not surely slower")
    assert unknown.startswith(
        "not shown: that tier-low_topk1_blocks12 (0.938, 100 ms) is less accurate than the best; differences in "
    )


def test_without_a_verdict_nothing_is_called_faster() -> None:
    found = analysed(four_settings(5, (0.4, 0.4, 1.0, 1.0), (100.0, 110.0, 200.0, 210.0)))
    (unknown,) = conclusion(found, random_weights=False)
    assert unknown.startswith(
        "not shown: which setting is faster: the mean end-to-end latency needs 6 pictures for a verdict and has 5; "
    )


def test_random_weights_have_no_accuracy_in_any_line() -> None:
    found = analysed(four_settings(16, (0.0, 0.0, 0.0, 0.0), (100.0, 110.0, 200.0, 210.0)))
    assert conclusion(found, random_weights=True) == [
        "knobs: vision low → high: +100 ms; top-k 1 → 2: +10 ms",
        "not shown: accuracy: the weights are random",
    ]


def test_answers_of_which_none_is_right_name_no_setting() -> None:
    found = analysed(four_settings(16, (0.0, 0.0, 0.0, 0.0), (100.0, 110.0, 200.0, 210.0)))
    nothing, knobs, _ = conclusion(found, random_weights=False)
    assert nothing.startswith("no conclusion: no answer was right at any setting; compare pred with answers")
    assert knobs.startswith("knobs: vision low → high: +100 ms, accuracy +0.0 points (noise)")


def test_settings_without_times_have_the_reason_alone() -> None:
    made = four_settings(16, (0.5, 0.5, 1.0, 1.0), (np.nan,) * 4)
    (line,) = conclusion(analysed(made), random_weights=False)
    assert line.startswith("no conclusion: no setting has a sample with a time")
    assert front_places(analysed(made)) == {}


def test_of_settings_that_are_all_right_the_cheapest_is_named_the_best() -> None:
    sentences = " ".join(
        front_sentences(analysed(four_settings(40, (1.0, 1.0, 1.0, 1.0), (100.0, 110.0, 200.0, 210.0))))
    )
    assert (
        "The most accurate setting is tier-low_topk1_blocks12 with 1.000 on 40 samples; none is cheaper." in sentences
    )
