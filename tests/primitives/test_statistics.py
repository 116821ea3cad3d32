import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from experiment_core_utils.primitives import statistics
from experiment_core_utils.primitives.statistics import (
    bounded_mean_interval,
    correlation_of_means,
    describe,
    fraction_above,
    fraction_of,
    half_of_interval,
    highest_of,
    mean_of,
    percentiles,
    percentiles_over_runs,
    positive_interval,
    ratio_interval,
)


def test_a_fraction_of_nothing_is_absent() -> None:
    assert (fraction_of(1, 4), fraction_of(0, 4), fraction_of(0, 0)) == (0.25, 0.0, None)


def test_four_numbers_by_hand() -> None:
    spread = describe([1.0, 2.0, 3.0, 6.0])
    assert spread is not None
    assert (spread.n, spread.mean, spread.min, spread.max) == (4, 3.0, 1.0, 6.0)
    # Squares of the differences: 4 + 1 + 0 + 9 = 14; divided by n - 1 = 3.
    assert spread.std == pytest.approx(math.sqrt(14 / 3))
    # Positions from 0 to 3: 1.5 for the median, 2.85 for P95 (3 + 0.85 * 3), 2.97 for P99.
    assert spread.p50 == pytest.approx(2.5)
    assert spread.p95 == pytest.approx(5.55)
    assert spread.p99 == pytest.approx(5.91)
    # Student's t with 3 degrees of freedom, 97.5 %: 3.182446.
    half = 3.182446 * math.sqrt(14 / 3) / 2
    assert spread.ci_low == pytest.approx(3 * math.exp(-half / 3), rel=1e-6)
    assert spread.ci_high == pytest.approx(3 * math.exp(half / 3), rel=1e-6)
    assert half_of_interval(3.0, spread.ci_low or 0.0, spread.ci_high or 0.0) == pytest.approx(half, rel=1e-6)
    # One below 0 makes the interval symmetric.
    signed = describe([1.0, 2.0, -6.0, 3.0])
    assert signed is not None and signed.ci_low is not None and signed.ci_high is not None
    assert signed.mean == 0.0 and signed.ci_low == -signed.ci_high < 0.0
    assert half_of_interval(0.0, 0.0, 0.0) == 0.0


def test_an_interval_of_which_everything_is_open_is_finite() -> None:
    low, high = positive_interval(1e-3, 5.0)
    assert 0.0 < low < 1e-9 and 1e5 < high < 1e9


@pytest.mark.parametrize("values", [[0.12, 0.9], [1.0, 0.0, 0.0], [3e-9, 8.0, 9.0, 1e4], [0.0, 0.0]])
def test_the_interval_of_what_is_not_below_0_is_not_below_0(values: list[float]) -> None:
    spread = describe(values)
    assert spread is not None and spread.ci_low is not None and spread.ci_high is not None
    assert spread.ci_low > 0.0 or spread.max == 0.0
    assert spread.ci_low <= spread.mean <= spread.ci_high


def test_weighted_percentiles_are_numpys_where_weights_are_equal() -> None:
    values = np.random.default_rng(3).lognormal(size=37)
    found = percentiles(values, (0, 5, 50, 95, 100), np.full(37, 0.25))
    assert found == pytest.approx(np.percentile(values, (0, 5, 50, 95, 100)).tolist())
    # 1 and 5 of weight 1, 2 of weight 2: steps of 1.5 and 1.5, so that half way is 2; 5 of weight 4: 1.5 and 3.
    assert percentiles(np.array([2.0, 1.0, 5.0]), (50,), np.array([2.0, 1.0, 1.0])) == [2.0]
    assert percentiles(np.array([2.0, 1.0, 5.0]), (50,), np.array([2.0, 1.0, 4.0])) == [pytest.approx(2 + 3 * 0.75 / 3)]
    assert percentiles(np.array([7.0]), (1, 99), np.array([0.5])) == [7.0, 7.0]


