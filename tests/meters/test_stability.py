"""Orders, warm-ups, when there are enough samples, and runs that stand out, by hand-worked numbers."""

import math

import numpy as np
import pytest

from experiment_core_utils.meters.stability import (
    PrecisionGoal,
    find_outliers,
    is_stable,
    measuring_order,
    needs_another_run,
    shuffled,
    spread_of_last,
    warm_up_of,
)
from experiment_core_utils.primitives.statistics import describe, relative_half_width

KEYS = ("a", "b", "c", "d", "e")


def test_the_shuffle_is_that_of_numpys_frozen_stream() -> None:
    # numpy.random.RandomState(42).permutation(5) is [1, 4, 2, 0, 3].
    assert shuffled(KEYS, 42) == ("b", "e", "c", "a", "d")
    assert shuffled((), 42) == ()


def test_settings_run_shuffled_by_the_seed_or_as_planned() -> None:
    assert measuring_order(KEYS, "shuffled", 42).keys == ("b", "e", "c", "a", "d")
    assert measuring_order(KEYS, "shuffled", 42).seed == 42
    assert measuring_order(KEYS, "shuffled", 7).keys != ("b", "e", "c", "a", "d")
    planned = measuring_order(KEYS, "planned", 42)
    assert (planned.keys, planned.seed) == (KEYS, None)


def test_three_runs_agree_within_five_percent_of_the_shortest() -> None:
    assert spread_of_last([9.0, 1.0, 1.25]) == pytest.approx(8.0)
    assert spread_of_last([9.0, 1.0, 1.25, 1.0]) == pytest.approx(0.25)
    assert spread_of_last([1.0, 1.0]) is None
    assert is_stable([5.0, 1.0, 1.04, 1.02])
    assert not is_stable([5.0, 1.0, 1.06, 1.02])
    assert not is_stable([1.0, 1.0])


def runs_of_warm_up(totals: list[float], least: int, most: int) -> int:
    done: list[float] = []
    while needs_another_run(done, least, most):
        done.append(totals[len(done)])
    return len(done)


@pytest.mark.parametrize(
    ("totals", "least", "most", "runs"),
    [
        ([3.0, 2.0, 1.0, 1.0, 1.0, 1.0], 2, 10, 5),  # runs 3, 4 and 5 are the first that agree
        ([1.0, 1.0, 1.0, 1.0], 2, 10, 3),  # two were requested, but agreement takes three
        ([1.0, 1.0, 1.0, 1.0, 1.0], 4, 10, 4),  # stable before, but four were requested
        ([1.0, 2.0, 1.0, 2.0, 1.0, 2.0], 2, 5, 5),  # never stable
        ([1.0, 2.0, 3.0], 2, 2, 2),
        ([], 0, 10, 0),  # switched off
    ],
)
def test_a_warm_up_continues_until_it_is_stable(totals: list[float], least: int, most: int, runs: int) -> None:
    assert runs_of_warm_up(totals, least, most) == runs


def test_what_is_noted_of_a_warm_up() -> None:
    warm = warm_up_of([3.0, 1.0, 1.0, 1.0], 2, "0007", 1)
    assert (warm.experiment_id, warm.rank, warm.is_stable, warm.spread) == ("0007", 1, True, 0.0)
    assert warm_up_of([3.0, 1.0, 2.0], 2, "0007", 0).is_stable is False
    assert warm_up_of([], 0, "0007", 0).is_stable is None


def test_the_half_width_is_that_of_students_t() -> None:
    # n = 4, mean 10, std sqrt(8 / 3); t(0.975, 3) = 3.182446.
    values = [8.0, 10.0, 10.0, 12.0]
    assert relative_half_width(values) == pytest.approx(3.182446 * math.sqrt(8 / 3) / 2 / 10)
    spread = describe(values)
    assert spread is not None and spread.ci_high is not None
    assert relative_half_width(values) == pytest.approx(math.log(spread.ci_high / spread.mean))
    assert relative_half_width([5.0]) is None
    assert relative_half_width([]) is None


def test_samples_that_share_a_picture_count_as_one() -> None:
    # Two pictures, sums 16 and 24 of 2 each, mean 10: variance 2 / 1 * (16 + 16) / 16 = 4; t(0.975, 1) = 12.7062.
    assert relative_half_width([8.0, 8.0, 12.0, 12.0], ["a", "a", "b", "b"]) == pytest.approx(12.7062 * 2 / 10, 1e-5)
    assert relative_half_width([8.0, 8.0], ["a", "a"]) is None


