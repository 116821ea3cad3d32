"""The mixed task: its samples are those of its parts in turn, and each is scored by the metric of its part."""

import pytest

from experiment_core_utils.primitives.errors import ConfigurationError, SampleError
from experiment_core_utils.tasks.datasets.reference_mixed import PARTS, MixedMetric, ReferenceMixed
from experiment_core_utils.tasks.interface import Answer, answer_to
from experiment_core_utils.tasks.registry import get_metric, load_task
from experiment_core_utils.tasks.sampling import create_sampled_dataset

NAMES = ["reference_vqa", "reference_reading", "reference_counting", "reference_choice", "reference_knowledge"]


def test_samples_are_those_of_the_parts_in_turn() -> None:
    task = load_task("reference_mixed")
    assert len(task) == 5 * 2000 and list(PARTS) == NAMES
    assert [task.question_type(index) for index in range(6)] == [*NAMES, "reference_vqa"]
    for index in (5, 9):
        mixed, alone = task[index], load_task(NAMES[index % 5])[1]
        assert (mixed.sample_id, mixed.question_type) == (index, NAMES[index % 5])
        assert (mixed.question, mixed.answers, mixed.image_id) == (alone.question, alone.answers, alone.image_id)
        assert mixed.metadata["type_in_task"] == alone.question_type
    choice = task[3]
    assert task.prompt(choice) == load_task("reference_choice").prompt(choice) and "\nA: " in task.prompt(choice)
    assert task.max_new_tokens == 40
    with pytest.raises(IndexError, match="reference_mixed validation has samples 0 to 9999, not 10000"):
        task.question_type(10_000)


def test_a_draw_by_type_has_equal_parts() -> None:
    drawn = create_sampled_dataset(ReferenceMixed(), 40, stratify_by_type=True)
    assert [sum(each % 5 == part for each in drawn.sample_ids) for part in range(5)] == [8] * 5


def test_each_answer_is_scored_by_the_metric_of_its_part() -> None:
    task, metric = load_task("reference_mixed"), get_metric("mixed")
    samples = [task[index] for index in range(10)]
    right = metric.score([answer_to(sample, str(sample.metadata["answer"])) for sample in samples])
    assert [score.value for score in right.scores] == pytest.approx([1.0] * 10, abs=0.1)
    # One of ten annotators says it: a third by VQA accuracy; two characters of four are an ANLS of 0.5; a letter.
    answers = [
        Answer("red", ("red",) + ("blue",) * 9, question_type="reference_vqa"),
        Answer("AB", ("ABCD",), question_type="reference_reading"),
        Answer("?", ("x",), options=("x", "y"), answer_index=0, question_type="reference_choice"),
        Answer("A", ("x",), options=("x", "y"), answer_index=0, question_type="reference_choice"),
    ]
    scored = metric.score(answers)
    assert [score.value for score in scored.scores] == pytest.approx([0.3, 0.5, 0.0, 1.0])
    assert scored.overall == pytest.approx(0.45) and scored.details == {"unparsed": 1}


def test_other_splits_templates_and_types_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="reference_mixed has no split 'control': choose one of train, valid"):
        load_task("reference_mixed", "control")
    with pytest.raises(ConfigurationError, match="options"):
        load_task("reference_mixed", prompt_template="{question}")
    with pytest.raises(SampleError, match="mixed scores the types reference_vqa, .*, not 'colour'; give another --met"):
        MixedMetric().score([Answer("red", ("red",), question_type="colour")])
