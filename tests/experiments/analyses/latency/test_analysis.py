"""E3 of a frame is a fitted, validated model with its guardrail."""

import pandas as pd
import pytest

from experiment_core_utils.primitives.errors import ResultsError
from experiments.analyses.latency.analysis import analyse_latency
from experiments.analyses.sweeps import load_sweep, samples_frame
from tests.experiments.core_exp.test_e3_latency_estimator import sweep_folder


def test_a_frame_becomes_a_validated_model(tmp_path_factory: pytest.TempPathFactory) -> None:
    frame: pd.DataFrame = samples_frame(load_sweep(sweep_folder(tmp_path_factory.mktemp("run"))))
    found = analyse_latency(frame, 0.8)
    assert (found.estimator.level, len(found.samples), found.validation.num_folds, found.left_out) == (0.8, 45, 8, None)
    # At a margin of 0 each of 45 samples is a case at each of 9 budgets.
    assert next(each.cases for each in found.curve if each.margin == 0.0) == 405
    with pytest.raises(ResultsError, match="too few"):
        analyse_latency(frame[frame["top_k"] == 2])
