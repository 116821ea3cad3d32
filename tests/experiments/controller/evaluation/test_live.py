"""The caveats of a live evaluation: samples of a training, requests that run eagerly for want of memory."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiment_core_utils.b_model_loader import find_model
from experiment_core_utils.c_prompt_processing import fingerprint_of_ids
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.knobs.block_choice import BlockChoice
from experiment_core_utils.primitives.errors import ConfigurationError, EngineRefused
from experiment_core_utils.records.caveats import sentences
from experiment_core_utils.tasks.interface import Score
from experiment_core_utils.tasks.registry import get_metric, load_task
from experiment_core_utils.tasks.scoring.metrics import AnswerMetric
from experiments.controller.evaluate_controller import main
from experiments.controller.evaluation.live import LiveJob, controllers_of, grouped_accuracy, live_caveats, open_live
from experiments.controller.knob_choices import KnobSpace, choice_of
from experiments.controller.networks.two_stage import TwoStageNetworks, action_space
from experiments.controller.policies.interface import StaticPolicy
from experiments.controller.running.live import prepare_requests
from experiments.controller.training.expected import UpdateRecipe
from experiments.controller.training.replay_environment import ReplayEnvironment, RewardRecipe
from experiments.controller.training.run import CHECKPOINT, TrainingPlan, TrainingRun
from tests.conftest import save_tiny, tiny_config
from tests.experiments.controller.hand_made_environment import made_up_environment
from tests.experiments.controller.hand_made_requests import grid
from tests.experiments.hand_made_sweep import result, setting, write

TASK = load_task("reference_vqa", "validation")
TINY_WIDTH = 32


def opened(checkpoint: Path) -> LiveJob:
    """Two requests; the published knobs are of larger models."""
    config = parse_config(["--model_path", str(checkpoint), "--device", "cpu", "--execution", "graph"])
    model = find_model(config.model.model_path).load(config.model, torch.device("cpu"))
    space = KnobSpace(("low", "medium"), (2, 4), (3, 4), num_total_blocks=4, first_top_k=4)
    requests, failed = prepare_requests(model, TASK, [0, 5], space.tiers)
    blocks, both = BlockChoice(scores={1: 0.1, 2: 0.2, 3: 0.3}), tuple(requests)
    return LiveJob(config, (), model, TASK, get_metric(TASK.metric), space, blocks, 3, both, both, failed, 0, {})


def trained(job: LiveJob, folder: Path) -> Path:
    """A checkpoint before its first update, of a training on the job's requests."""
    space = action_space(job.space, job.blocks)
    ids = fingerprint_of_ids([each.sample.sample_id for each in job.requests])
    described = {"kind": "replay", "samples": {TASK.name: ids}, "splits": {TASK.name: job.task.split}}
    environment = ReplayEnvironment(space, made_up_environment(5, 2, seed=0).tables, described)
    networks = TwoStageNetworks(space, TINY_WIDTH, 1.0, 0)
    TrainingRun(networks, environment, TrainingPlan(UpdateRecipe(), RewardRecipe(), 1, 0)).save(folder / CHECKPOINT)
    return folder / CHECKPOINT


def test_adaptive_requests_that_cannot_run_as_the_others_are_refused(tiny_checkpoint: Path, tmp_path: Path):
    """A store of 10^13 slots is more than any address can reach."""
    job = opened(tiny_checkpoint)
    checkpoint = trained(job, tmp_path)
    caveats = sentences(live_caveats(job, checkpoint))
    assert "two_stage was trained on samples of the same ids as those that it is evaluated on" in caveats
    with pytest.raises(EngineRefused, match="^requests with a pause: the device has no memory left"):
        controllers_of(replace(job, max_new_tokens=10**13), checkpoint)


def test_accuracy_of_answers_in_groups_is_a_fraction_of_the_best(tiny_checkpoint: Path):
    """Every answer is worth 2 of 8; one of two requests is measured."""
    job = opened(tiny_checkpoint)
    policy = StaticPolicy(choice_of("low", 2, 3))
    worth = AnswerMetric("worth", lambda answer: Score(2.0), best=8.0)
    some = replace(job, policies=(policy,), metric=worth, measured=job.measured[:1])
    assert grouped_accuracy(some, [0.5]) == {
        "num_requests": 2,
        "policies": {policy.name: [{"budget_ms": 500.0, "accuracy": 0.25, "num_scored": 2}]},
    }
    assert grouped_accuracy(replace(some, measured=some.requests), [0.5]) is None


def test_the_caption_says_what_was_measured_here_and_now(tiny_checkpoint: Path):
    job = opened(tiny_checkpoint)
    hardware = {"gpu_name": None, "cpu": "Scripted CPU"}
    model = {"name": "folder/tiny", "dtype": "float32", "execution": "cpu"}
    shown = replace(job, measured=job.measured[:1], source={"hardware": hardware, "model": model})
    assert shown.caption == (
        "Scripted CPU  ·  tiny  ·  float32, cpu  ·  n = 1 request, measured live  ·  reference vqa"
    )


@pytest.mark.parametrize("other", ["grid", "controller"])
def test_a_grid_or_a_controller_of_another_model_is_refused_before_samples_are_drawn(
    tiny_checkpoint: Path, tmp_path: Path, other: str
):
    """The controller is for 4 blocks; the published knobs need 5, and the task does not exist."""
    folder = save_tiny(tiny_config(num_hidden_layers=5), tmp_path / "small")
    checkpoint = trained(opened(tiny_checkpoint), tmp_path)
    flags = ["--model_path", str(folder), "--device", "cpu", "--dataset_name", "nothing"]
    if other == "grid":
        with pytest.raises(ConfigurationError, match="of the model folder/tiny, and the answers are of .*small; give"):
            open_live(flags, [], replace(grid(), model="folder/tiny"))
    else:
        with pytest.raises(ConfigurationError, match="is for another model than .*small: blocks 4 in place of 5; give"):
            open_live(flags, [], grid(), checkpoint)


def test_random_weights_under_a_trained_controller_are_a_caveat(tiny_checkpoint: Path, tmp_path: Path):
    job = opened(tiny_checkpoint)
    output = "the model's weights are random, and not those that two_stage was trained with"
    checkpoint = trained(job, tmp_path)
    assert output not in sentences(live_caveats(job, checkpoint))
    assert output in sentences(live_caveats(replace(job, config=job.config.replaced(random_weights=True)), checkpoint))


def test_a_live_evaluation_says_that_its_grid_is_of_another_task(tmp_path: Path):
    """The grid is of `signs`, by the model that runs; a model of 5 blocks is the smallest that is controlled."""
    model = save_tiny(tiny_config(num_hidden_layers=5), tmp_path / "small")
    made = [result(setting(tier, 4, 3)) for tier in ("low", "high")]
    for each in made:
        each["provenance"]["model"]["name"] = str(model)
    folder = write(tmp_path / "run", *made)
    flags = [
        "--mode",
        "live",
        "--budgets_ms",
        "500",
        "--model_path",
        str(model),
        "--device",
        "cpu",
        "--num_threads",
        "1",
    ]
    options = ["--dataset_name", TASK.name, "--num_samples", "1", "--max_new_tokens", "2"]
    assert main([str(folder), *flags, *options]) == 0
    content = json.loads((folder / "analysis" / "controller_live" / "controller_evaluation.json").read_text())
    assert f"the grid is of signs, and {TASK.name} was measured" in content["caveats"]
