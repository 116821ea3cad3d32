"""The scripts of the stages under stand-ins for sbatch and Python that write down their arguments."""

import os
import subprocess
from pathlib import Path

import pytest

from experiment_core_utils.primitives.files import REPOSITORY

SCRIPTS = REPOSITORY / "experiments" / "performance_prediction"
STAGES = {
    "1_sanity_check.sh": ("1_sanity", "00:15:00", ["--test"]),
    "2_quick_sweep.sh": ("2_quick", "01:30:00", ["--quick"]),
    "3_full_run.sh": ("3_full", "08:00:00", []),
}


@pytest.fixture
def here(tmp_path: Path) -> dict[str, str]:
    """An environment whose Python writes its arguments into a file, one a line, and says one line."""
    stub(tmp_path / "python", 'printf "%s\\n" "$@" > "$STUB_LOG"; echo measured; exit "${STUB_CODE:-0}"')
    inherited = {name: value for name, value in os.environ.items() if name not in ("RESULTS", "CONSTRAINT")}
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    return inherited | {
        "PATH": f"{bin_folder}:/usr/bin:/bin",
        "PYTHON": str(tmp_path / "python"),
        "STUB_LOG": str(tmp_path / "log"),
        "BIN": str(bin_folder),
    }


def stub(path: Path, body: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


def run(script: str, *arguments: str, env: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(SCRIPTS / script), *arguments], env=env, cwd=cwd, capture_output=True, text=True)


@pytest.mark.parametrize("script", STAGES)
def test_without_slurm_a_stage_runs_here(script: str, here: dict[str, str], tmp_path: Path) -> None:
    stage, _, flags = STAGES[script]
    done = run(script, "vgg16", "implicit gemm", "H100", "--seed", "7", env=here, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    calls = Path(here["STUB_LOG"]).read_text().splitlines()
    assert calls == [
        str(SCRIPTS / "run_profile.py"), "--model", "vgg16", "--algorithm", "implicit gemm", "--output-dir", "results",
        *flags, "--device", "cuda", "--gpu", "h100", "--seed", "7",
    ]  # fmt: skip
    assert (tmp_path / "results" / stage / "vgg16_implicit_gemm_h100" / "here.out").read_text() == "measured\n"


def test_its_exit_code_is_that_of_the_profile(here: dict[str, str], tmp_path: Path) -> None:
    done = run("1_sanity_check.sh", "vgg16", "fft", "cpu", env={**here, "STUB_CODE": "2"}, cwd=tmp_path)
    assert done.returncode == 2
    assert Path(here["STUB_LOG"]).read_text().splitlines()[-2:] == ["--device", "cpu"]


@pytest.mark.parametrize("script", STAGES)
def test_with_slurm_a_stage_is_submitted(script: str, here: dict[str, str], tmp_path: Path) -> None:
    stage, limit, flags = STAGES[script]
    stub(Path(here["BIN"]) / "sbatch", 'printf "%s\\n" "$@" > "$STUB_LOG.sbatch"; echo "Submitted batch job 9"')
    done = run(script, "vgg16", "fft tiling", "l40s", env=here, cwd=tmp_path)
    assert done.returncode == 0 and "Submitted batch job 9" in done.stdout
    assert not Path(here["STUB_LOG"]).exists()
    *calls, wrapped = Path(here["STUB_LOG"] + ".sbatch").read_text().splitlines()
    assert calls == [
        "--job-name=vgg16_fft_tiling_l40s", f"--output=results/{stage}/vgg16_fft_tiling_l40s/%j.out",
        f"--time={limit}", "--ntasks=1", "--gres=gpu:1", "--constraint=gpul40s",
    ]  # fmt: skip
    assert (tmp_path / "results" / stage / "vgg16_fft_tiling_l40s").is_dir()
    # What the job runs: the words arrive as they were given.
    job = ["bash", "-c", wrapped.removeprefix("--wrap=")]
    subprocess.run(job, env=here, cwd=tmp_path, check=True, capture_output=True)
    words = Path(here["STUB_LOG"]).read_text().splitlines()
    assert words[words.index("--algorithm") + 1] == "fft tiling" and words[-2:] == ["--gpu", "l40s"]
    assert all(flag in words for flag in flags)


def test_too_few_words_are_refused(here: dict[str, str], tmp_path: Path) -> None:
    done = run("2_quick_sweep.sh", "vgg16", env=here, cwd=tmp_path)
    assert done.returncode == 2 and "MODEL ALGORITHM GPU are needed" in done.stderr
    assert not (tmp_path / "results").exists()


def test_the_status_asks_for_the_folder_that_is_given(here: dict[str, str], tmp_path: Path) -> None:
    done = run("check_status.sh", "elsewhere", env=here, cwd=tmp_path)
    assert done.stdout == "measured\n"
    calls = Path(here["STUB_LOG"]).read_text().splitlines()
    assert calls == ["-m", "experiments.performance_prediction.profile_status", "elsewhere"]


def test_the_gpu_run_takes_its_sizes(here: dict[str, str], tmp_path: Path) -> None:
    done = run("h200_run.sh", "out", "--sizes", "64", "96", env=here, cwd=tmp_path)
    assert done.returncode == 0
    calls = Path(here["STUB_LOG"]).read_text().splitlines()
    assert calls[-3:] == ["--sizes", "64", "96"] and "out/energy" in calls
    assert run("h200_run.sh", env=here, cwd=tmp_path).returncode == 2


def test_the_layers_and_all_networks_are_profiled_size_after_size(here: dict[str, str], tmp_path: Path) -> None:
    sizes = {"SIZES": "64 32", "LAYER_SIZES": "48", "PROFILE_FLAGS": "--device cpu --measure 1"}
    assert run("h200_layers.sh", "out", env=here | sizes, cwd=tmp_path).returncode == 0
    asked = Path(here["STUB_LOG"]).read_text().splitlines()
    assert asked[-8:] == ["--device", "cpu", "--measure", "1", "--model", "all", "--sizes", "32"]
    assert run("h200_layers.sh", "out", env=here | sizes | {"STUB_CODE": "2"}, cwd=tmp_path).returncode == 2
    assert run("h200_layers.sh", env=here, cwd=tmp_path).returncode == 2


@pytest.mark.parametrize("script", ["h200_layers.sh", "h200_run.sh"])
def test_what_is_stopped_begins_nothing_more(script: str, here: dict[str, str], tmp_path: Path) -> None:
    assert run(script, "out", env=here | {"STUB_CODE": "130"}, cwd=tmp_path).returncode == 130
    assert Path(here["STUB_LOG"]).read_text().splitlines().count("--output-dir") == 1