def test_precision_needs_ten_samples_and_a_narrow_interval_of_every_ratio() -> None:
    goal, pictures = PrecisionGoal(0.02), list("abcdefghij")
    equal = np.zeros((3, 10))
    assert not goal.is_reached(equal[:, :9], pictures[:9])
    assert goal.is_reached(equal, pictures)
    # A setting alone, a sample that one lacks, and ten samples of five pictures say too little.
    assert not goal.is_reached(equal[:1], pictures)
    lacking = equal.copy()
    lacking[2, 4] = np.nan
    assert not goal.is_reached(lacking, pictures)
    assert not goal.is_reached(equal, list("aabbccddee"))
    # Logarithms 0.03 apart in half of the samples each way: std 0.031623, error 0.01, t(0.975, 9) = 2.262157.
    apart = np.array([[0.0] * 10, [-0.03, 0.03] * 5])
    assert not goal.is_reached(apart, pictures)
    assert goal.of_shard(4).relative == pytest.approx(0.04)
    assert goal.of_shard(4).is_reached(apart, pictures)
    # Requests of very unequal lengths, alike for both settings, change nothing.
    assert goal.of_shard(4).is_reached(apart + np.arange(10.0), pictures)


def test_outliers_are_found_over_all_samples_and_named_by_their_run() -> None:
    # Runs of 1/1.01, 1, 1.01 in four samples, and one of 1.2: of 15 distances between two runs of one sample nine are
    # log 1.01, so is the first quartile. Student's t with 15 - 5 degrees of freedom exceeds 5.10 with the probability
    # 0.000233 with which a normal exceeds 3.5; the limit is 5.10 * 2.21914 * log 1.01 = 0.1126, a factor of 1.119.
    usual = [1.0 / 1.01, 1.0, 1.01]
    found = find_outliers([usual, usual, usual, [2.0 / 1.01, 2.4, 2.0], usual])
    assert found.by_sample == ((), (), (), (1,), ())
    assert found.share == pytest.approx(1 / 15)
    assert found.reason is None


def test_a_run_within_five_percent_is_no_outlier_however_equal_the_others_are() -> None:
    assert find_outliers([[1.0, 1.0, 1.04]] * 3).by_sample == ((), (), ())
    assert find_outliers([[1.0, 1.0, 1.06]] * 3).by_sample == ((2,), (2,), (2,))
    assert find_outliers([[1.0, 1.0, 0.94]] * 3).by_sample == ((2,), (2,), (2,))


def test_few_runs_take_a_larger_distance() -> None:
    # Deviation 2.21914 * log 1.01 = 0.02208; 3.5 of them are a factor of 1.080. With 2 degrees of freedom the quantile
    # is (1 - 2p) / sqrt(2p (1 - p)) for the probability p = 0.0002326: 46.34, a factor of 2.782.
    usual = [1.0, 1.01, 1.01**2]
    assert find_outliers([[1.0, 1.01, 2.75]]).by_sample == ((),)
    assert find_outliers([[1.0, 1.01, 2.85]]).by_sample == ((2,),)
    assert find_outliers([*[usual] * 400, [1.0, 1.01, 1.01 * 1.075]]).by_sample[-1] == ()
    assert find_outliers([*[usual] * 400, [1.0, 1.01, 1.01 * 1.085]]).by_sample[-1] == (2,)


@pytest.mark.parametrize("num_runs", [3, 5, 10])
@pytest.mark.parametrize("num_samples", [1, 5, 50])
def test_hardly_a_run_stands_out_of_noise_alone(num_runs: int, num_samples: int) -> None:
    source = np.random.default_rng(num_runs)
    settings = [source.lognormal(0.0, 0.1, (num_samples, num_runs)) for _ in range(3000 // num_samples)]
    shares = [find_outliers(setting.tolist()).share for setting in settings]
    assert np.mean([share for share in shares if share is not None]) < 0.01


@pytest.mark.parametrize("num_runs", [3, 5, 10])
def test_runs_of_three_times_the_time_stand_out_of_noise(num_runs: int) -> None:
    totals = np.random.default_rng(num_runs).lognormal(0.0, 0.05, (40, num_runs))
    totals[:8, 1] *= 3
    assert all(1 in (found or ()) for found in find_outliers(totals.tolist()).by_sample[:8])


def test_a_wide_spread_has_no_outliers() -> None:
    assert find_outliers([[0.8, 1.0, 1.25]] * 4).share == 0.0


def test_two_runs_say_nothing() -> None:
    assert find_outliers([[1.0, 9.0], [1.0]]).by_sample == (None, None)
    assert find_outliers([[1.0, 9.0]]).share is None
    assert find_outliers([]).reason == "no sample has 3 runs"
    assert find_outliers([[1.0, 9.0], [1.0, 1.0, 2.0]]).by_sample == (None, (2,))
