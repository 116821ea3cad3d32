"""A backend of one's own is registered and profiled to the end, and results say what cannot be seen of its model."""

import csv
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import knob_profiler as kp
from experiment_core_utils.b_model_loader import BACKENDS, register_backend
from experiment_core_utils.records.provenance import Model
from knob_profiler.__main__ import main
from tests.experiments.hand_made_sweep import write_signed
from tests.scripted.opaque_model import opaque_source


@pytest.fixture(autouse=True)
def backend() -> Iterator[None]:
    register_backend(opaque_source)
    yield
    BACKENDS.remove(opaque_source)


def flags_for(folder: Path) -> list[str]:
    """Two settings of three samples, of which one is timed."""
    flags = ["profile", "--model_path", "opaque", "--output_dir", str(folder), "--device", "cpu", "--num_threads", "1"]
    flags += ["--num_samples", "3", "--num_latency_samples", "1", "--top_k_list", "1", "2", "--no_reference"]
    flags += ["--num_active_blocks_list", "3", "--num_runs_per_sample", "2", "--num_warmup_runs", "0"]
    return [*flags, "--max_new_tokens", "3"]


def test_it_is_measured_to_the_end_and_what_is_not_seen_is_a_caveat(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags_for(tmp_path)) == 0
    assert "knobs: top_k: the model shows no experts" in capsys.readouterr().out
    results = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*blocks3.json"))]
    assert [each["knobs"]["top_k"] for each in results] == [1, 2]
    for result in results:
        assert len(result["per_sample_results"]) == 3
        assert result["provenance"]["model"]["model_class"] == "OpaqueModel"
        realised = result["realised"]
        assert (realised["experts_per_token"], realised["blocks_run"], realised["cache_layers"]) == (None, None, None)
        seen_not = {"top_k": "the model shows no experts", "num_active_blocks": "the model shows no blocks"}
        assert realised["knobs_not_seen"] == seen_not
        sentence = "knobs: " + "; ".join(f"{name}: {reason}" for name, reason in seen_not.items())
        assert any(sentence in caveat for caveat in result["provenance"]["caveats"])


def test_a_plan_is_made_without_loading_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*flags_for(tmp_path), "--dry_run"]) == 0
    shown = capsys.readouterr().out
    assert "plan: 2 settings" in shown and "no estimate: the model shows no architecture" in shown


def test_stages_one_by_one_are_refused_where_the_profiler_needs_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*flags_for(tmp_path), "--use_profiler"]) == 2
    assert "needs stages that run one by one, which opaque does not have" in capsys.readouterr().err


def test_the_script_of_the_docstring_registers_and_measures_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it stands, where the backend is not registered yet."""
    (code,) = re.findall(r"```python\n(.*?)```", inspect.getdoc(register_backend) or "", re.DOTALL)
    monkeypatch.chdir(tmp_path)
    BACKENDS.remove(opaque_source)
    exec(compile(code, "register_backend", "exec"), {})
    assert (tmp_path / "results" / "opaque" / "report.html").is_file()
    assert BACKENDS.count(opaque_source) == 1


def test_its_results_are_read_compared_and_drawn_though_most_of_its_model_is_not_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`describe()` of the model has a class, a number format and stages; files from before lack the other keys."""
    one, other = tmp_path / "one", tmp_path / "other"
    assert main(flags_for(one)) == main(flags_for(other)) == 0
    for path in one.glob("*blocks3.json"):
        model = json.loads(path.read_text())["provenance"]["model"]
        assert model.keys() >= Model.model_fields.keys()
        assert [model[name] for name in ("total_parameters", "execution", "decoding", "num_experts")] == [None] * 4
    for path in other.glob("*blocks3.json"):
        content = json.loads(path.read_text())
        model = content["provenance"]["model"]
        content["provenance"]["model"] = {name: each for name, each in model.items() if each is not None}
        write_signed(path, content)
    for folder in (one, other):
        for command in ("status", "report"):
            assert main([command, str(folder)]) == 0, capsys.readouterr().err
        results = kp.load(folder)
        frame = results.frame()
        assert frame["precision"].tolist() == ["float32"] * 2 and frame["execution"].isna().all()
        assert len(results.front()) >= 1 and results.plot() is not None
        with next(folder.glob("*_settings.csv")).open() as table:
            assert [(row["precision"], "execution" in row) for row in csv.DictReader(table)] == [("float32", False)] * 2
    page = (one / "report.html").read_text()
    assert "not known" in page and "None" not in page.split("<script")[0]
    compared = kp.compare(one, other)
    assert len(compared.frame()) > 0 and compared.plot() is not None
