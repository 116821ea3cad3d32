"""In: what a counter showed at some moments; out: what it rose by between them, or why that cannot be told. Pure."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

# Limits hold on average over a while, and a counter shows up to a tick more or less at either end of a time.
LIMIT_SLACK = 1.1
TICKS_S = 0.2


class CounterReading(NamedTuple):
    """What a counter showed; `reason` says why nothing.

    Attributes:
        begun_s, ended_s: when it was read; it tells of some moment in between.
    """

    begun_s: float
    ended_s: float
    joules: float | None
    reason: str | None = None


class CounterDelta(NamedTuple):
    """What a counter rose by; None with the reason, or with a remark on what was done to it."""

    joules: float | None
    reason: str | None
    remark: str | None


def counter_delta(
    before_j: float, after_j: float, seconds: float, wraps_at_j: float | None, limit_w: float | None
) -> CounterDelta:
    """What a counter rose by in `seconds`; one that went backwards has wrapped or was reset.

    It has wrapped where it is known to and the rise is within what the device can draw at its limit. Of a counter that
    wraps nothing is told where that limit is not known, or where it can have wrapped once more than it shows. A counter
    that was reset and has since passed its old value cannot be told from one that rose: one that is read each second
    has drawn less than a second's energy then.
    """
    if wraps_at_j is None:
        if after_j >= before_j:
            return CounterDelta(after_j - before_j, None, None)
        return CounterDelta(None, f"{_backwards(before_j, after_j)}: it was reset", None)
    if limit_w is None:
        reason = f"the counter wraps at {wraps_at_j:.0f} J and no power limit tells a wrap from a reset"
        return CounterDelta(None, reason, None)
    most_j = limit_w * LIMIT_SLACK * (max(seconds, 0.0) + TICKS_S)
    has_wrapped = after_j < before_j
    rise_j = after_j - before_j + (wraps_at_j if has_wrapped else 0.0)
    if rise_j + wraps_at_j <= most_j:
        reason = f"the counter wraps at {wraps_at_j:.0f} J, which may have happened unseen in {seconds:.3g} s"
        return CounterDelta(None, reason, None)
    if not has_wrapped:
        return CounterDelta(rise_j, None, None)
    went = _backwards(before_j, after_j)
    if rise_j > most_j:
        return CounterDelta(None, f"{went}: it was reset, a wrap at {wraps_at_j:.0f} J would be too much energy", None)
    return CounterDelta(rise_j, None, f"{went}: it wrapped at {wraps_at_j:.0f} J, which was undone")


def _backwards(before_j: float, after_j: float) -> str:
    return f"the counter went backwards, from {before_j:.3f} to {after_j:.3f} J"


def rise_along(readings: Sequence[CounterReading], wraps_at_j: float | None, limit_w: float | None) -> CounterDelta:
    """What a counter rose by from the first of these readings to the last; none where any of them failed, or where it
    was reset between any two."""
    total_j, remark = 0.0, None
    failed = next((each for each in readings if each.joules is None), None)
    if failed is not None:
        return CounterDelta(None, failed.reason, None)
    for before, after in itertools.pairwise(readings):
        assert before.joules is not None and after.joules is not None
        delta = counter_delta(before.joules, after.joules, after.ended_s - before.begun_s, wraps_at_j, limit_w)
        if delta.joules is None:
            return delta
        total_j += delta.joules
        remark = delta.remark or remark
    return CounterDelta(total_j, None, remark)
