"""The header of the CSV of samples, its rows by hand, and text that a spreadsheet would run."""

from pathlib import Path
from typing import Any

import pytest

from experiment_core_utils.l_results_csv_cleaning import read_results_csv, samples_csv_beside, write_samples_csv
from experiment_core_utils.records.columns import SAMPLE_COLUMNS
from experiment_core_utils.records.setting_result import SettingResult
from tests.hand_made_records import (
    SETTING,
    answered_sample,
    measured_sample,
    part,
    result_of,
    staged_run,
    stored_result,
)

HEADER = (
    "task,setting,tier,vision_tokens_target,top_k,num_active_blocks,sample_id,image_id,question_type,question,pred,"
    "answers,accuracy,parse_status,T_total_ms,T_vision_total_ms,T_LLM_prefill_ms,T_LLM_decode_ms,T_first_token_ms,"
    "T_decode_per_token_ms,T_preprocess_ms,T_transfer_ms,num_runs,num_outlier_runs,energy_j,energy_source,target_crops,"
    "actual_num_crops,pooled_image_features,actual_vision_tokens,image_marker_tokens,input_text_tokens,prompt_tokens,"
    "output_tokens,output_ended,vision_flops,prefill_flops,decode_flops_per_token,accuracy_batch_size,prompt"
)


def write(folder: Path, *samples: Any) -> Path:
    path = samples_csv_beside(folder / "signs_settings.csv")
    write_samples_csv([result_of(part(*samples))], path)
    return path


def test_the_header_is_pinned(tmp_path: Path) -> None:
    path = write(tmp_path, measured_sample(0))
    assert path.name == "signs_samples.csv"
    assert path.read_text().splitlines()[0] == HEADER


def test_rows_by_hand_and_absent_is_empty(tmp_path: Path) -> None:
    path = write(tmp_path, measured_sample(0, staged_run(inter_token_s=())), answered_sample(1))
    assert path.read_text().splitlines()[1] == (
        'signs,tier-low_topk2_blocks3,low,,2,3,0,picture-0,reading,what?,"1.0","[""stop""]",1.0,text,'
        "750.0,500.0,250.0,,750.0,,2.0,1.0,1,,,,2,2,432,384,28,10,422,1,true,,,,,"
    )
    measured, answered = read_results_csv(path)
    assert (measured["T_decode_per_token_ms"], measured["energy_j"], measured["pred"]) == (None, None, "1.0")
    assert (answered["T_total_ms"], answered["num_runs"], answered["accuracy_batch_size"]) == (None, 0, 3)


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r"])
def test_no_text_is_run_by_a_spreadsheet(start: str, tmp_path: Path) -> None:
    sample = measured_sample(0, prediction="none", question_type=f"{start}HYPERLINK(1)", image_id=f"{start}1+1")
    path = write(tmp_path, sample)
    (row,) = read_results_csv(path)
    assert (row["question_type"], row["image_id"]) == (f"{start}HYPERLINK(1)", f"{start}1+1")
    content = path.read_bytes().decode()
    assert f"'{start}HYPERLINK(1)" in content and f",{start}" not in content and f'"{start}' not in content


def test_what_no_file_can_hold_is_replaced(tmp_path: Path) -> None:
    (row,) = read_results_csv(write(tmp_path, measured_sample(0, image_id="a\0b\ud800c")))
    assert row["image_id"] == "a\ufffdb\ufffdc"


def test_a_result_from_before_energy_has_an_empty_cell(tmp_path: Path) -> None:
    content = stored_result(part(measured_sample(0)))
    del content["per_sample_results"][0]["energy_j"]
    write_samples_csv([SettingResult.from_content(content, "old.json")], tmp_path / "samples.csv")
    (row,) = read_results_csv(tmp_path / "samples.csv")
    assert row["energy_j"] is None


def test_numbers_have_six_digits(tmp_path: Path) -> None:
    (row,) = read_results_csv(write(tmp_path, measured_sample(0, staged_run(vision_s=0.123456789))))
    assert row["T_vision_total_ms"] == 123.457


def test_a_table_without_samples_has_all_columns(tmp_path: Path) -> None:
    header = write(tmp_path).read_text().splitlines()
    assert header == [",".join(column.name for column in SAMPLE_COLUMNS if column.is_everywhere)]


def test_settings_follow_each_other(tmp_path: Path) -> None:
    results = [result_of(part(measured_sample(number))) for number in (3, 1)]
    write_samples_csv(results, tmp_path / "samples.csv")
    assert [row["sample_id"] for row in read_results_csv(tmp_path / "samples.csv")] == [3, 1]
    assert {row["setting"] for row in read_results_csv(tmp_path / "samples.csv")} == {SETTING.key}
