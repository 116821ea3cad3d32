"""Scores by log-probability, with values worked out by hand."""

import math

import pytest

from experiment_core_utils.primitives.errors import SampleError
from experiment_core_utils.records.requests import ScoredContinuation
from experiment_core_utils.tasks.interface import Answer, Sample, check_scorable
from experiment_core_utils.tasks.registry import get_metric, scored_by


def answer(logprobs: tuple[float, ...], options: tuple[str, ...], right: int | None) -> Answer:
    scores = tuple(ScoredContinuation(each, 1, False) for each in logprobs)
    return Answer("", (options[right or 0],), options, right, scores=scores)


# Per character -2, -1, -4/3: the second; per byte -2, -1, -4/5: the third; of equal ones the first. Then -2.5 against
# -5/3, or -5/4 by bytes, and equal ones.
QUESTIONS = [
    answer((-4.0, -5.0, -4.0), ("no", "maybe", "ünö"), 2),
    answer((-2.5, -5.0), ("a", "güb"), 1),
    answer((-3.0, -3.0), ("x", "y"), 0),
]


@pytest.mark.parametrize(("name", "values"), [("acc", (0, 0, 1)), ("acc_norm", (0, 1, 1)), ("acc_bytes", (1, 1, 1))])
def test_the_option_is_the_likeliest_by_its_rule(name: str, values: tuple[float, ...]) -> None:
    scoring = get_metric(name).score(QUESTIONS)
    assert tuple(score.value for score in scoring.scores) == values
    assert scoring.overall == pytest.approx(sum(values) / 3)
    assert scoring.details == {"acc": 1 / 3, "acc_norm": 2 / 3, "acc_bytes": 1.0, "unparsed": 0}


def test_bytes_and_characters_differ() -> None:
    """-6 / 3 characters against -5 / 2, but -6 / 6 bytes against -5 / 2; the other way round for -8 / 3 and -8 / 6."""
    asked = answer((-8.0, -5.0), ("üüü", "no"), 0)
    found = get_metric("acc").score([asked]).scores[0].details
    assert found == {"acc": 0.0, "acc_norm": 0.0, "acc_bytes": 1.0}


def test_perplexities_lay_all_texts_end_to_end() -> None:
    """Two texts of 4 and 8 bytes, of 1 and 3 words, in 2 and 1 parts: 12 ln 2 and 6 ln 2 in all."""
    ln2 = math.log(2)
    parts = tuple(ScoredContinuation(-each * ln2, 2, False) for each in (5, 7))
    texts = [
        Answer("", ("grü",), scores=parts),
        Answer("", ("a b  cd!",), scores=(ScoredContinuation(-6 * ln2, 4, False),)),
    ]
    scoring = get_metric("perplexity").score(texts)
    assert [score.value for score in scoring.scores] == pytest.approx([100 / 8, 100 * 2**-0.75])
    assert scoring.details == pytest.approx(
        {"word_perplexity": 2**4.5, "byte_perplexity": 2**1.5, "bits_per_byte": 1.5, "unparsed": 0}
    )


def test_what_was_generated_or_has_no_options_is_refused() -> None:
    with pytest.raises(SampleError, match="acc_norm reads 2 log-probabilities, and the answer has 0: measure it with"):
        get_metric("acc_norm").score([Answer("no", ("no",), ("no", "yes"), 0)])
    with pytest.raises(SampleError, match="perplexity reads 1 log-probabilities"):
        get_metric("perplexity").score([Answer("no", ("no",))])
    for options, right in ((("one",), 0), (("one", "two"), None), (("one", ""), 0)):
        sample = Sample(3, "p", "?", ("one",), None, "", options=options, answer_index=right)
        with pytest.raises(SampleError, match="acc compares options|acc cannot score an empty option"):
            check_scorable(sample, get_metric("acc"))
    check_scorable(Sample(3, "p", "?", ("one",), None, "", options=("one", "two"), answer_index=0), get_metric("acc"))
    assert [scored_by(name) for name in ("acc", "perplexity", "mc", "unknown")] == ["options", "text", None, None]
