"""Formulas of models whose knobs were turned by hand, against what a forward pass of the same model computes."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, LlamaForCausalLM

from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.models.costs.active_shapes import architecture_in_force
from experiment_core_utils.models.costs.architecture import Architecture, UnknownArchitecture
from experiment_core_utils.models.costs.decoder import ExpertsShape
from experiment_core_utils.models.costs.prompt_flops import count_prompt_flops
from experiment_core_utils.models.hf.knobs.controller import DecoderKnobs
from experiment_core_utils.models.molmoe.language_model import MolmoeForCausalLM
from tests.conftest import tiny_config
from tests.models.knob_families import LLAMA4
from tests.models.knob_families import TEXT_FAMILIES as KNOB_TEXT_FAMILIES
from tests.models.knob_families import VISION_FAMILIES as KNOB_VISION_FAMILIES
from tests.models.tiny_families import PATCH_FAMILIES, TEXT_FAMILIES, build, turn

# Families whose configs say by places which blocks have experts, or of what kind their attention is.
PLACED = ("qwen3_moe, dense first", "qwen3_moe, every second", "deepseek_v3, queries whole", "gpt_oss")
KNOBBED = {**KNOB_TEXT_FAMILIES, **KNOB_VISION_FAMILIES}
del KNOBBED["qwen3_next"]  # linear attention
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
@pytest.mark.parametrize("name", ["olmoe", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "granitemoe", "deepseek_v3"])
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


@pytest.mark.parametrize(("top_k", "blocks"), [(None, (1, 2, 3)), (1, (0, 2)), (2, (2, 3)), (5, (0, 1, 3))])
@pytest.mark.parametrize("name", [*PLACED, *KNOBBED])
def test_a_model_at_a_setting_has_the_formula_of_the_setting(
    name: str, top_k: int | None, blocks: tuple[int, ...]
) -> None:
    """Also where the config says by their places which blocks have experts, and the places have moved."""
    model: Any = build(TEXT_FAMILIES[name]()) if name in PLACED else KNOBBED[name].built()
    knobs = DecoderKnobs(model)
    if knobs.routed_blocks and knobs.top_k_unsupported_reason is not None:
        pytest.skip(f"in this version of transformers top-k cannot be set: {knobs.top_k_unsupported_reason}")
    whole = in_force(model)
    if knobs.num_experts is None:
        top_k = None
    elif top_k is not None and knobs.top_k_limit is not None:
        # Its groups allow no more.
        top_k = min(top_k, knobs.top_k_limit[0])
    setting = Setting.of(top_k=top_k, num_active_blocks=RunningBlocks.of(blocks))
    with knobs.applied(top_k, blocks):
        turned = in_force(model)
        assert turned.decoder.blocks == whole.at(setting).decoder.blocks
        experts = tuple(
            block.mlp.top_k if isinstance(block.mlp, ExpertsShape) else None for block in turned.decoder.blocks
        )
        assert experts == tuple(knobs.experts_at(setting).values())
    assert in_force(model) == whole


def test_blocks_that_lie_one_module_deeper_are_found() -> None:
    class Deeper(LlamaForCausalLM):
        def get_decoder(self) -> nn.Module:
            return self

    assert isinstance(architecture_in_force(Deeper(TEXT_FAMILIES["llama"]())), Architecture)


def test_a_decoder_without_a_list_of_blocks_has_no_formula() -> None:
    model = LlamaForCausalLM(TEXT_FAMILIES["llama"]())
    model.model.layers = nn.Sequential(*model.model.layers)
    found = architecture_in_force(model)
    assert isinstance(found, UnknownArchitecture) and "LlamaForCausalLM has no list of blocks" in found.reason


def test_a_family_that_computes_all_its_experts_has_no_formula() -> None:
    found = architecture_in_force(LLAMA4.built())
    assert isinstance(found, UnknownArchitecture) and "'llama4_text'" in found.reason


def test_experts_where_the_config_knows_of_none() -> None:
    model: Any = build(TEXT_FAMILIES["llama"]())
    model.get_decoder().layers[2] = build(TEXT_FAMILIES["olmoe"]()).get_decoder().layers[2]  # type: ignore[operator]
    found = architecture_in_force(model)
    assert isinstance(found, UnknownArchitecture)
    assert found.reason == "block 2 of this llama has experts, which its config does not say"


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


def narrowed(linear: nn.Linear, out_features: int) -> nn.Linear:
    return nn.Linear(linear.in_features, out_features, bias=False)


def narrow_mlp(model: Any) -> None:
    mlp = model.get_decoder().layers[2].mlp
    mlp.gate_proj, mlp.up_proj = narrowed(mlp.gate_proj, 64), narrowed(mlp.up_proj, 64)
    mlp.down_proj = nn.Linear(64, 40, bias=False)


def narrow_weight(model: Any) -> None:
    """Without another module: the weight alone."""
    mlp = model.get_decoder().layers[2].mlp
    for name, shape in (("gate_proj", (64, 40)), ("up_proj", (64, 40)), ("down_proj", (40, 64))):
        getattr(mlp, name).weight = nn.Parameter(torch.ones(shape))


def narrow_experts(model: Any) -> None:
    experts = model.get_decoder().layers[2].mlp.experts
    experts.gate_up_proj = nn.Parameter(experts.gate_up_proj[:, :96].detach().clone())
    experts.down_proj = nn.Parameter(experts.down_proj[:, :, :48].detach().clone())


def narrow_head(model: Any) -> None:
    model.lm_head = narrowed(model.lm_head, 90)


@pytest.mark.parametrize("is_seen_before", [False, True])
@pytest.mark.parametrize(
    ("name", "narrow", "output"),
    [
        # 4 x 40 x 40 of attention less a half of two, and 3 x 40 x 96 or 3 x 40 x 64.
        ("llama", narrow_mlp, "block 2 of this llama has 12480 weights in its matrices, its config says 16320"),
        ("llama", narrow_weight, "block 2 of this llama has 12480 weights"),
        # 6 x 40 of the router, and 6 experts of 3 x 40 x 96 or 3 x 40 x 48.
        ("olmoe", narrow_experts, "block 2 of this olmoe has 39600 weights in its matrices, its config says 74160"),
        ("llama", narrow_head, "the head of this llama has 3600 weights in its matrices, its config says 3880"),
    ],
)
def test_a_model_that_was_made_narrower_has_no_formula(
    name: str, narrow: Callable[[Any], None], output: str, is_seen_before: bool
) -> None:
    model: Any = build(TEXT_FAMILIES[name]())
    if is_seen_before:
        in_force(model)
    narrow(model)
    found = architecture_in_force(model)
    assert isinstance(found, UnknownArchitecture) and found.reason.startswith(output)
    count = count_prompt_flops(model, PROMPTS)
    assert (count.method, count.counted_on) == ("counter", "model")
    assert count.flops == count_prompt_flops(model, PROMPTS, method="counter").flops


@pytest.mark.parametrize("is_seen_before", [False, True])
@pytest.mark.parametrize("part", ["itself", "mlp"])
def test_a_patched_forward_has_no_formula(part: str, is_seen_before: bool) -> None:
    """A block, or its MLP, skipped without another module: the counter sees fewer operations than the config says."""
    model: Any = build(TEXT_FAMILIES["llama"]())
    whole = in_force(model).forward_flops(7) if is_seen_before else 0
    block = model.get_decoder().layers[2]
    patched = block if part == "itself" else block.mlp
    patched.forward = lambda hidden, *_, **__: hidden
    found = architecture_in_force(model)
    assert isinstance(found, UnknownArchitecture)
    assert found.reason == f"block 2 of this llama has another forward than its class ({part})"
    counted = count_prompt_flops(model, IDS[:1])
    assert counted.method == "counter" and counted.flops is not None
    assert not is_seen_before or counted.flops < whole
    del patched.forward
    assert in_force(model).forward_flops(7) == count_prompt_flops(model, IDS[:1], method="counter").flops


def test_hooks_of_accelerate_are_no_patched_forward() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model: Any = build(TEXT_FAMILIES["llama"]())
    expected = in_force(model)
    for layer in model.get_decoder().layers:
        hooks.add_hook_to_module(layer, hooks.ModelHook())
    assert "forward" in vars(model.get_decoder().layers[2])
    assert in_force(model) == expected


class PackedLinear(nn.Module):
    """As quantisers make them: the weights in another form, their logical sizes beside."""

    def __init__(self, linear: nn.Linear, is_column: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        packed = torch.zeros(linear.weight.numel() // 4, 1) if is_column else torch.zeros(3, 5, dtype=torch.uint8)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(torch.ones(2, 2))


@pytest.mark.parametrize("is_column", [False, True])
def test_packed_weights_have_the_formula_of_their_logical_sizes(is_column: bool) -> None:
    model: Any = build(TEXT_FAMILIES["llama"]())
    expected = in_force(model)
    for layer in model.get_decoder().layers:
        layer.mlp.up_proj = PackedLinear(layer.mlp.up_proj, is_column)
    assert in_force(model) == expected


def test_packed_experts_that_do_not_tell_their_sizes_are_believed() -> None:
    model: Any = build(TEXT_FAMILIES["olmoe"]())
    expected = in_force(model)
    for layer in model.get_decoder().layers:
        layer.mlp.experts.down_proj = nn.Parameter(torch.zeros(6, 7, dtype=torch.uint8), requires_grad=False)
    assert in_force(model) == expected


def test_what_changes_after_the_first_figure_is_noticed() -> None:
    """A block that is dropped, one that is put in another's place, and a config that says something else."""
    model: Any = build(TEXT_FAMILIES["llama"]())
    whole = in_force(model).forward_flops(7)
    decoder = model.get_decoder()
    decoder.layers = decoder.layers[:3]
    assert isinstance(architecture_in_force(model), UnknownArchitecture)
    decoder.config.num_hidden_layers = 3
    three = in_force(model).forward_flops(7)
    assert three < whole
    decoder.layers[1] = build(TEXT_FAMILIES["llama, wide heads"]()).get_decoder().layers[1]  # type: ignore[operator]
    found = architecture_in_force(model)
    assert isinstance(found, UnknownArchitecture) and "block 1 of this llama" in found.reason
    decoder.layers[1] = build(TEXT_FAMILIES["llama"]()).get_decoder().layers[1]  # type: ignore[operator]
    assert in_force(model).forward_flops(7) == three


def test_what_was_seen_of_a_model_does_not_keep_it() -> None:
    model: Any = build(TEXT_FAMILIES["olmoe"]())
    block, whole = weakref.ref(model.get_decoder().layers[3]), weakref.ref(model)
    in_force(model)
    model.get_decoder().layers = model.get_decoder().layers[:3]
    gc.collect()
    assert block() is None
    del model
    gc.collect()
    assert whole() is None


def test_a_model_without_a_head_has_no_formula_of_one() -> None:
    model: Any = build(TEXT_FAMILIES["olmoe"]())
    found = architecture_in_force(model.model)
    assert isinstance(found, UnknownArchitecture) and "OlmoeModel has no head" in found.reason


def test_what_has_no_formula_says_so() -> None:
    linear = architecture_in_force(nn.Linear(2, 2))
    assert isinstance(linear, UnknownArchitecture) and "not a model of transformers" in linear.reason
    gpt2 = architecture_in_force(build(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=97)))
    assert isinstance(gpt2, UnknownArchitecture) and "'gpt2'" in gpt2.reason