def test_the_runs_of_a_column_weigh_as_much_as_one_value() -> None:
    """1 and 3 weigh 1/2 each, 4 weighs 1: the median is 3 + (0.625 - 0.5) / 0.75."""
    runs = np.array([[3.0, 4.0, np.nan], [1.0, np.nan, np.nan]])
    assert percentiles_over_runs(runs, (50,)) == [pytest.approx(3 + 0.125 / 0.75)]
    late = fraction_above(runs, 2.0)
    assert late[:2].tolist() == [0.5, 1.0] and np.isnan(late[2])


def test_values_of_one_cluster_are_one_for_the_interval_alone() -> None:
    # Clusters of 1, 2 and 3 and of 6: sums 6 and 6, mean 3; 2 / 1 * ((6 - 9)^2 + (6 - 3)^2) / 4^2 = 2.25.
    spread, alone = describe([1.0, 2.0, 6.0, 3.0], ["a", "a", "b", "a"]), describe([1.0, 2.0, 6.0, 3.0])
    assert spread is not None and alone is not None
    # Student's t with 1 degree of freedom, 97.5 %: 12.706205.
    times = math.exp(12.706205 * 1.5 / 3)
    assert (spread.ci_low, spread.ci_high) == (pytest.approx(3 / times), pytest.approx(3 * times))
    assert replace(spread, ci_low=alone.ci_low, ci_high=alone.ci_high) == alone
    assert describe([1.0, 2.0, 6.0, 3.0], range(4)) == alone
    of_one = describe([1.0, 2.0, 3.0], "aaa")
    assert of_one is not None
    assert (of_one.std, of_one.ci_low, of_one.ci_high) == (pytest.approx(1.0), None, None)


def test_clustered_intervals_of_a_mean_cover_it() -> None:
    """40 pictures with 5 questions each, whose times differ mostly by picture; one over questions covers too seldom."""
    source = np.random.default_rng(7)
    pictures = np.repeat(np.arange(40), 5).tolist()
    hits = [0, 0]
    for _ in range(400):
        values = (source.normal(size=(40, 1)) + 0.3 * source.normal(size=(40, 5))).ravel().tolist()
        for place, clusters in enumerate((pictures, None)):
            spread = describe(values, clusters)
            assert spread is not None and spread.ci_low is not None and spread.ci_high is not None
            hits[place] += spread.ci_low <= 0.0 <= spread.ci_high
    assert hits[0] >= 367 and hits[1] < 300  # 95 % of 400 is 380, less three standard deviations of 4.4


def test_what_is_not_known_is_in_no_mean_and_never_the_highest() -> None:
    assert mean_of([1.0, None, 4.0]) == 2.5 and highest_of([1.0, None, 4.0]) == 4.0
    assert mean_of([None]) is mean_of([]) is highest_of([None]) is highest_of([]) is None


def test_one_number_has_no_spread_and_none_has_nothing() -> None:
    single = describe([5.0])
    assert single is not None
    assert (single.mean, single.std, single.ci_low, single.ci_high) == (5.0, None, None, None)
    assert describe([]) is None
    assert bounded_mean_interval([]) is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        describe([1.0, value])


def test_the_interval_of_a_ratio_by_hand() -> None:
    # 0.6 * 0.4 R^2 - 2 * 10 * 0.5 R + 8 * 12 = 0: R = (10 -+ sqrt(100 - 92.16)) / 0.48 = (10 -+ 2.8) / 0.48.
    assert ratio_interval(10.0, (8.0, 12.0), 0.5, (0.4, 0.6)) == (pytest.approx(15.0), pytest.approx(12.8 / 0.48))
    # Of one that is known exactly the ends are those of the other.
    assert ratio_interval(10.0, (10.0, 10.0), 0.5, (0.4, 0.9)) == (pytest.approx(10 / 0.9), pytest.approx(25.0))
    assert ratio_interval(10.0, (8.0, 13.0), 0.5, (0.5, 0.5)) == (pytest.approx(16.0), pytest.approx(26.0))
    # An upper limit more than twice the estimate, and a lower one of 0.
    low, high = ratio_interval(10.0, (10.0, 10.0), 0.1, (0.0, 0.3))
    assert (low, high) == (pytest.approx(10 / 0.3), None)


