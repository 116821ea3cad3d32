"""A small physical model of one stage's time, fitted so that no knob can make it negative.

A stage takes the longer of two parts: the *work* of the device, and the *floor* that the host needs to launch it. Each
part is a sum of terms with coefficients that are not negative. Where the host launches ahead of the device, the floor
of the prefill begins with the request, not with the prefill: the time of vision is subtracted from it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, ConfigDict, with_config

from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.analyses.latency.features import STAGES, TERMS, RequestColumns, TimedSamples, columns_of, identifiable
from experiments.fitting.regression import robust_nonnegative

# Fractions of the samples, those of least work first, that a fit begins with on the floor.
_STARTS = (0.3, 0.7, 1.0)
_ROUNDS = 6
# Steps in logarithms, and the relative change of every prediction at which they end.
_LOG_STEPS = 4
_SETTLED = 0.002
# Of a measured time: what is predicted for it at least while steps are taken.
_LEAST = 0.05


@dataclass(frozen=True)
class StageForm:
    """The terms that a stage's model may be made of, by names of TERMS."""

    name: str
    work: tuple[str, ...]
    floor: tuple[str, ...] | None = None  #: terms of the floor, None for a stage that is work alone
    runs_ahead: bool = False  #: the floor begins with the request, so that the time of vision is taken off it


_PREFILL_WORK = ("request", "tokens", "blocks_x_tokens", "experts_x_tokens", "blocks_x_tokens_squared")
_LAUNCHES = ("request", "blocks", "experts")
# Simplest first: it is kept where no other is clearly better on settings left out.
FORMS: Mapping[str, tuple[StageForm, ...]] = {
    "T_vision_total": (
        StageForm("work", ("request", "image_crops")),
        StageForm("roofline", ("request", "image_crops"), floor=("request",)),
    ),
    "T_LLM_prefill": (
        StageForm("work", (*_LAUNCHES, *_PREFILL_WORK[1:])),
        StageForm("roofline", _PREFILL_WORK, floor=_LAUNCHES),
        StageForm("launch_ahead", _PREFILL_WORK, floor=_LAUNCHES, runs_ahead=True),
    ),
    "T_decode_per_token": (
        StageForm("work", (*_LAUNCHES, "blocks_x_context")),
        StageForm("roofline", (*_LAUNCHES, "blocks_x_context"), floor=_LAUNCHES[:2]),
    ),
}


def _term(name: str) -> str:
    if name not in TERMS:
        raise ValueError(f"no model has the term {name}")
    return name


STORED = ConfigDict(strict=True, allow_inf_nan=False)
Part = Mapping[Annotated[str, AfterValidator(_term)], float]


@with_config(STORED)
@dataclass(frozen=True)
class StageModel:
    """A fitted stage: coefficients in milliseconds per unit of each term, none negative."""

    form: str  #: name of the form
    work: Part
    floor: Part  #: empty for a stage that is work alone
    runs_ahead: bool

    def times(self, requests: RequestColumns, vision_ms: np.ndarray) -> np.ndarray:
        """Times [S] in milliseconds, given those of vision [S]."""
        work = linear(self.work, requests)
        if not self.floor:
            return work
        return np.maximum(work, linear(self.floor, requests) - (vision_ms if self.runs_ahead else 0.0))

    def affine(self, factor: float, added_ms: float) -> "StageModel":
        """The model of a stage that takes `factor` times as long and `added_ms` more."""
        return StageModel(
            self.form,
            _affine(self.work, factor, added_ms),
            _affine(self.floor, factor, added_ms) if self.floor else {},
            self.runs_ahead,
        )


def linear(coefficients: Mapping[str, float], requests: RequestColumns) -> np.ndarray:
    """The sum [S] of the terms times their coefficients."""
    return columns_of(list(coefficients), requests) @ np.fromiter(coefficients.values(), np.float64)


def _affine(part: Mapping[str, float], factor: float, added_ms: float) -> dict[str, float]:
    scaled = {name: factor * value for name, value in part.items()}
    return {"request": 0.0} | scaled | {"request": scaled.get("request", 0.0) + added_ms}


def fit_stage(form: StageForm, requests: RequestColumns, times: np.ndarray, vision_ms: np.ndarray) -> StageModel:
    """The form's coefficients with the least error of logarithms, runs that stand out weighted down.

    Terms that these requests cannot distinguish are left out, see `identifiable`.

    Args:
        times: [S], measured, above 0.
        vision_ms: [S], predicted for the same requests.
    """
    if form.floor is None:
        return StageModel(form.name, fit_part(form.work, requests, times, times), {}, False)
    ahead = vision_ms if form.runs_ahead else np.zeros_like(times)
    order = np.argsort(linear(fit_part(form.work, requests, times, times), requests), kind="stable")
    fits = []
    for share in _STARTS:
        on_floor = np.zeros(len(times), dtype=bool)
        on_floor[order[: round(share * len(times))]] = True
        fits.append(_alternate(form, requests, times, ahead, on_floor))
    errors = [np.abs(each.times(requests, vision_ms) / times - 1).mean() for each in fits]
    return fits[int(np.argmin(errors))]


def _alternate(
    form: StageForm, requests: RequestColumns, times: np.ndarray, ahead: np.ndarray, on_floor: np.ndarray
) -> StageModel:
    """Fit each part to the samples on it, put each sample on the part that is longer, repeat until none changes."""
    assert form.floor is not None
    work, floor = {}, {}
    for _ in range(_ROUNDS):
        # A part with no samples of its own is bounded by the shortest time that was seen.
        work = _part_of(form.work, requests, times, times, ~on_floor) or {"request": float(times.min())}
        floor = _part_of(form.floor, requests, times + ahead, times, on_floor)
        if not floor:
            break
        moved = linear(floor, requests) - ahead > linear(work, requests)
        if (moved == on_floor).all():
            break
        on_floor = moved
    return StageModel(form.name, work, floor, form.runs_ahead)


