"""Contrasts of settings: estimates, errors, critical values and words, by values worked out by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from experiment_core_utils.primitives.contrasts import (
    MOST_FLIPPED_SETTINGS,
    PairedContrasts,
    ScoreContrasts,
    groups_of_ties,
    word_of,
)
from tests.hand_made_replication import with_variance

NONE = np.zeros(6)
UP = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])  # mean 3.5, sum of squares about it 17.5: error sqrt(17.5 / 5 / 6)
ERROR = math.sqrt(17.5 / 30)


def test_estimate_and_error_are_those_of_the_paired_t_test() -> None:
    found = PairedContrasts.of(np.stack([NONE, UP / 100]), range(6))
    assert found.log_ratio[1, 0] == pytest.approx(0.035) and found.errors(1)[0] == pytest.approx(ERROR / 100)
    assert found.ratio(1, 0) == pytest.approx(math.exp(0.035)) == pytest.approx(1 / found.ratio(0, 1))
    assert (found.num_samples, found.num_pictures, found.num_comparisons) == (6, 6, 1)


def test_six_pictures_that_agree_are_one_pattern_of_signs_of_32() -> None:
    # |t| = 3.5 / ERROR is the largest of the patterns, since all differences agree; of differences less their mean
    # it is 1.5 / sqrt((17.5 - 6 * 2.25) / 30), smaller.
    found = PairedContrasts.of(np.stack([NONE, UP / 100]), range(6))
    assert found.p_value(0, 1) == pytest.approx(1 / 32) and found.p_value(1, 0) == 1.0
    assert (found.word(0, 1), found.word(1, 0)) == ("yes", "no")
    low, high = found.interval(0, 1) or (0.0, 0.0)
    assert 0 < low < math.exp(-0.035) < high < 1 and low * high == pytest.approx(math.exp(-0.07))


def test_the_critical_value_is_the_second_largest_of_32_patterns() -> None:
    # 5 % of 32 patterns is one. The second largest |t| of the differences flips the smallest: their mean is 19 / 6 and
    # their squares still add up to 91. Of the differences less their mean, -2.5 to 2.5, the two largest have 2.5, 1.5
    # and 0.5 on one side each, but one of 0.5: mean 9 / 6 and 8 / 6 of squares that add up to 17.5.
    found = PairedContrasts.of(np.stack([NONE, UP / 100]), range(6))
    patterns = [(19 / 6, 91.0), (8 / 6, 17.5)]
    ratios = [mean / math.sqrt((squares - 6 * mean**2) / 30) for mean, squares in patterns]
    assert found.critical() == pytest.approx(max(*ratios, stats.t.ppf((1 + 31 / 32) / 2, 5)))


def test_samples_of_one_picture_are_one() -> None:
    twice = PairedContrasts.of(np.repeat(np.stack([NONE, UP]), 2, axis=1), np.repeat(range(6), 2))
    once = PairedContrasts.of(np.stack([NONE, UP]), range(6))
    assert twice.errors(0)[1] == pytest.approx(once.errors(0)[1]) and twice.p_value(0, 1) == once.p_value(0, 1)
    assert twice.critical() == pytest.approx(once.critical()) and twice.num_samples == 12


def test_samples_that_a_setting_lacks_are_left_out_of_all() -> None:
    times = np.stack([np.append(NONE, 9.0), np.append(UP, np.nan)])
    found = PairedContrasts.of(times, range(7))
    assert found.num_samples == 6 and found.log_ratio[1, 0] == pytest.approx(3.5)


@pytest.mark.parametrize("pictures", [0, 1, 5])
def test_too_few_pictures_have_no_verdict_and_say_why(pictures: int) -> None:
    found = PairedContrasts.of(np.stack([np.zeros(pictures), np.ones(pictures)]), range(pictures))
    assert found.no_verdict == f"a verdict needs 6 pictures that all settings have, and {pictures} are"
    assert found.word(0, 1) == "can't tell" and found.interval(0, 1) is None and found.p_value(0, 1) == 1.0


def test_equal_times_are_not_told_apart_and_a_constant_ratio_is() -> None:
    found = PairedContrasts.of(np.log(np.stack([np.full(8, 10.0), np.full(8, 10.0), np.full(8, 11.0)])), range(8))
    assert found.word(0, 1) == found.word(1, 0) == "can't tell" and found.interval(0, 1) == (1.0, 1.0)
    assert found.word(0, 2) == "yes" and found.p_value(0, 2) == pytest.approx(1 / 128)
    assert found.interval(2, 0) == pytest.approx((1.1, 1.1))


def test_what_all_settings_share_changes_nothing() -> None:
    random = np.random.default_rng(0)
    times, common = random.normal(size=(4, 30)), 5 * random.normal(size=30)
    one, other = PairedContrasts.of(times, range(30)), PairedContrasts.of(times + common, range(30))
    assert one.largest == pytest.approx(other.largest) and one.p_values(0) == pytest.approx(other.p_values(0))


def test_more_comparisons_need_more_and_those_with_a_reference_fewer() -> None:
    times = np.random.default_rng(1).normal(size=(12, 40))
    two, all_pairs = PairedContrasts.of(times[:2], range(40)), PairedContrasts.of(times, range(40))
    with_reference = PairedContrasts.of(times, range(40), reference=0)
    assert two.critical() < with_reference.critical() < all_pairs.critical()
    # From Student's t of one pair to Bonferroni's correction for 66.
    assert two.critical() == pytest.approx(stats.t.ppf(0.975, 39), rel=0.04)
    assert all_pairs.critical() < stats.t.ppf(1 - 0.025 / 66, 39)
    assert (all_pairs.num_comparisons, with_reference.num_comparisons) == (66, 11)
    assert with_reference.critical(0.8) < with_reference.critical()


def test_a_pair_outside_the_family_is_refused() -> None:
    found = PairedContrasts.of(np.random.default_rng(1).normal(size=(3, 9)), range(9), reference=0)
    assert np.isnan(found.p_values(1)[2]) and 0 < found.p_values(1)[0] <= 1
    for read in (found.word, found.interval, found.p_value):
        with pytest.raises(ValueError, match="were not compared: contrasts are with 0 only"):
            read(1, 2)


def test_a_setting_variance_is_in_every_error_and_takes_verdicts_away() -> None:
    times = np.stack([np.zeros(50), np.full(50, 0.02) + 0.001 * np.tile([-1.0, 1.0], 25)])
    rounds = PairedContrasts.of(times, range(50))
    blocked = PairedContrasts.of(times, range(50), replication=with_variance(0.03**2, 20, 2))
    assert rounds.word(0, 1) == "yes" and blocked.word(0, 1) == "can't tell"
    assert blocked.errors(0)[1] ** 2 == pytest.approx(rounds.errors(0)[1] ** 2 + 2 * 0.03**2)
    # Of one pair, what is drawn is nearly normal over a variance of 20 degrees of freedom: Student's t.
    assert blocked.critical() == pytest.approx(stats.t.ppf(0.975, 20), rel=0.08)
    assert (
        PairedContrasts.of(times * 10, range(50), replication=with_variance(0.03**2, 20, 2)).word(0, 1)
        == "yes"
    )


def test_many_settings_are_judged_by_students_t_with_bonferronis_correction() -> None:
    size = MOST_FLIPPED_SETTINGS + 1
    found = PairedContrasts.of(np.random.default_rng(2).normal(size=(size, 10)), range(10))
    assert found.critical() == pytest.approx(stats.t.isf(0.025 / (size * (size - 1) / 2), 9))
    ratio = float(found.log_ratio[1, 0] / found.errors(1)[0])
    expected = min(size * (size - 1) * stats.t.sf(abs(ratio), 9), 1.0)
    assert min(found.p_value(0, 1), found.p_value(1, 0)) == pytest.approx(expected)


def test_a_wrong_verdict_or_a_missed_difference_is_in_five_percent_of_families_at_most() -> None:
    random, wrong, missed = np.random.default_rng(3), 0, 0
    truth = np.repeat(np.arange(6.0), 2)
    for _ in range(120):
        found = PairedContrasts.of(truth[:, None] + 0.1 * random.normal(size=(12, 16)), range(16))
        gaps = np.abs(found.log_ratio - (truth[:, None] - truth))
        outside = gaps > found.critical() * np.stack([found.errors(at) for at in range(12)])
        wrong += bool((found.told_apart() & (truth[:, None] == truth)).any())
        missed += bool(outside.any())
    # 5 % of 120, and three standard deviations; flips of differences that are truly far apart alone miss a fifth.
    assert wrong <= 13 and missed <= 13


def test_scores_that_agree_are_not_known_to_be_equal() -> None:
    # No difference in 100 pictures: half of (1 - d)^100 is 0.025.
    scores = np.tile([1.0, 0.0, 1.0, 1.0], 25)
    found = ScoreContrasts.of(np.stack([scores, scores]), range(100))
    half = 1 - 0.05 ** (1 / 100)
    # The critical value is that of 2,000 draws, 1.96 or a little more.
    assert found.interval(0, 1) == pytest.approx((-half, half), rel=0.05)
    assert found.word(0, 1) == "can't tell"
    assert found.not_worse(0).tolist() == [True, False] and found.not_worse(0, 0.05).tolist() == [True, True]
    many = ScoreContrasts.of(np.stack([np.tile(scores, 3)] * 2), range(300))
    assert many.not_worse(0).tolist() == [True, True]


def test_added_answers_are_as_large_as_changes_of_a_picture() -> None:
    # 60 pictures of two answers, of which 10 change: both answers alike, or one alone; at rest nothing is known.
    pictures, none, alone = np.repeat(np.arange(60), 2), np.ones(120), np.ones(120)
    alone[:20:2] = 0.0
    alike = np.where(np.arange(120) < 20, 0.0, 1.0)
    for other, changed, size in ((alone, 10, 1), (alike, 40, 2), (none, 0, 2)):
        found = ScoreContrasts.of(np.stack([none, other]), pictures)
        own = changed - 60 * (2 * found.difference(0, 1)) ** 2
        assert found.errors(0)[1] == pytest.approx(math.sqrt((own + 4 * size**2) * 60 / 59) / 120)


def test_the_sign_test_of_few_answers_that_differ() -> None:
    """Of 40 answers seven are better and none is worse: of 128 patterns 2 are as large, which count half."""
    one, other = np.ones(40), np.concatenate([np.zeros(7), np.ones(33)])
    found = ScoreContrasts.of(np.stack([one, other]), range(40))
    error = math.sqrt((7 - 49 / 40 + 4) * 40 / 39) / 40
    assert found.difference(0, 1) == pytest.approx(7 / 40) and found.errors(0)[1] == pytest.approx(error)
    assert found.p_value(0, 1) == pytest.approx(1 / 128, abs=0.01) and found.word(0, 1) == "yes"
    # Four that differ are two of 16 patterns: half of 0.125.
    other[:3] = 1.0
    assert ScoreContrasts.of(np.stack([one, other]), range(40)).p_value(0, 1) == pytest.approx(0.0625, abs=0.02)


def test_scores_are_in_the_metrics_own_unit() -> None:
    scores = np.random.default_rng(4).choice([0.0, 0.3, 1.0], size=(3, 30))
    one, hundred = ScoreContrasts.of(scores, range(30)), ScoreContrasts.of(100 * scores, range(30), best=100.0)
    assert hundred.difference(0, 1) == pytest.approx(100 * one.difference(0, 1))
    assert hundred.interval(0, 1) == pytest.approx([100 * each for each in one.interval(0, 1) or ()])
    assert hundred.p_values(0) == pytest.approx(one.p_values(0))
    assert hundred.not_worse(0, 0.3).tolist() == one.not_worse(0, 0.3).tolist()


@pytest.mark.parametrize(
    ("p_value", "opposite", "word"),
    [(0.05, 1, "yes"), (0.051, 1, "likely"), (0.2, 1, "likely"), (0.21, 1, "can't tell"), (1, 0.05, "no"),
     (1, 0.2, "can't tell"), (1, 1, "can't tell")],
)  # fmt: skip
def test_four_words(p_value: float, opposite: float, word: str) -> None:
    assert word_of(p_value, opposite) == word


def test_groups_are_runs_whose_ends_cannot_be_told_apart() -> None:
    apart = np.zeros((5, 5), dtype=bool)
    for one, other in ((0, 2), (0, 3), (0, 4), (1, 4), (2, 4), (3, 4)):
        apart[one, other] = apart[other, one] = True
    # 0 is like 1, 1 is like 3, but 0 is not like 3: no chain makes them one group; 4 is alone.
    assert groups_of_ties([0, 1, 2, 3, 4], apart) == [(0, 1), (1, 2, 3), (4,)]
    assert groups_of_ties([4, 3, 2, 1, 0], apart) == [(4,), (3, 2, 1), (1, 0)]
    assert groups_of_ties([0, 1, 2], np.zeros((3, 3), dtype=bool)) == [(0, 1, 2)] and groups_of_ties([], apart) == []


@pytest.mark.parametrize(("right", "word"), [(300, "yes"), (296, "likely"), (294, "can't tell"), (200, "no")])
def test_a_setting_is_not_worse_where_its_whole_interval_is_above_the_margin(right: int, word: str) -> None:
    """Of 400 answers 300 are right, of the other's so many of the same."""
    rows = np.array([np.arange(400) < 300, np.arange(400) < right], dtype=float)
    assert ScoreContrasts.of(rows, np.arange(400), reference=0).word_not_worse(1, 0) == word


