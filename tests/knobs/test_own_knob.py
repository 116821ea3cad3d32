"""A knob that one file registers, through every command that plans, measures or reads settings."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

import knob_profiler as kp
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.knobs.registry import all_knobs, load_knob_module, unregister_knob
from experiment_core_utils.pipeline import run_profiling
from experiment_core_utils.planning.dry_run import describe_plan
from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError
from experiment_core_utils.primitives.files import REPOSITORY
from experiment_core_utils.records.run_report import RunReport
from experiment_core_utils.records.setting_result import setting_key
from experiment_core_utils.saved_results import tasks_command
from experiment_core_utils.saved_results.terminal import caveat_lines, closing_table
from experiments.controller import lookup
from experiments.core_exp import e1_stage_latency, e2_knob_pareto, report
from tests.models.tiny_checkpoints import write_checkpoint

MODULE = REPOSITORY / "knob_profiler" / "head_fraction.py"
PUBLISHED = {knob.name for knob in all_knobs()}
OWN = ("--knob_module", str(MODULE))
MORE = ("--num_samples", "4", "--num_runs_per_sample", "1", "--num_warmup_runs", "0", "--max_repeats", "0",
        "--num_threads", "1", "--max_new_tokens", "4")  # fmt: skip
KEYS = [f"own_blocks{blocks}{head}" for blocks in (2, 3) for head in ("", "_head0.25")]


@pytest.fixture(autouse=True)
def nothing_stays_registered() -> Iterator[None]:
    yield
    for name in {knob.name for knob in all_knobs()} - PUBLISHED:
        unregister_knob(name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama", tmp_path_factory.mktemp("llama"))


def flags_for(folder: Path, output_dir: Path, *more: str, module: Path = MODULE) -> list[str]:
    grid = ("--num_active_blocks_list", "2", "3", "--head_fraction_list", "0.25", "1")
    own = ("--knob_module", str(module))
    return ["--model_path", str(folder), "--output_dir", str(output_dir), *own, *grid, *MORE, *more]


@pytest.fixture(scope="module")
def run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> RunReport:
    report = run_profiling(parse_config(flags_for(folder, tmp_path_factory.mktemp("own") / "results")))
    unregister_knob("head_fraction")
    return report


def test_its_flags_are_on_the_command_line_and_its_values_in_the_plan(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="unrecognized arguments: --head_fraction_list"):
        parse_config(["--head_fraction_list", "0.5"])
    with pytest.raises(ConfigurationError, match="^--head_fraction_list 2 is not possible; give at most 1$"):
        parse_config([*OWN, "--head_fraction_list", "2"])
    plan = describe_plan(parse_config(flags_for(folder, tmp_path))).text
    assert "own_blocks2_head0.25" in plan


def test_the_command_of_the_page_runs_wherever_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (REPOSITORY / "docs" / "profiling.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^    (knobprof profile --knob_module .*)$", page, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    plan = describe_plan(parse_config([*shlex.split(command)[2:], "--num_samples", "2", "--output_dir", "results"]))
    assert plan.text.count("_head0.5 ") >= 12


def test_it_acts_and_is_in_json_and_tables(run: RunReport) -> None:
    assert not run.failed
    content = {
        path.stem.partition("_imgsize")[2]: json.loads(path.read_text())
        for path in run.output_dir.glob("*_blocks*.json")
    }
    assert sorted(content) == sorted(KEYS)
    knobs = {key: result["knobs"] for key, result in content.items()}
    assert knobs["own_blocks2_head0.25"] == {"vision": "own", "num_active_blocks": 2, "head_fraction": 0.25}
    assert knobs["own_blocks2"] == {"vision": "own", "num_active_blocks": 2}
    answers = {key: [sample["pred"] for sample in result["per_sample_results"]] for key, result in content.items()}
    assert answers["own_blocks3"] != answers["own_blocks3_head0.25"]
    settings, samples = (pd.read_csv(next(run.output_dir.glob(f"*_{name}.csv"))) for name in ("settings", "samples"))
    assert dict(zip(settings["setting"], settings["head_fraction"], strict=True)) == {
        "own_blocks2": 1.0, "own_blocks2_head0.25": 0.25, "own_blocks3": 1.0, "own_blocks3_head0.25": 0.25
    }  # fmt: skip
    assert (
        samples.groupby("setting")["head_fraction"].agg(["min", "max"]).loc["own_blocks3_head0.25"].tolist()
        == [0.25] * 2
    )


def test_that_it_cannot_be_seen_is_a_caveat(run: RunReport) -> None:
    load_knob_module(MODULE)
    found = {setting_key(each): each.realised["knobs_not_seen"] if "knobs_not_seen" in (each.realised or {}) else None
             for each in run.results}  # fmt: skip
    reason = {"head_fraction": "nothing that is counted shows head"}
    assert found == {key: reason if "head" in key else None for key in KEYS}
    assert any(
        "nothing that is counted shows head" in line and "2 of 4 settings" in line for line in caveat_lines(run.results)
    )
    assert "head" in closing_table(run.results).splitlines()[0].split()


def test_results_are_refused_without_its_file(run: RunReport) -> None:
    with pytest.raises(ResultsError, match=r"_head0.25.json: there is no knob head_fraction here; .*--knob_module"):
        kp.load(run.output_dir)


def test_commands_read_it(run: RunReport, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(run.output_dir)
    assert e2_knob_pareto.main([folder, *OWN, "--output_dir", str(tmp_path / "e2"), "--verbose"]) == 0
    effects = pd.read_csv(tmp_path / "e2" / "e2_effects.csv")
    assert "head_fraction" in set(effects["term"])
    assert e1_stage_latency.main([folder, *OWN, "--output_dir", str(tmp_path / "e1")]) == 0
    assert report.main([folder, *OWN, "--output", str(tmp_path / "page.html")]) == 0
    assert "head0.25" in (tmp_path / "page.html").read_text(encoding="utf-8")
    capsys.readouterr()
    assert tasks_command.main(["compare", folder, *OWN, "--baseline", "own_blocks2_head0.25"]) == 0
    assert "settings against own_blocks2_head0.25" in capsys.readouterr().out
    table = tmp_path / "lookup.json"
    assert lookup.main(["build", folder, *OWN, "--output", str(table)]) == 0
    assert lookup.main(["predict", str(table), *OWN, "--budget_ms", "1000000"]) == 0
    assert "own_blocks" in capsys.readouterr().out


def test_python_measures_and_loads_it(folder: Path, tmp_path: Path) -> None:
    results = kp.profile(
        folder, active_blocks=[2], samples=2, output_dir=tmp_path, knob_module=MODULE, head_fraction_list=[0.5],
        num_runs_per_sample=1, num_warmup_runs=0, max_repeats=0, num_threads=1,
        max_new_tokens=2, no_reference=True,
    )  # fmt: skip
    assert list(results.frame()["head_fraction"]) == [0.5]
    assert list(kp.load(tmp_path).samples()["head_fraction"]) == [0.5, 0.5]


def test_its_file_and_flags_are_part_of_what_results_are_recognised_by(folder: Path, tmp_path: Path) -> None:
    module = tmp_path / "mine.py"
    module.write_text(MODULE.read_text())
    flags = ["--model_path", str(folder), "--output_dir", str(tmp_path / "results"), "--num_active_blocks_list", "2",
             "--no_reference", "--knob_module", str(module), *MORE]  # fmt: skip
    (first,) = run_profiling(parse_config(flags)).results
    (again,) = run_profiling(parse_config([*flags, "--head_fraction_list", "1"])).results
    (last,) = run_profiling(parse_config([*flags, "--head_reads_last"])).results
    module.write_text(MODULE.read_text() + "# another\n")
    (other,) = run_profiling(parse_config(flags)).results
    assert first.fingerprint == again.fingerprint
    assert len({first.fingerprint, last.fingerprint, other.fingerprint}) == 3


def test_a_file_that_cannot_be_run_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="^--knob_module .*nowhere.py: No such file"):
        parse_config(["--knob_module", str(tmp_path / "nowhere.py")])
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ConfigurationError, match="broken.py cannot be run .ZeroDivisionError: .*; correct it$"):
        parse_config(["--knob_module", str(tmp_path / "broken.py")])


def broken_in(method: str, folder: Path) -> Path:
    """The file of the knob, in which a method divides by 0."""
    path = folder / "broken.py"
    path.write_text(re.sub(rf"(def {method}\(.*\n)", r"\1        1 / 0\n", MODULE.read_text()))
    return path


def test_an_error_in_what_it_can_be_set_to_refuses_the_plan(folder: Path, tmp_path: Path) -> None:
    path = broken_in("requested", tmp_path)
    flags = flags_for(folder, tmp_path / "results", module=path)
    words = "^knob head_fraction of .*broken.py, requested: ZeroDivisionError: division by zero; correct the file$"
    with pytest.raises(ConfigurationError, match=words):
        describe_plan(parse_config(flags))


def test_an_error_where_it_acts_fails_the_setting_alone(folder: Path, tmp_path: Path) -> None:
    path = broken_in("applied", tmp_path)
    report = run_profiling(parse_config(flags_for(folder, tmp_path / "results", module=path)))
    assert {setting_key(each) for each in report.results} == {"own_blocks2", "own_blocks3"}
    words = f"knob head_fraction of {path}, applied: ZeroDivisionError: division by zero; correct the file"
    assert {key: each.reason for key, each in report.failed.items()} == {
        f"own_blocks{blocks}_head0.25": words for blocks in (2, 3)
    }
