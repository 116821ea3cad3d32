"""Every notebook runs from its first cell to its last, leaves no files, and was committed with its outputs."""

import os
import re
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
    assert any(cell.get("outputs") for cell in notebook.cells)
    assert not re.search(r"Traceback|/home/|/root/|/work/", (NOTEBOOKS / name).read_text(encoding="utf-8"))
    for cell in notebook.cells:
        cell.source = cell.source.replace(*flags)
    before = sorted(folder.iterdir())
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(folder)}}).execute()
    assert sorted(folder.iterdir()) == before
    return notebook


def shown(notebook: nbformat.NotebookNode, cell: str) -> str:
    """What a cell shows as text."""
    (found,) = (each for each in notebook.cells if each.id == cell)
    return "".join(
        each.get("text") or each["data"]["text/plain"] for each in found.outputs if each.get("name") != "stderr"
    )


def test_the_steps_leave_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = executed("pipeline_steps.ipynb", tmp_path, monkeypatch)
    imported = "".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    letters = {path.stem for path in (REPOSITORY / "experiment_core_utils").glob("[a-l]_*.py")}
    assert len(letters) == 12 and all(f"experiment_core_utils.{letter} import" in imported for letter in letters)
    assert "'num_prompts': 8" in shown(notebook, "cell-14")
    assert re.search(r"'total_energy_kwh': (?!0\.0[,}])[0-9]", shown(notebook, "cell-18"))
    files = shown(notebook, "cell-26").split()
    assert sum(each.startswith("results/raw_results/") and each.endswith(".json") for each in files) == 7
    assert {"results/notebook_results.json", "results/notebook_results.csv"} <= set(files)


def test_a_sweep_is_analysed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a random model with the shipped one's blocks and experts, which is quicker, and nothing measured again."""
    config = tiny_config(num_hidden_layers=16, num_experts=16, num_experts_per_tok=8)
    model = f"model={str(save_tiny(config, tmp_path / 'model'))!r}"
    flags = ('device="cpu"', f'device="cpu", max_repeats=0, {model}')
    notebook = executed("analyse_a_sweep.ipynb", tmp_path, monkeypatch, flags)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert shown(notebook, "cell-02").endswith(": 9 settings of reference_vqa)")
    assert shown(notebook, "compare").startswith("ComparedResults(")
    # A front and shares of the stages.
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    table = shown(notebook, "cell-13").splitlines()
    # Top-k 16 is the last of four settings and the only one outside of what was measured.
    assert len(table) == 5 and [line.split()[-1] for line in table[1:]] == ["False", "False", "False", "True"]
