"""Models of transformers with fewer image tokens: the logits of the model that is given the shorter prompt by hand."""

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from experiment_core_utils.b_model_loader import find_model
from experiment_core_utils.engines.cuda_graphs import Reruns
from experiment_core_utils.engines.kept_tokens import kept_places
from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import tier_target
from experiment_core_utils.knobs.visual_token_keep import KeptTokens
from experiment_core_utils.measuring.sample_runs import check_proof
from experiment_core_utils.measuring.staged_runs import run_staged
from experiment_core_utils.models.hf.adapter import TransformersModel
from experiment_core_utils.primitives.errors import KnobDidNotAct
from experiment_core_utils.primitives.private_apis import flattened, unflattened
from tests.models.hf.test_batch import SAMPLES, sample
from tests.models.hf.test_graphed_stages import endless, read
from tests.models.tiny_checkpoints import write_checkpoint
from tests.models.tiny_pictures import PICTURE_FAMILIES

STEPS = 4
LOW = tier_target("low")
# Of each way to place features: rows of one picture or of all, several kinds of positions, features for several blocks,
# masks that let image tokens see each other, a window.
CHECKPOINTS = ["llava", "llava_next", "qwen2_5_vl", "qwen3_vl_moe", "internvl", "smolvlm", "idefics3", "glm4v_moe"]
TRIED = [*CHECKPOINTS, *PICTURE_FAMILIES]
Loaded = Callable[[str], TransformersModel]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def written(family: str) -> Path:
        try:
            return write_checkpoint(PICTURE_FAMILIES.get(family, family), tmp_path_factory.mktemp(family))
        except ImportError as error:
            # In older versions of transformers this processor needs torchvision.
            if family != "idefics3":
                raise
            pytest.skip(str(error).strip().splitlines()[0])

    return written


@pytest.fixture(scope="module")
def model_of(folder_of: Callable[[str], Path]) -> Loaded:
    @cache
    def loaded(family: str) -> TransformersModel:
        return read(folder_of(family))

    return loaded


def at(model: TransformersModel, keep: KeptTokens, *, fewer: bool) -> Setting:
    top_k = model.default_top_k if not fewer or model.num_experts is None else 1
    blocks = RunningBlocks.of((0, 2) if fewer else range(model.num_total_blocks))
    return Setting.of(vision=LOW, visual_token_keep=keep, top_k=top_k, num_active_blocks=blocks)


def request(model: TransformersModel, place: int) -> Mapping[str, Any]:
    size, words = SAMPLES[place]
    return model.to_device(model.prepare(sample(place, size), words, LOW.crops).inputs)


@torch.inference_mode()
def logits_by_hand(model: TransformersModel, keep: KeptTokens, inputs: Mapping[str, Any], token: int) -> torch.Tensor:
    """Logits [2, V] after the prompt and after the token behind it, in one pass over what is kept of both."""
    plain, ids = model.model, inputs["input_ids"]
    encoded = model.encode_image(inputs)
    pooled = encoded.pooler_output
    features = torch.cat(list(pooled)) if isinstance(pooled, tuple | list) else pooled.flatten(0, -2)
    is_image = ids[0] == model.requests.placeholder
    places = is_image.nonzero().flatten().tolist()
    assert len(places) == len(features)
    kept = kept_places(keep, features, ids[0, places[0] :].tolist()).tolist()
    dropped = set(places) - {places[each] for each in kept}
    stay = [place for place in range(ids.shape[1]) if place not in dropped]
    assert len(kept) == int(len(places) * keep.fraction + 0.5)

    embeddings = plain.get_input_embeddings()(ids)[0].clone()
    embeddings[is_image] = features
    for place, mark in enumerate(getattr(plain.config, "visual_indicator_token_ids", ())):
        embeddings[ids[0] == mark] = encoded.visual_indicator_features[place]
    last = plain.get_input_embeddings()(torch.tensor([token]))
    given: dict[str, Any] = {"inputs_embeds": torch.cat([embeddings[stay], last])[None]}
    if "image_grid_thw" in inputs:
        positions, _ = plain.model.get_rope_index(
            ids, image_grid_thw=inputs["image_grid_thw"], mm_token_type_ids=inputs["mm_token_type_ids"]
        )
        given["position_ids"] = torch.cat([positions[:, :, stay], positions[:, :, -1:] + 1], dim=-1)
    else:
        first = 1 if plain.config.model_type == "paligemma" else 0
        given["position_ids"] = torch.arange(first, first + len(stay) + 1)[None]
    if getattr(encoded, "deepstack_features", None):
        given["visual_pos_masks"] = torch.cat([is_image[stay], torch.tensor([False])])[None]
        deepstack = [
            torch.cat(list(each)) if isinstance(each, tuple | list) else each for each in encoded.deepstack_features
        ]
        given["deepstack_visual_embeds"] = [each[kept] for each in deepstack]
    runs = plain.get_decoder()
    if "token_type_ids" in inputs:
        # Its base model makes masks of them; a token behind the prompt is no picture, and sees what is before it alone.
        behind = 0 if plain.config.model_type == "gemma3" else 1
        given["token_type_ids"] = torch.cat([inputs["token_type_ids"][:, stay], torch.tensor([[behind]])], dim=1)
        runs = plain.base_model
    hidden = runs(**given, use_cache=False).last_hidden_state
    return plain.get_output_embeddings()(hidden[0, -2:])


