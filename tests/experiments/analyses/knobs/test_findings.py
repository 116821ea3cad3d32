"""E2's findings of one grid in sentences."""

import numpy as np
import pytest

from experiment_core_utils.knobs.setting import Setting
from experiments.analyses.knobs.analysis import analyse_knobs
from experiments.analyses.knobs.effects import is_beyond_noise
from experiments.analyses.knobs.findings import change_sentences, conclusion, front_places, front_sentences
from experiments.analyses.knobs.grid import KnobPoint, TaskGrid
from experiments.analyses.knobs.objectives import LATENCY_MEAN, LATENCY_P95
from experiments.analyses.knobs.records import TaskAnalysis, contents_of, present, tables_of
from tests.experiments.hand_made_grid import grid, point, reference

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
        "200 ms a request, 95 % of the slowest setting's time (the reference, the model as it is, was not measured)"
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
    assert taken.endswith(
        "a request, and no setting is slower (the reference, the model as it is, was not measured); 1 of 1 others as "
        "accurate are not surely slower"
    )
    assert unknown.startswith(
        "not shown: that tier-low_topk1_blocks12 (0.938, 100 ms) is less accurate than the best; differences in "
    )


def beside(milliseconds: float, right: float, *, in_grid: bool = False, num_samples: int = 200) -> TaskGrid:
    """The four settings above, and the reference with its time and accuracy."""
    four = four_settings(num_samples, (0.5, 0.5, 1.0, 1.0), (100.0, 110.0, 200.0, 210.0))
    own_scores = (np.arange(num_samples) < right * num_samples).astype(float)
    own_times = milliseconds * np.linspace(0.95, 1.05, num_samples)
    points = [*POINTS, reference(in_grid)]
    return grid(points, np.vstack([four.scores, own_scores]), np.vstack([four.total_ms, own_times]))


def test_percentages_are_of_the_reference_also_where_it_is_not_the_slowest() -> None:
    taken, *_ = conclusion(analysed(beside(160.0, 0.5)), random_weights=False)
    assert taken.endswith(
        "is tier-high_topk1_blocks12 with 1.000 and 200 ms a request, 125 % of the time of the reference "
        "(own_topk2_blocks12, 0.500)"
    )
    taken, *_ = conclusion(analysed(beside(160.0, 1.0)), random_weights=False)
    assert taken.endswith(
        "is own_topk2_blocks12 with 1.000 and 160 ms a request, the reference, which is the model as it is"
    )
    (changes, best, _) = [
        *change_sentences(analysed(beside(160.0, 0.5))),
        *front_sentences(analysed(beside(160.0, 0.5))),
    ]
    # 100 of 160 ms, and 10 of 160 ms.
    assert changes.startswith(
        "What changes the mean end-to-end latency (in % of the reference's 160 ms): vision low → high: +100 ms, +63 %"
    )
    assert "+10 ms, +6 %" in changes
    assert best.startswith("The most accurate setting is tier-high_topk1_blocks12 with 1.000")


def test_the_reference_competes_for_the_front_and_is_outside_the_effects() -> None:
    made = beside(90.0, 1.0)
    found, alone = analysed(made), analysed(four_settings(200, (0.5, 0.5, 1.0, 1.0), (100.0, 110.0, 200.0, 210.0)))
    assert front_places(found) == {each.key: "-" for each in POINTS} | {"own_topk2_blocks12": "established"}
    # The grid's four settings are all that effects and couplings are of.
    for figure in ("accuracy", "latency_mean"):
        assert found.effects[figure].is_full_grid
        assert [mean.value for mean in found.effects[figure].level_means] == ["low", "high", 1, 2]
        means = [[mean.mean for mean in each.effects[figure].level_means] for each in (found, alone)]
        assert means[0] == pytest.approx(means[1])
    (one,), (other,) = (present(each) for each in (found, alone))
    assert [(row.value, row.num_settings) for row in one.fixed] == [("low", 2), ("high", 2), (1, 2), (2, 2)]
    assert [row.loss.share for row in one.fixed] == pytest.approx([row.loss.share for row in other.fixed])
    (content,) = contents_of({}, {}, [found], {}, [])["e2_coupling_analysis"]["couplings"]
    assert content["reference_cost"] == pytest.approx(1.1 * 210)
    rows = {row["setting"]: row for row in tables_of([found])["e2_fronts"]}
    assert rows["tier-low_topk1_blocks12"]["cost_share_of_reference"] == pytest.approx(100 / 90)
    assert [key for key, row in rows.items() if row["is_reference"]] == ["own_topk2_blocks12"]


