"""Every generated family: samples made again alone, types without pixels, prompts, expected answers that score best."""

import random

import pytest

from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.tasks.datasets.reference_task import GeneratedTask, QuestionAnswer, draw_by_type, prompt_of
from experiment_core_utils.tasks.interface import answer_to
from experiment_core_utils.tasks.prompt_forms import prompt_for
from experiment_core_utils.tasks.registry import REFERENCE_TASKS, get_metric, get_metric_for_dataset, load_task

SHARED = [family for family in REFERENCE_TASKS if not family.pictures]

families = pytest.mark.parametrize("family", REFERENCE_TASKS, ids=lambda family: family.name)


@families
def test_a_sample_depends_on_its_index_alone(family: type[GeneratedTask]) -> None:
    first, again = family("validation"), family("validation")
    forwards = [first[index] for index in range(9)]
    backwards = [again[index] for index in reversed(range(9))]
    for one, other in zip(forwards, reversed(backwards), strict=True):
        assert one.image is not None and other.image is not None
        assert (one.question, one.answers, one.options, one.metadata) == (
            other.question, other.answers, other.options, other.metadata
        )  # fmt: skip
        assert one.image.tobytes() == other.image.tobytes()


@pytest.mark.parametrize("family", SHARED, ids=lambda family: family.name)
def test_families_ask_about_the_same_pictures(family: type[GeneratedTask]) -> None:
    vqa, task = REFERENCE_TASKS[0]("validation"), family("validation")
    mine, other = task[task.questions_per_image * 3], vqa[vqa.questions_per_image * 3]
    assert mine.image_id == other.image_id == "validation-0-000003"
    assert mine.image is not None and other.image is not None
    assert mine.image.tobytes() == other.image.tobytes()


@families
def test_types_are_known_without_painting(family: type[GeneratedTask], monkeypatch: pytest.MonkeyPatch) -> None:
    task = family("validation")
    painted = [task[index].question_type for index in range(12)]
    assert [task.question_type(index) for index in range(12)] == painted
    assert set(painted) <= set(family.question_types)
    with pytest.raises(IndexError, match=rf"{family.name} validation has samples 0 to 1999, not 2000"):
        task.question_type(2000)


@families
def test_all_types_occur(family: type[GeneratedTask]) -> None:
    task = family("validation")
    assert {task.question_type(index) for index in range(150)} == set(family.question_types)


@families
def test_expected_answers_score_best_and_registry_agrees(family: type[GeneratedTask]) -> None:
    task = load_task(family.name, "validation")
    metric = get_metric(get_metric_for_dataset(family.name))
    assert metric.name == task.metric
    samples = [task[index] for index in range(24)]
    scoring = metric.score([answer_to(sample, str(sample.metadata["answer"])) for sample in samples])
    values = [score.value for score in scoring.scores]
    if metric.best == 1.0:
        assert all(value is not None and value >= 0.9 for value in values)
    else:
        silent = metric.score([answer_to(sample, "a picture") for sample in samples])
        assert scoring.overall is not None and silent.overall is not None
        assert scoring.overall > 3.0 > 10 * silent.overall
    assert all(score.parsed for score in scoring.scores)


@families
def test_splits_and_lengths_are_validated(family: type[GeneratedTask]) -> None:
    with pytest.raises(ConfigurationError, match="has no split 'test': choose one of train, validation"):
        family("test")
    train, validation = family("train"), family("validation")
    assert (len(train), len(validation)) == (100_000, 2_000)
    assert train[0].image_id == f"{family.pictures}train-0-000000"


def test_options_have_letters() -> None:
    assert prompt_of("which one?", ("red", "blue")) == " User: which one?\nA: red\nB: blue\n Assistant:"
    assert prompt_of("how many?") == " User: how many? Assistant:"


def test_drawing_by_type_follows_the_weights_and_can_even_out_answers() -> None:
    pool = [QuestionAnswer(f"q{n}", "0" if n else "1", "often") for n in range(10)]
    pool += [QuestionAnswer("rare", "2", "rare")]
    rng = random.Random(0)
    drawn = [draw_by_type(pool, {"often": 0.9, "rare": 0.1}, rng, 1, even_answers=True)[0] for _ in range(2000)]
    share = {answer: sum(each.answer == answer for each in drawn) / 2000 for answer in "012"}
    # 0.9 x 1/2 each for the answers 0 and 1 of the frequent type, however many questions have them; 0.1 for the rare.
    assert share == pytest.approx({"0": 0.45, "1": 0.45, "2": 0.1}, abs=0.04)
    assert len(draw_by_type(pool, {"often": 0.5, "rare": 0.5}, rng, 99)) == len(pool)


def test_a_given_template_replaces_the_trained_one() -> None:
    task = load_task("reference_vqa", prompt_template="{question} One {{word}}. ({style})")
    sample = task[0]
    assert task.prompt(sample) == f"{sample.question} One {{word}}. (vqa2)"
    assert sample == load_task("reference_vqa")[0]
    assert task.prompt_form == {"open": task.prompt_template, "choice": task.prompt_template}  # type: ignore[attr-defined]
    choice = load_task("reference_choice", prompt_template="{question}\n{options}")
    lines = choice.prompt(choice[0]).splitlines()
    assert lines[0] == choice[0].question
    assert lines[1:] == [f"{letter}: {text}" for letter, text in zip("ABCD", choice[0].options, strict=True)]
    for family in ("chat", "plain", "molmo"):
        assert prompt_for(task, sample, family) == task.prompt(sample)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "template", "message"),
    [
        ("reference_choice", "{question}", "leaves out {options}"),
        ("reference_vqa", "Say yes.", "leaves out {question}"),
        ("reference_vqa", "{question} {hint}", "has the field {hint}"),
    ],
)
def test_a_template_that_cannot_be_filled_is_refused(name: str, template: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load_task(name, prompt_template=template)
