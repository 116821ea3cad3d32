"""Known coefficients come back from synthetic times."""

import numpy as np
import pytest

from experiments.analyses.latency.features import RequestSetting, requests_of
from experiments.analyses.latency.stage_regression import STAGE_TERMS, StageModel, after_vision, fit_stage
from tests.experiments.analyses.latency.synthetic_samples import working_samples


def test_a_stage_is_a_sum_of_terms() -> None:
    requests = requests_of(
        [
            RequestSetting(90, 1, 10, {"top_k": 2, "num_active_blocks": 4}),
            RequestSetting(990, 9, 10, {"top_k": 2, "num_active_blocks": 4}),
        ]
    )
    # 0.01 a block and token, and 5: 4 + 5 and 40 + 5 ms.
    model = StageModel({"blocks_x_tokens": 0.01, "request": 5.0})
    assert model.times(requests).tolist() == [9.0, 45.0]
    # Twice as long and 1 ms more.
    assert model.affine(2.0, 1.0).times(requests).tolist() == [19.0, 91.0]
    assert StageModel({"blocks_x_tokens": 0.01}).affine(2.0, 1.0).times(requests).tolist() == [9.0, 81.0]


def test_what_is_left_after_vision_takes_as_many_times_longer_as_vision_did() -> None:
    predicted = {"T_vision_total": [10.0, 0.0], "T_LLM_prefill": [4.0, 4.0], "T_decode_per_token": [1.0, 1.0]}
    columns = {name: np.array(each) for name, each in (predicted | {"T_LLM_decode": [3.0, 3.0]}).items()}
    found = after_vision(columns, np.array([15.0, np.nan]))
    # Vision took 1.5 times as long: 6 ms and 4.5 ms are left.
    assert {name: each[0] for name, each in found.items()} == {
        "T_LLM_prefill": 6.0, "T_decode_per_token": 1.5, "T_LLM_decode": 4.5, "T_first_token": 21.0, "T_total": 25.5,
    }  # fmt: skip
    assert np.isnan(found["T_total"][1])


@pytest.mark.parametrize(("stage", "expected"), [
    ("T_vision_total", {"request": 2.0, "image_crops": 1.0}),
    ("T_LLM_prefill", {"request": 3.0, "blocks_x_tokens": 0.001, "experts_x_tokens": 0.0005}),
])  # fmt: skip
def test_coefficients_are_recovered(stage: str, expected: dict[str, float]) -> None:
    samples = working_samples()
    found = fit_stage(STAGE_TERMS[stage], samples.requests, samples.times[stage]).work
    assert {name: value for name, value in found.items() if value > 1e-9} == pytest.approx(expected, rel=1e-4)


def test_coefficients_are_recovered_from_noise() -> None:
    samples = working_samples(noise=0.05, samples_each=20)
    name = "T_decode_per_token"
    found = fit_stage(STAGE_TERMS[name], samples.requests, samples.times[name])
    assert found.times(samples.requests) == pytest.approx(0.2 + 0.5 * samples.requests.num_active_blocks, rel=0.02)


def test_noise_does_not_draw_a_stage_below_its_median() -> None:
    """Errors relative to the measured times would be least at exp(-1.5 * 0.4^2) = 0.79 of the median."""
    still, noisy = working_samples(samples_each=24), working_samples(noise=0.4, samples_each=24)
    name = "T_LLM_prefill"
    model = fit_stage(STAGE_TERMS[name], noisy.requests, noisy.times[name])
    assert np.median(model.times(still.requests) / still.times[name]) == pytest.approx(1.0, abs=0.05)
