"""No setting is predicted from its own samples, and the right form is found."""

from dataclasses import replace

import numpy as np

from experiments.analyses.latency.settings_left_out import choose_forms, predicted_left_out
from experiments.fitting.held_out import left_out_masks
from tests.experiments.analyses.latency.synthetic_samples import launching_samples, working_samples


def test_no_setting_is_predicted_by_its_own_samples_of_whatever_task() -> None:
    samples = working_samples()
    tasks = np.where(np.arange(len(samples)) % 2, "signs", "counts")
    settings = np.array([f"{task} {knobs}" for task, knobs in zip(tasks, samples.knobs, strict=True)])
    samples = replace(samples, settings=settings)
    masks = list(left_out_masks(samples.knobs, 3))
    seen = []

    def fit(part):  # type: ignore[no-untyped-def]
        seen.append(set(part.knobs))
        number = float(len(seen))
        return lambda requests: {"fold": np.full(len(requests), number)}

    found = predicted_left_out(samples, fit, 3)["fold"]
    for fold, (mask, fitted) in enumerate(zip(masks, seen, strict=True), 1):
        assert set(found[mask]) == {fold} and fitted.isdisjoint(samples.knobs[mask])


def test_each_device_gets_its_form() -> None:
    assert {name: form.name for name, form in choose_forms(launching_samples(noise=0.02)).items()} == {
        "T_vision_total": "roofline", "T_LLM_prefill": "launch_ahead", "T_decode_per_token": "work",
    }  # fmt: skip
    assert {form.name for form in choose_forms(working_samples(noise=0.02)).values()} == {"work"}
