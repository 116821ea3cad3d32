"""CIDEr-D by hand, against recorded results of the COCO evaluation, and against the definition written as loops."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiment_core_utils.primitives.errors import SampleError
from experiment_core_utils.tasks.interface import Answer, Scoring
from experiment_core_utils.tasks.scoring.cider_score import DocumentFrequencies, document_frequencies
from experiment_core_utils.tasks.scoring.metrics import CiderMetric
from tests.tasks.scoring.vectors import vectors

# The COCO evaluation gives 0 for a single image, by construction; ours has no value there.
WITHOUT_A_VALUE = {"single_image", "single_image_exact"}


def scored(
    predictions: Mapping[str, str],
    references: Mapping[str, Sequence[str]],
    frequencies: DocumentFrequencies | None = None,
) -> Scoring:
    """One caption of each image against the image's references."""
    answers = [Answer(caption, tuple(references[name]), image_id=name) for name, caption in predictions.items()]
    return CiderMetric(frequencies).score(answers)


def values(scoring: Scoring) -> list[float | None]:
    return [score.value for score in scoring.scores]


@pytest.mark.parametrize("row", vectors("cider_score"))
def test_vector(row: dict[str, Any]) -> None:
    result = scored(row["prediction"], row["references"])
    if row["case"] in WITHOUT_A_VALUE:
        assert row["expected"] == 0.0
        assert result.overall is None and set(values(result)) == {None}
        return
    assert result.overall == pytest.approx(row["expected"], abs=1e-9)
    expected = [row["expected_per_image"][name] for name in row["prediction"]]
    assert values(result) == pytest.approx(expected, abs=1e-9)


def ngrams(text: str, n: int) -> Counter[tuple[str, ...]]:
    words = text.split()
    return Counter(tuple(words[at : at + n]) for at in range(len(words) - n + 1))