def test_a_reference_that_was_requested_as_a_tier_is_inside_the_effects() -> None:
    found = analysed(beside(90.0, 1.0, in_grid=True))
    values = [mean.value for mean in found.effects["accuracy"].level_means if mean.knob == "vision"]
    assert values == ["low", "high", "own"] and not found.effects["accuracy"].is_full_grid


def test_the_reference_alone_has_a_place_and_no_effects() -> None:
    made = grid([reference()], [[1.0] * 8], [[5.0] * 8])
    found = analysed(made)
    assert front_places(found) == {"own_topk2_blocks12": "established"}
    (each,) = present(found)
    assert not each.fixed and not each.couplings and not found.effects["latency_mean"].terms
    assert contents_of({}, {}, [found], {}, [])["e2_coupling_analysis"]["couplings"][0]["hypervolume"] is None


def one_knob(milliseconds: tuple[float, ...], drift: float | None) -> TaskGrid:
    """A dense model's runs of 20, 24, ... blocks, which are all right on half of the 20 samples."""
    points = [KnobPoint(key := f"own_blocks{20 + 4 * at}", Setting.named(key)) for at in range(len(milliseconds))]
    scores = np.array([np.arange(20) < 10] * len(points), dtype=float)
    return grid(points, scores, np.outer(milliseconds, np.linspace(0.95, 1.05, 20)), drift=drift)


@pytest.mark.parametrize(
    ("milliseconds", "drift", "text"),
    [
        # Each setting's time is exact to the sample; the device's speed changed by 46 %, and 300 / 231 - 1 = 30 %.
        ((300.0, 231.0), 0.46, "blocks 20 → 24: -69 ms (noise)"),
        ((231.0, 300.0), 0.46, "blocks 20 → 24: +69 ms (noise)"),
        ((300.0, 231.0), 0.29, "blocks 20 → 24: -69 ms"),
        # A fall to 60 % is a change by 67 % from the other end.
        ((300.0, 180.0), 0.5, "blocks 20 → 24: -120 ms"),
        ((300.0, 231.0), None, "blocks 20 → 24: -69 ms"),
        ((0.3, 0.26), None, "blocks 20 → 24: -0.04 ms"),
        # What is beyond the drift is in the middle; the ends are not.
        ((300.0, 600.0, 310.0), 0.1, "blocks 20 → 28: +10 ms (noise)"),
    ],
)
def test_a_change_within_the_drift_is_noise_in_a_run_of_one_knob(
    milliseconds: tuple[float, ...], drift: float | None, text: str
) -> None:
    found = analysed(one_knob(milliseconds, drift))
    (knobs,) = (line for line in conclusion(found, random_weights=False) if line.startswith("knobs: "))
    assert knobs == f"knobs: {text}, accuracy +0.0 points (noise)"
    (term,) = found.effects["latency_mean"].terms
    is_noise = text.endswith("(noise)") and len(milliseconds) == 2
    assert (term.within_drift, is_beyond_noise(term)) == (is_noise, not is_noise)
    # Of the ends alone nothing is said where only the middle is beyond the drift.
    said = ["No knob"] if is_noise else ["What ch"] * (not text.endswith("(noise)"))
    assert [sentence[:7] for sentence in change_sentences(found)] == said


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
    # Nor is one the most accurate, or on a front.
    (sentence,) = front_sentences(found)
    assert sentence.startswith("No setting is the most accurate: no answer was right at any setting; compare pred")
    assert front_places(found) == {}


def test_sentences_and_columns_are_of_the_mean_latency_whatever_the_first_cost_is() -> None:
    """By P95 the second setting is the cheapest, by the mean the first: one of 100 requests in ten is slow at each."""
    times = np.full((4, 100), 300.0)
    times[0], times[0, :10] = 100.0, 500.0
    times[1] = 200.0
    made = grid(POINTS, np.ones((4, 100)), times)
    (found,) = analyse_knobs([made], (LATENCY_P95, LATENCY_MEAN), num_draws=200).tasks
    best, counts = front_sentences(found)
    # 0.9 * 100 + 0.1 * 500 = 140 ms against 200 and 300.
    assert best.endswith(
        "is tier-low_topk1_blocks12 with 1.000 on 100 samples; none has a lower mean end-to-end latency."
    )
    assert counts.startswith("On the front of accuracy and mean end-to-end latency are 1 of 4 settings")
    assert front_places(found)["tier-low_topk1_blocks12"] == "within noise"


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
        "The most accurate setting is tier-low_topk1_blocks12 with 1.000 on 40 samples; none has a lower mean "
        "end-to-end latency." in sentences
    )
