"""The relaxed match beside the rules of toolkits, and at its edges."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiment_core_utils.primitives.errors import SampleError
from experiment_core_utils.tasks.scoring.em import em_lenient
from experiment_core_utils.tasks.scoring.relaxed import WORD_LIMIT, read_answer, relaxed
from experiment_core_utils.tasks.scoring.replies import spoken

LONG = "The picture shows a kitchen with many things on the table and on the shelves above it. " * 3

# Worked out by hand from the public rules, of which each column names one: the reply contains the reference (OCRBench,
# in VLMEvalKit and lmms-eval); MMMU's candidates after a lead (lmms-eval); and ours, with the reason where it differs
# from what contains it.
BESIDE_TOOLKITS = [
    ("The capital of France is Paris.", "Paris", 1, 1, 1, ""),
    ("paris", "Paris", 1, 1, 1, ""),
    ("It is Lyon.", "Paris", 0, 0, 0, ""),
    ("So the answer is 24.", "24", 1, 1, 1, ""),
    ("I see a red bus", "red bus", 1, 1, 1, ""),
    ("Therefore the metal is zinc", "zinc", 1, 1, 1, ""),
    ("There are 24 of them, so 24", "24", 1, 1, 1, ""),
    ("unknown", "Paris", 0, 0, 0, ""),
    ("ionization", "ion", 1, 1, 0, "a part of a word is another word"),
    ("It is a Parisian street", "Paris", 1, 1, 0, "a part of a word is another word"),
    ("There are 24 birds", "2", 1, 0, 0, "a part of a number is another number"),
    ("It is not Paris.", "Paris", 1, 1, 0, "denied"),
    ("It could be Paris or Lyon.", "Paris", 1, 1, 0, "several candidates"),
    ("The opposite of hot is cold.", "hot", 1, 0, 0, "repeated from the question"),
    ("There are two dogs.", "2", 0, 0, 1, "a number in words"),
    ("It is a cafe\u0301.", "café", 0, 0, 1, "another form of the same letter"),
    (f"It is a kitchen. {LONG}There is also a cat.", "cat", 1, 0, 0, "in passing in a long reply"),
]


def contains(reply: str, reference: str) -> int:
    """OCRBench's rule."""
    return int(reference.lower().strip() in reply.lower().strip())


@pytest.mark.parametrize(("reply", "reference", "contained", "mmmu", "ours", "reason"), BESIDE_TOOLKITS)
def test_beside_the_rules_of_toolkits(
    reply: str, reference: str, contained: int, mmmu: int, ours: int, reason: str
) -> None:
    assert contains(reply, reference) == contained
    assert relaxed(reply, [reference]) == ours
    assert bool(reason) == (ours != contained)


def test_a_longer_reply_counts_by_its_first_sentence_and_its_conclusion() -> None:
    assert len(LONG.split()) > WORD_LIMIT
    assert relaxed(f"It is a cat. {LONG}", ["cat"]) == 1
    assert relaxed(f"{LONG}So it is a cat.", ["cat"]) == 1
    assert relaxed(f"{LONG}The answer is a cat.", ["cat"]) == 1
    assert relaxed(f"{LONG}I like the cat.", ["cat"]) == 0
    assert relaxed("The picture shows a kitchen. I see the cat.", ["cat"]) == 1


def test_no_references_is_an_error() -> None:
    with pytest.raises(SampleError, match="at least one reference"):
        relaxed("3", [])


WORDS = st.lists(st.sampled_from("a the is not or and , . ? ; : Paris paris 2 two yes no B answer ( ) $ it's".split()))


@settings(max_examples=200, deadline=None)
@given(WORDS.map(" ".join) | st.text(), st.lists(st.text(max_size=8) | st.just("Paris"), min_size=1, max_size=3))
def test_what_is_exact_up_to_a_next_question_is_relaxed_too(prediction: str, references: list[str]) -> None:
    assert em_lenient(spoken(prediction), references) <= relaxed(prediction, references) <= 1.0


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(["Paris", "12", "yes", "a red bus"]),
    st.sampled_from(["{}.", "It is {}.", "The answer is {}.", "**{}**"]),
)
def test_the_reference_in_a_plain_sentence_is_right(reference: str, form: str) -> None:
    assert relaxed(form.format(reference), ["other", reference]) == 1.0


RUNS_ON = "Tokyo\n\nQuestion: What is the capital of China?\nAnswer: Beijing"


@pytest.mark.parametrize(
    ("reply", "references", "expected"),
    [
        (RUNS_ON, ["Tokyo"], 1),
        (RUNS_ON, ["Beijing"], 0),
        ("Tokyo. What is the capital of China? Answer: Beijing", ["Beijing"], 0),
        ("Tokyo\nWhat is the capital of China?\nA: Beijing", ["Beijing"], 0),
        ("Question: What is the capital of China?\nAnswer: Beijing", ["Beijing"], 1),
        ("Sure! What is the capital of China? Answer: Beijing", ["Beijing"], 1),
    ],
)
def test_the_answer_to_a_question_that_the_model_asks_itself_does_not_count(
    reply: str, references: list[str], expected: float
) -> None:
    assert relaxed(reply, references) == expected


@pytest.mark.parametrize("filling", [" ", " \n", "-", "* ", "A "])
def test_a_reply_of_one_repeated_character_is_scored_in_time(filling: str) -> None:
    start = time.perf_counter()
    assert relaxed(f"x{filling * 3000}y", ["Paris"]) == 0
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    ("reply", "references", "expected"),
    [
        ("He runs 3*60=180 meters each time. He runs 180*3=540 meters.", ["540"], (1.0, "number")),
        ("He runs 3*60=180 meters each time. He runs 180*3=540 meters.", ["180"], (0.0, "number")),
        ("It costs $3.2 billion.", ["3.2 billion"], (1.0, "number")),
        ("الإجابة هي ٤٢.", ["42"], (1.0, "number")),
        ("$\\boxed{\\dfrac{1}{2}}$", ["\\frac{1}{2}"], (1.0, "number")),
        ('{"answer": 12}', ["12"], (1.0, "exact")),
        ("It is between 10 and 20.", ["20"], (0.0, "unreadable")),
        ("- blue\n- red", ["red, blue"], (1.0, "list")),
        ("red, blue and green", ["red, blue"], (0.0, "list")),
        ("Nein, es hat drei Ecken.", ["no"], (1.0, "yes_no")),
        ("Paris or Lyon", ["Paris"], (0.0, "unreadable")),
        ("I don't know.", ["Paris"], (0.0, "unreadable")),
        ("It is Lyon.", ["Paris"], (0.0, "text")),
        ("It is a cafe\u0301.", ["café"], (1.0, "text")),
        ("It was Fleming. It was Pasteur.", ["Fleming"], (0.0, "unreadable")),
        ("Ian Fleming", ["Alexander Fleming", "Fleming"], (0.0, "text")),
    ],
)
def test_what_was_read_is_said(reply: str, references: list[str], expected: tuple[float, str]) -> None:
    assert read_answer(reply, references) == expected
