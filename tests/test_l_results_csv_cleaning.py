"""The header of the CSV, its rows, and the table that closes a run."""

import csv
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from experiment_core_utils.g_metrics_inference import summarise
from experiment_core_utils.j_results_saving import setting_result
from experiment_core_utils.l_results_csv_cleaning import closing_table, settings_frame, write_settings_csv
from experiment_core_utils.primitives.knobs import KnobSetting, token_target
from experiment_core_utils.primitives.records import FailedSample, StageFlops
from tests.hand_made_records import SETTING, measured_sample, part, staged_run

HEADER = (
    "tier,vision_tokens_target,top_k,num_active_blocks,num_samples,num_failed_samples,accuracy,accuracy_ci95_low,"
    "accuracy_ci95_high,selected_crops_mean,actual_vision_tokens_mean,T_vision_total_mean_ms,T_LLM_prefill_mean_ms,"
    "T_LLM_decode_mean_ms,T_total_mean_ms,T_total_std_ms,T_total_p50_ms,T_total_p95_ms,T_total_p99_ms,"
    "T_decode_per_token_mean_ms,T_first_token_mean_ms,T_preprocess_mean_ms,output_tokens_mean,prompt_tokens_mean,"
    "vision_flops_mean,prefill_flops_mean,decode_flops_per_token_mean"
)


def result(setting: KnobSetting = SETTING, *samples: Any, failures: tuple[FailedSample, ...] = ()) -> dict[str, Any]:
    return setting_result(setting, 4, part(*samples, failures=failures), summarise(samples), {})


@pytest.fixture
def results() -> list[dict[str, Any]]:
    flops = StageFlops(vision_flops=700, prefill_flops=300, decode_flops_per_token=20.5)
    tier = result(SETTING, measured_sample(0, flops=flops), measured_sample(1, flops=flops))
    tokens = result(
        KnobSetting(token_target(720), 4, (0,)),
        measured_sample(0, staged_run(inter_token_s=()), accuracy=0.0),
        failures=(FailedSample(1, "SampleError", "unreadable"),),
    )
    return [tier, tokens]


def test_the_header_is_pinned(results: list[dict[str, Any]], tmp_path: Path) -> None:
    write_settings_csv(results, tmp_path / "settings.csv")
    assert (tmp_path / "settings.csv").read_text().splitlines()[0] == HEADER
    assert [path.name for path in tmp_path.iterdir()] == ["settings.csv"]


def test_rows_by_hand(results: list[dict[str, Any]], tmp_path: Path) -> None:
    write_settings_csv(results, tmp_path / "settings.csv")
    with (tmp_path / "settings.csv").open() as file:
        tier, tokens = csv.DictReader(file)
    assert [tier[name] for name in ("tier", "vision_tokens_target", "top_k", "num_active_blocks")] == [
        "low",
        "",
        "2",
        "3",
    ]
    assert (tokens["tier"], float(tokens["vision_tokens_target"]), tokens["top_k"]) == ("", 720.0, "4")
    assert (tokens["num_samples"], tokens["num_failed_samples"]) == ("1", "1")
    # Two equal samples of 500 + 250 + 250 ms.
    assert [float(tier[f"T_{name}_mean_ms"]) for name in ("vision_total", "LLM_prefill", "LLM_decode", "total")] == [
        500.0, 250.0, 250.0, 1000.0,
    ]  # fmt: skip
    assert (float(tier["T_total_std_ms"]), float(tier["T_first_token_mean_ms"])) == (0.0, 750.0)
    assert (float(tier["prompt_tokens_mean"]), float(tier["decode_flops_per_token_mean"])) == (422.0, 20.5)
    assert float(tier["accuracy"]) == 1.0 and 0.0 < float(tier["accuracy_ci95_low"]) < 1.0
    # One token has no decode: an empty cell, no zero.
    assert (tokens["T_LLM_decode_mean_ms"], tokens["T_decode_per_token_mean_ms"], tokens["vision_flops_mean"]) == (
        "", "", "",
    )  # fmt: skip


def test_a_setting_without_samples_has_a_row_of_empty_cells() -> None:
    frame = settings_frame([result(SETTING, failures=(FailedSample(0, "SampleError", "unreadable"),))])
    assert frame.loc[0, "num_failed_samples"] == 1
    assert frame.loc[0, ["accuracy", "accuracy_ci95_low", "T_total_mean_ms", "selected_crops_mean"]].isna().all()


def test_rows_keep_the_order_of_the_plan(results: list[dict[str, Any]]) -> None:
    assert list(settings_frame(results[::-1])["top_k"]) == [4, 2]
    assert isinstance(settings_frame(results), pd.DataFrame)


def test_the_closing_table(results: list[dict[str, Any]]) -> None:
    head, tier, tokens = closing_table(results).splitlines()
    assert " ".join(head.split()) == (
        "vision top-k blocks crops tokens accuracy [95 %] vision ms prefill ms decode ms total ms p95 ms/token failed"
    )
    # 2 of 2 right: Wilson's lower bound is 2 / (2 + 3.8415) = 0.34.
    assert tier.split() == "low 2 3 2.0 422 1.000 [0.34, 1.00] 500.0 250.0 250.0 1000.0 1000.0 125.00 0".split()
    assert tokens.split() == "720 4 1 2.0 422 0.000 [0.00, 0.79] 500.0 250.0 - 750.0 750.0 - 1".split()
