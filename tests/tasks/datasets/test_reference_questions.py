"""The questions for language models: their number, answers and options."""

import hashlib
from collections import Counter

import pytest

from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.tasks.datasets.reference_questions import (
    QUESTIONS_FILE,
    ReferenceQuestions,
    ReferenceQuestionsChoice,
)
from experiment_core_utils.tasks.interface import answer_to
from experiment_core_utils.tasks.registry import get_metric, load_task


def test_there_are_304_different_questions_of_six_types() -> None:
    task = ReferenceQuestions()
    assert len({task[index].question for index in range(len(task))}) == len(task) == 304
    types = Counter(task.question_type(index) for index in range(len(task)))
    assert types == {"capital": 81, "opposite": 80, "sum": 60, "plural": 45, "colour": 26, "month": 12}
    assert task.source["sha256"] == hashlib.sha256(QUESTIONS_FILE.read_bytes()).hexdigest()


def test_sums_and_months_are_right() -> None:
    months = [
        "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
        "December",
    ]  # fmt: skip
    words = ("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
             "seventeen eighteen").split()  # fmt: skip
    task = ReferenceQuestions()
    for sample in map(task.__getitem__, range(len(task))):
        if sample.question_type == "sum":
            one, _, other = sample.question.removeprefix("What is ").rstrip("?").split()
            total = int(one) + int(other)
            assert sample.answers == (str(total), words[total])
        if sample.question_type == "month":
            *_, way, month = sample.question.rstrip("?").split()
            step = 1 if way == "after" else -1
            assert sample.answers == (months[(months.index(month) + step) % 12],)


def test_options_are_four_of_which_one_is_an_answer_and_letters_are_evenly_spread() -> None:
    task, open_task = ReferenceQuestionsChoice(), ReferenceQuestions()
    letters: Counter[tuple[str, int | None]] = Counter()
    for index in range(len(task)):
        sample, answers = task[index], open_task[index].answers
        assert len(set(sample.options)) == 4 and sample.answer_index is not None
        assert [each for each in sample.options if each in answers] == [sample.options[sample.answer_index]]
        assert sample.answers == (sample.options[sample.answer_index],)
        letters[sample.question_type, sample.answer_index] += 1
    for kind in {kind for kind, _ in letters}:
        counts = [letters[kind, place] for place in range(4)]
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("task", [ReferenceQuestions(), ReferenceQuestionsChoice()], ids=lambda task: task.name)
def test_right_answers_score_1_and_others_0(task: ReferenceQuestions) -> None:
    metric = get_metric(task.metric)
    samples = [task[index] for index in range(len(task))]
    assert metric.score([answer_to(each, each.answers[0]) for each in samples]).overall == 1.0
    assert metric.score([answer_to(each, "I do not know.") for each in samples]).overall == 0.0


def test_it_takes_a_template_and_nothing_else() -> None:
    task = load_task("reference_questions_choice", prompt_template="{question}\n{options}")
    assert task.prompt(task[0]).startswith("What is the capital of France?\nA: ")
    with pytest.raises(ConfigurationError, match="leaves out {options}"):
        load_task("reference_questions_choice", prompt_template="{question}")
    with pytest.raises(ConfigurationError, match="takes no folder or revision: leave them out"):
        load_task("reference_questions", data_dir="here")
    with pytest.raises(ConfigurationError, match="has no split 'test': give validation"):
        load_task("reference_questions", "test")
    with pytest.raises(IndexError):
        ReferenceQuestions()[304]


def test_neighbours_of_a_question_do_not_share_its_content() -> None:
    task = ReferenceQuestions()
    digests = {task.data_sha256(index) for index in range(len(task))}
    assert len(digests) == 304 and None not in digests
