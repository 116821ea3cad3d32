"""Settings stay together, intervals are order statistics, and the right form is found."""

from dataclasses import replace

import numpy as np
import pytest

from experiments.analyses.latency.settings_left_out import (
    choose_forms,
    conformal_ratios,
    folds_of,
    predicted_left_out,
    relative_error,
)
from tests.experiments.analyses.latency.synthetic_samples import launching_samples, working_samples


def test_a_setting_is_in_one_fold_and_folds_are_of_like_size() -> None:
    settings = working_samples().settings
    folds = folds_of(settings, 5)
    assert all(len(set(folds[settings == each])) == 1 for each in set(settings))
    # 27 settings of 4 samples in 5 folds: 5 or 6 settings each.
    assert sorted(np.bincount(folds).tolist()) == [20, 20, 20, 24, 24]


def test_no_setting_is_predicted_by_its_own_samples_of_whatever_task() -> None:
    samples = working_samples()
    tasks = np.where(np.arange(len(samples)) % 2, "signs", "counts")
    settings = np.array([f"{task} {knobs}" for task, knobs in zip(tasks, samples.knobs, strict=True)])
    samples = replace(samples, settings=settings)
    folds = folds_of(samples.knobs, 3)
    seen = []

    def fit(part):  # type: ignore[no-untyped-def]
        seen.append(set(part.knobs))
        number = float(len(seen))
        return lambda requests: {"fold": np.full(len(requests), number)}

    found = predicted_left_out(samples, fit, 3)["fold"]
    assert found.tolist() == (folds + 1.0).tolist()
    for fold, fitted in enumerate(seen):
        assert fitted.isdisjoint(samples.knobs[folds == fold])


def test_relative_error_by_hand() -> None:
    # 10 % over, 20 % under, one that is absent.
    measured = np.array([10.0, 10.0, np.nan])
    assert relative_error(np.array([11.0, 8.0, 3.0]), measured) == pytest.approx(0.15)
    assert relative_error(None, measured) == float("inf")


def test_interval_ends_are_order_statistics() -> None:
    # n = 19 at 90 %: k = floor(20 x 0.05) = 1, the extremes; n = 39: k = 2, the second from either end.
    assert conformal_ratios(np.arange(1.0, 20.0), 0.9) == (1.0, 19.0)
    assert conformal_ratios(np.arange(1.0, 40.0)[::-1], 0.9) == (2.0, 38.0)
    assert conformal_ratios(np.array([1.5, 0.5]), 0.9) == (0.5, 1.5)
    assert conformal_ratios(np.array([]), 0.9) == (1.0, 1.0)


def test_each_device_gets_its_form() -> None:
    assert {name: form.name for name, form in choose_forms(launching_samples(noise=0.02)).items()} == {
        "T_vision_total": "roofline", "T_LLM_prefill": "launch_ahead", "T_decode_per_token": "work",
    }  # fmt: skip
    assert {form.name for form in choose_forms(working_samples(noise=0.02)).values()} == {"work"}
