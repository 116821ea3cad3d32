"""Output whose reader goes away or that the system refuses, seen from outside, and the line of a stopped command."""

import gc
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from experiment_core_utils.config.command import libraries_loading, reporting_errors, run_command
from experiment_core_utils.primitives.errors import Stopped
from experiment_core_utils.primitives.files import REPOSITORY
from tests.measuring.measurer.every_error import every_error

PROGRAM = """
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from experiment_core_utils.config.command import run_command

def main():
    for number in range(20000):
        print(f"line {number}")
        if number % 5000 == 0:
            print("progress", file=sys.stderr, flush=True)
    Path(sys.argv[1]).write_text("saved")
    return int(sys.argv[2])

sys.exit(run_command(main))
"""


@pytest.mark.parametrize("code", [0, 3])
def test_a_reader_that_goes_away_changes_nothing(tmp_path: Path, code: int) -> None:
    saved, errors = tmp_path / "saved", tmp_path / "errors"
    with errors.open("wb") as error:
        run = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(saved), str(code)], stdout=subprocess.PIPE, stderr=error
        )
        assert run.stdout is not None and run.stdout.readline() == b"line 0\n"
        run.stdout.close()
        assert run.wait(60) == code
    assert saved.read_text() == "saved" and errors.read_text() == "progress\n" * 4


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_is_refused_is_one_line_and_progress_is_not_missed(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path / "a"), "0"], stdout=full, stderr=-1, text=True
        )
        both = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path / "b"), "0"], stdout=-1, stderr=full)
    assert run.returncode == 1 and run.stderr.splitlines()[-1].startswith("error: standard output cannot be written")
    assert "Traceback" not in run.stderr and both.returncode == 0
    assert (tmp_path / "a").exists() and (tmp_path / "b").exists()


def test_control_characters_of_names_reach_no_terminal() -> None:
    program = """
import sys
from experiment_core_utils.config.command import run_command
from experiment_core_utils.primitives.errors import ConfigurationError

def main():
    print("name \\x1b[2J of \\x9b31m")
    print("warning \\x1b]0;owned\\x07", file=sys.stderr)
    raise ConfigurationError("there is no \\x1b[31m\\r")

sys.exit(run_command(main))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (2, "name \\x1b[2J of \\x9b31m\n")
    assert run.stderr == "warning \\x1b]0;owned\\x07\nerror: there is no \\x1b[31m\\r\n"


@pytest.mark.parametrize("error", [Stopped("stopped by SIGINT; go on"), KeyboardInterrupt()])
def test_of_several_processes_the_first_says_that_they_are_stopped(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @reporting_errors
    def main() -> int:
        raise error

    monkeypatch.delenv("RANK", raising=False)
    assert main() == 130
    assert capsys.readouterr().err.startswith("stopped")
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        assert main() == 130
        assert capsys.readouterr().err.count("\n") == lines


def test_garbage_is_looked_for_again_after_the_imports() -> None:
    with libraries_loading():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), libraries_loading():
        raise ImportError("No module named torch")
    assert gc.isenabled()


@pytest.mark.unforeseen
@pytest.mark.parametrize("run", [run_command, lambda main: reporting_errors(main)()])
def test_an_error_of_any_class_is_one_line_with_its_traceback_in_a_file(
    run: Callable[[Callable[[], int]], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for error in every_error():
        if isinstance(error, MemoryError):
            continue

        def main(error: Exception = error) -> int:
            raise error

        assert run(main) == 1
        line = capsys.readouterr().err
        name = re.fullmatch(rf"error: {type(error).__name__}\b.* its traceback is in (.*): please report it\)\n", line)
        assert name is not None and line[:-1].isprintable(), line
        assert ", in main\n" in Path(name[1]).read_text()


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("std::bad_alloc")])
def test_lack_of_memory_is_one_line_and_not_unforeseen(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    @reporting_errors
    def main() -> int:
        raise error

    assert main() == 1
    assert capsys.readouterr().err == (
        f"error: {type(error).__name__}: {error}: the host has no memory left for this process; free some, or raise "
        "its limit (ulimit -v); what is finished is saved\n"
    )


@pytest.mark.unforeseen
def test_where_no_traceback_can_be_saved_the_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))

    @reporting_errors
    def main() -> int:
        raise KeyError("x")

    assert main() == 1
    line = "error: KeyError: 'x' (its traceback cannot be saved: No such file or directory)\n"
    assert capsys.readouterr().err == line


def test_a_broken_gpu_is_one_line_that_says_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    @reporting_errors
    def main() -> int:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nfor debugging")

    assert main() == 1
    assert capsys.readouterr().err == (
        "error: the GPU does no further work for this process (CUDA error: an illegal memory access was encountered); "
        "what is finished is saved: run the same command again to resume, with CUDA_LAUNCH_BLOCKING=1 to learn which "
        "operation it was\n"
    )


def test_every_module_that_is_a_command_reports_its_errors() -> None:
    """By the text of the modules: what runs as a script goes through `run_command`, or hands over to one that does."""
    bare, number = [], 0
    for folder in ("experiment_core_utils", "experiments", "knob_profiler", "scripts"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            above, is_script, below = path.read_text().rpartition('if __name__ == "__main__":')
            number += bool(is_script)
            called = f"{above.rpartition('def ')[2]}{below}"
            if is_script and not any(each in called for each in ("run_command(", "run_module(")):
                bare.append(path.name)
    assert bare == [] and number > 30
