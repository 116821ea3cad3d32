"""E2's conclusion of one grid."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.primitives.replication import IN_ROUNDS, OPEN_LOOP, UNKNOWN, Replication
from experiments.analyses.knobs.analysis import analyse_knobs
from experiments.analyses.knobs.conclusion import conclude, front_words
from experiments.analyses.knobs.grid import KnobPoint, TaskGrid
from experiments.analyses.knobs.objectives import LATENCY_MEAN, LATENCY_P95
from experiments.analyses.knobs.records import TaskAnalysis, contents_of, present, tables_of
from tests.experiments.hand_made_grid import grid, point, reference
from tests.hand_made_replication import with_variance

POINTS = [point(vision, top_k) for vision in ("low", "high") for top_k in (1, 2)]


def four_settings(num_samples: int, right: tuple[float, ...], milliseconds: tuple[float, ...]) -> TaskGrid:
    """Each setting is right on the first fraction of the samples; its times spread by 5 % around their mean."""
    scores = np.array([np.arange(num_samples) < fraction * num_samples for fraction in right], dtype=float)
    return grid(POINTS, scores, np.outer(milliseconds, np.linspace(0.95, 1.05, num_samples)))


def analysed(made: TaskGrid) -> TaskAnalysis:
    (found,) = analyse_knobs([made], (LATENCY_MEAN,), num_draws=200).tasks
    return found


def test_without_the_reference_the_most_accurate_setting_is_what_others_are_against() -> None:
    # top-k 2 costs 10 ms and buys nothing; `high` costs 100 ms and buys 50 points.
    found = analysed(four_settings(200, (0.5, 0.5, 1.0, 1.0), (100.0, 110.0, 200.0, 210.0)))
    concluded = conclude(found)
    assert (concluded.setting, concluded.word) == ("tier-high_topk1_blocks12", "no")
    assert concluded.sentence == (
        "keep tier-high_topk1_blocks12 (the most accurate setting: 200 ms a request, accuracy 1.000): no other setting "
        "is faster and not worse by 0.02 (200 samples)"
    )
    assert concluded.lines[1] == (
        "knobs: vision low → high: +100 ms, accuracy +50.0 points; top-k 1 → 2: +10 ms, accuracy +0.0 points "
        "(can't tell)"
    )
    words = front_words(analysed(four_settings(1000, (0.5, 0.5, 1.0, 1.0), (100.0, 110.0, 200.0, 210.0))))
    assert [words[each.key] for each in POINTS] == ["yes", "no", "yes", "no"]


def beside(milliseconds: float, right: float, *, in_grid: bool = False, num_samples: int = 200) -> TaskGrid:
    """The four settings above, and the reference with its time and accuracy."""
    four = four_settings(num_samples, (0.5, 0.5, 1.0, 1.0), (100.0, 110.0, 200.0, 210.0))
    own_scores = (np.arange(num_samples) < right * num_samples).astype(float)
    own_times = milliseconds * np.linspace(0.95, 1.05, num_samples)
    points = [*POINTS, reference(in_grid)]
    return grid(points, np.vstack([four.scores, own_scores]), np.vstack([four.total_ms, own_times]))


def test_the_cheapest_setting_that_is_not_worse_than_the_reference_is_taken() -> None:
    """Twice as accurate a setting is slower than the reference, and no answer to what is cheaper."""
    found = conclude(analysed(beside(160.0, 0.5, num_samples=400)))
    assert (found.setting, found.against, found.is_reference) == ("tier-low_topk1_blocks12", "own_topk2_blocks12", True)
    assert found.nearest is not None and found.nearest.time_ratio == pytest.approx(100 / 160)
    # The other one is slower by a tenth, and is not named beside it.
    assert found.as_fast == ()


def test_few_samples_show_no_setting_to_be_as_accurate() -> None:
    found = conclude(analysed(beside(160.0, 0.5, num_samples=40)))
    assert (found.setting, found.word) == ("own_topk2_blocks12", "can't tell")
    assert found.nearest is not None and (found.nearest.faster, found.nearest.not_worse) == ("yes", "can't tell")
    assert found.nearest.accuracy_difference == 0.0 and found.samples_needed is not None
    assert 250 < found.samples_needed < 400


def test_the_reference_competes_for_the_front_and_is_outside_the_effects() -> None:
    made = beside(90.0, 1.0, num_samples=1000)
    found, alone = analysed(made), analysed(four_settings(1000, (0.5, 0.5, 1.0, 1.0), (100.0, 110.0, 200.0, 210.0)))
    assert front_words(found) == {each.key: "no" for each in POINTS} | {"own_topk2_blocks12": "yes"}
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
    assert front_words(found) == {"own_topk2_blocks12": "yes"}
    (each,) = present(found)
    assert not each.fixed and not each.couplings and not found.effects["latency_mean"].terms
    assert contents_of({}, {}, [found], {}, [])["e2_coupling_analysis"]["couplings"][0]["hypervolume"] is None


@pytest.mark.parametrize(
    ("milliseconds", "std", "text"),
    [
        # Each setting's time is exact to the sample; what may be the machine is 20 %, and 300 / 231 - 1 = 30 %.
        ((300.0, 231.0), 0.2, "blocks 20 → 24: -69 ms (can't tell)"),
        ((231.0, 300.0), 0.2, "blocks 20 → 24: +69 ms (can't tell)"),
        ((300.0, 231.0), 0.02, "blocks 20 → 24: -69 ms"),
        ((0.3, 0.26), 0.0, "blocks 20 → 24: -0.04 ms"),
    ],
)
def test_a_change_has_a_word_unless_it_is_sure(milliseconds: tuple[float, ...], std: float, text: str) -> None:
    """A dense model's runs of 20, 24, ... blocks, which are all right on half of the 20 samples."""
    points = [KnobPoint(key := f"own_blocks{20 + 4 * at}", Setting.named(key)) for at in range(len(milliseconds))]
    scores = np.array([np.arange(20) < 10] * len(points), dtype=float)
    times = np.outer(milliseconds, np.linspace(0.95, 1.05, 20))
    found = conclude(
        analysed(grid(points, scores, times, variance=with_variance(std**2, 20, len(points))))
    )
    assert found.lines[1] == f"knobs: {text}, accuracy +0.0 points (can't tell)"


