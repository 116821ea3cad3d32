"""Analyses of many settings: what is left out is reported, and the fast ways find what the plain ones find."""

import numpy as np
import pytest

from experiments.analyses.knobs.effects import effects
from experiments.analyses.latency.features import MEASURED, RequestColumns, TimedSamples, of_fewer_settings
from experiments.analyses.limits import Steps, draws_for


@pytest.mark.parametrize(("settings", "draws"), [(1, 1000), (1000, 1000), (2000, 500), (5000, 200), (100_000, 100)])
def test_draws_for_many_settings(settings: int, draws: int) -> None:
    assert draws_for(settings, 1000) == draws


def test_a_spread_that_is_too_large_is_not_split_and_says_so() -> None:
    levels = {"vision": [f"{n % 40} tokens" for n in range(1040)], "top_k": [n // 40 + 1 for n in range(1040)]}
    found = effects(levels, np.arange(1040.0), np.ones((3, 1040)))
    assert found.reason == "not split: more than 1000 settings" and found.is_too_large
    assert not found.terms and len(found.level_means) == 66
    many = effects({"vision": list(range(200))}, np.arange(200.0), np.ones((3, 200)))
    assert many.reason == "not split: more than 100 values of a knob" and many.is_too_large and not many.level_means


def test_an_estimator_is_fitted_to_some_of_many_settings() -> None:
    settings = np.array([f"signs tokens{number // 2}_topk2_blocks3" for number in range(2002)])
    requests = RequestColumns(*(np.full(2002, 2.0) for _ in range(6)))
    samples = TimedSamples(requests, {name: np.ones(2002) for name in MEASURED}, settings, np.full(2002, "signs"))
    # A thousand are all taken.
    thousand = samples.take(np.arange(2000))
    assert of_fewer_settings(thousand, 5) == (thousand, None)
    fewer, caveat = of_fewer_settings(samples, 5)
    # Each setting with both of its samples.
    assert len(fewer) == 10 and len(set(fewer.knobs)) == 5
    assert (
        caveat is not None
        and caveat.sentence == "fitted to and validated on 5 of 1001 settings, drawn at random; 996 left out"
    )


def test_progress_is_shown_for_many_settings_only(capsys: pytest.CaptureFixture[str]) -> None:
    Steps().say(12, "fronts")
    assert capsys.readouterr().err == ""
    Steps().say(5000, "fronts")
    assert capsys.readouterr().err == "0 s: fronts\n"
