"""In: models of the stages, or samples; out: every time of a request, predicted or measured, under one set of names."""

from collections.abc import Mapping

import numpy as np

from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.core_exp.latency_features import STAGES, RequestColumns, TimedSamples
from experiments.core_exp.stage_model import StageForm, StageModel, fit_stage

PREDICTED = (*STAGES, "T_LLM_decode", "T_first_token", "T_total")


def stage_times(stages: Mapping[str, StageModel], requests: RequestColumns) -> dict[str, np.ndarray]:
    """Name of PREDICTED -> [S] milliseconds; raises ConfigurationError for pictures that the model knows nothing of."""
    vision_ms = vision_times(stages, requests)
    prefill_ms = stages["T_LLM_prefill"].times(requests, vision_ms)
    per_token_ms = stages["T_decode_per_token"].times(requests, vision_ms)
    decode_ms = (requests.output_tokens - 1) * per_token_ms
    first_ms = vision_ms + prefill_ms
    return dict(
        zip(PREDICTED, (vision_ms, prefill_ms, per_token_ms, decode_ms, first_ms, first_ms + decode_ms), strict=True)
    )


def vision_times(stages: Mapping[str, StageModel], requests: RequestColumns) -> np.ndarray:
    """[S] milliseconds, 0 for requests without a picture; raises as `stage_times` does."""
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
    """Name of PREDICTED -> [S]; NaN where a sample lacks the stage, whose time is then 0 in the sums."""
    vision = np.nan_to_num(samples.times["T_vision_total"])
    steps = samples.requests.output_tokens - 1
    return {
        **{name: samples.times[name] for name in STAGES},
        "T_LLM_decode": steps * samples.times["T_decode_per_token"],
        "T_first_token": vision + samples.times["T_LLM_prefill"],
        "T_total": samples.times["T_total"],
    }