def test_a_knob_whose_ends_are_alike_changes_nothing_surely_between_them() -> None:
    """The value in the middle takes twice as long; the two others have the same times in another order."""
    points = [KnobPoint(key := f"own_blocks{20 + 4 * at}", Setting.named(key)) for at in range(3)]
    times = np.outer((300.0, 600.0, 300.0), np.linspace(0.95, 1.05, 20))
    times[2] = np.roll(times[2], 7)
    (change,) = conclude(analysed(grid(points, np.ones(times.shape), times))).changes
    assert change.time_word == "can't tell" and (change.first, change.last) == ("20", "28")


@pytest.mark.parametrize(
    ("num_samples", "variance", "reason"),
    [
        (5, IN_ROUNDS, "needs 6 pictures"),
        (40, UNKNOWN, "measured one after another"),
        (40, OPEN_LOOP, "requests that came at a rate and waited for each other"),
    ],
)
def test_without_a_verdict_nothing_is_called_faster(num_samples: int, variance: Replication, reason: str) -> None:
    times = np.outer((100.0, 110.0, 200.0, 210.0), np.linspace(0.95, 1.05, num_samples))
    (line,) = conclude(analysed(grid(POINTS, np.ones(times.shape), times, variance=variance))).lines
    assert line.startswith("conclusion: no setting is named: ") and reason in line


