"""The header of the CSV, its rows, and the table that closes a run."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from experiment_core_utils.j_results_saving import flatten_results_to_csv
from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import token_target
from experiment_core_utils.l_results_csv_cleaning import (
    json_to_csv,
    read_results,
    read_results_csv,
    reorder_csv_columns,
    setting_key,
    write_settings_csv,
    write_tables,
)
from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError
from experiment_core_utils.records.columns import SETTING_COLUMNS
from experiment_core_utils.records.ledger import plan_path
from experiment_core_utils.records.requests import StageFlops
from experiment_core_utils.records.sample_result import FailedSample
from experiment_core_utils.records.setting_result import SettingResult
from experiment_core_utils.saved_results.terminal import closing_table, comparison_table, few_samples_warning
from experiment_core_utils.tasks.comparison import PairedComparison
from experiment_core_utils.tasks.sampling import few_samples_caveats
from tests.hand_made_records import SETTING, failed_sample, measured_sample, part, result_of, staged_run

HEADER = (
    "task,setting,tier,vision_tokens_target,top_k,num_active_blocks,num_samples,num_failed_samples,accuracy,"
    "accuracy_ci95_low,accuracy_ci95_high,metric,T_total_mean_ms,T_total_p95_ms,T_vision_total_mean_ms,"
    "T_LLM_prefill_mean_ms,T_LLM_decode_mean_ms,T_first_token_mean_ms,T_decode_per_token_mean_ms,tokens_per_second,"
    "requests_per_second,selected_crops_mean,actual_vision_tokens_mean,T_total_std_ms,T_total_p50_ms,T_total_p99_ms,T_preprocess_mean_ms,output_tokens_mean,prompt_tokens_mean,vision_flops_mean,"
    "prefill_flops_mean,decode_flops_per_token_mean,metric_best,num_unparsed,share_unparsed,share_truncated,"
    "share_failed,num_latency_samples,is_reference,in_grid,T_total_mean_typical_ms,T_total_p95_typical_ms,"
    "T_total_p99_typical_ms,share_discarded_runs,protocol_version,vision,num_total_blocks,target_vision_tokens_mean,pooled_image_features_mean,"
    "file"
)


def result(setting: Setting = SETTING, *samples: Any, failures: tuple[FailedSample, ...] = ()) -> SettingResult:
    return result_of(part(*samples, failures=failures), setting)


@pytest.fixture
def results() -> list[SettingResult]:
    flops = StageFlops(vision_flops=700, prefill_flops=300, decode_flops_per_token=20.5)
    tier = result(SETTING, measured_sample(0, flops=flops), measured_sample(1, flops=flops))
    tokens = result(
        Setting.of(vision=token_target(720), top_k=4, num_active_blocks=RunningBlocks.of((0,))),
        measured_sample(0, staged_run(inter_token_s=()), prediction="?"),
        failures=(failed_sample(1, "unreadable"),),
    )
    return [tier, tokens]


def test_the_header_is_pinned(results: list[SettingResult], tmp_path: Path) -> None:
    write_settings_csv(results, tmp_path / "settings.csv")
    assert (tmp_path / "settings.csv").read_text().splitlines()[0] == HEADER
    assert [path.name for path in tmp_path.iterdir()] == ["settings.csv"]


def test_a_column_without_a_value_is_left_out(results: list[SettingResult], tmp_path: Path) -> None:
    write_settings_csv(results[:1], tmp_path / "settings.csv")
    header = (tmp_path / "settings.csv").read_text().splitlines()[0]
    assert header == HEADER.replace("vision_tokens_target,", "")


def test_parquet_is_refused_where_nothing_writes_it(
    results: list[SettingResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigurationError, match=r"^the package pyarrow is not installed; .*extra \[datasets\]\)$"):
        write_tables(results, "signs", tmp_path, "parquet")
    assert list(tmp_path.iterdir()) == []


def test_rows_by_hand(results: list[SettingResult], tmp_path: Path) -> None:
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
    scoring = ("metric", "metric_best", "num_unparsed", "share_unparsed", "share_truncated", "share_failed")
    assert [tokens[name] for name in scoring] == ["read_off", "1.0", "1", "1.0", "0.0", "0.5"]
    # One token has no decode: an empty cell, no zero.
    assert (tokens["T_LLM_decode_mean_ms"], tokens["T_decode_per_token_mean_ms"], tokens["vision_flops_mean"]) == (
        "", "", "",
    )  # fmt: skip


def test_each_row_identifies_itself_in_few_digits(results: list[SettingResult], tmp_path: Path) -> None:
    made = results[0].provenance
    named = made.with_keys(
        experiment_id="0007",
        model=made.model.with_keys(name="checkpoints/tiny", dtype="float32", execution="cpu"),
        hardware=made.hardware.with_keys(device="cpu"),
    )
    write_settings_csv([results[0].with_keys(provenance=named), results[1]], tmp_path / "settings.csv")
    tier, tokens = read_results_csv(tmp_path / "settings.csv")
    identity = ("task", "setting", "model_name", "precision", "device", "execution", "experiment_id", "file")
    assert [tier[name] for name in identity] == [
        "signs", "tier-low_topk2_blocks3", "checkpoints/tiny", "float32", "cpu", "cpu", "0007",
        "signs_imgsizetier-low_crops2_topk2_blocks3.json",
    ]  # fmt: skip
    assert tokens["file"] == "signs_imgsizetokens720_topk4_blocks1.json"
    # Two samples of 1 s with 3 tokens each; one of 0.75 s with 1 token.
    assert [(row["tokens_per_second"], row["requests_per_second"]) for row in (tier, tokens)] == [
        (3.0, 1.0),
        (1.33333, 1.33333),
    ]


def test_parquet_is_beside_csv_with_all_digits(results: list[SettingResult], tmp_path: Path) -> None:
    assert write_tables(results, "some_signs", tmp_path, "parquet") == tmp_path / "some-signs_settings.csv"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"some-signs_{table}.{ending}" for table in ("samples", "settings") for ending in ("csv", "parquet")
    ]
    for table in ("settings", "samples"):
        cells, numbers = (
            pd.read_csv(tmp_path / f"some-signs_{table}.csv"),
            pd.read_parquet(tmp_path / f"some-signs_{table}.parquet"),
        )
        assert list(cells.columns) == list(numbers.columns) and len(cells) == len(numbers)
    settings = pd.read_parquet(tmp_path / "some-signs_settings.parquet")
    assert settings["tokens_per_second"].tolist() == [3.0, 1 / 0.75]


def test_the_published_list_finds_the_columns_of_the_table_of_settings(
    results: list[SettingResult], tmp_path: Path
) -> None:
    made = results[0].provenance
    named = made.with_keys(experiment_id="0007", model=made.model.with_keys(name="tiny", dtype="float32"))
    path = tmp_path / "settings.csv"
    write_settings_csv([results[0].with_keys(provenance=named)], path)
    before = path.read_text().splitlines()[0].split(",")
    published = ["experiment_id", "model_name", "precision", "batch_size", "tokens_per_second", "total_energy_kwh"]
    reorder_csv_columns(path, published)
    first = ["experiment_id", "model_name", "precision", "tokens_per_second"]
    assert path.read_text().splitlines()[0].split(",") == [*first, *(name for name in before if name not in first)]


def test_the_closing_table(results: list[SettingResult]) -> None:
    head, tier, tokens = closing_table(results).splitlines()
    names = "vision top-k blocks crops tokens accuracy [95 %] vision ms prefill ms decode ms total ms p95 ms ms/token"
    assert head.split() == [*names.split(), "GFLOP", "MB", "J", "failed", "unparsed"]
    # 2 of 2 right: p^2 = 0.025; 0 of 1: 1 - p = 0.025.
    times = "500.0 250.0 250.0 1000.0 1000.0 125.00"
    assert tier.split() == f"low 2 3 2.0 422 1.000 [0.16, 1.00] {times} 0.0 – – 0 0".split()
    assert tokens.split() == "720 4 1 2.0 422 0.000 [0.00, 0.97] 500.0 250.0 – 750.0 750.0 – – – – 1 1".split()


def test_pictures_that_are_not_cut_have_no_crops_in_the_closing_table(results: list[SettingResult]) -> None:
    whole = results[0].model_copy(update={"selected_crops_mean": 0.0})
    assert closing_table([whole, results[1]]).splitlines()[1].split()[:5] == ["low", "2", "3", "–", "422"]
    assert "crops" not in closing_table([whole])


def test_the_closing_table_has_no_column_for_what_did_not_happen(results: list[SettingResult]) -> None:
    assert "unparsed" not in closing_table(results[:1])


def test_a_comparison_of_settings_on_few_samples_is_warned_of(results: list[SettingResult]) -> None:
    sentence = few_samples_warning(results)
    assert sentence is not None
    assert sentence.startswith("only 1 sample per setting")
    assert "500 or more" in sentence
    assert few_samples_warning(results[:1]) is few_samples_warning([]) is None
    assert few_samples_caveats(2, 500) == []
    assert len(few_samples_caveats(2, 499)) == 1


def test_the_comparison_table() -> None:
    one = PairedComparison(4, 1, 0.75, 0.5, -0.25, (-0.5, 0.0), 0, 1, 3, 1.0)
    none = PairedComparison(0, 5, None, None, None, None, 0, 0, 0, None)
    comparisons = {"tier-low_topk2_blocks4": one, "tier-low_topk1_blocks4": none}
    head, first, second = comparison_table(comparisons, "perplexity").splitlines()
    assert head.split() == "setting perplexity difference [95 %] better worse equal p excluded".split()
    assert first.split() == "tier-low_topk2_blocks4 0.500 -0.250 [-0.500, +0.000] 0 1 3 1 1".split()
    assert second.split() == "tier-low_topk1_blocks4 – – 0 0 0 – 5".split()


# --- reading results back -----------------------------------------------------------------------------------------


def test_results_come_back_by_name_and_other_files_are_left_alone(results: list[SettingResult], tmp_path: Path) -> None:
    names = ["t_imgsizetokens720_topk4_blocks1.json", "t_imgsizetier-low_crops2_topk2_blocks3.json"]
    for name, content in zip(names, reversed(results), strict=True):
        (tmp_path / name).write_text(json.dumps(content.content()))
    (tmp_path / "notes.json").write_text("{}")
    found = read_results(tmp_path)
    assert list(found) == sorted(names)
    assert [setting_key(content) for content in found.values()] == ["tier-low_topk2_blocks3", "tokens720_topk4_blocks1"]


def test_a_folder_of_a_run_without_results_yet_is_one(tmp_path: Path) -> None:
    plan = plan_path(tmp_path)
    plan.parent.mkdir()
    plan.write_text("{}")
    with pytest.raises(ResultsError, match="has no results yet: no sample has run at every setting; `knobprof status "):
        read_results(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "is not a result of schema 1"),
        ('{"schema_version": 2}', r"is not a result of schema 1 \(its schema is 2\)"),
        (None, "contains no results"),
    ],
)
def test_a_file_that_is_no_result_is_one_line(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "t_imgsizetier-low_crops2_topk2_blocks3.json").write_text(content)
    with pytest.raises(ResultsError, match=message) as caught:
        read_results(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="is not a folder"):
        read_results(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        (
            {"e1": {"a": {"x": 1}, "id": "0001"}, "e2": {"a": {"x": 2.5}}},
            [{"experiment": "e1", "a.x": 1, "id": "0001"}, {"experiment": "e2", "a.x": 2.5, "id": None}],
        ),
        ([{"a": 1}, {"b": "=1"}], [{"a": 1, "b": None}, {"a": None, "b": "=1"}]),
        ({"tokens_per_second": 5.5, "x": {"y": True}}, [{"tokens_per_second": 5.5, "x.y": True}]),
        (
            {"inference_metrics": {"flops": 1}, "local_energy_results_process_0": {"k": [2]}},
            [{"inference_metrics.flops": 1, "local_energy_results_process_0.k.0": 2}],
        ),
    ],
)
def test_json_becomes_csv_and_comes_back(content: Any, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps(content))
    json_to_csv(tmp_path / "r.json", str(tmp_path / "r.csv"))
    assert read_results_csv(tmp_path / "r.csv") == rows


@pytest.mark.parametrize(
    ("content", "output"),
    [
        ("{", "cannot be read"),
        ("3", "neither a dict nor a list"),
        ("[3]", "neither a dict nor a list"),
        ("{}", "nothing to write"),
    ],
)
def test_json_that_holds_no_experiment_is_one_line(content: str, output: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(content)
    with pytest.raises(ResultsError, match=output) as caught:
        json_to_csv(tmp_path / "r.json", tmp_path / "r.csv")
    assert "\n" not in str(caught.value) and not (tmp_path / "r.csv").exists()


def test_columns_are_reordered_and_cells_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_bytes('\ufeffb,x.10,x.2,id,\'=a\r\n1.50,"",,0001,"1"\r\n"two\nlines",\'=x,é,"a ""q""",7\r\n'.encode())
    before = read_results_csv(path)
    reorder_csv_columns(str(path), ["id", "not there", "=a"])
    assert path.read_bytes().decode() == ('id,\'=a,b,x.2,x.10\n0001,"1",1.50,,""\n"a ""q""",7,"two\nlines",é,\'=x\n')
    assert read_results_csv(path) == before
    assert before[0] == {"b": 1.5, "x.10": "", "x.2": None, "id": "0001", "=a": "1"}


