"""What is told of a server's cache from times to the first token."""

from collections.abc import Sequence

import pytest

from experiment_core_utils.models.endpoint.caches import CacheFinding, new_salt, warm_ratio


@pytest.mark.parametrize(
    ("new_s", "again_s", "expected"),
    [
        # Without the oddest of each the slowest takes 0.05 of 0.2 s.
        ([0.2] * 7 + [0.01], [0.05] * 7 + [0.9], 0.25),
        ([0.2] * 8, [0.19] * 8, 0.95),
        ([0.2] * 8, [0.05] * 6 + [0.21] * 2, 1.0),
        # It saves half, and less than a client can tell.
        ([0.003] * 8, [0.0015] * 8, 1.0),
    ],
)
def test_a_cache_is_told_by_all_pairs_but_the_oddest(
    new_s: Sequence[float], again_s: Sequence[float], expected: float
) -> None:
    left, salts = [each for pair in zip(new_s, again_s, strict=True) for each in pair], list[str]()

    def first_token_s(salt: str) -> float:
        salts.append(salt)
        return left.pop(0)

    assert warm_ratio(first_token_s) == pytest.approx(expected)
    assert salts[::2] == salts[1::2] and len(set(salts)) == 8 and not left


def test_salts_are_of_equal_length_and_never_the_same() -> None:
    salts = [new_salt() for _ in range(99)]
    assert {len(each) for each in salts} == {12} and len(set(salts)) == 99


@pytest.mark.parametrize(
    ("finding", "kinds"),
    [
        (CacheFinding(0.95), []),
        (CacheFinding(0.2, 0, 8), ["server_salted"]),
        (CacheFinding(0.2, 1, 8), ["server_salt_changes"]),
    ],
)
def test_a_reader_is_told_of_a_cache_and_of_answers_that_the_salt_changes(
    finding: CacheFinding, kinds: list[str]
) -> None:
    assert [each.kind for each in finding.caveats] == kinds
