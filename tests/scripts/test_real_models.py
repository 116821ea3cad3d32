"""What the scripts of real models refuse before they load anything."""

import subprocess
import sys
from pathlib import Path

import pytest

from experiment_core_utils.primitives.files import REPOSITORY

SCRIPTS = sorted((REPOSITORY / "scripts/real_models").glob("*.sh"))


def run(script: Path, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, **variables}
    return subprocess.run(
        ["bash", str(script), *args], env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )


def test_there_is_a_script() -> None:
    assert SCRIPTS


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_folder_is_asked_for(script: Path) -> None:
    found = run(script)
    assert (found.returncode, found.stderr) == (2, "error: no folder for the results; give one\n")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_weights_of_another_digest_are_refused(script: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF")
    found = run(script, str(tmp_path / "run"), MODEL=str(other))
    assert found.returncode == 2 and f"{other} is not the file of" in found.stderr
    assert not list((tmp_path / "run").iterdir())
