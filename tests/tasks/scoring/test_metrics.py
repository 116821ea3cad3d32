"""The metrics for whole runs: values, how an answer was read, what is counted, and CIDEr's pictures."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiment_core_utils.primitives.errors import SampleError
from experiment_core_utils.tasks.interface import Answer, Metric, Score
from experiment_core_utils.tasks.scoring.cider_score import document_frequencies
from experiment_core_utils.tasks.scoring.metrics import METRICS, CiderMetric

BY_NAME: dict[str, Metric] = {metric.name: metric for metric in METRICS}
TEXT = ["vqa_score", "vqa_score_molmo", "em", "em_lenient", "relaxed", "in_sentence", "ansl_em", "anls", "mmmu_score"]
PUBLISHED = ["vqa_v2", "chartqa_relaxed", "docvqa_anls", "mmmu", "gsm8k_boxed", "gsm8k_flexible"]
GASES = ("oxygen", "carbon dioxide", "water", "nitrogen")


# Metrics of answers; the others score log-probabilities.
GENERATED = {name for name, metric in BY_NAME.items() if getattr(metric, "scored", None) is None}


def test_names_and_best() -> None:
    assert {metric.name: metric.best for metric in METRICS} == {
        **dict.fromkeys([*TEXT, *PUBLISHED, "mc", "mc_molmo"], 1.0),
        "cider_score": 10.0,
        **dict.fromkeys(["acc", "acc_norm", "acc_bytes"], 1.0),
        "perplexity": 100.0,
    }


def test_vqa_has_both_values() -> None:
    scoring = BY_NAME["vqa_score"].score([Answer("cat", ("cat", *["dog"] * 9)), Answer("dog", ("cat", *["dog"] * 9))])
    assert scoring.scores[0] == Score(pytest.approx(0.3), details={"vqa_score_molmo": pytest.approx(1 / 3)})
    assert scoring.overall == pytest.approx((0.3 + 1.0) / 2)
    assert scoring.details == {"vqa_score_molmo": pytest.approx((1 / 3 + 1) / 2), "unparsed": 0}


@pytest.mark.parametrize(
    ("references", "value", "molmo"),
    [
        (["cat"], 1, 1),
        (["dog"], 0, 0),
        (["cat", "Cat."], 1, 1),
        (["dog", "cat"], 1 / 2, 1 / 2),  # 1/6 of 1/3, and 1/3 of 2/3
        (["cat", "cat", "cat"], 1, 1),
        (["dog", "cat", "cat"], 2 / 3, 2 / 3),  # 4/9 of 2/3; Molmo's own
        (["cat", "dog", "bird"], 1 / 3, 1 / 3),
        (["cat", "cat", "cat", "cat"], 1, 1),
        (["cat", "cat", "cat", "dog"], (3 * 2 / 3 + 1) / 4, 1),  # from four on the benchmark's own
        (["dog", "dog", "cat", "dog"], (3 / 3) / 4, 1 / 3),
    ],
)
def test_few_references_leave_a_perfect_answer_its_full_score(
    references: list[str], value: float, molmo: float
) -> None:
    scoring = BY_NAME["vqa_score"].score([Answer("cat", tuple(references)), Answer("cat", ("cat",) * 10)])
    assert scoring.scores[0] == Score(pytest.approx(value), details={"vqa_score_molmo": pytest.approx(molmo)})
    assert scoring.details.get("few_references") == (1 if len(references) < 4 else None)
    alone = BY_NAME["vqa_score_molmo"].score([Answer("cat", tuple(references))])
    assert alone.overall == pytest.approx(molmo)
    assert alone.details.get("few_references") == (1 if len(references) < 3 else None)


def test_documents_have_both_figures() -> None:
    scoring = BY_NAME["ansl_em"].score([Answer("hallo", ("hello",)), Answer("Hello", ("hello",))])
    assert [score.value for score in scoring.scores] == [pytest.approx(0.8), 1.0]
    assert scoring.details == {"anls": pytest.approx(0.9), "em": 0.5, "unparsed": 0}
    assert BY_NAME["anls"].score([Answer("hallo", ("hello",))]).overall == pytest.approx(0.8)


def test_exact_match_and_its_variant() -> None:
    answers = [Answer("three", ("3",)), Answer("3", ("3",))]
    assert BY_NAME["em"].score(answers).overall == 0.5
    assert BY_NAME["em_lenient"].score(answers).overall == 1.0


def test_choices_say_how_they_were_read() -> None:
    outputs = ["B", "carbon dioxide", "B: carbon dioxide", "the answer is B", "it must be B", "zzz", ""]
    answers = [Answer(output, (), options=GASES, answer_index=1) for output in outputs]
    scoring = BY_NAME["mc"].score(answers)
    assert [score.parse_status for score in scoring.scores] == [
        "letter",
        "option_text",
        "leading_letter",
        "answer_is",
        "last_letter",
        "unparsed",
        "unparsed",
    ]
    assert [(score.value, score.parsed) for score in scoring.scores] == [(1.0, True)] * 5 + [(0.0, False)] * 2
    assert scoring.overall == pytest.approx(5 / 7)
    assert scoring.details == {"unparsed": 2}
    assert BY_NAME["mmmu_score"].score(answers).scores == scoring.scores
    molmo = BY_NAME["mc_molmo"].score([Answer("", (), options=GASES, answer_index=0)])
    assert molmo.scores == (Score(1.0, parse_status="nearest_letter"),)


def test_mmmu_scores_open_answers_without_options() -> None:
    scoring = BY_NAME["mmmu_score"].score([Answer("The answer is 24.", ("24",)), Answer("25", ("24",))])
    assert [score.value for score in scoring.scores] == [1.0, 0.0]


@pytest.mark.parametrize("name", TEXT)
def test_an_empty_output_is_counted_and_worth_nothing(name: str) -> None:
    answers = [Answer(" \n", ("",) * 10), Answer("yes", ("yes",) * 10)]
    scoring = BY_NAME[name].score(answers)
    empty = scoring.scores[0]
    assert (empty.value, empty.parsed, empty.parse_status) == (0.0, False, "empty")
    assert set(empty.details.values()) <= {0.0}
    assert scoring.scores[1].value == 1.0 and scoring.scores[1].parse_status in ("text", "exact")
    assert (scoring.overall, scoring.details["unparsed"]) == (0.5, 1)


@pytest.mark.parametrize("name", sorted(GENERATED - {"gsm8k_boxed", "gsm8k_flexible"}))  # read numbers
@pytest.mark.parametrize(
    "wrapped", ["I see two. <answer>{}</answer>", "<Answer> {}", "<answer>{}</ANSWER> <answer></answer>"]
)
def test_what_is_between_answer_tags_is_the_answer_of_every_metric(name: str, wrapped: str) -> None:
    """Of two pictures, so that CIDEr has frequencies; one of four tokens and the same choice."""
    choice = {"options": GASES, "answer_index": 1} if name in ("mc", "mc_molmo") else {}
    texts = ("B", "B") if choice else ("a red round ball", "the old blue car")
    plain, tagged = (
        BY_NAME[name].score(
            [
                Answer(form.format(text), (text,) * 10, image_id=text, **choice)  # type: ignore[arg-type]
                for text in texts
            ]
        )
        for form in ("{}", wrapped)
    )
    assert [score.value for score in tagged.scores] == [score.value for score in plain.scores]
    assert plain.overall == pytest.approx(BY_NAME[name].best)


def test_empty_answer_tags_are_an_empty_output() -> None:
    assert BY_NAME["em"].score([Answer("<answer> </answer>", ("yes",))]).scores[0].parse_status == "empty"


@pytest.mark.parametrize("name", [*TEXT, "cider_score"])
def test_no_references_is_an_error_also_for_an_empty_output(name: str) -> None:
    for prediction in ("cat", ""):
        with pytest.raises(SampleError, match="reference"):
            BY_NAME[name].score([Answer(prediction, (), image_id="x")])


@pytest.mark.parametrize("name", ["mc", "mc_molmo"])
def test_a_choice_without_options_or_right_one_is_an_error(name: str) -> None:
    with pytest.raises(SampleError, match="answer_index"):
        BY_NAME[name].score([Answer("B", ("carbon dioxide",))])
    with pytest.raises(SampleError, match="answer_index"):
        BY_NAME[name].score([Answer("B", (), options=GASES, answer_index=None)])


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_no_answers_have_no_overall(name: str) -> None:
    scoring = BY_NAME[name].score([])
    assert (scoring.scores, scoring.overall, scoring.details["unparsed"]) == ((), None, 0)


def test_captions_of_a_run() -> None:
    scoring = BY_NAME["cider_score"].score(
        [Answer("red cat", ("red cat",), image_id="x"), Answer("...", ("blue dog",), image_id="y")]
    )
    assert [(score.value, score.parsed, score.parse_status) for score in scoring.scores] == [
        (pytest.approx(5.0), True, "text"),
        (0.0, False, "empty"),
    ]
    assert scoring.overall == pytest.approx(2.5)
    assert scoring.details == {"unparsed": 1, "idf": "references of this run's 2 images"}


def test_two_outputs_for_one_picture_are_two_scores_and_one_picture() -> None:
    once = [Answer("red cat", ("red cat",), image_id="x"), Answer("blue", ("blue dog",), image_id="y")]
    scoring = BY_NAME["cider_score"].score([*once, Answer("cat", ("red cat",), image_id="x")])
    alone = BY_NAME["cider_score"].score(once)
    assert scoring.scores[:2] == alone.scores
    assert scoring.details["idf"] == "references of this run's 2 images"
    other = BY_NAME["cider_score"].score([Answer("cat", ("red cat",), image_id="x"), once[1]])
    assert scoring.scores[2].value == pytest.approx(other.scores[0].value)


def test_different_references_of_one_picture_are_one_document() -> None:
    answers = [
        Answer("red", ("red",), image_id="x"),
        Answer("cat", ("cat", "red"), image_id="x"),
        Answer("dog", ("dog",), image_id="y"),
    ]
    # red and cat are each in one of two pictures, so all weights are log 2 and equal captions have cosine 1.
    assert [score.value for score in BY_NAME["cider_score"].score(answers).scores] == pytest.approx([2.5, 1.25, 2.5])


def test_captions_without_value_or_picture() -> None:
    answers = [Answer("red cat", ("red cat",), image_id="x")]
    scoring = BY_NAME["cider_score"].score(answers)
    assert (scoring.overall, scoring.scores[0].value) == (None, None)
    assert scoring.details["idf"] == "references of this run's 1 images"
    with pytest.raises(SampleError, match="image_id"):
        BY_NAME["cider_score"].score([Answer("red cat", ("red cat",))])
    whole = CiderMetric(document_frequencies({"x": ["red cat"], "y": ["dog"]}, "references of both"))
    assert whole.score(answers).overall == pytest.approx(5.0)
    assert whole.score(answers).details["idf"] == "references of both"


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.text(), st.lists(st.text(), min_size=1, max_size=4)), min_size=1, max_size=5))
@pytest.mark.parametrize("name", sorted(GENERATED))
def test_wild_answers_stay_in_range(name: str, texts: list[tuple[str, list[str]]]) -> None:
    choice = name in ("mc", "mc_molmo")
    answers = [
        Answer(text, tuple(refs), tuple(refs) if choice else (), 0 if choice else None, image_id=str(at))
        for at, (text, refs) in enumerate(texts)
    ]
    scoring = BY_NAME[name].score(answers)
    assert len(scoring.scores) == len(answers)
    for score in scoring.scores:
        assert score.value is None or 0.0 <= score.value <= BY_NAME[name].best + 1e-9
        assert score.parsed or not score.value
    values = [score.value for score in scoring.scores if score.value is not None]
    assert scoring.overall == (pytest.approx(sum(values) / len(values)) if values else None)
    assert scoring.details["unparsed"] == sum(not score.parsed for score in scoring.scores)
    json.dumps(scoring.details)
