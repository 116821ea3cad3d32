"""A run as it is requested: validated against model and task without any weight, one order and one control setting."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.meters.stability import shuffled
from experiment_core_utils.planning.plan import RequestedRun, requested_run
from experiment_core_utils.planning.remarks import resumed_lines
from experiment_core_utils.planning.tidying import check_and_make_folder
from experiment_core_utils.primitives.errors import ConfigurationError, OutputRefused
from experiment_core_utils.records.ledger import PLAN_VERSION, RunPlan
from tests.given_flags import over

# 2 tiers x 1 top-k x 2 block counts, the last changing fastest.
GRID = ("tier-low_topk4_blocks2", "tier-low_topk4_blocks4", "tier-high_topk4_blocks2", "tier-high_topk4_blocks4")
KEYS = (*GRID, "own_topk4_blocks4")


@pytest.fixture
def folder(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A model without its weights."""
    shutil.copytree(tiny_checkpoint, tmp_path / "model")
    for weights in (tmp_path / "model").glob("*.safetensors"):
        weights.write_bytes(b"no weights")
    return tmp_path / "model"


def requested(folder: Path, *flags: str) -> RequestedRun:
    return requested_run(
        parse_config(
            over(["--model_path", str(folder), "--tier_list", "low", "high", "--top_k_list", "4",
                  "--num_active_blocks_list", "2", "4", "--sampling_strategy", "full", "--seed", "3"], flags)
        )
    )  # fmt: skip


def test_settings_and_samples_are_known_without_weights(folder: Path) -> None:
    run = requested(folder, "--ids", "9", "2", "5")
    assert run.keys == KEYS == tuple(setting.key for setting in run.settings)
    assert run.drawn.sample_ids == (2, 5, 9)
    assert tuple(setting.key for setting in run.grid) == GRID and run.beside == run.settings[-1]
    assert requested(folder, "--no_reference").keys == GRID
    assert (run.task.name, run.source.limits.num_total_blocks) == ("reference_vqa", 4)


def test_a_placebo_is_the_reference_again_beside_the_grid(folder: Path) -> None:
    run = requested(folder, "--placebo")
    assert run.beside is not None and run.placebo is not None
    assert run.keys == (*KEYS, f"{run.beside.key}_placebo")
    assert {**run.placebo.values, "placebo": None} == {**run.beside.values, "placebo": None}
    assert Setting.named(run.placebo.key).levels == run.placebo.levels and run.placebo != run.beside


def test_a_placebo_without_a_reference_in_turn_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="^--no_reference leaves --placebo nothing to be compared with"):
        requested(folder, "--placebo", "--no_reference")


def test_settings_are_shuffled_by_the_seed_or_measured_as_planned(folder: Path) -> None:
    run = requested(folder, "--setting_order", "shuffled")
    assert (run.order.seed, run.order.keys) == (3, shuffled(KEYS, 3)) != (3, KEYS)
    planned = requested(folder, "--setting_order", "planned")
    assert (planned.order.keys, planned.order.seed) == (KEYS, None)


def test_a_table_that_cannot_be_written_is_refused_before_anything_is_measured(folder: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    run = requested(folder, "--output_dir", str(results), "--num_samples", "2")
    check_and_make_folder(run, None)
    (results / "reference-vqa_samples.csv").write_text("of an earlier run")
    check_and_make_folder(run, None)
    (results / "reference-vqa_settings.csv").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OutputRefused, match=r"reference-vqa_settings.csv is a link, and only a regular file"):
        check_and_make_folder(run, None)
    (results / "reference-vqa_settings.csv").unlink()
    (results / "reference-vqa_samples.csv").unlink()
    (results / "reference-vqa_samples.csv").mkdir()
    with pytest.raises(OutputRefused, match=r"reference-vqa_samples.csv cannot be written \(Is a directory\)"):
        check_and_make_folder(run, None)


