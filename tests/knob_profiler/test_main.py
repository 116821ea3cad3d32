"""One command for every job: the same parsers under its own name, imported only when they run."""

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from experiment_core_utils import __version__
from experiment_core_utils.config.profiling import build_parser
from experiment_core_utils.primitives.files import REPOSITORY
from knob_profiler.__main__ import COMMANDS, Command, Group, main


def all_commands(group: Group) -> Iterator[Command]:
    for each in group.commands.values():
        yield from [each] if isinstance(each, Command) else all_commands(each)


def test_every_subcommand_names_a_module_that_is_there() -> None:
    assert [each.module for each in all_commands(COMMANDS) if find_spec(each.module) is None] == []


def unwrapped(text: str) -> str:
    return " ".join(text.split())


def test_the_help_of_profile_is_the_drivers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["profile", "--help"])
    assert ended.value.code == 0
    shown, driver = unwrapped(capsys.readouterr().out), unwrapped(build_parser().format_help())
    assert shown == driver.replace("usage: acc_lat_profiling.py", "usage: knobprof profile")


@pytest.mark.parametrize("words", [[], ["analyse"], ["controller"]])
def test_without_a_command_the_help_is_printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    shown = capsys.readouterr()
    assert shown.out.startswith(f"usage: {' '.join(['knobprof', *words])} [-h]") and shown.err == ""
    group = COMMANDS.commands[words[0]] if words else COMMANDS
    assert isinstance(group, Group)
    assert {line.split()[0] for line in shown.out.splitlines() if line.startswith("    ") and line[4] != " "} >= set(
        group.commands
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model_path", "MODEL"], r"; write the command before --model_path; see --help"),
        (["prfile"], r"invalid choice: 'prfile' .* \(did you mean profile\?\); see --help"),
        (["analyse", "stage"], r"\(did you mean stages\?\)"),
        (["conclusion", "results/first"], r"knobprof analyse knobs RESULTS_DIR prints the conclusion of a run"),
        (["profile", "--num_sampels", "4"], r"arguments: --num_sampels 4 \(did you mean --num_samples\?\)"),
        (["profile", "--tier_list", "lwo"], r"'lwo' \(did you mean low\?\); choose among own, low, medium, high"),
        (["tasks", "compare", "RESULTS", "--basline", "x"], r"\(did you mean --baseline\?\); see --help"),
        (["text", "--zzz"], r"unrecognized arguments: --zzz; see --help"),
    ],
)  # fmt: skip
def test_a_wrong_word_is_one_line_with_the_nearest_right_one(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and error.count("\n") == 1


def test_a_folder_alone_asks_for_its_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith(f"error: {tmp_path} contains no plan of a run (.parts/plan.json); ")


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        (["--help"], "knobprof"),
        (["tasks", "--help"], "knobprof tasks"),
        (["tasks", "rescore", "--help"], "knobprof tasks rescore"),
        (["tasks", "compare", "--help"], "knobprof tasks compare"),
        (["compare", "--help"], "knobprof compare"),
        (["convolutions", "status", "--help"], "knobprof convolutions status"),
        (["blocks", "--help"], "knobprof blocks"),
    ],
)
def test_help_names_the_command_that_was_typed(
    words: list[str], usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert capsys.readouterr().out.startswith(f"usage: {usage} [-h]")


def test_the_version_has_a_short_flag_too(capsys: pytest.CaptureFixture[str]) -> None:
    shown = set()
    for flag in ("-V", "--version"):
        with pytest.raises(SystemExit) as ended:
            main([flag])
        assert ended.value.code == 0
        shown.add(capsys.readouterr().out)
    assert shown == {f"knobprof {__version__}\n"}


def test_help_and_version_import_no_torch() -> None:
    for words in (["--help"], ["--version"], ["profile", "--help"]):
        code = (
            "import sys\nfrom knob_profiler.__main__ import main\n"
            f"try:\n    main({words})\nfinally:\n    assert not {{'torch', 'pandas'}} & set(sys.modules)\n"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("argv", [
    ["analyse", "stages", ""], ["analyse", "knobs", "", "--output_dir", "a"],
    ["analyse", "latency", "a", "--output_dir="],
    ["report", "a", "--output", ""], ["compare", "a", ""], ["controller", "lookup", "build", "a", "--output", ""],
    ["controller", "train", "--controller_dir", ""], ["blocks", "--output", ""], ["status", ""],
    ["profile", "--output_dir", ""], ["text", "--output_dir", ""], ["tables", ""],
])  # fmt: skip
def test_no_command_takes_an_empty_path_for_the_current_folder(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    assert "a path is missing; write . for the current folder" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