def test_the_interval_of_a_ratio_of_correlated_estimates_is_narrower() -> None:
    """(10 - R / 2)^2 = 4 + R^2 / 100 - 2 r R / 5: with r = 1 it is (2 - R / 10)^2, so 8 = 0.4 R and 12 = 0.6 R."""
    found = ratio_interval(10.0, (8.0, 12.0), 0.5, (0.4, 0.6), correlation=1.0)
    assert found == (pytest.approx(20.0), pytest.approx(20.0))
    # With r = -1 it is (2 + R / 10)^2: 8 = 0.6 R and 12 = 0.4 R.
    found = ratio_interval(10.0, (8.0, 12.0), 0.5, (0.4, 0.6), correlation=-1.0)
    assert found == (pytest.approx(8 / 0.6), pytest.approx(30.0))


def test_means_over_shared_clusters_are_correlated() -> None:
    # By cluster the first moves by -2, 0 and 2, the second by -1, 1 and 0: 2 / sqrt(8 * 2).
    assert correlation_of_means((1.0, 3.0, 5.0), "abc", (0.0, 2.0, 1.0), "abc") == pytest.approx(0.5)
    # Only `b` is in both; two values of one cluster move it together.
    assert correlation_of_means((1.0, 3.0), "ab", (0.0, 0.0, 3.0), "bbc") == pytest.approx(-2 / math.sqrt(2 * 8))
    assert correlation_of_means((1.0, 1.0), "ab", (0.0, 2.0), "ab") == 0.0


@pytest.mark.parametrize("right", [0, 1, 5, 8, 10])
def test_scores_of_0_and_1_have_the_exact_interval(right: int) -> None:
    exact = stats.binomtest(right, 10).proportion_ci(0.95, method="exact")
    interval = bounded_mean_interval([1.0] * right + [0.0] * (10 - right))
    assert interval == pytest.approx((exact.low, exact.high))


def test_drawn_ends_are_those_of_the_closed_form() -> None:
    """Scores that differ by less than matters have no closed form: their ends are quantiles of draws."""
    scores = [1.0] * 8 + [0.0] * 2
    unequal = [score + 1e-9 * place for place, score in enumerate(scores)]
    drawn = bounded_mean_interval(unequal, best=1 + 1e-7)
    assert drawn == pytest.approx(bounded_mean_interval(scores), abs=0.02)


def nearly_zeros_and_ones(right: int, wrong: int, tail: float) -> tuple[float, float]:
    """The interval of scores that differ by less than matters, so that no closed form is used."""
    scores = [score + 1e-9 * place / (right + wrong) for place, score in enumerate([1.0] * right + [0.0] * wrong)]
    return bounded_mean_interval(scores, best=1 + 1e-7, tail=tail) or (math.nan, math.nan)


@pytest.mark.parametrize("tail", [0.025, 1e-3, 1e-4, 1e-6])
@pytest.mark.parametrize(("right", "wrong"), [(1, 1), (2, 3), (20, 10), (29, 1), (311, 189), (499, 1)])
def test_integrated_ends_are_those_of_the_closed_form(
    right: int, wrong: int, tail: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "FEWEST_DRAWS_BEYOND", math.inf)
    exact = stats.beta.ppf(tail, right, wrong + 1), stats.beta.ppf(1 - tail, right + 1, wrong)
    assert nearly_zeros_and_ones(right, wrong, tail) == pytest.approx(exact, abs=1e-5)