def losses(generator: np.random.Generator, num_pictures: int, questions: int, fraction: float) -> np.ndarray:
    """[8, N] scores: a setting that is right on everything, and seven that each lose whole pictures by chance."""
    lost = np.repeat(generator.random((7, num_pictures)) < fraction, questions, axis=1)
    return np.vstack([np.ones((1, lost.shape[1])), ~lost])


@pytest.mark.parametrize(
    ("num_pictures", "questions", "best"), [(200, 1, 1.0), (500, 1, 100.0), (66, 3, 1.0), (167, 3, 1.0), (200, 6, 1.0)]
)
def test_a_loss_of_the_margin_by_few_answers_is_not_called_none(num_pictures: int, questions: int, best: float) -> None:
    """All seven lose exactly 0.02, and 0.02 is in their intervals, in 95 % of families: words are what these say."""
    generator, called, num_runs = np.random.default_rng(11), 0, 40
    for _ in range(num_runs):
        scores = best * losses(generator, num_pictures, questions, 0.02)
        found = ScoreContrasts.of(scores, np.repeat(range(num_pictures), questions), best=best, reference=0)
        words = {found.word_not_worse(at, 0) for at in range(1, 8)}
        called += bool(words & {"yes", "no"})
    # 5 % of 40, and two standard deviations; with a variance of what was seen 15 % and more are wrong.
    assert called <= 4