def _part_of(
    terms: Sequence[str], requests: RequestColumns, times: np.ndarray, scale: np.ndarray, which: np.ndarray
) -> dict[str, float]:
    """The coefficients of a part on these samples; empty where they are too few for its terms."""
    if which.sum() < 2 * len(terms):
        return {}
    return fit_part(terms, requests.take(which), times[which], scale[which])


def fit_part(terms: Sequence[str], requests: RequestColumns, times: np.ndarray, scale: np.ndarray) -> dict[str, float]:
    """Coefficients, none negative, of least error of logarithms in Huber's sense; terms without effect are left out.

    Errors relative to what was measured would draw a noisy stage down: of lognormal times of spread s their least
    squares are at exp(-1.5 s^2) of the median. So from there Gauss-Newton steps go on in logarithms.

    Args:
        times: [S], the part's; where vision is taken off it, with vision's.
        scale: [S], the same without it: the measured times.
    """
    kept = identifiable(terms, requests)
    columns = columns_of(kept, requests)
    units = (columns / scale[:, None]).max(axis=0)
    columns, taken_off = columns / units, times - scale
    values = robust_nonnegative(columns / scale[:, None], times / scale)
    for _ in range(_LOG_STEPS):
        before = np.maximum(columns @ values - taken_off, _LEAST * scale)
        aimed = taken_off + before * (1 + np.clip(np.log(scale / before), -1, 1))
        previous, values = values, robust_nonnegative(columns / before[:, None], aimed / before)
        if np.abs(columns @ (values - previous) / before).max() < _SETTLED:
            break
    values = values / units
    return {name: float(value) for name, value in zip(kept, values, strict=True) if value > 0} or {"request": 0.0}


PREDICTED = (*STAGES, "T_LLM_decode", "T_first_token", "T_total")


def stage_times(stages: Mapping[str, StageModel], requests: RequestColumns) -> dict[str, np.ndarray]:
    """Name of PREDICTED -> times [S] in ms; raises ConfigurationError for pictures that the model cannot predict."""
    vision_ms = vision_times(stages, requests)
    prefill_ms = stages["T_LLM_prefill"].times(requests, vision_ms)
    per_token_ms = stages["T_decode_per_token"].times(requests, vision_ms)
    return composed_times(vision_ms, prefill_ms, per_token_ms, requests.output_tokens)


def composed_times(
    vision_ms: np.ndarray, prefill_ms: np.ndarray, per_token_ms: np.ndarray, output_tokens: np.ndarray
) -> dict[str, np.ndarray]:
    """Name of PREDICTED -> times [S] in ms, from those of the stages [S] and the tokens of the answers [S]."""
    decode_ms = (output_tokens - 1) * per_token_ms
    first_ms = vision_ms + prefill_ms
    times = vision_ms, prefill_ms, per_token_ms, decode_ms, first_ms, first_ms + decode_ms
    return dict(zip(PREDICTED, times, strict=True))


def after_vision(predicted: Mapping[str, np.ndarray], vision_ms: np.ndarray) -> dict[str, np.ndarray]:
    """Predictions of `stage_times` [S] once vision has run in `vision_ms` [S]: what is left takes as many times longer
    than predicted as vision did. Load of the machine slows all stages alike. NaN for requests without a picture.
    """
    speed = vision_ms / np.where(predicted["T_vision_total"] > 0, predicted["T_vision_total"], np.nan)
    later = {name: speed * predicted[name] for name in ("T_LLM_prefill", "T_decode_per_token", "T_LLM_decode")}
    first_ms = vision_ms + later["T_LLM_prefill"]
    return {**later, "T_first_token": first_ms, "T_total": first_ms + later["T_LLM_decode"]}


def vision_times(stages: Mapping[str, StageModel], requests: RequestColumns) -> np.ndarray:
    """Times [S] of vision in milliseconds, 0 for requests without a picture; raises as `stage_times` does."""
    has_picture = requests.vision_tokens > 0
    if "T_vision_total" in stages:
        return np.where(has_picture, stages["T_vision_total"].times(requests, np.zeros(len(requests))), 0.0)
    if has_picture.any():
        raise ConfigurationError("the model was fitted on samples without pictures; fit it on some that have one")
    return np.zeros(len(requests))


def fit_stages(samples: TimedSamples, forms: Mapping[str, StageForm]) -> dict[str, StageModel]:
    """Each stage's form fitted on the samples that have the stage; stages without samples or form are left out."""
    found: dict[str, StageModel] = {}
    vision_ms = np.zeros(len(samples))
    for name in (each for each in STAGES if each in forms):
        times = samples.times[name]
        has = np.isfinite(times)
        if not has.any():
            continue
        found[name] = fit_stage(forms[name], samples.requests.take(has), times[has], vision_ms[has])
        if name == "T_vision_total":
            vision_ms = vision_times(found, samples.requests)
    return found


def measured_times(samples: TimedSamples) -> dict[str, np.ndarray]:
    """Name of PREDICTED -> measured times [S]; NaN where a sample lacks the stage, whose time is then 0 in the sums."""
    vision = np.nan_to_num(samples.times["T_vision_total"])
    steps = samples.requests.output_tokens - 1
    return {
        **{name: samples.times[name] for name in STAGES},
        "T_LLM_decode": steps * samples.times["T_decode_per_token"],
        "T_first_token": vision + samples.times["T_LLM_prefill"],
        "T_total": samples.times["T_total"],
    }
