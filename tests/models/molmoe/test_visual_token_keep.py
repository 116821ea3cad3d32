"""MolmoE with fewer image tokens: the logits of the modules that are given the shorter prompt by hand."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from experiment_core_utils.engines.greedy import generate_greedily
from experiment_core_utils.engines.kept_tokens import kept_places
from experiment_core_utils.knobs.active_blocks import RunningBlocks, blocks_of
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.top_k import experts_of
from experiment_core_utils.knobs.vision_tokens import tier_target
from experiment_core_utils.knobs.visual_token_keep import KeptTokens
from experiment_core_utils.measuring.sample_runs import check_proof
from experiment_core_utils.measuring.staged_runs import run_staged
from experiment_core_utils.models.molmoe.staged_model import MolmoeStagedModel
from experiment_core_utils.primitives.device import NoMarks
from experiment_core_utils.tasks.registry import load_task
from tests.models.molmoe.executions import eager_and_graph

NEW_TOKENS = 5
LOW = tier_target("low")


def at(keep: KeptTokens, top_k: int = 4, blocks: tuple[int, ...] = (0, 1, 2, 3)) -> Setting:
    return Setting.of(vision=LOW, visual_token_keep=keep, top_k=top_k, num_active_blocks=RunningBlocks.of(blocks))


@pytest.fixture(scope="module")
def models(tiny_checkpoint: Path) -> dict[str, MolmoeStagedModel]:
    return eager_and_graph(tiny_checkpoint)


@pytest.fixture(scope="module")
def requests(models: dict[str, MolmoeStagedModel]) -> list[Mapping[str, Any]]:
    """Two with pictures, of different lengths, and one without."""
    task, model = load_task("reference_vqa", "validation"), models["eager"]
    found = [model.prepare(sample, task.prompt(sample), LOW.crops).inputs for sample in (task[0], task[5])]
    found[1] = {**found[1], "input_ids": torch.cat([found[1]["input_ids"], torch.tensor([[9, 8, 7]])], dim=1)}
    return [model.to_device(each) for each in (*found, {"input_ids": torch.tensor([[7, 20, 33, 46, 59]])})]


def logits_by_hand(model: MolmoeStagedModel, setting: Setting, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Of the embeddings of the whole prompt, from which those that are dropped are taken away."""
    keep = setting.value("visual_token_keep")
    features = model.encode_image(inputs)
    assert features is not None
    embeddings = model.model.model.embed(inputs["input_ids"], features)[0]
    of_feature = {
        int(place): feature
        for place, feature in zip(features.image_input_idx[0], features.pooler_output[0], strict=True)
        if place >= 0
    }
    places = sorted(of_feature)
    in_order = torch.stack([of_feature[place] for place in places])
    ids = inputs["input_ids"][0].tolist()
    kept = {places[each] for each in kept_places(keep, in_order, ids[places[0] :]).tolist()}
    assert len(kept) == int(len(places) * keep.fraction + 0.5)
    stay = [place for place in range(len(embeddings)) if place not in of_feature or place in kept]
    with model.model.knobs(experts_of(setting), blocks_of(setting)):
        hidden = model.model.model(inputs_embeds=embeddings[stay][None]).last_hidden_state
        return model.model.lm_head(hidden[:, -1])


@pytest.mark.parametrize("execution", ["eager", "graph"])
@pytest.mark.parametrize("keep", [KeptTokens(0.5, "divprune"), KeptTokens(0.25, "random", 3)], ids=repr)
@torch.inference_mode()
def test_the_logits_are_those_of_the_shorter_prompt(
    models: dict[str, MolmoeStagedModel], requests: list[Mapping[str, Any]], execution: str, keep: KeptTokens
) -> None:
    model = models[execution]
    for setting in (at(keep), at(keep, 2, (0, 2))):
        model.apply(setting)
        for inputs in requests[:2]:
            model.warm_up(inputs, NEW_TOKENS)
            logits, _ = model.prefill(inputs, model.encode_image(inputs))
            torch.testing.assert_close(logits, logits_by_hand(model, setting, inputs), rtol=1e-4, atol=1e-5)


def test_answers_are_the_same_by_modules_by_engines_and_in_batches(
    models: dict[str, MolmoeStagedModel], requests: list[Mapping[str, Any]]
) -> None:
    setting = at(KeptTokens(0.3, "norm"), 2, (0, 1, 3))
    models["eager"].apply(setting)
    expected = [generate_greedily(models["eager"], inputs, NEW_TOKENS, NoMarks()).token_ids for inputs in requests]
    for model in models.values():
        model.apply(setting)
        assert [run_staged(model, inputs, NEW_TOKENS).token_ids for inputs in requests] == expected
        assert model.answer_batch(requests, NEW_TOKENS) == expected
        proof = model.prove(setting, requests[0])
        assert not check_proof(proof, setting, model)
        whole = requests[0]["input_ids"].shape[1]
        features = int((requests[0]["image_input_idx"] >= 0).sum())
        assert proof.prefill_tokens == whole - features + int(0.3 * features + 0.5)
        first, second = (model.prefill(requests[0], model.encode_image(requests[0])) for _ in range(2))
        # A state of the same request can be decoded from after it was prefilled again.
        token = torch.tensor([[9]])
        assert torch.equal(model.decode_step(token, first[1]), model.decode_step(token, second[1]))
