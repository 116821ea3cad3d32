"""No setting is predicted from its own samples."""

from dataclasses import replace

import numpy as np

from experiments.analyses.latency.settings_left_out import predicted_left_out
from experiments.fitting.held_out import left_out_masks
from tests.experiments.analyses.latency.synthetic_samples import working_samples


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
