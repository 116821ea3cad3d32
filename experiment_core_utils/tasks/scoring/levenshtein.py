"""In: two texts and a limit; out: their edit distance, or None where it is above the limit.

V. Levenshtein, "Binary codes capable of correcting deletions, insertions, and reversals", 1966, computed a column at a
time with the bits of integers: G. Myers, "A fast bit-vector algorithm for approximate string matching based on dynamic
programming", JACM 1999, in the form for two whole texts of H. Hyyrö, "A bit-vector algorithm for computing Levenshtein
and Damerau edit distances", 2003.
"""

from collections import defaultdict


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