def test_answers_of_which_none_is_right_name_no_setting() -> None:
    found = analysed(four_settings(16, (0.0, 0.0, 0.0, 0.0), (100.0, 110.0, 200.0, 210.0)))
    assert conclude(found).lines == [
        "conclusion: no setting is named: no answer was right at any setting; compare pred with answers in the CSV of "
        "samples (--metric changes the scoring, of own data --prompt_template the prompt)",
        "knobs: vision low → high: +100 ms; top-k 1 → 2: +10 ms",
    ]
    assert front_words(found) == {}


def test_words_are_of_the_mean_latency_whatever_the_first_cost_is() -> None:
    """By P95 the second setting is the cheapest, by the mean the first: one of 100 requests in ten is slow at each."""
    times = np.full((4, 100), 300.0)
    times[0], times[0, :10] = 100.0, 500.0
    times[1] = 200.0
    (found,) = analyse_knobs([grid(POINTS, np.ones((4, 100)), times)], (LATENCY_P95, LATENCY_MEAN), num_draws=200).tasks
    # 0.9 * 100 + 0.1 * 500 = 140 ms against 200 and 300.
    assert conclude(found).against == "tier-low_topk1_blocks12" and conclude(found).against_time_ms == 140.0
    assert front_words(found)["tier-low_topk1_blocks12"] == "yes"


def test_a_setting_that_is_faster_by_ratios_and_not_by_the_mean_is_not_called_faster() -> None:
    """Nine of ten requests take a fifth less, one takes three times as long: 0.9 * 80 + 0.1 * 300 = 102 ms."""
    times = np.full((2, 100), 100.0)
    times[1] = 80.0
    times[1, ::10] = 300.0
    found = conclude(analysed(grid([reference(True), POINTS[0]], np.ones((2, 100)), times)))
    assert found.nearest is not None and found.nearest.time_ratio < 1 and found.nearest.faster == "can't tell"


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1), (3, 2, 1, 0)])
def test_the_nearest_is_what_lacks_least_to_a_yes_in_whatever_order(order: tuple[int, ...]) -> None:
    """All surely lose; the cheapest loses most, and the one that loses least is half as fast again as the reference."""
    right, ms = (0.34, 0.81, 0.50, 1.0), (59.0, 79.0, 70.0, 197.0)
    points = [point("low", 2, 13), point("low", 8, 16), point("low", 8, 13), reference(True)]
    scores = np.array([np.arange(200) < part * 200 for part in right], dtype=float)
    times = np.outer(ms, np.linspace(0.95, 1.05, 200))
    rows = list(order)
    found = conclude(analysed(grid([points[at] for at in rows], scores[rows], times[rows])))
    assert found.word == "no" and found.nearest is not None and found.nearest.setting == points[1].key


def test_settings_without_times_have_the_reason_alone() -> None:
    made = four_settings(16, (0.5, 0.5, 1.0, 1.0), (np.nan,) * 4)
    (line,) = conclude(analysed(made)).lines
    assert line.startswith("conclusion: no setting is named: no setting has a sample with a time")
    assert front_words(analysed(made)) == {}


def test_accuracy_changes_are_also_by_type_and_hold_together_for_all() -> None:
    """40 samples of three types: of `reading` all are right with `high` and none with `low`; 30 of the 40 of `facts`
    are right with top-k 2 alone; `colour` has the same answers everywhere. Types and knobs are a family of 3 x 2."""
    types = ("reading",) * 40 + ("facts",) * 40 + ("colour",) * 40
    reading, facts = np.array([[0.0], [0.0], [1.0], [1.0]]), np.array([[0.0], [1.0], [0.0], [1.0]])
    by_facts = np.hstack([np.repeat(facts, 30, axis=1), np.zeros((4, 10))])
    scores = np.hstack([np.repeat(reading, 40, axis=1), by_facts, np.ones((4, 40))])
    times = np.outer((100.0, 110.0, 200.0, 210.0), np.linspace(0.95, 1.05, 120))
    made = replace(grid(POINTS, scores, times), question_types=types)
    vision, top_k = conclude(analysed(made)).changes
    assert [(each.question_type, each.num_samples) for each in vision.by_type] == [
        ("colour", 40), ("facts", 40), ("reading", 40)
    ]  # fmt: skip
    assert [each.accuracy for each in vision.by_type] == pytest.approx([0.0, 0.0, 1.0])
    assert [each.accuracy_word for each in vision.by_type] == ["can't tell", "can't tell", "yes"]
    assert vision.most_in == vision.by_type[2]
    assert top_k.most_in is not None and top_k.most_in.question_type == "facts"
    assert top_k.most_in.accuracy == pytest.approx(0.75)
    low, high = top_k.most_in.accuracy_ci95 or (0.0, 0.0)
    # 30 of 40, all in one direction: that of more is between Clopper's and Pearson's end and that of one answer less,
    # each with 0.05 / 12, to which the family's simulated quantile adds little; that of less counts a loss, too.
    tail = 0.05 / 12
    assert stats.beta.isf(tail, 30, 11) < high < stats.beta.isf(tail / 2, 31, 10)
    assert 0.45 < low < stats.beta.ppf(tail, 30, 11)


