"""The runner of several datasets: what it asks of the driver, and what becomes of failures and signals."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import REPOSITORY
from experiment_core_utils.tasks.datasets.coco import OKVQA, Coco2014VQA, CocoCaption
from experiment_core_utils.tasks.datasets.doc_qa import DocVQA
from experiment_core_utils.tasks.datasets.science_qa import ScienceQAImages
from experiment_core_utils.tasks.datasets.st_qa import SceneTextQA
from experiment_core_utils.tasks.datasets.tally_qa import TallyQA
from experiment_core_utils.tasks.datasets.text_vqa import TextVQA
from experiments.core_exp.multi_datasets import (
    DRIVER,
    PUBLISHED_LIMITS,
    DatasetsRequest,
    Outcome,
    closing_lines,
    driver_command,
    needs_hub,
    parse_request,
    visible_gpus,
    worst,
)

FOLDER = REPOSITORY / "experiments" / "core_exp"
PUBLISHED = ["coco_2014_vqa", "text_vqa", "okvqa", "science_qa_img", "st_qa", "doc_qa", "tally_qa", "coco_caption"]
QUICK = ("--tier_list", "low", "--top_k_list", "4", "--num_active_blocks_list", "4", "--num_runs_per_sample", "1",
         "--num_warmup_runs", "0", "--max_new_tokens", "2", "--max_repeats", "0",
         "--no_reference",
         "--num_threads", "1")  # fmt: skip


def request_of(*arguments: str, gpus: int = 0, **environment: str) -> DatasetsRequest:
    return parse_request(["--output_dir", "out", *arguments], environment, gpus)


def test_without_a_word_the_published_datasets_run_with_the_drivers_own_values() -> None:
    request = request_of()
    assert list(request.datasets) == PUBLISHED
    command = driver_command("okvqa", request)
    assert command == [
        sys.executable, str(DRIVER), "--dataset_name", "okvqa", "--output_dir", "out/okvqa", "--num_processes", "1",
        "--max_new_tokens", "16",
    ]  # fmt: skip


def test_the_published_limits_are_those_of_the_tasks() -> None:
    tasks = (Coco2014VQA, TextVQA, OKVQA, ScienceQAImages, SceneTextQA, DocVQA, TallyQA, CocoCaption)
    assert {task.name: task.max_new_tokens for task in tasks} == PUBLISHED_LIMITS


def test_every_variable_reaches_the_driver(tmp_path: Path) -> None:
    (tmp_path / "text_vqa").mkdir()
    request = request_of(
        "--enable_memory_optimization", "--", "--seed", "1", "--", "--x", gpus=8,
        DATASETS=" text_vqa  st_qa text_vqa ", MODEL_PATH="a model", NUM_SAMPLES="7", NUM_GPUS_OVERRIDE="3",
        USE_PROFILER="True", OUTPUT_DIR="elsewhere", DATA_DIR=str(tmp_path),
    )  # fmt: skip
    assert request.datasets == ("text_vqa", "st_qa")
    assert driver_command("text_vqa", request) == [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", str(DRIVER),
        "--dataset_name", "text_vqa", "--output_dir", "elsewhere/text-vqa", "--num_processes", "3",
        "--max_new_tokens", "64", "--model_path", "a model", "--num_samples", "7",
        "--data_dir", str(tmp_path / "text_vqa"), "--use_profiler", "--enable_memory_optimization",
        "--seed", "1", "--", "--x",
    ]  # fmt: skip
    # No local copy of this one: it comes from the hub.
    assert "--data_dir" not in driver_command("st_qa", request)


def test_a_flag_of_the_driver_takes_the_place_of_the_runners_own() -> None:
    flags = ("--num_samples=3", "--output_dir", "my folder", "--max_new_tokens", "5", "--use_profiler")
    request = request_of("okvqa", "text_vqa", "--", *flags, NUM_SAMPLES="7", USE_PROFILER="true", MODEL_PATH="a model")
    assert driver_command("okvqa", request) == [
        sys.executable, str(DRIVER), "--dataset_name", "okvqa", "--num_processes", "1", "--model_path", "a model",
        *flags,
    ]  # fmt: skip
    assert closing_lines([Outcome("okvqa", 0, 1.0)], request)[1].split("  ")[-1] == "my folder"


def test_arguments_come_before_the_environment_and_a_count_of_gpus_before_its_override() -> None:
    assert request_of("mmmu", DATASETS="okvqa").datasets == ("mmmu",)
    assert "--max_new_tokens" not in driver_command("mmmu", request_of("mmmu"))
    assert [request_of(gpus=gpus).num_processes for gpus in (0, 1, 4)] == [1, 1, 4]
    assert request_of(gpus=4, NUM_GPUS_OVERRIDE="2").num_processes == 2
    assert request_of(USE_PROFILER="false").use_profiler is request_of(USE_PROFILER="").use_profiler is False


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("NUM_SAMPLES", "many", "whole number from 1"),
        ("NUM_SAMPLES", "0", "whole number from 1"),
        ("NUM_GPUS_OVERRIDE", "-1", "whole number from 1"),
        ("USE_PROFILER", "yes", "true or false"),
    ],
)
def test_an_impossible_variable_is_named_with_what_is_allowed(name: str, value: str, allowed: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}={value} is not possible; give (a )?{allowed}"):
        request_of(**{name: value})


def test_gpus_are_those_that_a_process_would_see() -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,3"}) == 2
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == 0


def test_the_closing_table_names_every_outcome() -> None:
    outcomes = [Outcome("okvqa", 0, 61.4), Outcome("st_qa", 2, 3.0), Outcome("doc_qa", -9, 5.0)]
    assert closing_lines(outcomes, request_of()) == [
        "dataset  outcome          seconds  results",
        "okvqa    done                  61  out/okvqa",
        "st_qa    NOT POSSIBLE           3  out/st-qa",
        "doc_qa   FAILED (-9)            5  out/doc-qa",
        "1 of 3 datasets done",
        "the reason is shown above, at the end of each one's output; run the same command again to measure the rest",
    ]
    assert worst(outcomes) == 1
    assert worst(outcomes[:1]) == 0
    assert worst([outcomes[0], Outcome("st_qa", 3, 1.0)]) == 3
    assert worst([outcomes[1], Outcome("st_qa", 3, 1.0)]) == 1
    stopped = [outcomes[0], Outcome("st_qa", 130, 1.0), Outcome("doc_qa", None, 0.0)]
    assert worst(stopped) == 130
    assert closing_lines(stopped, replace(request_of(), output_dir=Path("x")))[3] == (
        "doc_qa   not started            -  x/doc-qa"
    )


def environment(tiny_checkpoint: Path, tmp_path: Path) -> dict[str, str]:
    return os.environ | {
        "PYTHON": sys.executable,
        "MODEL_PATH": str(tiny_checkpoint),
        "NUM_SAMPLES": "2",
        "OUTPUT_DIR": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }


def test_a_dataset_that_fails_does_not_stop_the_rest(tiny_checkpoint: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", str(FOLDER / "run_multi_datasets_a100.sh"), "--", *QUICK],
        env=environment(tiny_checkpoint, tmp_path) | {"DATASETS": "no_such_task reference_counting"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    table = done.stdout.splitlines()[-4:]
    assert [line.split()[:2] for line in table[:2]] == [["no_such_task", "NOT"], ["reference_counting", "done"]]
    assert table[2] == "1 of 2 datasets done"
    assert "unknown task 'no_such_task'" in done.stderr
    (result,) = (tmp_path / "reference-counting").glob("reference-counting_*.json")
    assert '"enable_memory_optimization": true' in result.read_text()


def test_the_first_dataset_without_a_hub_ends_those_from_it_alone(tiny_checkpoint: Path, tmp_path: Path) -> None:
    away = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_HUB_CACHE": str(tmp_path / "hub")}
    done = subprocess.run(
        ["bash", str(FOLDER / "run_multi_datasets_h100.sh"), "--", "--dry_run", *QUICK],
        env=environment(tiny_checkpoint, tmp_path) | away | {"DATASETS": "okvqa text_vqa reference_counting doc_qa"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert [line[:3] for line in done.stdout.splitlines() if line.startswith("==")] == ["== ", "== "]
    assert done.stderr.count("error: ") == 1
    table = done.stdout.splitlines()[-6:]
    outcomes = [line.split()[1:3] for line in table[:4]]
    assert outcomes == [["NOT", "POSSIBLE"], ["not", "started"], ["done", outcomes[2][1]], ["not", "started"]]
    assert table[4] == "1 of 4 datasets done"
    assert table[5].startswith("the hub cannot be reached: ")


def test_a_model_that_the_hub_does_not_give_ends_all_datasets_at_the_first(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """Also those that need nothing else from the hub."""
    away = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_HUB_CACHE": str(tmp_path / "hub")}
    asked = {"MODEL_PATH": "nobody/no-such-model", "DATASETS": "reference_vqa doc_qa reference_counting"}
    done = subprocess.run(
        ["bash", str(FOLDER / "run_multi_datasets_h100.sh"), "--", "--dry_run", *QUICK],
        env=environment(tiny_checkpoint, tmp_path) | away | asked,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("==")] == ["== 1/3 reference_vqa"]
    (error,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert "nobody/no-such-model is not a folder, and the hub did not give it" in error
    table = done.stdout.splitlines()[-5:]
    outcomes = [line.split()[1:3] for line in table[:3]]
    assert outcomes == [["NOT", "POSSIBLE"], ["not", "started"], ["not", "started"]]
    assert table[3] == "0 of 3 datasets done"
    assert table[4].startswith("the hub cannot be reached for the model nobody/no-such-model: nothing was started")


def test_only_datasets_without_a_copy_need_the_hub(tmp_path: Path) -> None:
    (tmp_path / "okvqa").mkdir()
    request = request_of(DATA_DIR=str(tmp_path))
    assert [needs_hub(name, request) for name in ("okvqa", "st_qa", "reference_vqa")] == [False, True, False]
    assert not needs_hub("st_qa", request_of("--", "--data_dir=x"))


def test_a_signal_to_the_runner_stops_the_dataset_at_work_and_begins_no_other(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    command = ["bash", str(FOLDER / "run_combined_profiling.sh"), "reference_vqa", "reference_counting", "--", *QUICK]
    surroundings = environment(tiny_checkpoint, tmp_path) | {"NUM_SAMPLES": "500"}
    with subprocess.Popen(
        command, env=surroundings, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as runner:
        while not (tmp_path / "reference-vqa").exists():
            assert runner.poll() is None
            time.sleep(0.1)
        runner.send_signal(signal.SIGTERM)
        output, _ = runner.communicate(timeout=120)
    assert runner.returncode == 130
    outcomes = [line.split()[:2] for line in output.splitlines()[-4:-2]]
    assert outcomes == [["reference_vqa", "stopped"], ["reference_counting", "not"]]
    assert not (tmp_path / "reference-counting").exists()