@pytest.mark.parametrize(
    "changed", [[], [(3, -1.0)], [(3, -1.0), (9, 1.0), (20, -0.4)], [(at, -0.5) for at in range(30)]]
)
def test_a_verdict_is_what_its_interval_says(changed: list[tuple[int, float]]) -> None:
    """At margins just inside and outside the interval's ends, of right and wrong and of partial scores."""
    one = np.tile([1.0, 0.5, 0.0, 1.0], 40)
    other = one.copy()
    for at, change in changed:
        other[at] = np.clip(one[at] + change, 0, 1)
    found = ScoreContrasts.of(np.stack([one, other, one[::-1]]), range(160), reference=0)
    low, high = found.interval(1, 0) or (0.0, 0.0)
    assert low <= found.difference(1, 0) <= high
    for margin, is_sure in ((-low + 1e-4, True), (-low - 1e-4, False)):
        assert bool(found.not_worse(0, margin)[1]) is is_sure
    for margin, word in ((-high - 1e-4, True), (-high + 1e-4, False)):
        assert (found.word_not_worse(1, 0, margin) == "no") is word


def test_the_order_of_pictures_changes_nothing() -> None:
    scores = np.random.default_rng(6).choice([0.0, 0.4, 1.0], size=(4, 50))
    order = np.random.default_rng(7).permutation(50)
    one, other = (ScoreContrasts.of(scores[:, rows], range(50)) for rows in (np.arange(50), order))
    assert one.interval(0, 3) == pytest.approx(other.interval(0, 3), rel=1e-5)
    assert one.p_values(1) == pytest.approx(other.p_values(1))