def by_definition(predictions: Mapping[str, str], references: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """CIDEr-D of lower-case words, one caption and one n-gram at a time."""

    def weights(text: str, n: int) -> dict[tuple[str, ...], float]:
        return {
            gram: count
            * (
                math.log(len(references))
                - math.log(max(1, sum(any(gram in ngrams(ref, n) for ref in refs) for refs in references.values())))
            )
            for gram, count in ngrams(text, n).items()
        }

    def similarity(caption: str, reference: str, n: int) -> float:
        ours, theirs = weights(caption, n), weights(reference, n)
        norms = math.sqrt(sum(w * w for w in ours.values())) * math.sqrt(sum(w * w for w in theirs.values()))
        dot = sum(min(weight, theirs.get(gram, 0.0)) * theirs.get(gram, 0.0) for gram, weight in ours.items())
        difference = ngrams(caption, 2).total() - ngrams(reference, 2).total()
        return dot / norms * math.exp(-(difference**2) / (2 * 6**2)) if norms else 0.0

    return {
        name: 10
        * sum(similarity(text, ref, n) for n in range(1, 5) for ref in references[name])
        / (4 * len(references[name]))
        for name, text in predictions.items()
    }


def test_by_hand() -> None:
    references = {"x": ["red cat"], "y": ["blue dog"]}
    # Each n-gram is in one of two images, idf log 2. "red cat": two words and one bigram match wholly, cosines 1, 1;
    # no n-grams of 3 and 4 words: 0, 0. (1 + 1 + 0 + 0) / 4 * 10 = 5.
    # "blue": of the words' vector (1, 1) log 2 the half (1, 0): cosine 1 / sqrt 2; no bigram; one bigram fewer than
    # the reference's 1: penalty exp(-1 / 72). 10 / 4 / sqrt 2 * exp(-1 / 72).
    result = scored({"x": "Red cat.", "y": "blue"}, references)
    expected = [5.0, 2.5 / math.sqrt(2) * math.exp(-1 / 72)]
    assert values(result) == pytest.approx(expected)
    assert result.overall == pytest.approx(sum(expected) / 2)
    assert result.details == {"unparsed": 0, "idf": "references of this run's 2 images"}


def test_repeating_a_word_is_clipped() -> None:
    references = {"x": ["cat"], "y": ["dog"]}
    # Weights 3 log 2 against log 2: min is log 2, cosine log² 2 / (3 log 2 · log 2) = 1/3; two bigrams more than none.
    first = scored({"x": "cat cat cat", "y": "dog"}, references).scores[0]
    assert first.value == pytest.approx(10 / 4 / 3 * math.exp(-4 / 72))


def test_what_every_image_has_weighs_nothing() -> None:
    result = scored({"x": "a cat", "y": "a cat"}, {"x": ["a cat"], "y": ["a cat"]})
    assert result.overall == 0.0


def test_empty_captions_score_zero_and_are_named() -> None:
    references = {"x": ["red cat"], "y": ["blue dog"], "z": ["a bird"]}
    result = scored({"x": "red cat", "y": "", "z": "..."}, references)
    assert [score.parse_status for score in result.scores] == ["text", "empty", "empty"]
    assert values(result) == pytest.approx([5.0, 0.0, 0.0])
    assert result.overall == pytest.approx(5.0 / 3)


def test_frequencies_of_a_larger_corpus() -> None:
    split = {"x": ["red cat", "cat"], "y": ["blue dog"], "z": ["red bird"], "w": ["a bird"]}
    frequencies = document_frequencies(split, "references of a split of 4 images")
    assert (frequencies.images, frequencies.source) == (4, "references of a split of 4 images")
    assert [int(count.sum()) for count in frequencies.counts] == [8, 4, 0, 0]  # red 2, bird 2, four others; bigrams
    result = scored({"x": "red"}, {"x": ["red cat"]}, frequencies)
    # One image of a run is enough here. red: log 4 - log 2 = log 2; cat: log 4 = 2 log 2. Cosine 1 / sqrt 5.
    assert result.overall == pytest.approx(10 / 4 / math.sqrt(5) * math.exp(-1 / 72))
    assert result.details["idf"] == "references of a split of 4 images"
    assert scored({"x": "zebra red"}, {"x": ["red cat"]}, frequencies).overall == pytest.approx(
        10 / 4 / math.sqrt(5) / math.sqrt(5)  # zebra is unknown: log 4 - log 1, as much as cat; no bigram in common
    )


def test_frequencies_of_the_run_itself_change_nothing() -> None:
    references = {"x": ["a red cat sits", "the cat"], "y": ["a blue dog runs"], "z": ["a red bird"]}
    predictions = {"x": "a red cat", "y": "a dog runs fast", "z": "zebra"}
    own = scored(predictions, references)
    given_ones = scored(predictions, references, document_frequencies(references, "the same"))
    assert values(own) == pytest.approx(values(given_ones))
    assert given_ones.details["idf"] == "the same"


def test_small_runs_have_no_value() -> None:
    assert scored({"x": "cat"}, {"x": ["cat"]}).overall is None
    assert scored({}, {}).overall is None


def test_errors_name_the_image() -> None:
    with pytest.raises(SampleError, match="'x' has no reference"):
        scored({"x": "cat", "y": "dog"}, {"x": [], "y": ["dog"]})
    with pytest.raises(SampleError, match="'y' has no reference"):
        document_frequencies({"y": []}, "nothing")


CAPTIONS = st.lists(st.sampled_from(["red", "blue", "cat", "dog", "on", "a"]), max_size=9).map(" ".join)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(CAPTIONS, st.lists(CAPTIONS, min_size=1, max_size=3)), min_size=2, max_size=5))
def test_equals_the_definition(images: list[tuple[str, list[str]]]) -> None:
    predictions = {str(at): caption for at, (caption, _) in enumerate(images)}
    references = {str(at): captions for at, (_, captions) in enumerate(images)}
    result = scored(predictions, references)
    expected = list(by_definition(predictions, references).values())
    assert values(result) == pytest.approx(expected, abs=1e-9)
    assert result.overall == pytest.approx(sum(expected) / len(images))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.text(), st.lists(st.text(), min_size=1, max_size=3)), min_size=2))
def test_wild_texts_stay_in_range(images: list[tuple[str, list[str]]]) -> None:
    result = scored(
        {str(at): caption for at, (caption, _) in enumerate(images)},
        {str(at): refs for at, (_, refs) in enumerate(images)},
    )
    assert all(value is not None and 0.0 <= value <= 10.0 + 1e-9 for value in values(result))
    assert all(score.value == 0.0 for score in result.scores if not score.parsed)
