"""What a correct answer takes, from the joules of requests and what their answers are worth."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from experiment_core_utils.meters.energy_statistics import expanded_interval
from experiment_core_utils.primitives.statistics import (
    correlation_of_means,
    describe,
    half_of_interval,
    positive_interval,
    ratio_interval,
)
from experiment_core_utils.records.energy import END_TO_END, Energy, EnergySummary, PassesEnergy, StageFigure
from experiment_core_utils.records.setting_result import AccuracyPart

_ABSENT = (None, None, None)


class AnsweredRequest(NamedTuple):
    """What a sample's request took, and what its answer is worth."""

    joules: float | None  #: None where it was not measured
    score: float | None  #: None where the metric has no value for it
    picture: str


def with_correct_answers(
    energy: Energy | None, accuracy: AccuracyPart, answered: Sequence[AnsweredRequest] = ()
) -> Energy | None:
    """A setting's energy with what a correct answer takes: made anew where answers are scored anew.

    Joules per correct answer = joules of a request / (accuracy / best score). A score between 0 and the best counts as
    that fraction of a correct answer.

    Of passes it is a ratio of two means over pictures. Its interval is `ratio_interval` of the accuracy's own (all
    samples) and of the energy's: how much requests of different pictures take, and what passes and ticks leave open, in
    squares. Requests that take more and are answered better make the two correlated, which enters.

    Of the one request whose stages were measured (`summary`), what requests differ in energy is not in the interval.

    Args:
        answered: the setting's samples.
    """
    if energy is None:
        return None
    known: dict[str, Any] = {}
    if energy.summary is not None:
        whole = next(figure for figure in energy.stages[END_TO_END] if figure.is_from_source_of(energy.summary))
        gross = energy.summary.end_to_end_j
        assert gross is not None
        known["summary"] = _with_correct_answers(
            energy.summary, gross, _half_width_of(whole), "the uncertainty of the energy is not known", accuracy
        )
    if energy.passes is not None and energy.passes.j_per_request is not None:
        known["passes"] = _passes_with_correct_answers(energy.passes, energy.passes.j_per_request, accuracy, answered)
    return energy.with_keys(**known)


def _half_width_of(figure: StageFigure) -> float | None:
    """Half of the 95 % interval of a figure, with the bound of ticks in it; None where its uncertainty is not known."""
    if figure.uncertainty_j is None or figure.gross_j is None:
        return None
    low, high = figure.gross_j_ci95_low, figure.gross_j_ci95_high
    assert low is not None and high is not None and figure.num_windows is not None
    of_spread = half_of_interval(figure.gross_j, low, high)
    return expanded_interval(figure.gross_j, of_spread, figure.num_windows, figure.uncertainty_j)[1] - figure.gross_j


def _passes_with_correct_answers(
    passes: PassesEnergy, gross: float, accuracy: AccuracyPart, answered: Sequence[AnsweredRequest]
) -> PassesEnergy:
    whole = next(figure for figure in passes.figures if figure.is_from_source_of(passes))
    measured = [(request.joules, request.picture) for request in answered if request.joules is not None]
    scored = [(request.score, request.picture) for request in answered if request.score is not None]
    pictures = [picture for _, picture in measured]
    spread, of_passes = describe([joules for joules, _ in measured], pictures), _half_width_of(whole)
    if spread is None or spread.ci_low is None or spread.ci_high is None:
        why = "the energies of requests are known for fewer than 2 pictures"
        return _with_correct_answers(passes, gross, None, why, accuracy)
    if of_passes is None:
        return _with_correct_answers(passes, gross, None, "the uncertainty of the energy is not known", accuracy)
    of_pictures = half_of_interval(spread.mean, spread.ci_low, spread.ci_high)
    half = math.hypot(of_pictures, of_passes)
    correlation = 0.0
    if half > 0 and scored:
        shared = correlation_of_means([joules for joules, _ in measured], pictures, *zip(*scored, strict=True))
        correlation = shared * of_pictures / half
    return _with_correct_answers(passes, gross, half, "", accuracy, correlation)


Summary = TypeVar("Summary", EnergySummary, PassesEnergy)


def _with_correct_answers(
    summary: Summary,
    gross: float,
    half_width: float | None,
    why_unknown: str,
    accuracy: AccuracyPart,
    correlation: float = 0.0,
) -> Summary:
    """The figures with those of a correct answer, and why one of these is not there.

    Args:
        half_width: half of the interval of `gross`, the joules of a request; None for the reason `why_unknown`.
        correlation: of the joules and the accuracy.
    """
    (joules, low, high), reason = _per_correct_answer(gross, half_width, why_unknown, accuracy, correlation)
    return summary.with_keys(
        j_per_correct_answer=joules,
        j_per_correct_answer_ci95_low=low,
        j_per_correct_answer_ci95_high=high,
        j_per_correct_answer_reason=reason,
    )


def _per_correct_answer(
    gross: float, half_width: float | None, why_unknown: str, accuracy: AccuracyPart, correlation: float
) -> tuple[tuple[float | None, float | None, float | None], str | None]:
    """The figure with its interval, and why one of them is not there."""
    if accuracy.metric_best != 1.0:
        return _ABSENT, f"{accuracy.metric} gives up to {accuracy.metric_best:g}: it counts no correct answers"
    if accuracy.accuracy is None:
        return _ABSENT, "no answer has a score"
    if accuracy.accuracy <= 0:
        return _ABSENT, "no answer is correct"
    fraction = accuracy.accuracy
    if half_width is None or accuracy.accuracy_ci95 is None:
        return (gross / fraction, None, None), why_unknown or "the interval of the accuracy is not known"
    least, most = accuracy.accuracy_ci95
    energy = positive_interval(gross, half_width)
    low, high = ratio_interval(gross, energy, fraction, (least, most), correlation)
    return (gross / fraction, low, high), None if high is not None else "the accuracy may be 0: there is no upper end"
