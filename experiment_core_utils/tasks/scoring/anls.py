"""Average normalised Levenshtein similarity (ANLS) of an answer: 0, or 0.5 to 1.

A. F. Biten et al., "Scene Text Visual Question Answering", ICCV 2019, with the details of the script that the Robust
Reading Competition scores ST-VQA and DocVQA (M. Mathew et al., "DocVQA", WACV 2021) with: a similarity of exactly one
half counts, and lengths are those before white space is collapsed.
"""

from collections.abc import Sequence

from rapidfuzz.distance import Levenshtein

from experiment_core_utils.tasks.interface import in_either_order, require_references


@in_either_order
def anls(prediction: str, references: Sequence[str]) -> float:
    """The similarity to the nearest reference: 1 - distance / length, and 0 where that is below one half.

    The distance is between both texts lower-cased with white space collapsed; the length is that of the longer one of
    the stripped prediction and the reference as it stands, in upper case. Two empty texts have similarity 1.

    Raises:
        SampleError: there are no references.
    """
    require_references("anls", references)
    answer = prediction.strip()
    return max(_similarity(answer, reference) for reference in references)


def docvqa_anls(prediction: str, references: Sequence[str]) -> float:
    """ANLS as lmms-eval's `anls` has it for DocVQA: `anls` with the prediction's length as it stands, not stripped.

    Raises:
        SampleError: there are no references.
    """
    require_references("docvqa_anls", references)
    return max(_similarity(prediction, reference) for reference in references)


def _similarity(answer: str, reference: str) -> float:
    length = max(len(answer.upper()), len(reference.upper()))
    texts = (" ".join(text.lower().split()) for text in (answer, reference))
    # More than half of the length in edits scores 0, so the distance need not be known beyond that.
    distance = Levenshtein.distance(*texts, score_cutoff=length // 2)
    if distance > length // 2:
        return 0.0
    return 1.0 - distance / length if length else 1.0
