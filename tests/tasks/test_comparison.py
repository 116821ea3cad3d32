"""Two settings on the same samples, by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiment_core_utils.tasks.comparison import PairedComparison, ScoredSample, compare_paired


def scored(*values: float | None, per_image: int = 1) -> dict[int, ScoredSample]:
    return {index: ScoredSample(f"picture-{index // per_image}", value) for index, value in enumerate(values)}


def test_differences_by_hand() -> None:
    # Differences -1, 0, 0, +1, -0.5, -0.5.
    found = compare_paired(scored(1, 1, 0, 0, 1, 0.5), scored(0, 1, 0, 1, 0.5, 0))
    assert (found.n, found.num_excluded) == (6, 0)
    assert (found.mean_baseline, found.mean) == (3.5 / 6, 2.5 / 6)
    assert found.difference == pytest.approx(-1 / 6)
    assert (found.better, found.worse, found.equal) == (1, 3, 2)
    # Two-sided sign test of 1 against 3: 2 * (1 + 4) / 2^4.
    assert found.p_value == pytest.approx(0.625)
    assert found.interval is not None
    assert -1 <= found.interval[0] < -1 / 6 < found.interval[1] <= 1


def test_mcnemars_exact_p() -> None:
    """0 against 6 discordant pairs: 2 / 2^6, however many pairs agree."""
    found = compare_paired(scored(*[1.0] * 50), scored(*[0.0] * 6, *[1.0] * 44))
    assert found.p_value == pytest.approx(0.03125)


def test_samples_without_a_score_in_both_are_excluded_and_counted() -> None:
    before, after = scored(1, 1, None, 1), scored(1, 0, 1)
    after[9] = ScoredSample("x", 1.0)
    found = compare_paired(before, after)  # shared: 0 and 1; excluded: 2, 3 and 9
    assert (found.n, found.num_excluded, found.difference) == (2, 3, -0.5)
    assert compare_paired({0: ScoredSample("a", 1.0)}, {1: ScoredSample("a", 1.0)}) == PairedComparison(
        0, 2, None, None, None, None, 0, 0, 0, None
    )


def test_the_interval_is_over_pictures() -> None:
    """40 pictures of 4 alike questions against 160 of one: twice as wide, sqrt(160 / 40)."""
    alike = [float(index // 4 % 2) for index in range(160)]
    base = scored(*[0.5] * 160, per_image=4)
    low, high = compare_paired(base, scored(*alike, per_image=4)).interval or (0, 0)
    low_apart, high_apart = compare_paired(scored(*[0.5] * 160), scored(*alike)).interval or (0, 0)
    assert (high - low) / (high_apart - low_apart) == pytest.approx(2.0, rel=0.15)


def test_no_difference_seen_is_not_certainly_none() -> None:
    # A change of probability p is unseen in 16 samples with (1 - p)^16 = 0.025.
    found = compare_paired(scored(*[1.0, 0.0] * 8), scored(*[1.0, 0.0] * 8))
    assert (found.difference, found.equal, found.p_value) == (0.0, 16, 1.0)
    assert found.interval == pytest.approx((-0.20591, 0.20591), abs=1e-5)


def test_one_change_seen_says_no_less_than_none() -> None:
    """One of 16 worse: the lower end is that of 1 of 16 (Clopper and Pearson 0.30232), the upper one still above 0."""
    found = compare_paired(scored(*[1.0] * 16), scored(0.0, *[1.0] * 15))
    assert found.interval is not None and found.difference == -1 / 16
    assert found.interval == (pytest.approx(-0.30232, abs=1e-5), pytest.approx(0.176, abs=0.015))


def test_a_paired_interval_is_narrower_than_the_settings_own() -> None:
    before = [float(index % 2) for index in range(400)]
    after = [0.0 if index % 20 == 1 else value for index, value in enumerate(before)]
    low, high = compare_paired(scored(*before), scored(*after)).interval or (0, 0)
    assert -0.08 < low < -0.05 < high < -0.02


@given(st.lists(st.tuples(st.sampled_from([0, 0.3, 1]), st.sampled_from([0, 0.3, 1])), min_size=1, max_size=40))
def test_swapping_the_settings_changes_the_sign(pairs: list[tuple[float, float]]) -> None:
    left, right = (scored(*values) for values in zip(*pairs, strict=True))
    there, back = compare_paired(left, right), compare_paired(right, left)
    assert there.difference == pytest.approx(-(back.difference or 0))
    assert (there.better, there.worse, there.p_value) == (back.worse, back.better, back.p_value)
    assert there.interval is not None and there.difference is not None
    assert -1 <= there.interval[0] <= there.difference + 1e-9 and there.difference - 1e-9 <= there.interval[1] <= 1
