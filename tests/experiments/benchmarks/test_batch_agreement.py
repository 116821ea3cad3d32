"""Where two runs begin to differ, by hand."""

import pytest

from experiments.benchmarks.batch_agreement import Agreement, compare, first_difference


@pytest.mark.parametrize(
    ("one", "other", "place"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 5, 3], 1),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [1, 2], 2),
        ([], [4], 0),
        ([], [], None),
    ],
)
def test_the_first_difference(one: list[int], other: list[int], place: int | None) -> None:
    assert first_difference(one, other) == place


def test_the_flip_rate_of_four_prompts() -> None:
    agreement = compare([[1, 2], [3], [4, 5], [6]], [[1, 9], [3], [7, 5], [6]])
    assert agreement == Agreement(4, (0, 1))
    assert agreement.flip_rate == 0.5
    low, high = agreement.interval or (0, 0)
    assert 0 < low < 0.5 < high < 1


def test_no_difference_is_not_certainty() -> None:
    agreement = compare([[1]] * 10, [[1]] * 10)
    assert agreement.flip_rate == 0.0
    # 0 among 10: (1 - p)^10 = 0.025.
    assert agreement.interval == (0.0, pytest.approx(1 - 0.025**0.1))


def test_runs_over_different_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        compare([[1]], [])
    assert compare([], []).flip_rate is None
