"""Blocks in lists of any name: a decoder with some of them computes what one built with these alone does."""

import re
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from experiment_core_utils.models.common.block_modules import block_stack, block_stacks, final_norm_of
from experiment_core_utils.models.hf.knobs.controller import DecoderKnobs
from tests.models.other_lists import NONE_LISTED, OTHER_LISTS
from tests.models.tiny_families import build

KEPT = (0, 2)
IDS = torch.tensor([[5, 11, 7, 3, 29, 4, 83, 60, 2]])


def _count_name(config: Any) -> str:
    return config.attribute_map.get("num_hidden_layers", "num_hidden_layers")


def _weights_of(full: nn.Module, name: str) -> dict[str, torch.Tensor]:
    """The state of the full model with block 2 in the place of block 1."""
    moved = {}
    for key, value in full.state_dict().items():
        found = re.search(rf"\b{name}\.(\d+)\.", key)
        if found is None:
            moved[key] = value
        elif int(found[1]) in KEPT:
            moved[key.replace(found[0], f"{name}.{KEPT.index(int(found[1]))}.", 1)] = value
    return moved


@pytest.mark.parametrize("name", OTHER_LISTS)
def test_the_reference_is_a_model_of_these_blocks(name: str) -> None:
    config = OTHER_LISTS[name]()
    full: Any = build(config)
    stack = block_stack(full)
    assert stack is not None
    smaller: Any = AutoModelForCausalLM.from_config(OTHER_LISTS[name](**{_count_name(config): len(KEPT)})).eval()
    smaller.load_state_dict(_weights_of(full, stack.name))
    knobs = DecoderKnobs(full)
    before = full(IDS).logits
    with torch.inference_mode(), knobs.applied(None, KEPT):
        skipped = full(IDS).logits
    assert torch.allclose(skipped, smaller(IDS).logits, atol=1e-5)
    assert not torch.allclose(skipped, before, atol=1e-2)
    assert torch.equal(full(IDS).logits, before) and len(stack.blocks) == 3


@pytest.mark.parametrize(
    ("name", "blocks", "reason"),
    [
        ("hrm_text", 1, "its decoder has no list of modules through which a prompt runs once, one after another"),
        ("gpt_neo", 4, "its blocks keep their number as layer_id"),
    ],
)
def test_blocks_are_refused_by_themselves(name: str, blocks: int, reason: str) -> None:
    knobs = DecoderKnobs(build(NONE_LISTED[name]()))
    assert (knobs.num_total_blocks, knobs.blocks_unsupported_reason) == (blocks, reason)
    assert knobs.top_k_unsupported_reason == "the model is dense" and knobs.failure is None


def test_lists_of_another_length_or_with_fewer_weights_come_later() -> None:
    model: Any = build(OTHER_LISTS["gpt2"]())
    model.transformer.few = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    model.transformer.wide = nn.ModuleList([nn.Linear(512, 512)])
    assert [stack.name for stack in block_stacks(model)] == ["h", "few", "wide"]
    assert final_norm_of(model) is model.transformer.ln_f


def test_a_list_that_no_prompt_runs_through_is_left_out() -> None:
    """The heavier list as long as the config says is never called."""
    model: Any = build(OTHER_LISTS["gpt2"]())
    model.transformer.aside = nn.ModuleList(nn.Linear(512, 512) for _ in range(3))
    assert block_stacks(model)[0].name == "aside"
    assert DecoderKnobs(model).every_block == tuple(model.transformer.h)
