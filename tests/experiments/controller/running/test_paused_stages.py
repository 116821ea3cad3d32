"""Adaptive inference by engines against the same by modules, token by token, on a tiny random model in float32."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from PIL import Image

from experiment_core_utils.b_model_loader import find_model
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.engines.answer_ends import NO_ENDS, AnswerEnds
from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.greedy import generate_async
from experiment_core_utils.engines.paused_runner import EnginePausedPrefill
from experiment_core_utils.knobs.block_choice import BlockChoice
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import tier_target
from experiment_core_utils.models.molmoe.eager.paused_stages import EagerPausedPrefill
from experiment_core_utils.models.molmoe.staged_model import MolmoeStagedModel
from experiment_core_utils.primitives.device import HostMarks
from experiment_core_utils.primitives.errors import SettingError
from experiment_core_utils.tasks.interface import Sample
from experiments.controller.knob_choices import KnobSpace, choice_of
from experiments.controller.networks.action_logits import ActionLogits
from experiments.controller.networks.two_stage import TwoStageNetworks, action_space
from experiments.controller.running.adaptive_generation import (
    AdaptiveModel,
    AdaptiveRequest,
    AsyncPausedStages,
    PausedStages,
)
from experiments.controller.running.deciders import NetworkDecider
from tests.experiments.controller.running.fixed_decider import FixedDecider
from tests.models.molmoe.executions import eager_and_graph
from tests.same_floats import assert_same_floats

KNOBS = KnobSpace(("low", "medium"), (1, 2, 4), (2, 3, 4), num_total_blocks=4, first_top_k=4)
LIMIT = 5


@pytest.fixture(scope="module")
def models(tiny_checkpoint: Path) -> dict[str, MolmoeStagedModel]:
    return eager_and_graph(tiny_checkpoint)


@pytest.fixture(scope="module")
def request_(models: dict[str, MolmoeStagedModel]) -> AdaptiveRequest:
    picture = Image.new("RGB", (500, 400), (20, 90, 200))
    sample = Sample(0, "0", "Which colour?", ("blue",), picture, "colour")
    prompt = "Which colour is it?"
    prepared = {tier: models["eager"].prepare(sample, prompt, tier_target(tier).crops) for tier in KNOBS.tiers}
    return AdaptiveRequest(sample, prompt, LIMIT, prepared)


def test_what_is_requested_runs(models: dict[str, MolmoeStagedModel]) -> None:
    assert isinstance(models["eager"].split, EagerPausedPrefill)
    assert isinstance(models["graph"].split, EnginePausedPrefill)


@pytest.mark.parametrize("pause", [1, 2, 3, 4])
def test_answers_are_those_of_the_modules(
    models: dict[str, MolmoeStagedModel], request_: AdaptiveRequest, pause: int
) -> None:
    # Without scores the first blocks run: behind a pause of 3, say, 3 or 4 of them.
    for tier, top_k, count in product(
        ("low",), KNOBS.top_ks, [count for count in KNOBS.block_counts if count >= pause]
    ):
        decider = FixedDecider(choice_of(tier, top_k, count), pause)
        found = {}
        for execution, model in models.items():
            adaptive = AdaptiveModel(model, decider, BlockChoice())
            adaptive.warm_up([request_])
            found[execution] = adaptive.adaptive_generate(request_, 0.5)
        assert found["graph"].token_ids == found["eager"].token_ids
        assert len(found["graph"].token_ids) == LIMIT
        assert replace(found["graph"], times=found["eager"].times) == found["eager"]


def test_networks_see_and_choose_the_same(models: dict[str, MolmoeStagedModel], request_: AdaptiveRequest) -> None:
    space, chosen = action_space(KNOBS, BlockChoice(), pauses=(1, 2, 3)), set()
    for seed, budget_s in product((1, 2, 3), (0.02, 1.0)):
        networks = TwoStageNetworks(space, 32, embedding_rms=0.2, seed=seed)
        # Odds far from even, so that the draw of untrained networks is their own.
        for head in (networks.first_out, networks.second_out):
            head.weight.data.mul_(50)
        runs, seen = [], []
        for model in models.values():
            decider = NetworkDecider(ActionLogits.for_model(model, networks), space)
            runs.append(AdaptiveModel(model, decider, BlockChoice()).adaptive_generate(request_, budget_s))
            seen.append(decider.seen)
        assert_same_floats(seen[1][0], seen[0][0])
        torch.testing.assert_close(seen[1][1], seen[0][1], rtol=1e-5, atol=1e-5)
        assert seen[1][2] == seen[0][2] and runs[1].token_ids == runs[0].token_ids
        chosen.add((runs[0].choice, runs[0].pause))
    assert len(chosen) > 1


def test_an_answer_without_a_picture(models: dict[str, MolmoeStagedModel]) -> None:
    request = AdaptiveRequest(Sample(0, "0", "Which?", ("a",), None, "colour"), "Which colour?", LIMIT)
    decider = FixedDecider(choice_of("low", 2, 3), 2)
    eager, graph = (
        AdaptiveModel(each, decider, BlockChoice()).adaptive_generate(request, 1.0) for each in models.values()
    )
    assert graph.token_ids == eager.token_ids and graph.times.vision_s is None


@pytest.mark.parametrize("ends_at", [0, 2, None])
def test_a_loop_that_does_not_wait_gives_the_same_tokens_and_marks(
    models: dict[str, MolmoeStagedModel], request_: AdaptiveRequest, ends_at: int | None
) -> None:
    model, knobs = models["graph"], EngineKnobs(2, (0, 1, 3))
    split = model.split
    assert isinstance(split, EnginePausedPrefill)
    inputs = model.to_device(request_.prepared["low"].inputs)
    plain = PausedStages(split, model.device, NO_ENDS, 2, None, LIMIT, lambda _: knobs)
    with pytest.raises(SettingError, match="chosen inside the prefill"):
        _ = plain.chosen
    with torch.inference_mode():
        logits, state = plain.prefill(inputs, plain.encode_image(inputs))
        expected = [int(logits.argmax())]
        while len(expected) < LIMIT:
            expected.append(int(plain.decode_step(torch.tensor([expected[-1:]]), state).argmax()))
    assert plain.chosen == knobs
    ends = NO_ENDS if ends_at is None else AnswerEnds(frozenset({expected[ends_at]}))
    stages, marks = AsyncPausedStages(split, model.device, ends, 2, None, LIMIT, lambda _: knobs), HostMarks()
    found = generate_async(stages, inputs, LIMIT, ends, marks).token_ids
    length = LIMIT if ends_at is None else expected.index(expected[ends_at]) + 1
    assert found == tuple(expected[:length])
    # Vision, prefill and steps.
    assert len(marks.seconds()) == 1 + length


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graphed_answers_are_those_of_the_modules(tiny_checkpoint: Path, request_: AdaptiveRequest) -> None:
    space = action_space(KNOBS, BlockChoice(), pauses=(1, 2, 3))
    networks = TwoStageNetworks(space, 32, embedding_rms=0.2, seed=1).cuda()
    runs: dict[str, list[tuple[tuple[int, ...], Setting, int]]] = {}
    for execution in ("eager", "graph"):
        flags = ["--model_path", str(tiny_checkpoint), "--device", "cuda", "--precision", "float32"]
        config = parse_config([*flags, "--execution", execution])
        model = find_model(str(tiny_checkpoint)).load(config.model, torch.device("cuda"))
        assert isinstance(model, MolmoeStagedModel)
        logits = ActionLogits.for_model(model, networks)
        deciders = [NetworkDecider(logits, space, torch.Generator().manual_seed(seed)) for seed in range(4)]
        for adaptive in (AdaptiveModel(model, decider, BlockChoice()) for decider in deciders):
            adaptive.warm_up([request_])
            run = adaptive.adaptive_generate(request_, 0.5)
            runs.setdefault(execution, []).append((run.token_ids, run.choice, run.pause))
    assert runs["graph"] == runs["eager"] and len(set(runs["graph"])) > 1