SERVED = ("--endpoint", "http://localhost:1/v1", "--model", "m", "--num_samples", "2")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (
            ("--dataset_name", "reference_vqa", "--text_only"),
            "--text_only is for a text model or the rows of --data_file, not reference_vqa",
        ),
        (
            ("--dataset_name", "reference_questions", "--picture_side_list", "20", "30"),
            "--picture_side_list cannot act: reference_questions has no pictures; give a task with some, such as "
            "--dataset_name reference_vqa, or drop it",
        ),
        (
            ("--max_new_tokens", "7", "--answer_limit_list", "3", "7", "8"),
            "--answer_limit_list 8 is above the 7 tokens that an answer of reference_questions may have; give "
            "--max_new_tokens 8",
        ),
        (
            ("--thinking_tokens_list", "0"),
            "--thinking_tokens_list 0 cannot be set in m: each kind of server has a field of its own for it; give "
            "--request_knob thinking_token_budget=0,256 (vLLM), chat_template_kwargs.enable_thinking=false or "
            "--reasoning_effort_list",
        ),
    ],
)
def test_what_a_server_would_not_be_asked_is_refused(flags: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigurationError) as found:
        requested_run(parse_config([*SERVED, *flags]))
    assert str(found.value) == reason


def test_a_server_is_asked_about_pictures_where_they_are_scaled() -> None:
    assert requested_run(parse_config(SERVED)).task.name == "reference_questions"
    run = requested_run(parse_config([*SERVED, "--picture_side_list", "20", "--answer_limit_list", "1"]))
    assert run.task.name == "reference_vqa" and len(run.grid) == 1


def test_what_does_not_fit_the_model_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="5"):
        requested(folder, "--num_active_blocks_list", "5")


@pytest.mark.parametrize(
    ("metric", "reason"),
    [
        ("acc", "acc compares options, and needs two or more and which is right"),
        ("perplexity", "perplexity scores a text, and this is a question with an answer; of a file name the column of"),
        ("mc", "a multiple-choice answer needs to know the right option"),
    ],
)
def test_a_metric_that_can_score_no_sample_is_refused_without_weights(folder: Path, metric: str, reason: str) -> None:
    first = f"^--metric {metric} can score no sample of reference_vqa: sample 4: {reason}"
    with pytest.raises(ConfigurationError, match=first):
        requested(folder, "--metric", metric, "--ids", "7", "4")
    served = parse_config([*SERVED, "--metric", metric])
    unseen = f"no sample of reference_questions: sample .*{reason}" if metric == "mc" else "which no server shows"
    with pytest.raises(ConfigurationError, match=f"^--metric {metric} .*{unseen}"):
        requested_run(served)


def test_one_sample_that_a_metric_can_score_is_enough(folder: Path) -> None:
    """Of sample n of reference_mixed, n % 5 is 3 where it has options."""
    ids = "0", "1", "2", "5", "6", "7", "10", "11", "12"
    flags = "--dataset_name", "reference_mixed", "--metric", "acc", "--ids"
    with pytest.raises(ConfigurationError, match="--metric acc can score no sample of reference_mixed: sample 0: "):
        requested(folder, *flags, *ids)
    assert len(requested(folder, *flags, *ids, "18").sample_ids) == 10


def test_a_resume_says_what_it_takes_up_and_what_it_sets_aside(tmp_path: Path) -> None:
    plan = RunPlan(PLAN_VERSION, "0001", "f00d", "signs", ("a", "b"), ("a", "b"), 10, 1, 0, 1000.0)
    assert resumed_lines(plan, {}, tmp_path) == [] == resumed_lines(plan, {"a": 0}, tmp_path)
    (line,) = resumed_lines(replace(plan, num_samples_before=12), {}, tmp_path)
    assert line == "resumed: 12 of 20 samples to measure had finished before, and are taken up"
    (line,) = resumed_lines(plan, {"a": 40, "b": 20}, tmp_path)
    assert line.startswith("warning: 60 finished samples of 2 settings are set aside, measured with other flags, data,")
    (tmp_path / "a.json").write_text("{}")
    os.utime(tmp_path / "a.json", (1100.0, 1100.0))
    assert resumed_lines(plan, {}, tmp_path) == []
    os.utime(tmp_path / "a.json", (8200.0, 8200.0))
    (line,) = resumed_lines(plan, {}, tmp_path)
    assert line.startswith("warning: the clock of this machine stepped back: ")
    assert "files from 2 h 00 min ahead" in line
