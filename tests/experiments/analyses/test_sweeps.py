"""What a run's folder is read as, which folders are refused and in which words."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from experiment_core_utils.l_results_csv_cleaning import read_results_csv
from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.records.columns import LAST_COLUMNS
from experiments.analyses.sweeps import (
    joint_settings_frame,
    load_sweep,
    load_sweeps,
    samples_frame,
    settings_frame,
)
from experiments.core_exp.write_tables import write_tables
from tests.experiments.hand_made_sweep import PROVENANCE, reference, result, setting, write
from tests.hand_made_records import measured_sample, staged_run


def test_settings_are_in_order_of_the_knobs_and_samples_with_them(tmp_path: Path) -> None:
    knobs = [("high", 2), ("low", 4), ("low", 2), ("medium", 2)]
    sweep = load_sweep(write(tmp_path, *(result(setting(tier, top_k)) for tier, top_k in knobs)))
    keys = [
        "tier-low_topk2_blocks3", "tier-low_topk4_blocks3", "tier-medium_topk2_blocks3", "tier-high_topk2_blocks3",
    ]  # fmt: skip
    assert [each.key for each in sweep.settings] == keys
    assert [row["setting"] for row in sweep.samples] == [key for key in keys for _ in range(2)]


def test_the_provenance_is_what_all_settings_share(tmp_path: Path) -> None:
    found = load_sweep(write(tmp_path, result(setting()), result(setting("high")))).provenance
    assert (found.device, found.is_gpu, found.model, found.dtype) == ("Scripted GPU", True, "folder/tiny", "bfloat16")
    assert (found.tasks, found.fingerprints) == (("signs",), {"signs": "f00d"})
    assert found.caveats == ("a comparison is based on 2 samples",)
    assert (found.peak_flops_per_s, found.peak_bytes_per_s, found.peak_reason) == (1e12, 1e11, None)


def test_frames_have_units_and_absent_is_nan(tmp_path: Path) -> None:
    single = measured_sample(1, staged_run(inter_token_s=()))
    sweep = load_sweep(write(tmp_path, result(setting(), [measured_sample(0), single])))
    samples, settings = samples_frame(sweep), settings_frame(sweep)
    assert list(samples["T_vision_total_ms"]) == [500.0, 500.0]
    assert samples["T_LLM_decode_ms"][0] == 250.0 and pd.isna(samples["T_LLM_decode_ms"][1])
    assert (samples["T_LLM_decode_ms"].dtype, samples["top_k"].dtype) == ("float64", "int64")
    assert list(settings.columns[:2]) == ["task", "setting"]
    assert tuple(settings.columns[-7:]) == tuple(column.name for column in LAST_COLUMNS)
    # 0.5 + 0.25 + 0.25 s and 0.5 + 0.25 s: 1000 and 750 ms.
    assert settings["T_total_mean_ms"][0] == 875.0
    assert pd.isna(settings["energy_vision_j"][0])


def test_frame_csv_and_parquet_are_one_table(tmp_path: Path) -> None:
    """Names, units and values alike, and absent is NaN in the one and nothing in the other, never 0 or no."""
    single = [measured_sample(1, staged_run(inter_token_s=()))]
    write_tables(write(tmp_path, result(setting("high"), single), result(setting()), reference()), "parquet")
    frame = settings_frame(load_sweep(tmp_path))
    cells = read_results_csv(tmp_path / "signs_settings.csv")
    stored = pd.read_parquet(tmp_path / "signs_settings.parquet")
    names = list(stored.columns)
    assert list(cells[0]) == names == [name for name in frame.columns if name in names]
    # There is no empty answer.
    left_out = frame.drop(columns=["share_empty", "share_one_token", *names])
    assert "peak_memory_bytes" in left_out and left_out.isna().all(axis=None)
    pd.testing.assert_frame_equal(stored, frame[names])
    for row, written in zip(frame[names].to_dict("records"), cells, strict=True):
        assert [name for name in names if pd.isna(row[name])] == [name for name in names if written[name] is None]
        for name, cell in written.items():
            assert cell is None or cell == (row[name] if isinstance(cell, str) else pytest.approx(row[name], rel=1e-5))
    of = {row["setting"]: row for row in cells}
    assert of["tier-high_topk2_blocks3"]["T_LLM_decode_mean_ms"] is None
    assert of["tier-low_topk2_blocks3"]["is_reference"] is False and of["own_topk4_blocks4"]["is_reference"] is True
    assert {key: row["vision"] for key, row in of.items()} == {
        "tier-low_topk2_blocks3": "low", "tier-high_topk2_blocks3": "high", "own_topk4_blocks4": "own",
    }  # fmt: skip
    # 750 ms of one token and 1000 ms of the reference on the sample that both have.
    assert of["tier-high_topk2_blocks3"]["T_total_share_of_reference"] == 0.75


def test_each_dataset_may_have_a_sub_folder_and_rescored_ones_are_left_out(tmp_path: Path) -> None:
    other = PROVENANCE["task"] | {"name": "counts"}
    write(tmp_path / "signs", result(setting()))
    write(tmp_path / "counts", result(setting(), task=other, fingerprint="beef"))
    write(tmp_path / "rescored_other", result(setting()))
    sweep = load_sweep(tmp_path)
    assert sweep.provenance.tasks == ("counts", "signs")
    assert sweep.provenance.fingerprints == {"counts": "beef", "signs": "f00d"}
    assert [each.task for each in sweep.settings] == ["counts", "signs"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": PROVENANCE["model"] | {"name": "other"}}, "their model is folder/tiny and other"),
        ({"hardware": PROVENANCE["hardware"] | {"gpu_name": None}}, "their GPU is None and Scripted GPU"),
        ({"fingerprint": "beef"}, "have different fingerprints"),
    ],
)
def test_results_of_two_sweeps_are_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    changed, plain = result(setting("high"), **change), result(setting("low"))
    if "gpu_name" in words or "GPU" in words:
        changed, plain = result(setting("low"), **change), result(setting("high"))
    with pytest.raises(ResultsError, match=words) as caught:
        load_sweep(write(tmp_path, changed, plain))
    assert "tier-low" in str(caught.value) and "tier-high" in str(caught.value) and "\n" not in str(caught.value)


def test_a_result_of_a_newer_protocol_is_not_called_broken(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="newer version: its protocol_version is 3, and this one reads up to 2"):
        load_sweep(write(tmp_path / "later", result(setting("high")) | {"protocol_version": 3}))


def test_the_same_setting_twice_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "first", result(setting()))
    write(tmp_path / "second", result(setting()))
    with pytest.raises(ResultsError, match="tier-low_topk2_blocks3 of signs is in .*first.* and in .*second"):
        load_sweep(tmp_path)


@pytest.mark.parametrize(
    "missing", ["provenance", "tier", "fingerprint", "per_sample_results", "max_crops", "num_total_blocks"]
)
def test_a_broken_file_is_named(tmp_path: Path, missing: str) -> None:
    write(tmp_path, result(setting("high")))
    broken = {key: value for key, value in result(setting("low")).items() if key != missing}
    path = tmp_path / "signs_imgsizetier-low_crops2_topk2_blocks3.json"
    path.write_text(json.dumps(broken))
    with pytest.raises(ResultsError, match=f"'{missing}'") as caught:
        settings_frame(load_sweep(tmp_path))
    assert path.name in str(caught.value)


def test_other_contents_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="nowhere is not a folder"):
        load_sweep(tmp_path / "nowhere")
    with pytest.raises(ResultsError, match="contains no results"):
        load_sweep(tmp_path)
    path = tmp_path / "signs_imgsizetier-low_crops2_topk2_blocks3.json"
    path.write_text("{")
    with pytest.raises(ResultsError, match=f"{path.name} cannot be read"):
        load_sweep(tmp_path)
    path.write_text(json.dumps(result(setting()) | {"schema_version": 2}))
    with pytest.raises(ResultsError, match=f"{path.name} is not a result of schema 1"):
        load_sweep(tmp_path)


def provenance_with(**model: Any) -> dict[str, Any]:
    return {"model": PROVENANCE["model"] | model}


def test_sweeps_side_by_side_are_named_by_what_differs(tmp_path: Path) -> None:
    """Folders of one sweep stay one; what sets the others apart is their label."""
    first = write(tmp_path / "a", result(setting("low")))
    more = write(tmp_path / "b", result(setting("high")))
    exact = write(tmp_path / "c", result(setting("low"), fingerprint="beef", **provenance_with(dtype="float32")))
    (only,) = load_sweeps(first, more, first)
    assert (only.label, len(only.settings), only.settings[0].name) == ("", 2, "tier-low_topk2_blocks3")
    both = load_sweeps(first, exact, more)
    assert [(each.label, len(each.settings)) for each in both] == [("bfloat16", 2), ("float32", 1)]
    assert both[1].settings[0].name == "float32 tier-low_topk2_blocks3"
    frame = joint_settings_frame(both)
    assert frame["sweep"].tolist() == ["bfloat16", "bfloat16", "float32"]
    assert frame["setting"].iloc[2] == "tier-low_topk2_blocks3"
    assert "sweep" not in joint_settings_frame([only])


def test_sweeps_that_nothing_sets_apart_have_their_folders_names(tmp_path: Path) -> None:
    folders = [write(tmp_path / name, result(setting("low"))) for name in ("before", "after")]
    assert [each.label for each in load_sweeps(*folders)] == ["before", "after"]
    other = provenance_with(name="elsewhere/other", execution="graph")
    folders.append(write(tmp_path / "other", result(setting("low"), **other)))
    assert [each.label for each in load_sweeps(*folders)] == [
        "tiny, execution eager, before", "tiny, execution eager, after", "other, execution graph, other",
    ]  # fmt: skip
    same = write(tmp_path / "x" / "before", result(setting("low")))
    assert [each.label for each in load_sweeps(folders[0], same)] == [str(folders[0]), str(same)]


def test_a_label_names_the_execution_beside_the_number_format(tmp_path: Path) -> None:
    """A bare "cpu" could be a device as well."""
    one = write(tmp_path / "one", result(setting("low"), **provenance_with(dtype="float32", execution="cpu")))
    other = write(tmp_path / "other", result(setting("low")))
    assert [each.label for each in load_sweeps(one, other)] == ["float32, execution cpu", "bfloat16, execution eager"]


def served(**variables: Any) -> dict[str, Any]:
    """The provenance of a model that a server runs, which shows neither number format nor execution."""
    shown = provenance_with(dtype=None, execution=None)
    return shown | {"experimental_variables": PROVENANCE["experimental_variables"] | variables}


def test_a_served_model_beside_one_in_process_has_a_label_without_what_it_does_not_show(tmp_path: Path) -> None:
    endpoint = [{"variant": "m", "url": "http://localhost:8000/v1", "model": "m"}]
    one = write(tmp_path / "one", result(setting("low"), **served(endpoint=endpoint)))
    other = write(tmp_path / "other", result(setting("low")))
    both = load_sweeps(one, other)
    assert [each.label for each in both] == ["execution server", "bfloat16, execution eager"]
    assert [each.provenance.how for each in both] == ["server", "bfloat16, eager"]
    unknown = load_sweep(write(tmp_path / "unknown", result(setting("low"), **served())))
    assert unknown.provenance.how == "not known"
    assert load_sweeps(other, tmp_path / "unknown")[1].label == "execution not known"


def test_a_folder_that_mixes_sweeps_is_still_refused(tmp_path: Path) -> None:
    mixed = write(tmp_path / "mixed", result(setting("low")), result(setting("high"), **provenance_with(name="other")))
    with pytest.raises(ResultsError, match="are of two sweeps"):
        load_sweeps(write(tmp_path / "one", result(setting("low"))), mixed)


GRAPHS = {"vision": "modules", "prefill": "cuda graph", "decode": "cuda graph"}
PREFILL_BY_MODULES = GRAPHS | {"prefill": "modules"}


@pytest.mark.parametrize(
    ("odd", "way"),
    [
        # As the files of a run of before say it, which let a setting fall back alone.
        ({"execution": "eager", "execution_reason": "it differs by 24.9 %"}, "eager"),
        ({"execution": "graph", "execution_reason": "prefill: it asks"}, "graph but for the prefill"),
        ({"execution": "graph", "execution_stages": PREFILL_BY_MODULES}, "decode cuda graph, prefill modules, .*"),
    ],
)
def test_settings_of_one_run_that_were_executed_in_different_ways_are_refused(
    tmp_path: Path, odd: dict[str, Any], way: str
) -> None:
    stages = {"execution_stages": GRAPHS} if "execution_stages" in odd else {}
    contents = [result(setting(tier, top_k)) for tier, top_k in (("high", 2), ("low", 2), ("low", 4))]
    for content in contents:
        content["realised"] |= {"execution": "graph", "execution_reason": None, **stages}
    assert len(load_sweep(write(tmp_path / "same", *contents)).settings) == 3
    contents[2]["realised"] |= odd
    with pytest.raises(ResultsError, match=f"^1 of 3 settings ran as {way} .tier-low_topk4_blocks3.*, the others as"):
        load_sweep(write(tmp_path / "mixed", *contents))
    # Two folders are two sweeps then, side by side.
    first, second = write(tmp_path / "first", *contents[:2]), write(tmp_path / "second", contents[2])
    assert [len(each.settings) for each in load_sweeps(first, second)] == [2, 1]
