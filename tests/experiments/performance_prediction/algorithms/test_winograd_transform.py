"""The matrices of F(2, 3) by hand, and the identity that makes them an algorithm for others."""

from fractions import Fraction

import pytest

from experiments.performance_prediction.algorithms.on_cpu import winograd_transform

HALF = Fraction(1, 2)


def test_the_matrices_of_two_outputs_of_three_taps() -> None:
    # Points 0, 1, -1 and infinity. Differences of each to the others multiply to (0-1)(0+1) = -1, (1-0)(1+1) = 2 and
    # (-1-0)(-1-1) = 2. Without 0: (x-1)(x+1) = x² - 1; without 1: x(x+1); without -1: x(x-1); all: x³ - x.
    transform = winograd_transform(2, 3)
    assert transform.output == ((1, 1, 1, 0), (0, 1, -1, 1))
    assert transform.kernel == ((-1, 0, 0), (HALF, HALF, HALF), (HALF, -HALF, HALF), (0, 0, 1))
    assert transform.given == ((-1, 0, 1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, -1, 0, 1))


@pytest.mark.parametrize(("outputs", "taps"), [(2, 3), (4, 3), (2, 5), (3, 2), (1, 1), (4, 5)])
def test_for_each_pair_of_tap_and_sample_the_sum_is_that_of_a_correlation(outputs: int, taps: int) -> None:
    transform = winograd_transform(outputs, taps)
    samples = outputs + taps - 1
    for place in range(outputs):
        for tap in range(taps):
            for sample in range(samples):
                products = (
                    transform.output[place][i] * transform.kernel[i][tap] * transform.given[i][sample]
                    for i in range(samples)
                )
                assert sum(products) == (sample == place + tap)


def test_more_points_than_there_are() -> None:
    with pytest.raises(ValueError, match=r"F\(6, 5\) needs 9 points, 7 are known"):
        winograd_transform(6, 5)
