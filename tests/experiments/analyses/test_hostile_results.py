"""Results that somebody edited or damaged: every command that reads them says so in one line and ends with 2."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiment_core_utils.meters.energy_files import read_energy_windows, read_windows
from experiment_core_utils.primitives.errors import ConfigurationError, ProfilerError, ResultsError, ResultsRefused
from experiment_core_utils.records.journal import read_end, read_journal
from experiment_core_utils.records.ledger import Ledger
from experiment_core_utils.records.locks import locked
from experiment_core_utils.records.result_files import parsed_json, read_json
from experiment_core_utils.records.run_ids import next_run_id
from experiment_core_utils.records.setting_result import SettingResult, read_setting
from experiment_core_utils.saved_results.tasks_command import main as tasks
from experiments.controller.evaluate_controller import main as evaluate_controller
from experiments.core_exp.e1_stage_latency import main as e1
from experiments.core_exp.e2_knob_pareto import main as e2
from experiments.core_exp.e3_latency_estimator import main as e3
from experiments.core_exp.report import main as report
from experiments.core_exp.write_tables import main as write_tables
from experiments.performance_prediction.prediction.measurements import read_measurements
from experiments.performance_prediction.profile_status import status_lines
from tests.experiments.hand_made_sweep import result, setting
from tests.processes.deadline import ends_within

Main = Callable[[list[str]], int]
NAME = "signs_imgsizetier-low_crops2_topk2_blocks3.json"
COMMANDS: dict[str, Callable[[str], int]] = {
    "report": lambda folder: report([folder]),
    "e1": lambda folder: e1([folder]),
    "e2": lambda folder: e2([folder]),
    "e3": lambda folder: e3([folder]),
    "compare": lambda folder: tasks(["compare", folder]),
    "rescore": lambda folder: tasks(["rescore", folder, "--metric", "em"]),
    "write_tables": lambda folder: write_tables([folder]),
    "evaluate_controller": lambda folder: evaluate_controller([folder]),
}
LONG = "x" * 300


def stored() -> dict[str, Any]:
    """A result as JSON gives it back."""
    content: dict[str, Any] = json.loads(json.dumps(result(setting())))
    return content


def edited(place: str, value: Any) -> dict[str, Any]:
    """The result with one field replaced, or removed where `value` is the class `KeyError`."""
    content: Any = stored()
    found = content
    *above, last = [int(part) if part.isdigit() else part for part in place.split(".")]
    for part in above:
        found = found[part]
    if value is KeyError:
        del found[last]
    else:
        found[last] = value
    return dict(content)


# A field, what stands in it, words of the message.
FIELDS: list[tuple[str, Any, str]] = [
    ("provenance.task.name", "../../../X", "provenance.task.name is '../../../X', and it is part of file names"),
    ("provenance.task.name", "/tmp/X", "provenance.task.name"),
    ("provenance.task.name", "a\0b", "provenance.task.name"),
    ("provenance.task.name", "a/b", "provenance.task.name"),
    ("provenance.task.name", "..", "provenance.task.name"),
    ("provenance.task.name", "", "provenance.task.name"),
    ("provenance.task.name", "a\n", "provenance.task.name"),
    ("provenance.task.name", LONG, "provenance.task.name"),
    ("provenance.task.name", 7, "provenance.task.name is 7"),
    ("provenance.task", None, "provenance.task is None"),
    ("provenance", KeyError, "lacks 'provenance'"),
    ("provenance.caveats", None, "provenance.caveats is None"),
    ("provenance.versions", [], "provenance.versions is []"),
    ("aggregate_stats", KeyError, "lacks 'aggregate_stats'"),
    ("aggregate_stats", None, "aggregate_stats is None"),
    ("aggregate_stats.T_total_mean", "x", "aggregate_stats.T_total_mean is 'x'"),
    ("aggregate_stats.T_total_mean", 0, "aggregate_stats.T_total_mean is 0"),
    ("tier", "huge", "tier is 'huge'"),
    ("top_k", "x", "top_k is 'x', and it should be a valid integer"),
    ("top_k", 0, "top_k is 0"),
    ("num_active_blocks", True, "num_active_blocks is True"),
    ("num_samples", 10**400, "num_samples is 1000"),
    ("num_samples", 7, "num_samples is 7, and per_sample_results contains 2"),
    ("accuracy", "x", "accuracy is 'x'"),
    ("accuracy", 10**400, "accuracy is 1000"),
    ("accuracy_ci95", [0.5], "accuracy_ci95 is [0.5]"),
    ("metric_best", 0, "metric_best is 0"),
    ("hardware_utilisation.peak_flops_per_s", "x", "hardware_utilisation.peak_flops_per_s is 'x'"),
    ("failed_samples", [{}], "lacks 'sample_id' in failed_samples[0]"),
    ("per_sample_results", None, "per_sample_results is None"),
    ("per_sample_results", {}, "per_sample_results is {}"),
    ("per_sample_results.1.sample_id", 0, "sample_id 0 more than once"),
    ("per_sample_results.0.T_total", "x", "per_sample_results[0].T_total is 'x'"),
    ("per_sample_results.0.T_total", 0, "per_sample_results[0].T_total is 0"),
    ("per_sample_results.0.T_total", -1.5, "per_sample_results[0].T_total is -1.5"),
    ("per_sample_results.0.T_total", 5.0, "per_sample_results[0].T_total is 5.0, and its runs' mean is another"),
    ("per_sample_results.0.T_LLM_prefill", None, "per_sample_results[0].T_LLM_prefill is None"),
    ("per_sample_results.0.output_tokens", 1, "per_sample_results[0].output_tokens is 1"),
    ("per_sample_results.0.accuracy", 2.0, "per_sample_results[0].accuracy is 2.0, above metric_best"),
    ("per_sample_results.0.pred", None, "per_sample_results[0].pred is None"),
    ("per_sample_results.0.metadata", [], "per_sample_results[0].metadata is []"),
    ("per_sample_results.0.metadata.answers", KeyError, "lacks 'answers' in per_sample_results[0].metadata"),
    ("per_sample_results.0.metadata.image_id", {}, "per_sample_results[0].metadata.image_id is {}"),
    ("per_sample_results.0.metadata.options", ["a", "b"], "metadata lacks answer_index"),
    ("per_sample_results.0.runs.0.T_inter_token", None, "per_sample_results[0].runs[0].T_inter_token is None"),
    ("per_sample_results.0.prefill_flops", -1, "per_sample_results[0].prefill_flops is -1"),
]
# The bytes of a whole file, words of the message.
FILES: list[tuple[str, bytes, str]] = [
    ("empty", b"", "cannot be read"),
    ("truncated", json.dumps(stored()).encode()[:200], "cannot be read"),
    ("not UTF-8", b'{"task": "\xff"}', "cannot be read"),
    ("deep", b'{"a":' + b"[" * 10000, "nested more than 200 deep"),
    ("nan", json.dumps(edited("per_sample_results.1.T_total", float("nan"))).encode(), "results[1].T_total is nan"),
    ("infinity", json.dumps(edited("accuracy", float("inf"))).encode(), "accuracy is inf, and numbers are finite"),
    ("too large", json.dumps(stored() | {"extra": "?"}).encode().replace(b'"?"', b"1e999"), "extra is inf"),
    ("schema 2", json.dumps(stored() | {"schema_version": 2}).encode(), "is not a result of schema 1 (its schema is 2"),
    ("list", b"[]", "is not a result of schema 1"),
    ("no keys", b'{"schema_version": 1, "fingerprint": "f00d"}', "lacks "),
]  # fmt: skip


def only_file(folder: Path, content: bytes) -> str:
    (folder / NAME).write_bytes(content)
    return str(folder)


@pytest.mark.parametrize(("place", "value", "words"), FIELDS)
def test_a_field_that_cannot_be_is_named_with_its_file(tmp_path: Path, place: str, value: Any, words: str) -> None:
    only_file(tmp_path, json.dumps(edited(place, value)).encode())
    with pytest.raises(ResultsRefused) as caught:
        read_setting(tmp_path / NAME)
    output = str(caught.value)
    assert words in output and output.startswith(str(tmp_path / NAME)) and "\n" not in output and len(output) < 500
    assert caught.value.exit_code == 2


def test_what_a_run_writes_is_in_order() -> None:
    assert SettingResult.from_content(stored(), "a.json").content() == stored()
    half_a_pair = edited("per_sample_results.0.pred", "\ud800")
    assert SettingResult.from_content(half_a_pair, "a.json").content() == half_a_pair
    assert parsed_json(json.dumps(half_a_pair).encode()) == half_a_pair


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_reads_through_the_same_check(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    inside = tmp_path / "deep" / "er" / "run"
    inside.mkdir(parents=True)
    for content, words in (
        (json.dumps(edited("provenance.task.name", "../../ESCAPED")).encode(), "part of file names"),
        (json.dumps(edited("per_sample_results.0.T_total", "x")).encode(), "per_sample_results[0].T_total is 'x'"),
        (json.dumps(edited("aggregate_stats", KeyError)).encode(), "lacks 'aggregate_stats'"),
        (FILES[3][1], FILES[3][2]),
    ):
        code = COMMANDS[command](only_file(inside, content))
        output = capsys.readouterr().err
        assert (code, output.count("\n")) == (2, 1) and words in output and NAME in output
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted(["deep", "er", "run", NAME])


@pytest.mark.parametrize(("content", "words"), [each[1:] for each in FILES], ids=[each[0] for each in FILES])
def test_a_file_that_is_no_result_is_one_line(tmp_path: Path, content: bytes, words: str) -> None:
    only_file(tmp_path, content)
    with pytest.raises(ResultsRefused) as caught:
        read_setting(tmp_path / NAME)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_file_is_not_opened(tmp_path: Path, kind: str) -> None:
    if kind == "folder":
        (tmp_path / NAME).mkdir()
    else:
        os.mkfifo(tmp_path / NAME)
    with pytest.raises(ResultsRefused, match=f"{NAME} cannot be read .(Is a directory|it is not a regular file)."):
        read_setting(tmp_path / NAME)
    assert write_tables([str(tmp_path)]) == 2


def test_a_file_that_is_not_there_is_no_damage(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="cannot be read .No such file") as caught:
        read_json(tmp_path / "none.json")
    assert caught.value.exit_code == 1 and not isinstance(caught.value, ConfigurationError)


# What is read in a results folder beside results: the path, who reads it, words of the message.
PLANTED: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "journal": (".parts/a.rank0.jsonl", read_journal, "cannot be read"),
    "end of a journal": (".parts/a.rank0.jsonl", read_end, "cannot be read"),
    "emissions": ("emissions_0002.csv", read_windows, "cannot be read"),
    "energy": ("energy_0002.json", read_energy_windows, "cannot be read"),
    "table": ("1_gpu/a/a_overall.csv", lambda path: list(status_lines(path.parents[2])), "cannot be read"),
    "measured sizes": ("a_overall.csv", lambda path: read_measurements([path.parent]), "cannot be read"),
    "lock of the counter": (
        "trackers/.experiment_id.txt.lock",
        lambda path: next_run_id(path.with_name("experiment_id.txt"), path.parent),
        "cannot be written|only a regular file is written over",
    ),
    "lock of a file": (
        ".a.json.lock",
        lambda path: locked(path.with_name("a.json")).__enter__(),
        "cannot be|is written",
    ),
}


@pytest.mark.parametrize("kind", ["folder", "pipe", "link to a device"])
@pytest.mark.parametrize(("name", "read", "words"), PLANTED.values(), ids=PLANTED)
def test_what_was_planted_in_the_place_of_a_file_is_not_waited_for(
    tmp_path: Path, name: str, read: Callable[[Path], Any], words: str, kind: str
) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with ends_within(20), pytest.raises(ProfilerError, match=words) as caught:
        read(path)
    assert name.rpartition("/")[2] in str(caught.value) and "\n" not in str(caught.value)


# --- a run that goes on ---------------------------------------------------------------------------------------------


def ledger(folder: Path) -> Ledger:
    """Of a run that has measured NAME."""
    made = Ledger(folder, "f00d")
    made.mark_done("a", NAME)
    return made


@pytest.mark.parametrize(
    "content",
    [{"per_sample_results": []}, {"per_sample_results": None}, {"fingerprint": "beef"}],
)
def test_a_result_of_another_kind_or_without_samples_is_due(tmp_path: Path, content: dict[str, Any]) -> None:
    only_file(tmp_path, json.dumps(stored() | content).encode())
    assert ledger(tmp_path).result("a") is None
    only_file(tmp_path, json.dumps(stored()).encode())
    found = ledger(tmp_path).result("a")
    assert found is not None and found.content() == stored()


def test_an_edited_result_stops_the_run_that_resumes(tmp_path: Path) -> None:
    only_file(tmp_path, json.dumps(edited("aggregate_stats", KeyError)).encode())
    with pytest.raises(ResultsRefused, match="lacks 'aggregate_stats'.*the same command measures it again"):
        ledger(tmp_path).result("a")
    (tmp_path / NAME).unlink()
    (tmp_path / NAME).mkdir()
    with pytest.raises(ResultsRefused, match="is not a result, but a folder"):
        ledger(tmp_path).result("a")


@pytest.mark.parametrize("name", ["../../x.json", "/etc/x.json", "a\0.json", "", 7, "x"])
def test_a_ledger_names_files_of_its_folder_only(tmp_path: Path, name: Any) -> None:
    made = ledger(tmp_path)
    content = json.loads(made.path.read_text())
    content["settings"]["a"]["result_file"] = name
    made.path.write_text(json.dumps(content))
    with pytest.raises(ResultsRefused, match="is not a ledger of this version .*delete it"):
        ledger(tmp_path)


@pytest.mark.parametrize("number", ["1e999", "-2.5E+400", "1e0999", "9" * 400 + ".0", "9" * 250 + ".0e99"])
def test_a_number_above_every_float_is_found_wherever_it_is(number: str) -> None:
    for text in (number, f"[{number}]", f'{{"a": [1, {number}\n], "b": 2}}', f'{{"a": {number}, "b": 2}}'):
        with pytest.raises(ValueError, match="inf, and numbers are finite"):
            parsed_json(text.encode())


def test_what_only_looks_like_a_large_number_is_kept() -> None:
    content = {"digest": "4e842", "answer": "9" * 400, "small": 1e-200, "large": 1.5e300, "1e999": 12**99}
    assert parsed_json(json.dumps(content).encode()) == content


@pytest.mark.parametrize("start", ['{"a": NaN, "b": ', '{"a": "\\ud800", "b": '])
@pytest.mark.parametrize("levels", [300, 100_000])
def test_deep_nesting_after_what_the_fast_reader_refuses_is_one_line(start: str, levels: int) -> None:
    with pytest.raises(ValueError, match="more than 200 deep|a is nan"):
        parsed_json(f"{start}{'[' * levels}{']' * levels}}}".encode())


def test_a_metric_whose_name_cannot_be_written_is_named(tmp_path: Path) -> None:
    only_file(tmp_path, json.dumps(edited("metric", "\ud800")).encode())
    with pytest.raises(ResultsRefused, match=r"is broken: metric is '\\ud800', and no metric has that name"):
        ledger(tmp_path).result("a")
