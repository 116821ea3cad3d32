"""The caveats that measured samples alone show: a server's notes, and answers that no batch could give."""

from collections import Counter
from collections.abc import Sequence
from statistics import median

import numpy as np

from experiment_core_utils.records.caveats import Caveat, caveat
from experiment_core_utils.records.requests import ServedNotes
from experiment_core_utils.records.settings import MeasuredSample

# A step: as many runs on either side at least, by such a factor, of which such a part of all pairs is in its order.
_STEP_RUNS, _STEP_FACTOR, _STEP_ORDERED = 5, 1.5, 0.95
# Of the time to the first token of a request's first run: below it, a later one did not compute its whole prefill.
_WARM_RATIO = 0.8


def speed_step(seconds: Sequence[float]) -> tuple[float, float, int] | None:
    """The step in times, in order, that divides them best: the median before and after it, and how many are before.

    It is where the means of the logarithms differ most by their own error (least squares with one break); None where
    less than 19 of 20 pairs of a time before and one after are in its order, or it is below a factor of 1.5.
    """
    logs = np.log(np.maximum(seconds, 1e-9))
    number = len(logs)
    before = np.arange(_STEP_RUNS, number - _STEP_RUNS + 1)
    if not len(before):
        return None
    sums = np.cumsum(logs)
    gaps = (sums[-1] - sums[before - 1]) / (number - before) - sums[before - 1] / before
    place = int(before[np.argmax(np.abs(gaps) * np.sqrt(before * (number - before)))])
    one, other = np.sort(seconds[:place]), np.sort(seconds[place:])
    rising = float(np.searchsorted(one, other).mean()) / place
    medians = float(np.median(one)), float(np.median(other))
    is_step = max(rising, 1 - rising) >= _STEP_ORDERED and max(medians) >= _STEP_FACTOR * min(medians)
    return (*medians, place) if is_step else None


def served_caveats(samples: Sequence[MeasuredSample], *, have_waited: bool = False) -> list[Caveat]:
    """The caveats of measured runs at a server that sent several tokens at once or more than were asked for, did not
    count or did not send some, changed its speed, or answered repeated requests from its prefix cache.

    Args:
        samples: in the order in which they were measured.
        have_waited: whether requests waited for each other, so that their times do not show a cache.
    """
    runs = [run for sample in samples for run in sample.runs if run.first_token_s is not None]
    notes = [
        ServedNotes(is_counted=run.prompt_tokens is not None) if run.served is None else run.served for run in runs
    ]
    found = {
        "server_pieces": sum(
            len(run.token_ids) > 1 and not run.inter_token_s and not note.is_recut
            for run, note in zip(runs, notes, strict=True)
        ),
        "server_recut": sum(note.is_recut for note in notes),
        "server_too_long": sum(note.is_too_long for note in notes),
        "server_uncounted": sum(not note.is_counted for note in notes),
        "server_miscounted": sum(not note.are_counts_possible for note in notes),
    }
    caveats = [caveat(kind, num_runs=count, num_all=len(runs)) for kind, count in found.items() if count]
    others = Counter(note.answered_by for note in notes if note.answered_by is not None)
    if others:
        names, number = sorted(others), sum(others.values())
        caveats.append(caveat("server_other_model", names=names, num_runs=number, num_all=len(runs)))
    hidden = [run.hidden_tokens for run in runs if run.hidden_tokens]
    if hidden:
        caveats.append(caveat("server_hidden_tokens", num_tokens=sum(hidden), num_runs=len(hidden), num_all=len(runs)))
    if not have_waited and (step := speed_step([run.first_token_s or 0.0 for run in runs])) is not None:
        before_s, after_s, place = step
        figures = {"before_ms": 1e3 * before_s, "after_ms": 1e3 * after_s, "num_before": place, "num_all": len(runs)}
        caveats.append(caveat("server_step", **figures))
    repeated = [(sample.runs[0].first_token_s, sample.runs[-1].first_token_s) for sample in samples if sample.runs[1:]]
    ratios = [last_s / first_s for first_s, last_s in repeated if first_s and last_s is not None]
    if not have_waited and ratios and (ratio := median(ratios)) < _WARM_RATIO:
        caveats.append(caveat("server_warm", ratio=ratio))
    return caveats


def alone_caveats(samples: Sequence[MeasuredSample]) -> list[Caveat]:
    """The caveat of samples that were answered one by one because batches of this setting gave other answers."""
    reasons = [each.answer.alone_reason for each in samples if each.answer is not None and each.answer.alone_reason]
    if not reasons:
        return []
    return [caveat("answered_one_by_one", num_alone=len(reasons), num_samples=len(samples), reason=reasons[0])]
