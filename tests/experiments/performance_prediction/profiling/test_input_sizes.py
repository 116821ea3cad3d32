"""Input sizes of a sweep."""

from itertools import pairwise

import pytest

from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.performance_prediction.profiling.config import checked_sizes, evenly_spread


def test_ten_sizes_of_the_usual_range_are_32_apart() -> None:
    assert evenly_spread(224, 512, 10) == (224, 256, 288, 320, 352, 384, 416, 448, 480, 512)


def test_a_hundred_sizes_are_different_and_reach_both_ends() -> None:
    sizes = evenly_spread(224, 512, 100)
    assert len(set(sizes)) == 100 and sizes[0] == 224 and sizes[-1] == 512
    # 288 / 99 = 2.909…: steps of 2 or 3 pixels.
    assert {b - a for a, b in pairwise(sizes)} == {2, 3}


def test_a_single_size_is_the_smallest() -> None:
    assert evenly_spread(224, 512, 1) == (224,)


@pytest.mark.parametrize("count", [0, 4])
def test_too_few_numbers_for_the_sizes_are_refused(count: int) -> None:
    with pytest.raises(ConfigurationError, match="do not fit between 5 and 7"):
        evenly_spread(5, 7, count)


def test_given_sizes_are_sorted_and_validated_by_the_model() -> None:
    assert checked_sizes((96, 64, 96), "alexnet", 63) == (64, 96)
    with pytest.raises(ConfigurationError, match="alexnet takes inputs of 63 pixels and more, not 32"):
        checked_sizes((96, 32), "alexnet", 63)
