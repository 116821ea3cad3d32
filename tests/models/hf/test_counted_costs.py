"""Operations and bytes of families without formulas: by hand, and as the formulas where there are some."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import Gemma3TextConfig

from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.models.costs.architecture import UnknownArchitecture
from experiment_core_utils.models.hf import counted_costs
from experiment_core_utils.models.hf.adapter import TransformersModel
from experiment_core_utils.models.hf.counted_costs import CountedCosts
from experiment_core_utils.models.hf.loader import find_hf_model
from experiment_core_utils.models.interface import own_setting
from experiment_core_utils.records.requests import PreparedRequest, RequestShape, VisionGeometry
from experiment_core_utils.tasks.interface import Sample
from tests.models.knob_families import PHI4_MULTIMODAL, UNTRIED_FAMILIES
from tests.models.tiny_checkpoints import write_checkpoint
from tests.models.tiny_families import build


def loaded(family: str, folder: Path) -> tuple[TransformersModel, PreparedRequest]:
    """A tiny model of a family, and a request with a picture."""
    write_checkpoint(family, folder)
    source = find_hf_model(family, folder, json.loads((folder / "config.json").read_text()))
    model = TransformersModel(family, source.auto_class.from_pretrained(folder).eval(), source.requests)
    return model, model.prepare(Sample(0, "x", "", (), Image.new("RGB", (96, 64)), ""), "Which?", None)


# Whose encoders run without values, and whose do not.
@pytest.mark.parametrize("family", ["internvl", "llava_next", "qwen3_vl_moe"])
def test_counts_are_those_of_the_formulas(family: str, tmp_path: Path) -> None:
    model, request = loaded(family, tmp_path)
    setting = own_setting(model)
    by_formula, bytes_by_formula = model.count_flops(setting, request.shape, 5), model.count_bytes(setting)
    counted = CountedCosts(model.model, model.knobs.with_all_blocks)
    counted.note(request.inputs, int((request.inputs["input_ids"] == model.requests.placeholder).sum()))
    assert counted.stages(setting, request.shape, 5) == by_formula
    assert bytes_by_formula is not None
    found = counted.bytes_at(setting, bytes_by_formula.weights_bytes, bytes_by_formula.step_weights_bytes)
    assert found is not None and counted.reason is None
    assert found.cache_bytes(20) == bytes_by_formula.cache_bytes(20)
    assert found.step_bytes(10, 3) == bytes_by_formula.step_bytes(10, 3)
    assert found.activation_bytes(20) is None


def test_a_tower_by_hand(tmp_path: Path) -> None:
    """32 x 32 pixels in 16 patches of 8: two blocks of width 16 and 24, joined to 4 tokens of width 32.

    SigLIP's pooling is computed and left unused: one query, 16 keys and values, an MLP.
    """
    model, request = loaded("gemma3", tmp_path)
    assert isinstance(model._architecture, UnknownArchitecture)
    model.to_device(request.inputs)
    found = model.count_flops(own_setting(model), request.shape, 1)
    embedding = 2 * 16 * (3 * 8 * 8) * 16
    block = 2 * 16 * (4 * 16 * 16 + 2 * 16 * 24) + 4 * 16 * 16 * 16
    pooling = 2 * (1 + 16 + 16 + 1) * 16 * 16 + 4 * 16 * 16 + 2 * 2 * 16 * 24
    assert found is not None
    assert found.vision_flops == embedding + 2 * block + pooling + 2 * 4 * 16 * 32
    assert model.describe()["flops_reason"] is None


def inside_the_prefill(text_tokens: tuple[int, ...]) -> list[tuple[int | None, str | None]]:
    """FLOPs of one picture in a model that encodes it inside the prefill, behind prompts of so many tokens, and why
    there are none.
    """
    model, inputs = PHI4_MULTIMODAL.built(), PHI4_MULTIMODAL.picture()  # type: ignore[misc]
    counted, seen, found = CountedCosts(model, nullcontext), VisionGeometry(0, None, None, 13), []
    setting = Setting.of(top_k=None, num_active_blocks=RunningBlocks.of((0, 1, 2, 3)))
    for text in text_tokens:
        ids = torch.cat([inputs["input_ids"][:, :14], torch.full((1, text - 1), 9)], dim=1)
        counted.note({**inputs, "input_ids": ids}, 13)
        stages = counted.stages(setting, RequestShape(seen, seen, 13, 0, text, 0.0), 1)
        found.append((None if stages is None else stages.vision_flops, counted.reason))
    return found


def test_a_tower_inside_the_prefill_by_hand() -> None:
    """Two crops of 32 x 32 pixels in 16 patches of 8, whose states become 13 tokens; the same of another prompt."""
    embedding = 2 * 16 * (3 * 8 * 8) * 16
    block = 2 * 16 * (4 * 16 * 16 + 2 * 16 * 20) + 4 * 16 * 16 * 16
    pooling = 2 * (1 + 16 + 16 + 1) * 16 * 16 + 4 * 16 * 16 + 2 * 2 * 16 * 20
    flops = 2 * (embedding + 2 * block + pooling) + 2 * 13 * (16 * 32 + 32 * 32)
    assert inside_the_prefill((3, 5)) == [(flops, None)] * 2


def test_a_tower_that_is_not_found_has_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counted_costs, "vision_entry", lambda _: None)
    reason = "pictures are encoded inside the prefill, and no module of it is known to do so"
    assert inside_the_prefill((3,)) == [(None, reason)]


def test_a_decoder_that_needs_values_has_a_reason_before_anything_is_counted() -> None:
    """What a run says of its model is written before its first request."""
    reason = CountedCosts(UNTRIED_FAMILIES["inkling_text"].built(), nullcontext).reason
    assert reason is not None and reason.startswith("'inkling_text' cannot be counted without weights: RuntimeError: ")


TEXT = RequestShape(None, None, 0, 0, 11, 0.0)


def text_model() -> tuple[Any, CountedCosts]:
    """Three blocks, two of which attend to 4 keys."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 3, "head_dim": 6}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 4, "layer_types": kinds}
    model = build(Gemma3TextConfig(**sizes, **heads, bos_token_id=1, eos_token_id=2, pad_token_id=0))
    return model, CountedCosts(model, nullcontext)


