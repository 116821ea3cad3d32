"""The draw of samples, its split over processes, and requests made from them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiment_core_utils.c_prompt_processing import (
    RequestMaker,
    draw_sample_ids,
    fingerprint_of_ids,
    share_of_process,
)
from experiment_core_utils.primitives.knobs import CropRange
from experiment_core_utils.tasks.registry import load_task
from tests.scripted_model import ScriptedModel


@given(st.integers(1, 500), st.integers(1, 500), st.integers(0, 2**32 - 1))
def test_a_draw_is_ascending_without_replacement_and_repeatable(length: int, wanted: int, seed: int) -> None:
    ids = draw_sample_ids(length, wanted, seed)
    assert len(ids) == len(set(ids)) == min(length, wanted)
    assert list(ids) == sorted(ids)
    assert set(ids) <= set(range(length))
    assert draw_sample_ids(length, wanted, seed) == ids


def test_the_draw_is_pinned() -> None:
    """Results of one seed stay comparable between versions: RandomState(42).choice(100, 5, replace=False), sorted."""
    assert draw_sample_ids(100, 5, 42) == (44, 45, 53, 70, 83)
    assert draw_sample_ids(100, 5, 43) != draw_sample_ids(100, 5, 42)


def test_more_samples_than_there_are_means_all() -> None:
    assert draw_sample_ids(4, 4, 0) == draw_sample_ids(4, 9, 7) == (0, 1, 2, 3)


@given(st.lists(st.integers(0, 999), unique=True), st.integers(1, 8))
def test_shares_are_disjoint_complete_and_of_like_size(ids: list[int], processes: int) -> None:
    shares = [share_of_process(ids, rank, processes) for rank in range(processes)]
    assert sorted(sample_id for share in shares for sample_id in share) == sorted(ids)
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_shares_by_hand() -> None:
    assert [share_of_process((3, 5, 7, 9, 11), rank, 2) for rank in (0, 1)] == [(3, 7, 11), (5, 9)]


def test_fingerprints_tell_ids_apart() -> None:
    assert fingerprint_of_ids((1, 23)) == fingerprint_of_ids([1, 23])
    assert len({fingerprint_of_ids(ids) for ids in ((1, 23), (12, 3), (23, 1), (1, 2, 3), ())}) == 5
    assert len(fingerprint_of_ids((1,))) == 16


def test_a_request_has_the_tasks_prompt_and_the_crops_asked_for() -> None:
    model, task = ScriptedModel(), load_task("reference_vqa", "validation")
    sample = task[0]
    request = RequestMaker(model, task).make(sample, CropRange(4, 8))
    assert model.calls == [f"prepare {' User: ' + sample.question + ' Assistant:'!r} 4-8"]
    assert request.shape.prompt_tokens == len(task.prompt(sample))


def test_an_index_outside_the_split_is_no_sample() -> None:
    with pytest.raises(IndexError):
        load_task("reference_vqa", "validation")[2000]
