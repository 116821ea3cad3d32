"""Sides that are measured now: order, failures, Ctrl-C, and a whole comparison of two precisions."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import REPOSITORY
from experiments.analyses import runs_in_turn
from experiments.analyses.runs_in_turn import Side
from experiments.core_exp.compare_runs import main
from experiments.core_exp.multi_datasets import DRIVER
from tests.experiments.core_exp.test_compare_runs import run_of

QUICK = ("--tier_list", "low", "--top_k_list", "2", "4", "--num_active_blocks_list", "2", "--num_runs_per_sample", "1",
         "--num_warmup_runs", "0", "--max_new_tokens", "2", "--max_repeats", "0", "--no_reference", "--num_samples",
         "2", "--num_threads", "1", "--device", "cpu", "--execution", "eager")  # fmt: skip


def interpreter(folder: Path, name: str, script: str) -> str:
    """A program that is called as Python would be, with the driver and its flags, the folder of results last."""
    path = folder / name
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)
    return str(path)


def copying(folder: Path, name: str, results: Path) -> str:
    """One that has measured `results`, and notes its arguments."""
    log, target = folder / "log", '"${@: -1}"'
    return interpreter(folder, name, f'echo {name} "${{@: 1:$#-1}}" >> {log}\ncp -r {results}/. {target}')


def test_sides_take_turns_and_each_process_is_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = {name: run_of(tmp_path / f"of_{name}", factor) for name, factor in (("one", 1.0), ("two", 1.1))}
    one, other = (copying(tmp_path, name, run) for name, run in runs.items())
    out = tmp_path / "out"
    asked = ["--run", "--x", "--y 'a b'", "--python", one, other, "--repeats", "3", "--output_dir", str(out)]
    assert main([*asked, "--fail_on_slower", "--", "--z"]) == 1
    first, second = f"one {DRIVER} --x --z --output_dir", f"two {DRIVER} --y a b --z --output_dir"
    assert (tmp_path / "log").read_text().splitlines() == [first, second, second, first, first, second]
    content = json.loads((out / "comparison.json").read_text())
    assert [each["runs"] for each in content["sides"]] == [3, 3]
    line = next(each for each in content["lines"] if each["is_pooled"])
    assert (line["verdict"], line["run_deviation"]) == ("SLOWER", pytest.approx(0))
    assert capsys.readouterr().err.splitlines()[0].startswith("1/6 A ")
    # The runs are read again as they are, and are not mixed with new ones.
    assert main([str(out / "a"), str(out / "b"), "--fail_on_slower"]) == 1
    assert main([*asked, "--", "--z"]) == 2
    assert "contains runs of a comparison already" in capsys.readouterr().err


def test_a_side_that_fails_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = copying(tmp_path, "good", run_of(tmp_path / "results", 1.0))
    bad = interpreter(tmp_path, "bad", "echo noise >&2; echo 'error: no such model' >&2; exit 5")
    asked = ["--run", "", "--model_path x", "--python", good, bad, "--output_dir", str(tmp_path / "out")]
    assert main(asked) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == f"error: B (--model_path x, {bad}) failed with exit code 5: error: no such model"
    assert [each.name for each in (tmp_path / "out" / "a").iterdir()] == ["1"]
    assert not list((tmp_path / "out" / "b").iterdir())


def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    """Neither the side's process nor what it started, which ignores signals to stop."""
    pids = tmp_path / "pids"
    slow = interpreter(
        tmp_path, "slow", f"(trap '' TERM INT; echo $BASHPID > {pids}.new; mv {pids}.new {pids}; sleep 1000) & wait"
    )
    command = [sys.executable, "-m", "knob_profiler", "compare", "--run", "", "", "--python", slow, slow,
               "--output_dir", str(tmp_path / "out")]  # fmt: skip
    options: dict[str, Any] = {"stderr": subprocess.PIPE, "text": True, "cwd": REPOSITORY}
    # What a shell starts in the background, these tests too, ignores Ctrl-C, and so does what that starts.
    options["preexec_fn"] = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, **options) as running:
        while not pids.exists():
            assert running.poll() is None
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=300)
    assert running.returncode == 130
    assert errors.splitlines()[-1].startswith("stopped after 0 of 10 processes")
    # The system removes an ended process whose parent ended, too, when it gets to it.
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pids.read_text().strip()}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pids.read_text().strip()}").exists()


def test_ctrl_c_while_a_process_is_started_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    class Interrupted(subprocess.Popen[bytes]):
        """Ctrl-C comes once the process runs, before its `Popen` is known."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self.pid)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(runs_in_turn.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        runs_in_turn._run(["sleep", "1000"], "A")
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


def test_a_wrong_flag_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--output_dir", str(tmp_path / "out")]
    assert main(["--run", "", "--precision bfloat", *out]) == 2
    assert "did you mean bfloat16?" in capsys.readouterr().err
    assert main(["--run", "", "--output_dir=x", *out]) == 2
    assert main(["--run", "", "'", *out]) == 2
    assert "close its quotes" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_checkout_brings_its_driver(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="lacks experiments/core_exp/acc_lat_profiling.py"):
        Side.of("", tmp_path, None)
    driver = tmp_path / "experiments" / "core_exp" / "acc_lat_profiling.py"
    driver.parent.mkdir(parents=True)
    driver.touch()
    side = Side.of("--seed 1", tmp_path, None)
    assert side.command(["--x"], Path("out")) == [
        sys.executable, str(driver), "--seed", "1", "--x", "--output_dir", "out",
    ]  # fmt: skip
    assert side.label == f"--seed 1, {tmp_path}"


def test_two_precisions_measured_in_turn(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(os.environ, "PYTHONPATH", str(REPOSITORY))
    code = main(
        ["--run", "--precision float32", "--precision bfloat16", "--repeats", "2",
         "--output_dir", str(tmp_path / "out"), "--", "--model_path", str(tiny_checkpoint), *QUICK]
    )  # fmt: skip
    printed = capsys.readouterr()
    assert code == 0, printed.err
    content = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert [each["runs"] for each in content["sides"]] == [2, 2]
    pooled = {each["quantity"]: each for each in content["lines"] if each["is_pooled"]}
    assert pooled["latency"]["setting"] == "all 2 settings" and pooled["latency"]["n"] == 4
    # bfloat16 has half the bytes; times of two runs on any machine are what they are.
    assert pooled["memory"]["change"] == pytest.approx(0.5, rel=0.01) and pooled["memory"]["verdict"] == "LESS"
    # Beside other work a run is INVALID, and its sentence has no verdict.
    assert ("INVALID: B takes" if content["voided_by"] else "latency: B ") in printed.out
    assert 'differs: precision ("bfloat16", "float32")' in printed.out