def block_pass(tokens: int, attended: int) -> int:
    """Queries and output of 24, keys and values of 12, a gated MLP of 24; scores and values of 24."""
    return 2 * tokens * 32 * (2 * 24 + 2 * 12 + 3 * 24) + 4 * tokens * attended * 24


@pytest.mark.parametrize(("blocks", "windows"), [((0, 1, 2), 2), ((0, 1), 1)])
def test_a_text_decoder_by_hand(blocks: tuple[int, ...], windows: int) -> None:
    _, counted = text_model()
    setting = Setting.of(top_k=None, num_active_blocks=RunningBlocks.of(blocks))
    head, number = 2 * 32 * 97, len(blocks)
    found = counted.stages(setting, TEXT, 3)
    steps = [block_pass(1, context) + windows * block_pass(1, 4) + head for context in (12, 13)]
    assert found is not None
    assert found.prefill_flops == number * block_pass(11, 11) + head
    assert found.decode_flops_per_token == sum(steps) / 2
    memory = counted.bytes_at(setting, 1000, 10.0)
    # Keys and values of 12 each; a window keeps 3, and a step sees its own key too.
    assert memory is not None and memory.cache_bytes(20) == 4 * 24 * (20 + windows * 3)
    assert memory.step_bytes(11, 2) == 2 * 10.0 + 4 * 24 * (12 + 13 + 2 * windows * 4)


def test_a_picture_that_was_not_seen_has_no_figure(tmp_path: Path) -> None:
    model, request = loaded("gemma3", tmp_path)
    assert model.count_flops(own_setting(model), request.shape, 1) is None
    assert "4 image tokens are not known: no such picture was seen" in model.describe()["flops_reason"]
