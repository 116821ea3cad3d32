"""The tables of settings and samples, by hand."""

import pytest

from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import token_target
from experiment_core_utils.records.columns import LAST_COLUMNS
from experiment_core_utils.records.compute import HardwareUtilisation
from experiment_core_utils.saved_results.terminal import closing_table
from experiment_core_utils.tables.frames import settings_frame, table_of_settings
from tests.hand_made_records import (
    SETTING,
    answered_sample,
    failed_sample,
    measured_sample,
    part,
    result_of,
    staged_run,
)


def test_a_setting_without_samples_has_a_row_of_empty_cells() -> None:
    frame = settings_frame([result_of(part(failures=(failed_sample(0, "unreadable"),)))])
    assert frame.loc[0, "num_failed_samples"] == 1
    assert frame.loc[0, ["accuracy", "accuracy_ci95_low", "T_total_mean_ms", "selected_crops_mean"]].isna().all()


def test_rows_keep_the_order_of_the_plan() -> None:
    other = Setting.of(vision=token_target(720), top_k=4, num_active_blocks=RunningBlocks.of((0,)))
    results = [result_of(part(measured_sample(0)), setting) for setting in (other, SETTING)]
    assert list(settings_frame(results)["top_k"]) == [4, 2]


def test_fractions_of_the_peaks_have_columns() -> None:
    unknown = result_of(part(measured_sample(3)))
    peaks = HardwareUtilisation.model_construct(mfu_prefill=0.25, mbu_decode=0.5)
    known = unknown.with_keys(hardware_utilisation=peaks)
    frame = settings_frame([known, unknown])
    assert frame["mfu_prefill"].tolist()[0] == 0.25 and frame["mbu_decode"].tolist()[0] == 0.5
    assert frame[["mfu_vision", "mfu_prefill", "mfu_decode", "mbu_decode"]].isna().sum(axis=1).tolist() == [2, 4]


def test_columns_are_of_all_runs_beside_those_of_the_typical_ones() -> None:
    """Runs of 1 s, 4 s and 1 s with 3 tokens each: a request takes 2 s."""
    found = result_of(part(measured_sample(3, staged_run(), staged_run(vision_s=3.5), staged_run())))
    row = table_of_settings([found]).iloc[0]
    assert (row["T_total_mean_ms"], row["T_total_mean_typical_ms"]) == (pytest.approx(2000.0), 1000.0)
    assert (row["T_total_p95_ms"], row["T_total_p95_typical_ms"]) == (pytest.approx(3700.0), 1000.0)
    assert (row["requests_per_second"], row["tokens_per_second"]) == (pytest.approx(0.5), pytest.approx(1.5))
    assert (row["share_discarded_runs"], row["protocol_version"]) == (0.0, 2)


def test_the_table_says_how_many_samples_were_measured() -> None:
    some = result_of(part(measured_sample(3), answered_sample(7)))
    none = result_of(part(answered_sample(7)))
    frame = settings_frame([some, none])
    assert frame["num_latency_samples"].tolist() == [1, 0]
    # What came later is behind what was there.
    later = [f"T_total_{figure}_typical_ms" for figure in ("mean", "p95", "p99")]
    later += ["share_discarded_runs", "protocol_version", "request_rate", "achieved_rate", "most_under_way"]
    later += [column.name for column in LAST_COLUMNS]
    assert list(frame.columns[-len(later) :]) == later
    first = [name for name in frame.columns if not name.startswith(("energy_", "mfu_", "mbu_")) and name not in later]
    assert first[-4:] == ["num_latency_samples", "share_outlier_runs", "is_reference", "in_grid"]
    assert frame["T_total_mean_ms"].isna().tolist() == [False, True]
    assert "tier" not in closing_table([some, none])


def test_empty_answers_have_a_column_where_there_are_any() -> None:
    none_known = result_of(part(failures=(failed_sample(0, "unreadable"),)))
    first, second = (none_known.model_copy(update={"share_empty": share}) for share in (0.25, 0.0))
    assert table_of_settings([first, second])["share_empty"].tolist() == [0.25, 0.0]
    assert not {"share_empty", "share_one_token"} & set(table_of_settings([second, none_known]).columns)
