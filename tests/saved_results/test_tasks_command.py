"""The command on tasks: what it prints, its exit codes, and that it starts without torch."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from experiment_core_utils.knobs.active_blocks import RunningBlocks, num_blocks_of
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.top_k import experts_of
from experiment_core_utils.knobs.vision_tokens import tier_target
from experiment_core_utils.primitives.files import REPOSITORY
from experiment_core_utils.saved_results.tasks_command import main
from experiment_core_utils.tasks.registry import get_metric_for_dataset, list_tasks
from tests.hand_made_records import SETTING, measured_sample, part, stored_result

FULL = Setting.of(vision=tier_target("low"), top_k=4, num_active_blocks=RunningBlocks.of((0, 1, 2, 3)))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    for setting, prediction in ((FULL, "stop"), (SETTING, "go")):
        samples = [
            replace(measured_sample(index, prediction="1"), prediction=prediction, references=("stop",) * 10)
            for index in range(3)
        ]
        stored = stored_result(part(*[replace(sample, prediction="1") for sample in samples]), setting)
        for entry in stored["per_sample_results"]:
            entry["pred"] = prediction
        knobs = f"topk{experts_of(setting)}_blocks{num_blocks_of(setting)}"
        (tmp_path / f"signs_imgsizetier-low_crops2_{knobs}.json").write_text(json.dumps(stored))
    return tmp_path


def test_the_list_names_every_task_and_metric(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[1:] for line in lines if line[0] == "task"] == [
        [name, f"({get_metric_for_dataset(name)})"] for name in list_tasks()
    ]
    assert ["metric", "vqa_score", "(0", "to", "1)"] in lines


def test_rescoring_prints_old_beside_new(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rescore", str(results), "--metric", "vqa_score"]) == 0
    head, small, full, warning, where, table = capsys.readouterr().out.splitlines()
    assert head.split() == "setting read_off (before) vqa_score [95 %] samples unparsed".split()
    assert small.split()[:3] == ["tier-low_topk2_blocks3", "1.000", "0.000"]
    assert full.split()[:3] == ["tier-low_topk4_blocks4", "1.000", "1.000"]
    assert warning.startswith("warning: only 3 samples per setting")
    folder = results / "rescored_vqa_score"
    assert (where, table) == (f"2 settings in {folder}", f"table of settings: {folder / 'signs_settings.csv'}")


def test_comparing_prints_a_row_for_each_other_setting(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rescore", str(results), "--metric", "vqa_score"]) == 0
    capsys.readouterr()
    assert main(["compare", str(results / "rescored_vqa_score")]) == 0
    title, _, row, warning = capsys.readouterr().out.splitlines()
    assert title == "signs, vqa_score: settings against tier-low_topk4_blocks4, on the samples that both have"
    # All three worse: unseen with a probability p of (1 - p)^3 = 0.025, p = 0.7076; -1 + 2 * 0.7076.
    assert row.split() == "tier-low_topk2_blocks3 0.000 -1.000 [-1.000, +0.415] 0 3 0 0.25 0".split()
    assert warning.startswith("warning: only 3 samples")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["rescore", "{}", "--metric", "vqa_score"], 1, "contains no results"),
        (["compare", "{}/nowhere"], 1, "is not a folder"),
        (["rescore", "{}", "--metric", "bleu"], 2, "unknown metric 'bleu'"),
        (["rescore", "{}"], 2, "required: --metric"),
        (["guess"], 2, "invalid choice: 'guess'"),
        ([], 2, "required: COMMAND"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    assert main([argument.format(tmp_path) for argument in arguments]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err and printed.err.startswith("error: ")
    assert len(printed.err.splitlines()) == 1


def test_no_command_needs_torch(results: Path) -> None:
    code = (
        "import sys, runpy\n"
        "class Refuse:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name in ('torch', 'transformers'): raise AssertionError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "sys.argv = ['tasks', *sys.argv[2:]]\n"
        "runpy.run_module('experiment_core_utils.tasks', run_name='__main__')\n"
    )
    command = [sys.executable, "-c", code, "--", "rescore", str(results), "--metric", "vqa_score"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert "2 settings in" in done.stdout
