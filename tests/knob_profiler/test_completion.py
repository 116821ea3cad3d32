"""Completion as a shell asks for it: argcomplete's variables, and the answer in a file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiment_core_utils.primitives.files import REPOSITORY

pytest.importorskip("argcomplete")


def completed(line: str, folder: Path) -> list[str]:
    """What may stand at the end of the line, in a folder with only `runs/` and `notes.txt` in it."""
    (folder / "runs").mkdir(exist_ok=True)
    (folder / "notes.txt").touch()
    answer = folder.parent / "answer"
    shell = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(answer)}
    here = {
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, "-m", "knob_profiler"],
        cwd=folder,
        env={**os.environ, **shell, **here},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return answer.read_text(encoding="utf-8").split("\n")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("knobprof pro", ["profile "]),
        ("knobprof analyse ", ["-h", "--help", "-V", "--version", "stages", "knobs", "latency"]),
        ("knobprof tasks res", ["rescore "]),
        ("knobprof tasks rescore runs --metric anl", ["anls "]),
        ("knobprof profile --tier_l", ["--tier_list "]),
        ("knobprof profile --tier_list ", ["low", "medium", "high", "own"]),
        ("knobprof profile --tier_list low m", ["medium "]),
        ("knobprof profile --execution ", ["auto", "eager", "graph", "kernels", "inductor"]),
        ("knobprof profile --dataset_name reference_kn", ["reference_knowledge "]),
        ("knobprof profile --output_dir ", ["runs/"]),
        ("knobprof profile --data_file n", ["notes.txt "]),
        # The file of a knob is read first, and has no name yet.
        ("knobprof profile --knob_module n", ["notes.txt "]),
        (
            f"knobprof profile --knob_module {REPOSITORY}/knob_profiler/head_fraction.py --head_f",
            ["--head_fraction_list "],
        ),
    ],
)
def test_what_is_expected_is_offered(line: str, words: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    assert completed(line, folder) == words
