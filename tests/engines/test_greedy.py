"""Answers of a batch: each grows until its own end of sequence."""

import pytest
import torch

from experiment_core_utils.engines.answer_ends import AnswerEnds
from experiment_core_utils.engines.greedy import BatchAnswers
from experiment_core_utils.primitives.errors import GenerationFailed
from experiment_core_utils.primitives.finite_logits import NOT_FINITE


def test_each_answer_ends_at_its_own_end_of_sequence() -> None:
    """End of sequence is 2; the second row ends at once, and what it gives afterwards is ignored."""
    answers = BatchAnswers(torch.tensor([[5], [2], [7]]), AnswerEnds(frozenset({2})))
    answers.add(torch.tensor([2, 9, 8]))
    assert not answers.have_ended
    answers.add(torch.tensor([[6], [2], [2]]))
    assert answers.have_ended
    assert answers.token_ids == [(5, 2), (2,), (7, 8, 2)]


def test_logits_that_are_not_finite_matter_until_an_answer_has_ended() -> None:
    answers = BatchAnswers(torch.tensor([2, 7]), AnswerEnds(frozenset({2})))
    answers.add(torch.tensor([NOT_FINITE, 5]))
    assert answers.token_ids == [(2,), (7, 5)]
    with pytest.raises(GenerationFailed, match="^logits are not finite$"):
        answers.add(torch.tensor([1, NOT_FINITE]))
