"""Files written whole or not at all, and every key with its value."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch

from experiment_core_utils.j_results_saving import (
    add_to_results,
    flatten_results_to_csv,
    load_aggregated_results,
    save_aggregated_results_json,
    save_raw_results_json,
)
from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError

MAIN = SimpleNamespace(process_index=0, local_process_index=0)
OTHER = SimpleNamespace(process_index=3, local_process_index=1)


@pytest.mark.parametrize(
    ("result_type", "name"),
    [
        ("experiment_setup", "4459_1_experiment_setup.json"),
        ("experiment_variables", "4459_2_experiment_variables.json"),
        ("model_architecture", "4459_3_model_architecture.json"),
        ("inference_metrics", "4459_4_inference_metrics.json"),
        ("compute_metrics", "4459_5_compute_metrics.json"),
        ("local_energy_results", "4459_6_local_energy_results_process_0.json"),
        ("local_energy_results_process_12", "4459_6_local_energy_results_process_12.json"),
        ("global_energy_results", "4459_7_global_energy_results.json"),
        ("text_output", "4459_8_text_output.json"),
        ("token_output", "4459_8_token_output.json"),
    ],
)
def test_raw_results_have_their_published_names(
    result_type: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = save_raw_results_json({"tokens": torch.tensor([[1, 2]]), "file": Path("a")}, "4459", result_type, MAIN)
    assert path == Path("results/raw_results/4459") / name
    assert json.loads(path.read_text()) == {"tokens": [[1, 2]], "file": "a"}


def test_a_process_that_is_not_the_main_one_writes_its_own_energy_alone(tmp_path: Path) -> None:
    own = save_raw_results_json({"a": 1}, "7", "local_energy_results", OTHER, results_dir=tmp_path)
    whole = save_raw_results_json({"a": 1}, "7", "inference_metrics", OTHER, results_dir=tmp_path)
    assert own.name == "7_6_local_energy_results_process_3.json" and own.exists()
    assert whole.name == "7_4_inference_metrics.json" and not whole.exists()


@pytest.mark.parametrize(
    ("content", "experiment_id", "result_type", "error", "output"),
    [
        ({}, "1", "energy", ConfigurationError, "'energy'; known are experiment_setup, .*_process_RANK.*token_output"),
        ({}, "1", "local_energy_results_process_x", ConfigurationError, "there is no result type"),
        ({}, "1", "text_output_process_1", ConfigurationError, "there is no result type"),
        ({}, "../1", "text_output", ConfigurationError, "experiment id '../1' is part of file names"),
        ({}, "", "text_output", ConfigurationError, "experiment id '' is part of file names"),
        ({"m": [float("nan")]}, "1", "text_output", ResultsError, r"text_output\.m\.0 is nan"),
    ],
)
def test_raw_results_that_cannot_be_saved_are_one_line(
    content: Any, experiment_id: str, result_type: str, error: type[Exception], output: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=output) as caught:
        save_raw_results_json(content, experiment_id, result_type, MAIN, results_dir=tmp_path)
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


def test_experiments_are_merged_by_name(tmp_path: Path) -> None:
    assert load_aggregated_results("text_generation", results_dir=tmp_path) == {}
    save_aggregated_results_json({"e1": {"a": 1}, "e2": {"a": 2}}, "text_generation", results_dir=tmp_path)
    path = save_aggregated_results_json({"e2": {"b": (3,)}}, "text_generation", results_dir=tmp_path)
    assert path == tmp_path / "text_generation_results.json"
    assert load_aggregated_results("text_generation", results_dir=tmp_path) == {"e1": {"a": 1}, "e2": {"b": [3]}}


@pytest.mark.parametrize("torn", ['{"e1": {', "[1]", '{"e1": 5}', "\xff"])
def test_a_torn_file_is_left_as_it_is(torn: str, tmp_path: Path) -> None:
    path = tmp_path / "t_results.json"
    path.write_bytes(torn.encode("latin-1"))
    with pytest.raises(ResultsError, match="t_results.json .*(move|repair)") as caught:
        save_aggregated_results_json({"e2": {}}, "t", results_dir=tmp_path)
    assert "\n" not in str(caught.value) and path.read_bytes() == torn.encode("latin-1")


WRITER = """
import sys
from pathlib import Path
from experiment_core_utils.j_results_saving import add_to_results
for number in range(20):
    _, table = add_to_results({f"p{sys.argv[1]}_{number}": {"n": number}}, "t", results_dir=Path(sys.argv[2]))
    rows = table.read_text()
    assert all(f"p{sys.argv[1]}_{each}," in rows for each in range(number + 1)), "a row is gone"
"""


def test_several_programs_at_once_lose_nothing(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(each), str(tmp_path)]) for each in range(3)]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0]
    expected = {f"p{writer}_{number}": {"n": number} for writer in range(3) for number in range(20)}
    assert load_aggregated_results("t", results_dir=tmp_path) == expected
    table = pd.read_csv(tmp_path / "t_results.csv")
    assert dict(zip(table["experiment"], table["n"], strict=True)) == {key: each["n"] for key, each in expected.items()}


def test_the_table_of_experiments_by_hand(tmp_path: Path) -> None:
    results = {
        "experiment_1": {
            "experiment_setup": {"experiment_id": "0001", "hardware_info": {"gpu_names": ["H200", "H200"]}},
            "global_energy_results": {"total_energy_kwh": None},
            "note": "=cmd()",
        },
        "experiment_2": {
            "experiment_setup": {"experiment_id": "0002", "hardware_info": {"gpu_names": []}},
            "global_energy_results": {"total_energy_kwh": 0.25},
            "note": "fine, so far",
        },
    }
    path = flatten_results_to_csv(results, "text_generation", results_dir=tmp_path)
    assert path == tmp_path / "text_generation_results.csv"
    assert path.read_text() == (
        "experiment,experiment_setup.experiment_id,global_energy_results.total_energy_kwh,"
        "experiment_setup.hardware_info.gpu_names,experiment_setup.hardware_info.gpu_names.0,"
        "experiment_setup.hardware_info.gpu_names.1,note\n"
        "experiment_1,0001,,,H200,H200,'=cmd()\n"
        'experiment_2,0002,0.25,[],,,"fine, so far"\n'
    )


def test_the_json_file_is_saved_before_the_table_fails(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="the column a.b would contain both"):
        add_to_results({"e": {"a.b": 1, "a": {"b": 2}}}, "t", results_dir=tmp_path)
    assert load_aggregated_results("t", results_dir=tmp_path) == {"e": {"a.b": 1, "a": {"b": 2}}}
    assert not (tmp_path / "t_results.csv").exists()


@pytest.mark.parametrize("save", [save_aggregated_results_json, flatten_results_to_csv, add_to_results])
def test_a_task_type_leads_to_no_other_folder(save: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="the task type '../x' is part of file names"):
        save({"e": {"a": 1}}, "../x", results_dir=tmp_path)