def test_the_published_list_finds_the_columns_of_the_projects_own_table(tmp_path: Path) -> None:
    content = {
        "caveats": ["random weights"],
        "compute_metrics": {"flops": 8.0, "flops_method": "formula"},
        "experiment_id": "0001",
        "experiment_variables": {"batch_size": 4, "model_name": "m", "precision": "float16"},
        "global_energy_results": {"per_process_breakdown": [{"total_energy_kwh": 0.5}], "total_energy_kwh": 0.5},
        "inference_metrics": {"num_prompts": 2, "tokens_per_second": 9.0},
    }
    path = flatten_results_to_csv({"e1": content}, "text_generation", results_dir=tmp_path)
    before, rows = path.read_text().splitlines()[0].split(","), read_results_csv(path)
    published = ["experiment_id", "model_name", "precision", "batch_size", "tokens_per_second", "total_energy_kwh"]
    reorder_csv_columns(path, published)
    after = path.read_text().splitlines()[0].split(",")
    assert after[:6] == [
        "experiment_id",
        "experiment_variables.model_name",
        "experiment_variables.precision",
        "experiment_variables.batch_size",
        "inference_metrics.tokens_per_second",
        "global_energy_results.total_energy_kwh",
    ]
    # Name, prompts and operations before the caveats, as the project writes them.
    assert after[6:] == [name for name in before if name not in after[:6]]
    assert after[6:9] == ["experiment", "inference_metrics.num_prompts", "compute_metrics.flops"]
    assert read_results_csv(path) == rows
    reorder_csv_columns(path, published)
    assert path.read_text().splitlines()[0].split(",") == after