def test_an_answer_changes_a_mean_over_settings_by_its_part() -> None:
    """Two tiers and four numbers of blocks, unsorted. Of 32 samples of one type 16 change with the tier, each at one
    number of blocks, so by 1 / 4 of the mean; at 4 blocks others are right at both tiers, which is no change."""
    orders = {"low": (4, 12, 8, 6), "high": (6, 12, 4, 8)}
    points = [point(tier, 1, blocks) for tier, order in orders.items() for blocks in order]
    apart = np.zeros((8, 32))
    for sample in range(16):
        apart[4 + sample % 4, sample] = 1.0
    apart[np.ix_([0, 6], range(16, 32))] = 1.0
    types = ("apart",) * 32 + ("same",) * 32
    made = grid(points, np.hstack([apart, np.ones((8, 32))]), np.outer(range(10, 18), np.linspace(0.9, 1.1, 64)))
    vision = conclude(analysed(replace(made, question_types=types))).changes[0]
    (found, same) = vision.by_type
    assert (found.accuracy, same.accuracy) == (pytest.approx(0.125), 0.0)
    # A quarter of 16 of 32, all in one direction: that of more is between Clopper's and Pearson's end and that of one
    # answer less, with 0.05 / 8; that of less counts a loss, too. A whole answer each would be four times as far.
    tail = 0.05 / 8
    low, high = found.accuracy_ci95 or (0.0, 0.0)
    assert stats.beta.isf(tail, 16, 17) / 4 < high < stats.beta.isf(tail / 2, 17, 16) / 4
    assert 0.05 < low < stats.beta.ppf(tail, 16, 17) / 4
    # Where none of n changes, nothing says that pairs change apart: a whole answer, and (1 - high)^n / 2 is the tail.
    low, high = same.accuracy_ci95 or (0.0, 0.0)
    assert -low == pytest.approx(high) and high == pytest.approx(1 - (2 * tail) ** (1 / 32), abs=0.002)


def test_too_few_samples_of_a_type_and_an_incomplete_grid_show_nothing_by_type() -> None:
    made = replace(four_settings(12, (0.5, 0.5, 1.0, 1.0), (100.0, 110.0, 200.0, 210.0)), question_types=("a", "b") * 6)
    vision, _ = conclude(analysed(made)).changes
    # Three more right of six: no six pictures decide among four changes.
    assert [each.accuracy_word for each in vision.by_type] == ["can't tell", "can't tell"] and vision.most_in is None
    three = replace(
        made, points=made.points[:3], scores=made.scores[:3], total_ms=made.total_ms[:3], log_times=made.log_times[:3],
        energy_j=made.energy_j[:3], flops=made.flops[:3],
    )  # fmt: skip
    assert all(each.by_type == () for each in conclude(analysed(three)).changes)
    alone = replace(made, question_types=("a",) * 12)
    assert all(each.by_type == () for each in conclude(analysed(alone)).changes)