def test_draws_are_not_used_where_few_of_them_lie_beyond_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 of 30 right, each end failing with 1e-4: Clopper and Pearson's lower one is 0.3195, the upper one 0.9168."""
    assert nearly_zeros_and_ones(20, 10, 1e-4) == pytest.approx((0.3195, 0.9168), abs=1e-4)
    monkeypatch.setattr(statistics, "FEWEST_DRAWS_BEYOND", 0)
    low, high = nearly_zeros_and_ones(20, 10, 1e-4)
    assert low > 0.33 or high < 0.91


@pytest.mark.parametrize("tail", [1e-3, 1e-4])
def test_the_end_of_two_graded_scores_by_hand(tail: float) -> None:
    """The lower end is b where E0 * b is above E1 * (0.3 - b) + E2 * (0.8 - b) with the tail's probability.

    For exponential variables that is the product of 1 / (1 + (score - b) / b), which is b^2 / (0.3 * 0.8).
    """
    low, _ = bounded_mean_interval([0.3, 0.8], tail=tail) or (1.0, 0.0)
    assert low == pytest.approx(math.sqrt(0.24 * tail), rel=1e-3)


def test_the_end_of_two_unequal_clusters_by_hand() -> None:
    # One of a score of 0.4 and one of three of 0.5, mean number 2: (2 b)^2 / ((0.4 + b) * (1.5 - b)) is the tail.
    low, _ = bounded_mean_interval([0.4, 0.5, 0.5, 0.5], "abbb", tail=1e-4) or (1.0, 0.0)
    assert 4 * low**2 / ((0.4 + low) * (1.5 - low)) == pytest.approx(1e-4, rel=1e-3)


def test_integrated_ends_of_graded_scores_are_quantiles_of_a_million_draws() -> None:
    scores = [0.0, 0.3, 0.3, 0.6, 0.9, 1.0] * 5
    source = np.random.default_rng(11)
    parts = [source.exponential(size=(100_000, 31)) for _ in range(10)]
    means = np.concatenate([each[:, :30] @ np.array(scores) / each.sum(axis=1) for each in parts])
    for tail in (1e-3, 1e-4):
        low, _ = bounded_mean_interval(scores, tail=tail) or (1.0, 0.0)
        assert (means < low).mean() == pytest.approx(tail, abs=4 * math.sqrt(tail / 1e6))


@given(
    st.lists(st.tuples(st.sampled_from([-1.0, -0.3, 0.0, 0.6, 1.0]), st.integers(0, 30)), min_size=1, max_size=60),
    st.sampled_from([1e-3, 1e-4, 1e-7]),
)
def test_a_surer_interval_contains_the_usual_one(pairs: list[tuple[float, int]], tail: float) -> None:
    scores, clusters = [score for score, _ in pairs], [cluster for _, cluster in pairs]
    low, high = bounded_mean_interval(scores, clusters, worst=-1.0) or (1.0, 0.0)
    lower, higher = bounded_mean_interval(scores, clusters, worst=-1.0, tail=tail) or (1.0, 0.0)
    assert -1.0 <= lower <= low and high <= higher <= 1.0


def test_a_nearly_perfect_score_is_no_surer_than_a_perfect_one() -> None:
    (low, _), (lower, _) = (bounded_mean_interval([1.0] * 15 + [last]) or (0.0, 0.0) for last in (1.0, 0.9))
    assert lower <= low + 0.01  # the error of draws


def test_all_right_is_not_certain() -> None:
    low, high = bounded_mean_interval([1.0] * 16) or (0.0, 0.0)
    assert 0.75 < low < 0.85
    assert high == 1.0


@given(st.lists(st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.0]), min_size=1, max_size=60))
def test_the_interval_holds_the_mean_and_stays_inside(scores: list[float]) -> None:
    low, high = bounded_mean_interval(scores) or (1.0, 0.0)
    assert 0.0 <= low <= np.mean(scores) + 1e-9
    assert np.mean(scores) - 1e-9 <= high <= 1.0


