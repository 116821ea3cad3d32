"""Which samples are drawn: the published draw, shares of the types, ids, and nothing made while choosing."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.tasks.sampling import Sampling, allocate, create_sampled_dataset


@dataclass(frozen=True)
class Letters:
    """Item i is the i-th letter, its type too; items must not be made while samples are chosen."""

    letters: str
    may_be_made: bool = False

    def __len__(self) -> int:
        return len(self.letters)

    def __getitem__(self, index: int) -> str:
        assert self.may_be_made, "an item was made"
        return self.letters[index]

    def question_type(self, index: int) -> str:
        return self.letters[index]


def test_the_draw_is_the_published_one_in_its_order() -> None:
    """RandomState(42).choice(100, size=5, replace=False)."""
    view = create_sampled_dataset(range(100), 5)
    assert view.sample_ids == (83, 53, 70, 45, 44)
    assert view.sampling == Sampling("random", 42, 5, 100)
    assert list(view) == [83, 53, 70, 45, 44]
    assert create_sampled_dataset(range(100), 5, seed=43).sample_ids != view.sample_ids


def test_what_is_left_out_is_passed_over_in_the_order_of_the_draw() -> None:
    """RandomState(42).permutation(100) begins 83, 53, 70, 45, 44, 39, 22."""
    view = create_sampled_dataset(range(100), 5, left_out={44, 53, 7})
    assert view.sample_ids == (83, 70, 45, 39, 22)
    assert view.sampling == Sampling("random", 42, 5, 100, 3)
    rest = create_sampled_dataset("abcd", 3, left_out={2})
    assert (rest.sample_ids, rest.sampling) == ((0, 1, 3), Sampling("all", None, 3, 4, 1))
    # Of 6 a and 2 b there are 3 a and 1 b left, of which two are drawn in proportion: one of each type at least.
    typed = create_sampled_dataset(Letters("abaaaaab"), 2, stratify_by_type=True, left_out={0, 7, 3, 5})
    assert len(typed.sample_ids) == 2 and set(typed.sample_ids) < {1, 2, 4, 6} and 1 in typed.sample_ids
    with pytest.raises(ConfigurationError, match="none of 4 samples of the dataset can be drawn: all are left out"):
        create_sampled_dataset("abcd", 2, left_out={0, 1, 2, 3})


@pytest.mark.parametrize("number", [None, 4, 9])
def test_no_number_or_a_large_one_means_all(number: int | None) -> None:
    view = create_sampled_dataset("abcd", number)
    assert "".join(view) == "abcd"
    assert view.sampling == Sampling("all", None, number, 4)


@given(st.integers(1, 500), st.integers(1, 500), st.integers(0, 2**32 - 1))
def test_a_draw_is_without_replacement_repeatable_and_as_large_as_requested(
    length: int, wanted: int, seed: int
) -> None:
    ids = create_sampled_dataset(range(length), wanted, seed).sample_ids
    assert len(ids) == len(set(ids)) == min(length, wanted)
    assert set(ids) <= set(range(length))
    assert create_sampled_dataset(range(length), wanted, seed).sample_ids == ids
    if wanted < length:
        assert list(ids) == np.random.RandomState(seed=seed).choice(length, size=wanted, replace=False).tolist()


def test_nothing_is_made_before_it_is_requested() -> None:
    dataset = Letters("aab" * 10)
    for options in ({}, {"stratify_by_type": True}, {"ids": [3, 1]}):
        assert len(create_sampled_dataset(dataset, 2, **options)) == 2
    assert create_sampled_dataset(Letters("xyz", may_be_made=True), 2, ids=[2, 0])[0] == "z"


def test_the_ids_given_are_those_taken() -> None:
    view = create_sampled_dataset("abcdef", 2, ids=[4, 0, 5])
    assert (view.sample_ids, view.sampling) == ((4, 0, 5), Sampling("ids", None, 3, 6))
    assert "".join(view) == "eaf"
    with pytest.raises(IndexError):
        view[3]


@pytest.mark.parametrize(
    ("number", "options", "message"),
    [
        (5, {"ids": [3, 6, -1]}, "sample ids 6, -1 are outside the split; it has 0 to 5"),
        (5, {"ids": range(6, 20)}, "6, 7, 8, 9, 10 and 9 more are outside"),
        (5, {"ids": [3, 1, 3]}, "sample ids 3 are given twice"),
        (5, {"ids": []}, "no sample ids"),
        (0, {}, "0 samples cannot be drawn"),
        (2, {"stratify_by_type": True}, "str has no question types"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(number: int, options: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        create_sampled_dataset("abcdef", number, **options)
    assert "\n" not in str(caught.value)


# --- by type of question ------------------------------------------------------------------------------------------


def test_shares_by_hand() -> None:
    # 10 of 60 + 25 + 15: exact shares 6, 2.5, 1.5; the one left falls to b, first of two equal remainders.
    assert allocate({"c": 15, "a": 60, "b": 25}, 10) == {"a": 6, "b": 3, "c": 1}
    # Exact shares 4.95, 0.04, 0.01: b and c get their one, and a what is left.
    assert allocate({"a": 990, "b": 8, "c": 2}, 5) == {"a": 3, "b": 1, "c": 1}
    # Fewer samples than types: the largest remainders.
    assert allocate({"a": 1, "b": 5, "c": 4}, 2) == {"a": 0, "b": 1, "c": 1}


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.data())
def test_shares_add_up_and_stay_near_proportion(numbers: list[int], data: st.DataObject) -> None:
    sizes = {f"type {index}": number for index, number in enumerate(numbers)}
    wanted = data.draw(st.integers(1, sum(numbers)))
    given_out = allocate(sizes, wanted)
    assert sum(given_out.values()) == wanted
    assert all(0 <= given_out[kind] <= size for kind, size in sizes.items())
    if wanted >= len(sizes):
        assert min(given_out.values()) >= 1
    exact = {kind: wanted * size / sum(numbers) for kind, size in sizes.items()}
    if min(exact.values()) >= 1 or wanted < len(sizes):
        assert all(abs(given_out[kind] - fraction) < 1 for kind, fraction in exact.items())


@given(st.text("abcd", min_size=2, max_size=80), st.integers(0, 2**32 - 1), st.data())
def test_a_draw_by_type_has_those_shares_and_is_repeatable(letters: str, seed: int, data: st.DataObject) -> None:
    wanted = data.draw(st.integers(1, len(letters) - 1))
    view = create_sampled_dataset(Letters(letters), wanted, seed, stratify_by_type=True)
    assert list(view.sample_ids) == sorted(set(view.sample_ids))
    found = Counter(letters[index] for index in view.sample_ids)
    assert found == Counter(allocate(Counter(letters), wanted))
    assert view.sampling == Sampling("question_type", seed, wanted, len(letters))
    again = create_sampled_dataset(Letters(letters), wanted, seed, stratify_by_type=True)
    assert again.sample_ids == view.sample_ids
