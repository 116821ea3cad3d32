"""Known coefficients come back from synthetic times."""

import numpy as np
import pytest

from experiments.analyses.latency.features import RequestSetting, requests_of
from experiments.analyses.latency.stage_regression import FORMS, StageForm, StageModel, after_vision, fit_stage, linear
from tests.experiments.analyses.latency.synthetic_samples import launching_samples, working_samples


def form(stage: str, name: str) -> StageForm:
    return next(each for each in FORMS[stage] if each.name == name)


def test_the_longer_part_decides_and_vision_is_taken_off_a_floor_that_runs_ahead() -> None:
    requests = requests_of(
        [
            RequestSetting(90, 1, 10, {"top_k": 2, "num_active_blocks": 4}),
            RequestSetting(990, 9, 10, {"top_k": 2, "num_active_blocks": 4}),
        ]
    )
    # Work 0.01 a block and token: 4 and 40 ms; floor 5 + 2 a block: 13 ms.
    model = StageModel("launch_ahead", {"blocks_x_tokens": 0.01}, {"request": 5.0, "blocks": 2.0}, runs_ahead=True)
    assert model.times(requests, np.array([3.0, 3.0])).tolist() == [10.0, 40.0]
    plain = StageModel("roofline", model.work, model.floor, runs_ahead=False)
    assert plain.times(requests, np.array([3.0, 3.0])).tolist() == [13.0, 40.0]
    # Twice as long and 1 ms more: work 9 and 81, floor 27 less 3.
    assert model.affine(2.0, 1.0).times(requests, np.array([3.0, 3.0])).tolist() == [24.0, 81.0]


def test_what_is_left_after_vision_takes_as_many_times_longer_as_vision_did() -> None:
    predicted = {"T_vision_total": [10.0, 0.0], "T_LLM_prefill": [4.0, 4.0], "T_decode_per_token": [1.0, 1.0]}
    columns = {name: np.array(each) for name, each in (predicted | {"T_LLM_decode": [3.0, 3.0]}).items()}
    found = after_vision(columns, np.array([15.0, np.nan]))
    # Vision took 1.5 times as long: 6 ms and 4.5 ms are left.
    assert {name: each[0] for name, each in found.items()} == {
        "T_LLM_prefill": 6.0, "T_decode_per_token": 1.5, "T_LLM_decode": 4.5, "T_first_token": 21.0, "T_total": 25.5,
    }  # fmt: skip
    assert np.isnan(found["T_total"][1])


def test_work_is_recovered() -> None:
    samples = working_samples()
    vision = samples.times["T_vision_total"]
    found = fit_stage(form("T_vision_total", "work"), samples.requests, vision, np.zeros(len(samples)))
    assert found.work == pytest.approx({"request": 2.0, "image_crops": 1.0})
    found = fit_stage(form("T_LLM_prefill", "work"), samples.requests, samples.times["T_LLM_prefill"], vision)
    strong = {name: value for name, value in found.work.items() if value > 1e-9}
    assert strong == pytest.approx({"request": 3.0, "blocks_x_tokens": 0.001, "experts_x_tokens": 0.0005}, rel=1e-4)


def test_work_is_recovered_from_noise() -> None:
    samples = working_samples(noise=0.05, samples_each=20)
    times = samples.times["T_decode_per_token"]
    found = fit_stage(form("T_decode_per_token", "work"), samples.requests, times, np.zeros(len(samples)))
    assert linear(found.work, samples.requests) == pytest.approx(
        0.2 + 0.5 * samples.requests.num_active_blocks, rel=0.02
    )


def test_a_floor_and_the_work_above_it_are_distinguished() -> None:
    samples = launching_samples()
    found = fit_stage(
        form("T_vision_total", "roofline"), samples.requests, samples.times["T_vision_total"], np.zeros(len(samples))
    )
    assert found.floor == pytest.approx({"request": 8.0}) and found.work == pytest.approx(
        {"request": 2.0, "image_crops": 0.8}
    )


def test_launches_that_vision_hides_are_found() -> None:
    samples = launching_samples()
    times, vision = samples.times["T_LLM_prefill"], samples.times["T_vision_total"]
    found = fit_stage(form("T_LLM_prefill", "launch_ahead"), samples.requests, times, vision)
    assert found.runs_ahead
    strong = {name: value for name, value in found.floor.items() if value > 1e-9}
    assert strong == pytest.approx({"request": 10.0, "blocks": 1.5})
    assert found.times(samples.requests, vision) == pytest.approx(times)


@pytest.mark.parametrize(("stage", "name"), [("T_LLM_prefill", "work"), ("T_LLM_prefill", "launch_ahead")])
def test_noise_does_not_draw_a_stage_below_its_median(stage: str, name: str) -> None:
    """Errors relative to the measured times would be least at exp(-1.5 * 0.4^2) = 0.79 of the median."""
    make = working_samples if name == "work" else launching_samples
    still, noisy = make(samples_each=24), make(noise=0.4, samples_each=24)
    vision = still.times["T_vision_total"]
    model = fit_stage(form(stage, name), noisy.requests, noisy.times[stage], vision)
    ratios = model.times(still.requests, vision) / still.times[stage]
    assert np.median(ratios) == pytest.approx(1.0, abs=0.05)