def test_intervals_of_graded_scores_cover_the_true_mean() -> None:
    source = np.random.default_rng(3)
    scores, shares = np.array([0.0, 0.3, 1.0]), np.array([0.3, 0.2, 0.5])
    truth = float(scores @ shares)
    hits = 0
    for _ in range(200):
        low, high = bounded_mean_interval(list(source.choice(scores, size=80, p=shares))) or (1.0, 0.0)
        hits += low <= truth <= high
    assert hits >= 180


# --- clusters -----------------------------------------------------------------------------------------------------


def test_scores_on_their_own_are_clusters_of_one() -> None:
    for scores in ([1.0] * 8 + [0.0] * 2, [0.3, 0.6, 1.0, 0.0, 0.3]):
        assert bounded_mean_interval(scores, range(len(scores))) == bounded_mean_interval(scores)


def test_clusters_that_agree_within_count_once() -> None:
    scores = [1.0] * 28 + [0.0] * 12  # 10 pictures, 4 alike questions each
    clustered = bounded_mean_interval(scores, [place // 4 for place in range(40)])
    assert clustered == pytest.approx(bounded_mean_interval([1.0] * 7 + [0.0] * 3))


def test_unequal_clusters_of_right_and_wrong_scores_by_hand() -> None:
    """Pictures with one right answer and with seven wrong ones, and the one more at the end with four, their mean.

    Under exponential weights the lower end b is where E0 * (1 - b) is above (7 E1 + 4 E2) * b with chance 1 - tail,
    which is (1 - b)^2 / ((1 + 6 b) * (1 + 3 b)); the upper one where E1 * 7 b is above (E0 + 4 E2) * (1 - b) with that.
    """
    scores, pictures = [0.0] * 4 + [1.0] + [0.0] * 3, "bbbbabbb"
    low, high = bounded_mean_interval(scores, pictures, tail=0.2) or (1.0, 0.0)
    # 2,000 draws leave a chance of 0.8 uncertain by 0.009.
    assert (1 - low) ** 2 / ((1 + 6 * low) * (1 + 3 * low)) == pytest.approx(0.8, abs=0.03)
    odds = 7 * high / (1 - high)
    assert odds / (odds + 1) * odds / (odds + 4) == pytest.approx(0.8, abs=0.03)


def test_many_scores_of_one_cluster_are_as_good_as_one() -> None:
    assert bounded_mean_interval([0.3, 0.6, 0.9], "aaa") == pytest.approx(bounded_mean_interval([0.6]))


def test_another_best_score_scales_the_interval() -> None:
    scores = [0.3, 0.6, 1.0, 0.0, 0.3]
    low, high = bounded_mean_interval(scores) or (0.0, 0.0)
    assert bounded_mean_interval([10 * score for score in scores], best=10) == pytest.approx((10 * low, 10 * high))


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.3, 1.0]), st.integers(0, 8)), min_size=1, max_size=40),
    st.sampled_from([1.0, 10.0]),
)
def test_the_clustered_interval_holds_the_mean_and_stays_inside(pairs: list[tuple[float, int]], best: float) -> None:
    scores = [best * score for score, _ in pairs]
    low, high = bounded_mean_interval(scores, [cluster for _, cluster in pairs], best) or (1.0, 0.0)
    assert 0.0 <= low <= np.mean(scores) + 1e-9
    assert np.mean(scores) - 1e-9 <= high <= best


def test_clustered_intervals_cover_the_true_mean() -> None:
    """60 pictures whose 4 questions are hard or easy together; scores of 0 and 1."""
    source = np.random.default_rng(5)
    hits = 0
    for _ in range(300):
        ease = source.beta(0.5, 0.5, size=60)  # mean 0.5
        scores = (source.random((60, 4)) < ease[:, None]).astype(float).ravel()
        low, high = bounded_mean_interval(scores.tolist(), np.repeat(np.arange(60), 4).tolist()) or (1.0, 0.0)
        hits += low <= 0.5 <= high
    assert hits >= 274  # 95 % of 300 is 285, less three standard deviations of 3.8
