"""The model of one stage's time: a line of terms whose coefficients are not negative, so that no knob makes it so."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import AfterValidator, ConfigDict, with_config

from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.analyses.latency.features import STAGES, TERMS, RequestColumns, TimedSamples, columns_of, identifiable
from experiments.fitting.regression import robust_nonnegative

# Steps in logarithms, and the relative change of every prediction at which they end.
_LOG_STEPS = 4
_SETTLED = 0.002
# Of a measured time: what is predicted for it at least while steps are taken.
_LEAST = 0.05
_LAUNCHES = ("request", "blocks", "experts")
#: stage -> the terms that its time is a sum of, by names of TERMS
STAGE_TERMS: Mapping[str, tuple[str, ...]] = {
    "T_vision_total": ("request", "image_crops"),
    "T_LLM_prefill": (*_LAUNCHES, "tokens", "blocks_x_tokens", "experts_x_tokens", "blocks_x_tokens_squared"),
    "T_decode_per_token": (*_LAUNCHES, "blocks_x_context"),
}


def _term(name: str) -> str:
    if name not in TERMS:
        raise ValueError(f"no model has the term {name}")
    return name


STORED = ConfigDict(strict=True, allow_inf_nan=False)


@with_config(STORED)
@dataclass(frozen=True)
class StageModel:
    """A fitted stage."""

    work: Mapping[Annotated[str, AfterValidator(_term)], float]  #: term -> milliseconds per unit of it, none negative
    form: Literal["work"] = "work"  #: in files; others had a floor beside the work, which is not predicted by

    def times(self, requests: RequestColumns) -> np.ndarray:
        """Times [S] in milliseconds."""
        return columns_of(list(self.work), requests) @ np.fromiter(self.work.values(), np.float64)

    def affine(self, factor: float, added_ms: float) -> "StageModel":
        """The model of a stage that takes `factor` times as long and `added_ms` more."""
        scaled = {"request": 0.0} | {name: factor * value for name, value in self.work.items()}
        return StageModel(scaled | {"request": scaled["request"] + added_ms})


def fit_stage(terms: Sequence[str], requests: RequestColumns, times: np.ndarray) -> StageModel:
    """The line of least error of logarithms in Huber's sense, which weights runs that stand out down.

    Terms that these requests cannot distinguish, see `identifiable`, and terms without effect are left out.

    Errors relative to what was measured would draw a noisy stage down: of lognormal times of spread s their least
    squares are at exp(-1.5 s^2) of the median. So from there Gauss-Newton steps go on in logarithms.

    Args:
        times: [S] milliseconds, measured, above 0.
    """
    kept = identifiable(terms, requests)
    columns = columns_of(kept, requests)
    units = (columns / times[:, None]).max(axis=0)
    columns = columns / units
    values = robust_nonnegative(columns / times[:, None], np.ones(len(times)))
    for _ in range(_LOG_STEPS):
        before = np.maximum(columns @ values, _LEAST * times)
        aimed = 1 + np.clip(np.log(times / before), -1, 1)
        previous, values = values, robust_nonnegative(columns / before[:, None], aimed)
        if np.abs(columns @ (values - previous) / before).max() < _SETTLED:
            break
    values = values / units
    found = {name: float(value) for name, value in zip(kept, values, strict=True) if value > 0}
    return StageModel(found or {"request": 0.0})


PREDICTED = (*STAGES, "T_LLM_decode", "T_first_token", "T_total")


def stage_times(stages: Mapping[str, StageModel], requests: RequestColumns) -> dict[str, np.ndarray]:
    """Name of PREDICTED -> times [S] in ms; raises ConfigurationError for pictures that the model cannot predict."""
    vision_ms = vision_times(stages, requests)
    prefill_ms, per_token_ms = (stages[name].times(requests) for name in STAGES[1:])
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
        return np.where(has_picture, stages["T_vision_total"].times(requests), 0.0)
    if has_picture.any():
        raise ConfigurationError("the model was fitted on samples without pictures; fit it on some that have one")
    return np.zeros(len(requests))


def fit_stages(samples: TimedSamples) -> dict[str, StageModel]:
    """Each stage's model of the samples that have the stage; stages without samples are left out."""
    found: dict[str, StageModel] = {}
    for name, terms in STAGE_TERMS.items():
        has = np.isfinite(samples.times[name])
        if has.any():
            found[name] = fit_stage(terms, samples.requests.take(has), samples.times[name][has])
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
