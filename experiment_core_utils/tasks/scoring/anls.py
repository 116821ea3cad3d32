"""In: one predicted answer and its reference answers; out: average normalised Levenshtein similarity, 0 or 0.5 to 1.

A. F. Biten et al., "Scene Text Visual Question Answering", ICCV 2019, with the details of the script that the Robust
Reading Competition scores ST-VQA and DocVQA (M. Mathew et al., "DocVQA", WACV 2021) with: a similarity of exactly one
half counts, and lengths are those before white space is collapsed.
"""

from collections.abc import Sequence

from experiment_core_utils.primitives.errors import SampleError
from experiment_core_utils.tasks.scoring.em import em
from experiment_core_utils.tasks.scoring.levenshtein import levenshtein


def anls(prediction: str, references: Sequence[str]) -> float:
    """The similarity to the nearest reference: 1 - distance / length, and 0 where that is below one half.

    The distance is between both texts lower-cased with white space collapsed; the length is that of the longer one of
    the stripped prediction and the reference as it stands, in upper case. Two empty texts have similarity 1.

    Raises:
        SampleError: there are no references.
    """
    if not references:
        raise SampleError("anls needs at least one reference answer, got none: check the sample's `answers`")
    answer = prediction.strip()
    return max(_similarity(answer, reference) for reference in references)


def ansl_em(prediction: str, references: Sequence[str]) -> dict[str, float]:
    """Both figures of the document tasks: `{"anls": anls(…), "em": em(…)}`; the name is published misspelt.

    Raises:
        SampleError: there are no references.
    """
    return {"anls": anls(prediction, references), "em": em(prediction, references)}


def _similarity(answer: str, reference: str) -> float:
    length = max(len(answer.upper()), len(reference.upper()))
    # More than half of the length in edits scores 0, so the distance need not be known beyond that.
    distance = levenshtein(" ".join(answer.lower().split()), " ".join(reference.lower().split()), limit=length // 2)
    if distance is None:
        return 0.0
    return 1.0 - distance / length if length else 1.0
