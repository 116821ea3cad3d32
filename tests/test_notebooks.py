"""Every notebook runs from its first cell to its last, and was committed without outputs."""

import json
import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from experiment_core_utils.primitives.files import REPOSITORY
from tests.conftest import save_tiny, tiny_config

NOTEBOOKS = REPOSITORY / "notebooks"


def executed(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, str] = ("", "")
) -> nbformat.NotebookNode:
    """`flags`: what stands in place of what in its cells."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    for cell in notebook.cells:
        cell.source = cell.source.replace(*flags)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook


def test_the_steps_leave_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = executed("pipeline_steps.ipynb", tmp_path, monkeypatch)
    imported = "".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    letters = {path.stem for path in (REPOSITORY / "experiment_core_utils").glob("[a-l]_*.py")}
    assert len(letters) == 12 and all(f"experiment_core_utils.{letter} import" in imported for letter in letters)
    (experiment,) = json.loads((tmp_path / "results" / "notebook_results.json").read_text()).values()
    assert experiment["inference_metrics"]["num_prompts"] == 8
    assert experiment["global_energy_results"]["total_energy_kwh"] > 0
    assert len(list((tmp_path / "results" / "raw_results").rglob("*.json"))) == 7


def test_a_sweep_is_analysed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a random model with the shipped one's blocks and experts, which is quicker."""
    config = tiny_config(num_hidden_layers=16, num_experts=16, num_experts_per_tok=8)
    model = ("--device cpu", f"--device cpu --model_path {save_tiny(config, tmp_path / 'model')}")
    notebook = executed("analyse_a_sweep.ipynb", tmp_path, monkeypatch, model)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert len(list((tmp_path / "results" / "analyse_a_sweep").glob("*blocks*.json"))) == 8
    # Shares of the stages and a front.
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    table = outputs[-1]["data"]["text/plain"].splitlines()
    # Top-k 16 is the last of four settings and the only one outside of what was measured.
    assert len(table) == 5 and [line.split()[-1] for line in table[1:]] == ["False", "False", "False", "True"]
