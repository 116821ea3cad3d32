"""Requests that are really run: whose setting is in force, what is counted, and grouped answers against single ones."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from experiment_core_utils.b_model_loader import find_model
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.knobs.block_choice import BlockChoice
from experiment_core_utils.primitives.errors import EngineRefused
from experiment_core_utils.tasks.registry import get_metric, load_task
from experiments.controller.knob_choices import KnobSpace, choice_of
from experiments.controller.policies.feedback import FeedbackPolicy
from experiments.controller.policies.interface import PictureShape, RandomPolicy, StaticPolicy
from experiments.controller.running.live import (
    ChosenBefore,
    prepare_requests,
    requests_of,
    requests_that_run,
    run_live,
    scores_of_choices,
    warm_up,
)

TASK = load_task("reference_vqa", "validation")
METRIC = get_metric(TASK.metric)
# The tiny model has 4 blocks and 4 experts a token.
SPACE = KnobSpace(("low", "medium"), (2, 4), (3, 4), 4, 4)
BLOCKS = BlockChoice(scores={1: 0.1, 2: 0.9, 3: 0.5})
LIMIT = 3


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path):
    config = parse_config(["--model_path", str(tiny_checkpoint), "--device", "cpu", "--precision", "float32"])
    return find_model(config.model.model_path).load(config.model, torch.device("cpu"))


@pytest.fixture(scope="module")
def requests(model):
    made, failed = prepare_requests(model, TASK, [0, 1, 2], SPACE.tiers)
    assert failed == {}
    return made


def test_a_request_shows_what_each_tier_makes_of_its_picture(requests):
    first = requests[0]
    assert first.features.task == "reference_vqa"
    assert list(first.features.shapes) == ["low", "medium"]
    for tier, shape in first.features.shapes.items():
        prepared = first.prepared[tier].shape
        assert shape == PictureShape(prepared.actual.crops_if_cut, prepared.vision_tokens)
    assert 1 <= first.features.shapes["low"].crops <= 3
    assert 4 <= first.features.shapes["medium"].crops <= 8
    assert first.features.text_tokens == first.prepared["low"].shape.text_tokens
    assert first.features.output_tokens is None


def test_the_choice_is_in_force_while_the_request_runs(model, requests):
    choice = choice_of("medium", 2, 3)
    answer = ChosenBefore(StaticPolicy(choice), model, SPACE, BLOCKS, LIMIT).answer(requests[0], 1.0)
    # Block 0 and the two most important others.
    assert model.active_setting == (2, (0, 2, 3))
    assert answer.choice == choice
    assert 1 <= len(answer.token_ids) <= LIMIT
    assert answer.overhead_s > 0
    assert answer.latency_s == answer.total_s + answer.overhead_s


@pytest.mark.parametrize("run", ["answer", "warm_up"])
def test_a_setting_without_memory_is_refused(tiny_checkpoint: Path, requests, run: str):
    """A store of 10^13 slots is more than any address can reach."""
    flags = ["--model_path", str(tiny_checkpoint), "--device", "cpu", "--precision", "float32", "--execution", "graph"]
    config = parse_config(flags)
    own = find_model(config.model.model_path).load(config.model, torch.device("cpu"))
    # Any token ends an answer, so that only the store is long.
    own.eos_token_ids = frozenset(range(own.model.config.text_config.vocab_size))
    controller = ChosenBefore(StaticPolicy(SPACE.full), own, SPACE, BLOCKS, 10**13)
    acts = {
        "answer": lambda: controller.answer(requests[0], 1.0),
        "warm_up": lambda: warm_up(own, SPACE, BLOCKS, requests[:1], 10**13),
    }
    with pytest.raises(EngineRefused, match="no memory left .*; run all settings with --execution eager$"):
        acts[run]()


def test_a_policy_with_feedback_is_told_how_long_the_answer_took(model, requests):
    choice = choice_of("low", 2, 3)
    policy = FeedbackPolicy(StaticPolicy(choice), {choice: 1e6}, half_life=1.0)
    ChosenBefore(policy, model, SPACE, BLOCKS, LIMIT).answer(requests[0], 1.0)
    # Much faster than predicted counts as a quarter, of which one answer shows half: ln 2 rounded to 0.01.
    assert policy.ratio == math.exp(-0.69)


def test_controllers_take_turns_and_what_was_in_force_comes_back(model, requests):
    before = model.active_setting
    policies = [StaticPolicy(choice_of("low", 2, 3)), RandomPolicy(SPACE.choices(), 1)]
    controllers = [ChosenBefore(policy, model, SPACE, BLOCKS, LIMIT) for policy in policies]
    static, random = run_live(controllers, model, METRIC, requests, (0.5, 2.0), seed=0)
    assert model.active_setting == before
    assert (static.name, random.name) == ("static_tier-low_topk2_blocks3", "random")
    assert static.scores.shape == static.latency_s.shape == (2, 3)
    assert set(static.choices[0]) == {choice_of("low", 2, 3)}
    assert random.choices[1] == tuple(policies[1].choose(each.features, 2.0) for each in requests)
    assert (static.latency_s > static.overhead_s).all()


def test_answers_in_groups_score_as_answers_one_by_one(model, requests):
    choices = [choice_of("low", 2, 3), choice_of("medium", 4, 4), choice_of("low", 2, 3)]
    grouped = scores_of_choices(model, METRIC, requests, choices, SPACE, BLOCKS, LIMIT, 8)
    alone = [
        run_live([ChosenBefore(StaticPolicy(choice), model, SPACE, BLOCKS, LIMIT)], model, METRIC, [request], (1.0,), 0)
        for choice, request in zip(choices, requests, strict=True)
    ]
    assert grouped.tolist() == [outcomes[0].scores[0, 0] for outcomes in alone]


def test_a_request_that_the_model_cannot_run_is_left_out_with_its_reason(model, requests):
    first, second, third = requests
    # A token of the tokenizer that the embedding lacks.
    beyond = {
        tier: replace(each, inputs={**each.inputs, "input_ids": torch.full_like(each.inputs["input_ids"], 10**6)})
        for tier, each in second.prepared.items()
    }
    running, failed = requests_that_run(model, SPACE, BLOCKS, [first, replace(second, prepared=beyond), third])
    assert running == [first, third] and list(failed) == [1]
    assert failed[1].startswith("sample 1: IndexError: ")


def test_a_task_that_breaks_at_a_sample_leaves_that_sample_out(model):
    class Odd:
        name, prompt = TASK.name, TASK.prompt

        def __getitem__(self, index):
            return TASK[index] if index != 2 else {}["odd"]

    made, failed = prepare_requests(model, Odd(), [1, 2], SPACE.tiers)
    assert [each.sample.sample_id for each in made] == [1] and failed == {2: "sample 2: KeyError: 'odd'"}


def test_warm_up_runs_each_tiling_once(model, requests):
    layouts = {
        (prepared.shape.actual.tiling, prepared.shape.actual.image_size)
        for request in requests
        for prepared in request.prepared.values()
    }
    assert warm_up(model, SPACE, BLOCKS, [*requests, *requests], LIMIT) == len(layouts)


def test_requests_know_task_picture_and_best_score(requests):
    found = requests_of(requests, METRIC)
    assert found.tasks == ("reference_vqa",) * 3
    assert found.pictures[0] == requests[0].sample.image_id
    assert np.array_equal(found.best, np.ones(3))
