"""Formulas of models whose knobs were turned by hand, against what a forward pass of the same model computes."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config

from experiment_core_utils.h_metrics_compute import count_prompt_flops
from experiment_core_utils.models.architecture_flops import Architecture, UnknownArchitecture
from experiment_core_utils.models.molmoe.language_model import MolmoeForCausalLM
from experiment_core_utils.models.shapes_in_force import architecture_in_force
from tests.conftest import tiny_config
from tests.models.tiny_families import PATCH_FAMILIES, TEXT_FAMILIES, build, turn

# 7 tokens twice, 3 once.
IDS = torch.full((3, 7), 11)
MASK = torch.tensor([[1] * 7, [0] * 4 + [1] * 3, [1] * 7])
PROMPTS = {"input_ids": IDS, "attention_mask": MASK}


def in_force(model: nn.Module) -> Architecture:
    found = architecture_in_force(model)
    assert isinstance(found, Architecture)
    return found


@pytest.mark.parametrize("name", [*TEXT_FAMILIES, *PATCH_FAMILIES])
def test_logits_at_every_position_agree_with_the_counter(name: str) -> None:
    model: Any = build({**TEXT_FAMILIES, **PATCH_FAMILIES}[name]())
    counted = count_prompt_flops(model, PROMPTS, method="counter")
    formula = count_prompt_flops(model, PROMPTS)
    assert (formula.method, counted.method) == ("formula", "counter")
    assert formula.flops == pytest.approx(counted.flops, rel=1e-3)


@pytest.mark.parametrize(("top_k", "active_blocks"), [(1, None), (5, (0, 3)), (None, (1, 2))])
@pytest.mark.parametrize("name", ["olmoe", "mixtral", "qwen2_moe", "qwen3_moe"])
def test_a_turned_knob_moves_the_formula_as_it_moves_the_counter(
    name: str, top_k: int | None, active_blocks: tuple[int, ...] | None
) -> None:
    model: Any = build(TEXT_FAMILIES[name]())
    before = count_prompt_flops(model, PROMPTS).flops
    turn(model, top_k, active_blocks)
    counted, formula = count_prompt_flops(model, PROMPTS, method="counter"), count_prompt_flops(model, PROMPTS)
    assert (formula.method, formula.counted_on) == ("formula", "config")
    assert formula.flops == pytest.approx(counted.flops, rel=1e-3)
    assert formula.flops != before


def test_molmoes_language_model_by_its_modules() -> None:
    model = MolmoeForCausalLM(tiny_config()).eval()
    for block in model.get_decoder().layers[1:]:
        block.mlp.gate.top_k = 1
    counted, formula = count_prompt_flops(model, PROMPTS, method="counter"), count_prompt_flops(model, PROMPTS)
    assert formula.method == "formula"
    assert formula.flops == pytest.approx(counted.flops, rel=1e-3)
    experts = [block.mlp.top_k for block in in_force(model).decoder.blocks]  # type: ignore[union-attr]
    assert experts == [4, 1, 1, 1]


def test_blocks_that_the_config_does_not_describe_are_counted() -> None:
    """Blocks 0 and 1 are left of a model whose config says that block 0 is dense and the others have experts."""
    model: Any = build(TEXT_FAMILIES["qwen3_moe, dense first"]())
    decoder = model.get_decoder()
    decoder.layers = decoder.layers[2:]
    found = architecture_in_force(model)
    assert isinstance(found, UnknownArchitecture)
    assert found.reason == "the 2 blocks of this qwen3_moe are not the 4 of its config"
    count = count_prompt_flops(model, PROMPTS)
    assert (count.method, count.counted_on, count.reason) == ("counter", "model", None)
    assert count.flops == count_prompt_flops(model, PROMPTS, method="counter").flops


def test_what_has_no_formula_says_so() -> None:
    linear = architecture_in_force(nn.Linear(2, 2))
    assert isinstance(linear, UnknownArchitecture) and "no model of transformers" in linear.reason
    gpt2 = architecture_in_force(build(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=97)))
    assert isinstance(gpt2, UnknownArchitecture) and "'gpt2'" in gpt2.reason
