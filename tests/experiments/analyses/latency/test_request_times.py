"""The times of a request from its stages, by hand."""

import numpy as np
import pytest

from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.analyses.latency.features import RequestColumns, RequestSetting, TimedSamples, requests_of
from experiments.analyses.latency.stage_regression import (
    PREDICTED,
    StageModel,
    fit_stages,
    measured_times,
    stage_times,
)

STAGES = {
    "T_vision_total": StageModel({"image_crops": 2.0}),
    "T_LLM_prefill": StageModel({"tokens": 0.1}),
    "T_decode_per_token": StageModel({"blocks": 0.5}),
}


def test_a_request_by_hand() -> None:
    requests = requests_of(
        [
            RequestSetting(80, 3, 20, {"top_k": 2, "num_active_blocks": 4}, 6),
            RequestSetting(0, 0, 20, {"top_k": 2, "num_active_blocks": 4}, 1),
            RequestSetting(0, 0, 20, {"top_k": 2, "num_active_blocks": 4}),
        ]
    )
    found = stage_times(STAGES, requests)
    assert tuple(found) == PREDICTED
    # Vision 2 x (3 + 1), nothing without a picture; prefill 0.1 x 100 and 0.1 x 20; 5 steps of 0.5 x 4.
    assert found["T_vision_total"].tolist() == [8.0, 0.0, 0.0]
    assert found["T_LLM_prefill"].tolist() == [10.0, 2.0, 2.0]
    assert found["T_decode_per_token"].tolist() == [2.0, 2.0, 2.0]
    assert found["T_LLM_decode"].tolist()[:2] == [10.0, 0.0] and np.isnan(found["T_LLM_decode"][2])
    assert found["T_first_token"].tolist() == [18.0, 2.0, 2.0]
    assert found["T_total"].tolist()[:2] == [28.0, 2.0] and np.isnan(found["T_total"][2])


def test_a_model_of_text_refuses_pictures() -> None:
    text = {name: stage for name, stage in STAGES.items() if name != "T_vision_total"}
    assert stage_times(text, requests_of([RequestSetting(0, 0, 20, {"top_k": 2, "num_active_blocks": 4})]))[
        "T_vision_total"
    ].tolist() == [0.0]
    with pytest.raises(ConfigurationError, match="fitted on samples without pictures"):
        stage_times(text, requests_of([RequestSetting(80, 3, 20, {"top_k": 2, "num_active_blocks": 4})]))


def test_samples_without_a_stage_are_left_out_of_its_fit() -> None:
    requests = RequestColumns(*(np.full(20, value) for value in (0.0, 0.0, 20.0, 2.0, 4.0, 3.0)))
    missing = np.full(20, np.nan)
    times = {"T_vision_total": missing, "T_LLM_prefill": np.full(20, 2.0), "T_decode_per_token": np.full(20, 1.5)}
    samples = TimedSamples(requests, times | {"T_total": np.full(20, 5.0)}, np.full(20, "s"), np.full(20, "t"))
    found = fit_stages(samples)
    assert set(found) == {"T_LLM_prefill", "T_decode_per_token"}
    assert found["T_LLM_prefill"].work == pytest.approx({"request": 2.0})
    measured = measured_times(samples)
    assert measured["T_first_token"][0] == 2.0 and measured["T_LLM_decode"][0] == 3.0
