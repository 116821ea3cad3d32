"""The command: lists, refusals before anything is timed, and a sweep that is killed and goes on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from experiment_core_utils.primitives.csv_tables import read_table
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import REPOSITORY
from experiment_core_utils.records.journal import only_run_in
from experiments.performance_prediction.profile_status import status_lines
from experiments.performance_prediction.profiling.config import build_parser, profile_config
from experiments.performance_prediction.run_profile import main

SCRIPT = REPOSITORY / "experiments" / "performance_prediction" / "run_profile.py"
SHORT = ["--device", "cpu", "--warmup", "0", "--measure", "1", "--energy", "off"]


def test_lists(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list-models"]) == 0
    listed = capsys.readouterr().out
    assert "alexnet (inputs of 63 pixels and more)" in listed and "sampled_layers (inputs of 1 pix" in listed
    assert main(["--list-algorithms"]) == 0
    assert capsys.readouterr().out.splitlines()[2:4] == ["implicit gemm", "implicit precomp gemm"]


def test_the_check_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--check-cuda"])
    known = capsys.readouterr().out
    assert f"torch {torch.__version__}" in known
    assert torch.cuda.is_available() or (code == 1 and "no GPU that torch sees" in known)


def test_stages_have_their_folders_and_numbers_of_sizes() -> None:
    def config(*flags: str) -> tuple[str, int]:
        found = profile_config(build_parser().parse_args(["--model", "vgg16", "--algorithm", "gemm", *flags, *SHORT]))
        return found.stage, len(found.combinations[0].sizes)

    assert config("--test") == ("1_sanity", 1)
    assert config("--quick") == ("2_quick", 10)
    assert config() == ("3_full", 100)
    assert config("--num-sizes", "50") == ("3_full", 50)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "vgg16"], "--model and --algorithm are needed"),
        (["--model", "vgg17", "--algorithm", "gemm"], "no model 'vgg17'"),
        (["--model", "vgg16", "--algorithm", "wino"], "no convolution algorithm 'wino'"),
        (["--model", "alexnet", "--algorithm", "gemm", "--sizes", "32"], "63 pixels and more"),
        (["--model", "vgg16", "--algorithm", "gemm", "--precision", "tf32"], "does not run on the CPU"),
        (["--model", "vgg16", "--algorithm", "gemm", "--measure", "0"], "--measure 0 is not possible; give at least 1"),
    ],
)
def test_what_cannot_be_done_is_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        profile_config(build_parser().parse_args(["--device", "cpu", *flags]))


def test_a_combination_that_is_not_covered_ends_with_2_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model", "alexnet", "--algorithm", "winograd", "--test", "--sizes", "64", "--output-dir", str(tmp_path)]
    assert main([*argv, *SHORT]) == 2
    known = capsys.readouterr().err
    assert "winograd does not cover 2 of 5 convolutions of alexnet" in known
    assert "winograd takes kernels of 3x3, this is 11x11: features.0" in known
    assert not list(tmp_path.rglob("*.csv"))


def test_another_gpu_than_the_requested_one_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", "alexnet", "--algorithm", "gemm", "--gpu", "l40s", "--output-dir", str(tmp_path), *SHORT]
    assert main(argv) == 2
    assert "--gpu l40s was given, but the device here is cpu" in capsys.readouterr().err


def test_a_second_profile_in_the_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", "alexnet", "--algorithm", "gemm", "--test", "--sizes", "64", "--output-dir", str(tmp_path)]
    with only_run_in(tmp_path / ".parts"):
        assert main([*argv, *SHORT]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path}/.parts/lock is being written by another process; wait for that run")
    assert error.count("\n") == 1 and not list(tmp_path.rglob("*.csv"))


def test_a_killed_sweep_resumes_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [str(size) for size in range(64, 97, 8)]
    argv = ["--model", "alexnet", "--algorithm", "gemm", "--sizes", *sizes, "--output-dir", str(tmp_path), *SHORT]
    table = tmp_path / "3_full" / "alexnet_gemm_cpu" / "alexnet_gemm_overall.csv"
    run = subprocess.Popen(
        [sys.executable, str(SCRIPT), *argv],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        given_up = time.monotonic() + 60
        while not table.exists() and run.poll() is None and time.monotonic() < given_up:
            time.sleep(0.005)
    finally:
        run.send_signal(signal.SIGKILL)
        run.wait()
    before = table.read_text().splitlines()
    found = len(before) - 1
    assert 1 <= found < len(sizes)
    assert f"{found} of 5 sizes ({found} ok), not done" in next(status_lines(tmp_path))

    # A row holds for one thread count or another; all else stays the same.
    assert main(argv) == 0
    assert f"{5 - found} sizes measured, 0 not measurable, {found} there already" in capsys.readouterr().out
    after = table.read_text().splitlines()
    assert after[: len(before)] == before
    rows = read_table(table.read_text(), "overall")
    assert [row["input_size"] for row in rows] == [64, 72, 80, 88, 96]
    layers = read_table(table.with_name("alexnet_gemm_layers.csv").read_text(), "layers")
    assert [row["input_size"] for row in layers] == [size for size in (64, 72, 80, 88, 96) for _ in range(5)]
    assert "5 of 5 sizes (5 ok), done" in next(status_lines(tmp_path))