@pytest.mark.parametrize("family", TRIED)
@pytest.mark.parametrize("keep", [KeptTokens(0.5, "divprune"), KeptTokens(0.25, "random", 3)], ids=repr)
def test_the_logits_are_those_of_the_shorter_prompt(model_of: Loaded, family: str, keep: KeptTokens) -> None:
    model = model_of(family)
    for fewer in (False, True):
        setting = at(model, keep, fewer=fewer)
        model.apply(setting)
        for place in (0, 2):
            inputs = request(model, place)
            logits, state = model.prefill(inputs, model.encode_image(inputs))
            token = logits.argmax(dim=-1, keepdim=True)
            after = model.decode_step(token, state)
            expected = logits_by_hand(model, keep, inputs, int(token))
            torch.testing.assert_close(torch.cat([logits, after]), expected, rtol=1e-3, atol=1e-4)


@torch.inference_mode()
def logits_by_stages(model: TransformersModel, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Logits [STEPS, V] after the prompt and after each of the likeliest tokens."""
    logits, state = model.prefill(inputs, model.encode_image(inputs))
    found = [logits]
    for _ in range(STEPS - 1):
        found.append(model.decode_step(found[-1].argmax(dim=-1, keepdim=True), state))
    return torch.cat(found)


@pytest.mark.parametrize("family", TRIED)
def test_answers_are_those_of_the_stages_by_generate_by_graphs_and_in_batches(
    model_of: Loaded, folder_of: Callable[[str], Path], family: str
) -> None:
    """Pictures of several shapes, so that rows of a batch lose different numbers of tokens, and one without any."""
    model, other = model_of(family), read(folder_of(family))
    graphed = endless(TransformersModel(other.name, other.model, other.requests, "graph", Reruns()))
    setting = at(model, KeptTokens(0.3, "norm"), fewer=True)
    model.apply(setting)
    # PaliGemma's processor refuses a prompt without a picture.
    requests = [request(model, place) for place in (0, 5 if family == "paligemma" else 1, 2, 3)]
    by_stages = [logits_by_stages(model, inputs) for inputs in requests]
    alone = [tuple(logits.argmax(dim=-1).tolist()) for logits in by_stages]
    assert run_staged(model, requests[2], STEPS).token_ids == alone[2]
    assert model.answer_batch(requests, STEPS) == alone
    # By `generate()`, one request and all of them.
    for rows in ([2], [0, 1, 2, 3]):
        followed = model.follow_batch([requests[row] for row in rows], [alone[row] for row in rows])
        for row, found in zip(rows, followed, strict=True):
            torch.testing.assert_close(found.logits, by_stages[row], rtol=1e-3, atol=1e-4)
    assert not check_proof(model.prove(setting, requests[0]), setting, model)
    graphed.apply(setting)
    for inputs, expected in zip(requests, alone, strict=True):
        graphed.warm_up(inputs, STEPS)
        assert run_staged(graphed, inputs, STEPS).token_ids == expected
    assert not check_proof(graphed.prove(setting, requests[0]), setting, graphed)
    is_graphed = graphed.describe()["execution_stages"]["prefill"] == "cuda graph"
    assert is_graphed or "Sliding" in str(graphed.describe()["execution_reason"])


@pytest.mark.parametrize("family", TRIED)
@torch.inference_mode()
def test_all_tokens_are_the_plain_run_to_the_bit(model_of: Loaded, family: str) -> None:
    model = model_of(family)
    inputs = request(model, 2)
    model.apply(at(model, KeptTokens(0.5), fewer=False))
    fewer, _ = model.prefill(inputs, model.encode_image(inputs))
    model.apply(at(model, KeptTokens(1.0), fewer=False))
    logits, _ = model.prefill(inputs, model.encode_image(inputs))
    assert not torch.equal(logits, fewer)
    answered = model.model.generate(
        **inputs, max_new_tokens=STEPS, return_dict_in_generate=True, output_logits=True, eos_token_id=None
    )
    assert torch.equal(logits, answered.logits[0])
    found = run_staged(model, inputs, STEPS).token_ids
    assert found == tuple(answered.sequences[0, inputs["input_ids"].shape[1] :].tolist())


@torch.inference_mode()
def test_pooled_features_beside_the_fields_of_an_output_are_shortened(
    model_of: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers 5.17 has them in SmolVLM, Idefics3 and Gemma 4."""
    model = model_of("llava")
    inputs = request(model, 2)
    model.apply(at(model, KeptTokens(0.5), fewer=False))
    expected = logits_by_stages(model, inputs)
    plain = model.model.base_model.get_image_features

    def beside(**given: Any) -> BaseModelOutput:
        found = plain(**given)
        output: Any = BaseModelOutput(last_hidden_state=found.last_hidden_state)
        output.pooler_output = found.pooler_output
        return output

    monkeypatch.setattr(model.model.base_model, "get_image_features", beside)
    assert torch.equal(logits_by_stages(model, inputs), expected)
    # A copy by its leaves, as batches of engines make it, has them too.
    copied = unflattened(*flattened(model.encode_image(inputs)))
    pooled = plain(inputs["pixel_values"]).pooler_output
    assert torch.equal(torch.cat(list(copied.pooler_output)), torch.cat(list(pooled)))


def test_a_prefill_of_another_length_is_no_proof(model_of: Loaded) -> None:
    model = model_of("llava")
    whole = at(model, KeptTokens(1.0), fewer=False)
    proof = model.prove(whole, request(model, 0))
    assert proof.prefill_tokens == proof.prompt_tokens
    half = at(model, KeptTokens(0.5), fewer=False)
    with pytest.raises(KnobDidNotAct, match=r"the prefill computed \d+ tokens instead of \d+ without 4 of its 9 image"):
        check_proof(proof, half, model)


def test_families_without_image_tokens_or_features_say_what_was_seen(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    assert "visual_token_keep" not in find_model(str(folder_of("paligemma"))).limits.unsupported
    reason = find_model(str(folder_of("llama"))).limits.unsupported["visual_token_keep"]
    assert reason.endswith("is a text model: it has no image tokens")
    # A processor that says more image tokens than the encoder gives features.
    folder = write_checkpoint("internvl", tmp_path)
    content = json.loads((folder / "processor_config.json").read_text())
    (folder / "processor_config.json").write_text(json.dumps({**content, "image_seq_length": 5}))
    reason = find_model(str(folder)).limits.unsupported["visual_token_keep"]
    assert reason == (
        "a picture of 96 x 64 pixels has 35 image tokens in its prompt, and its get_image_features gives 28 features"
    )
