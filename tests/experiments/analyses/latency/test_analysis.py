"""E3 of a sweep is a fitted, validated model with its guardrail."""

import pandas as pd
import pytest

from experiment_core_utils.primitives.errors import ResultsError
from experiments.analyses.latency.analysis import analyse_latency
from experiments.analyses.sweeps import load_sweep, samples_frame
from tests.experiments.core_exp.test_e3_latency_estimator import sweep_folder


def test_a_sweep_becomes_a_validated_model(tmp_path_factory: pytest.TempPathFactory) -> None:
    sweep = load_sweep(sweep_folder(tmp_path_factory.mktemp("run")))
    frame: pd.DataFrame = samples_frame(sweep)
    found = analyse_latency(sweep, frame, 0.8)
    assert (found.estimator.level, len(found.samples), found.validation.num_folds) == (0.8, 45, 8)
    # All settings are in it.
    assert "part_of_settings" not in {each.kind for each in found.caveats}
    # At a margin of 0 each of 45 samples is a case at each of 9 budgets.
    assert next(each.cases for each in found.curve if each.margin == 0.0) == 405
    with pytest.raises(ResultsError, match="too few"):
        analyse_latency(sweep, frame[frame["top_k"] == 2])
