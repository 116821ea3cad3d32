"""Average normalised Levenshtein similarity (ANLS) of an answer: 0, or 0.5 to 1.

A. F. Biten et al., "Scene Text Visual Question Answering", ICCV 2019, with the details of the script that the Robust
Reading Competition scores ST-VQA and DocVQA (M. Mathew et al., "DocVQA", WACV 2021) with: a similarity of exactly one
half counts, and lengths are those before white space is collapsed.
"""

from collections import defaultdict
from collections.abc import Sequence

from experiment_core_utils.tasks.interface import in_either_order, require_references


def levenshtein(first: str, second: str, limit: int) -> int | None:
    """The least number of inserted, deleted and replaced code points that turns one text into the other.

    Returns None where it is more than `limit`, without finding out by how much. Takes time in proportion to the
    longer text and to the machine words of the shorter one; two texts whose lengths differ by more than `limit` cost
    nothing.
    """
    shorter, longer = sorted((first, second), key=len)
    if len(longer) - len(shorter) > limit:
        return None
    if shorter == longer:
        return 0
    if not shorter:
        return len(longer)
    where: defaultdict[str, int] = defaultdict(int)
    for row, character in enumerate(shorter):
        where[character] |= 1 << row
    full = (1 << len(shorter)) - 1
    last_row = 1 << (len(shorter) - 1)
    # Bit i of `plus` (`minus`): going down from row i to row i + 1, the distance in this column rises (falls) by one.
    plus, minus, distance = full, 0, len(shorter)
    for columns_left, character in zip(range(len(longer) - 1, -1, -1), longer, strict=True):
        equal = where.get(character, 0)
        no_step_down = (((equal & plus) + plus) ^ plus) | equal | minus
        across_plus = minus | (full & ~(no_step_down | plus))
        across_minus = no_step_down & plus
        if across_plus & last_row:
            distance += 1
        elif across_minus & last_row:
            distance -= 1
        # Each column that is left can lower the last row's distance by one at most.
        if distance - columns_left > limit:
            return None
        # The first row counts the columns, so it always rises: a one is shifted in.
        across_plus = (across_plus << 1) | 1
        across_minus <<= 1
        plus = full & (across_minus | ~(no_step_down | across_plus))
        minus = full & no_step_down & across_plus
    return distance


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


def _similarity(answer: str, reference: str) -> float:
    length = max(len(answer.upper()), len(reference.upper()))
    # More than half of the length in edits scores 0, so the distance need not be known beyond that.
    distance = levenshtein(" ".join(answer.lower().split()), " ".join(reference.lower().split()), limit=length // 2)
    if distance is None:
        return 0.0
    return 1.0 - distance / length if length else 1.0
