"""Numbers of samples and what they show, by hand and by simulation."""

import math

import numpy as np
import pytest
from scipy import stats

from experiment_core_utils.sweep.statistical_power import (
    PairSpread,
    accuracy_shown,
    latency_shown,
    pair_spread,
    power_sentences,
    samples_for_accuracy,
    samples_for_latency,
)


def test_samples_for_a_difference_in_accuracy_by_hand() -> None:
    # 10 % of answers change, by 0.02 on balance: (1.95996 x 0.316228 + 0.841621 x sqrt(0.0996))^2 / 0.0004 =
    # (0.619794 + 0.265609)^2 / 0.0004 = 0.783939 / 0.0004 = 1959.8.
    assert samples_for_accuracy(0.02, 0.1) == 1960
    assert accuracy_shown(1960, 0.1) == 0.02 and accuracy_shown(1959, 0.1) == 0.021
    # Fewer answers change than would have to; 16 samples show nothing.
    assert samples_for_accuracy(0.2, 0.1) is None and accuracy_shown(16, 0.1) is None


def test_samples_for_a_difference_in_latency_are_those_of_the_t_test() -> None:
    number = samples_for_latency(0.02, 0.1)
    assert (latency_shown(number, 0.1) or math.inf) <= 0.02 < (latency_shown(number - 1, 0.1) or math.inf)
    # The power of the two-sided t-test of a mean that is 0.2 standard deviations above 0.
    df = number - 1
    power = stats.nct.sf(stats.t.ppf(0.975, df), df, 0.2 * math.sqrt(number))
    assert power == pytest.approx(0.8, abs=0.005)
    assert latency_shown(5, 0.1) is None


def test_the_power_for_accuracy_is_what_it_says() -> None:
    number = samples_for_accuracy(0.05, 0.15) or 0
    generator = np.random.default_rng(0)
    better, worse, _ = generator.multinomial(number, [0.10, 0.05, 0.85], size=2000).T
    shown = [2 * stats.binom.sf(b - 1, b + w, 0.5) <= 0.05 for b, w in zip(better[:500], worse[:500], strict=True)]
    # McNemar's exact test is a little more careful than the normal approximation.
    assert 0.72 <= np.mean(shown) <= 0.86


def test_what_was_not_measured_is_assumed_and_reported() -> None:
    assert pair_spread({}) == PairSpread(0.1, 0.1, 0)
    (first, second) = power_sentences(16, 16, pair_spread({}), 0.02)
    assert "accuracy none with 16 samples" in first and "assumed" in first
    assert second.startswith("to show 0.02: accuracy 1960 samples; mean latency (2.0%) 199 timed samples")
