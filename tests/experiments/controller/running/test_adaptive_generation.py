"""Adaptive inference against plain staged runs at the same setting, on a tiny random model in float32 on the CPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from experiment_core_utils.b_model_loader import find_model
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.knobs.active_blocks import RunningBlocks, blocks_of, num_blocks_of
from experiment_core_utils.knobs.block_choice import BlockChoice
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.top_k import experts_of
from experiment_core_utils.knobs.vision_tokens import tier_target, vision_of
from experiment_core_utils.measuring.staged_runs import run_staged
from experiment_core_utils.models.molmoe.staged_model import MolmoeStagedModel
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.tasks.interface import Sample
from experiments.controller.knob_choices import KnobSpace, choice_of
from experiments.controller.networks.action_logits import ActionLogits
from experiments.controller.networks.two_stage import TwoStageNetworks, action_space
from experiments.controller.running.adaptive_generation import AdaptiveModel, AdaptiveRequest, AdaptiveTimes
from experiments.controller.running.deciders import Decider, NetworkDecider
from tests.experiments.controller.running.fixed_decider import FixedDecider

# Of 4 blocks block 1 is the least important: 3 blocks are 0, 2 and 3, 2 blocks are 0 and 3.
SCORES = BlockChoice(scores={1: 0.1, 2: 0.2, 3: 0.3})
KNOBS = KnobSpace(("low", "medium"), (1, 2, 4), (2, 3, 4), num_total_blocks=4, first_top_k=4)
LIMIT = 5


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> MolmoeStagedModel:
    config = parse_config(["--model_path", str(tiny_checkpoint), "--device", "cpu"])
    found = find_model(str(tiny_checkpoint)).load(config.model, torch.device("cpu"))
    assert isinstance(found, MolmoeStagedModel)
    return found


def adaptive_request(with_picture: bool = True) -> AdaptiveRequest:
    picture = Image.new("RGB", (500, 400), (20, 90, 200)) if with_picture else None
    return AdaptiveRequest(Sample(0, "0", "Which colour?", ("blue",), picture, "colour"), "Which colour is it?", LIMIT)


def plain_tokens(model: MolmoeStagedModel, request: AdaptiveRequest, setting: Setting) -> tuple[int, ...]:
    prepared = model.prepare(request.sample, request.prompt, vision_of(setting).bounds)
    with model.restored_afterwards():
        model.apply(setting)
        return run_staged(model, model.to_device(prepared.inputs), request.max_new_tokens).token_ids


def adaptive(model: MolmoeStagedModel, decider: Decider, blocks: BlockChoice, request: AdaptiveRequest) -> Any:
    return AdaptiveModel(model, decider, blocks).adaptive_generate(request, 0.5)


@pytest.mark.parametrize("with_picture", [True, False])
@pytest.mark.parametrize(
    ("choice", "pause", "blocks", "active"),
    [
        (choice_of("medium", 2, 3), 1, SCORES, (0, 2, 3)),
        (choice_of("low", 1, 2), 1, SCORES, (0, 3)),
        (choice_of("low", 4, 3), 3, BlockChoice(), (0, 1, 2)),
        (choice_of("low", 4, 4), 4, SCORES, (0, 1, 2, 3)),
    ],
)
def test_a_fixed_choice_answers_as_the_plain_run_at_its_setting(
    model: MolmoeStagedModel,
    choice: Setting,
    pause: int,
    blocks: BlockChoice,
    active: tuple[int, ...],
    with_picture: bool,
) -> None:
    request = adaptive_request(with_picture)
    setting = Setting.of(
        vision=tier_target(vision_of(choice).tier), top_k=experts_of(choice), num_active_blocks=RunningBlocks.of(active)
    )
    found = adaptive(model, FixedDecider(choice, pause), blocks, request)
    assert (found.choice, found.pause, found.setting) == (choice, pause, setting)
    assert found.token_ids == plain_tokens(model, request, setting)
    assert (found.request.shape.vision_tokens > 0) == with_picture == (found.times.vision_s is not None)


@pytest.mark.parametrize("budget_s", [0.01, 0.5, 40.0])
def test_the_budget_changes_the_choice_but_not_the_answer_of_a_choice(
    model: MolmoeStagedModel, budget_s: float
) -> None:
    space = action_space(KNOBS, SCORES, pauses=(1,))
    networks = TwoStageNetworks(space, 32, embedding_rms=0.2, seed=1)
    request = adaptive_request()
    # Odds far from even, so that the draw of untrained networks is their own.
    for head in (networks.first_out, networks.second_out):
        head.weight.data.mul_(50)
    decider = NetworkDecider(ActionLogits.for_model(model, networks), networks.space)
    found = AdaptiveModel(model, decider, SCORES).adaptive_generate(request, budget_s)
    assert found.token_ids == plain_tokens(model, request, found.setting)
    prompt, states, actions = decider.seen
    assert prompt.shape == (32,) and states.shape == (2, 32)
    chosen = (KNOBS.tiers[actions[0]], KNOBS.top_ks[actions[2]], KNOBS.block_counts[actions[3]])
    assert chosen == (vision_of(found.choice).tier, experts_of(found.choice), num_blocks_of(found.choice))


def test_stage_2_sees_the_budget_and_not_only_the_prompt(model: MolmoeStagedModel) -> None:
    networks = TwoStageNetworks(action_space(KNOBS, SCORES, pauses=(1,)), 32, embedding_rms=0.2, seed=1)
    decider = NetworkDecider(ActionLogits.for_model(model, networks), networks.space)
    seen = []
    for budget_s in (0.1, 0.2):
        AdaptiveModel(model, decider, SCORES).adaptive_generate(adaptive_request(), budget_s)
        seen.append(decider.seen[1])
    # The prompt's last token is what it was; the budget token behind it is another.
    torch.testing.assert_close(seen[0][0], seen[1][0], rtol=1e-5, atol=1e-5)
    assert (seen[0][1] - seen[1][1]).abs().max() > 0.01


def test_what_runs_is_what_is_recorded(model: MolmoeStagedModel) -> None:
    ran: list[tuple[int, int]] = []
    handles = [
        block.mlp.gate.register_forward_hook(
            lambda _gate, _inputs, output, index=index: ran.append((index, output[2].shape[-1]))
        )
        for index, block in enumerate(model.decoder_blocks)
    ]
    found = adaptive(
        model, FixedDecider(choice_of("low", 2, 3), 2), BlockChoice(), replace(adaptive_request(), max_new_tokens=2)
    )
    for handle in handles:
        handle.remove()
    assert blocks_of(found.setting) == (0, 1, 2) and found.prefill_experts == (4, 4, 2)
    # Prefill: block 1 ran before stage 2; the decode step runs it with the top-k that was chosen.
    assert ran == [(0, 4), (1, 4), (2, 2), (0, 4), (1, 2), (2, 2)]


def test_knobs_come_back_and_the_parts_add_up(model: MolmoeStagedModel) -> None:
    before = model.active_setting
    times = adaptive(model, FixedDecider(choice_of("low", 1, 2), 1), SCORES, adaptive_request()).times
    assert model.active_setting == before
    assert min(times.first_stage_s, times.vision_s, times.prefill_s, times.second_stage_s, times.preprocess_s) > 0
    known = AdaptiveTimes(0.25, 1.0, 2.0, 0.5, None, preprocess_s=64.0, transfer_s=32.0)
    assert (known.controller_s, known.total_s) == (0.75, 3.75)


def test_what_cannot_be_is_refused(model: MolmoeStagedModel) -> None:
    fixed = FixedDecider(choice_of("low", 2, 3), 2)
    for budget_s in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigurationError, match="give one above 0"):
            AdaptiveModel(model, fixed, SCORES).adaptive_generate(adaptive_request(), budget_s)
    # Block 1 has run behind a pause of two; the three most important ones leave it out.
    with pytest.raises(ConfigurationError, match="leave out one of the first 2"):
        adaptive(model, fixed, SCORES, adaptive_request())