def test_the_table_of_settings_keeps_its_order_after_the_requested_columns(tmp_path: Path) -> None:
    path = tmp_path / "settings.csv"
    names = [column.name for column in SETTING_COLUMNS if column.name != "model_name"]
    path.write_text(",".join(names) + "\n" + ",".join("1" for _ in names) + "\n")
    reorder_csv_columns(path, ["model_name", "accuracy", "top_k"])
    rest = [name for name in names if name not in ("accuracy", "top_k")]
    assert path.read_text().splitlines()[0].split(",") == ["accuracy", "top_k", *rest]


@pytest.mark.parametrize("content", ["a,b\n1\n", "a,a\n1,2\n", "", 'a\n"x'])
def test_a_file_that_is_no_table_is_not_reordered(content: str, tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text(content)
    with pytest.raises(ResultsError, match="r.csv"):
        reorder_csv_columns(path, ["a"])
    assert path.read_text() == content


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="no.csv cannot be read"):
        read_results_csv(tmp_path / "no.csv")


def test_no_text_of_a_setting_is_run_by_a_spreadsheet(results: list[SettingResult], tmp_path: Path) -> None:
    write_settings_csv([results[0].with_keys(metric="=HYPERLINK()")], tmp_path / "settings.csv")
    assert pd.read_csv(tmp_path / "settings.csv")["metric"].tolist() == ["'=HYPERLINK()"]
