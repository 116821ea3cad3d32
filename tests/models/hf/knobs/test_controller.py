"""Knobs turned in place, against models that were built with the smaller setting and have the same weights."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, OlmoeConfig, OlmoeForCausalLM, OlmoeModel

from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.models.hf.knobs.controller import DecoderKnobs, flops_delta
from experiment_core_utils.primitives.errors import ConfigurationError
from tests.models.knob_families import (
    ALL_BLOCKS,
    BY_THETA_FAMILIES,
    GEMMA3N,
    GEMMA4,
    GEMMA4_EMBEDDINGS,
    GEMMA4_SHARING,
    LLAMA4,
    NUM_BLOCKS,
    PHIMOE,
    TEXT_FAMILIES,
    UNTRIED_FAMILIES,
    VISION_FAMILIES,
    KnobFamily,
    indexed,
    longcat,
)

FAMILIES = {**TEXT_FAMILIES, **BY_THETA_FAMILIES, **VISION_FAMILIES, "gemma4": GEMMA4}
NEW_TOKENS = 5
# 9 tokens and 5, filled up on the left.
IDS = torch.tensor([[10, 11, 12, 13, 14, 15, 16, 17, 18], [0, 0, 0, 0, 20, 21, 22, 23, 24]])
PADDED = {"input_ids": IDS, "attention_mask": (IDS != 0).long()}
ONE = {"input_ids": IDS[:1]}


def blocks_of(model: Any) -> Any:
    decoder = model.get_decoder()
    return decoder.layers if hasattr(decoder, "layers") else decoder.model.layers


def experts_at(knobs: DecoderKnobs, top_k: int | None, blocks: Sequence[int]) -> dict[int, int | None]:
    return knobs.experts_at(Setting.of(top_k=top_k, num_active_blocks=RunningBlocks.of(blocks)))


def reference(family: KnobFamily, full: Any, top_k: int | None, kept: Sequence[int]) -> Any:
    """A model built with these blocks and experts, with the weights of `full`; the first block with experts of `full`
    gets its own number by hand, because no config can say so."""
    model = family.built(kept, top_k)
    layers = next(name for name, module in full.named_modules() if module is blocks_of(full))
    weights = {}
    for name, tensor in full.state_dict().items():
        if name.startswith(f"{layers}."):
            index, _, rest = name.removeprefix(f"{layers}.").partition(".")
            if int(index) not in kept:
                continue
            name = f"{layers}.{kept.index(int(index))}.{rest}"
        weights[name] = tensor
    model.load_state_dict(weights)
    if family.routed and family.routed[0] in kept:
        for module in blocks_of(model)[kept.index(family.routed[0])].modules():
            if hasattr(module, "top_k"):
                module.top_k = family.top_k
            if type(module).__name__ == "Gemma4TextRouter":
                module.config = copy.copy(module.config)
                module.config.top_k_experts = family.top_k
    return model


def answer(model: Any, inputs: dict[str, torch.Tensor], **chosen: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of a greedy answer, and the logits [steps, B, V] that each was taken from."""
    model.generation_config.eos_token_id = None
    out = model.generate(
        **inputs,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        disable_compile=True,
        **chosen,
    )
    return out.sequences, torch.stack(out.logits)


def assert_alike(found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert found[1].shape[0] == NEW_TOKENS
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-5)
    assert torch.equal(found[0], expected[0])


def turnable(family: KnobFamily, top_k: int) -> int | None:
    """`top_k`; None for a dense model."""
    return None if family.top_k is None else top_k


SETTINGS = [(1, ALL_BLOCKS), (2, (0, 1, 3)), (1, (1, 3))]


@pytest.mark.parametrize(("top_k", "kept"), SETTINGS)
@pytest.mark.parametrize("name", FAMILIES)
def test_turned_knobs_equal_a_model_built_with_the_smaller_setting(
    name: str, top_k: int, kept: tuple[int, ...]
) -> None:
    family = FAMILIES[name]
    full = family.built()
    whole = answer(full, PADDED)
    knobs = DecoderKnobs(full)
    setting = turnable(family, top_k)
    small = reference(family, full, setting, kept)
    with knobs.applied(setting, kept):
        for cache in ("dynamic", "static"):
            found = answer(full, PADDED, cache_implementation=cache)
            assert_alike(found, answer(small, PADDED, cache_implementation=cache))
        with torch.inference_mode():
            torch.testing.assert_close(full(**PADDED).logits, small(**PADDED).logits, rtol=1e-5, atol=1e-5)
        if setting is not None or len(kept) < NUM_BLOCKS:
            assert not torch.allclose(found[1], whole[1], atol=1e-2)
    again = answer(full, PADDED)
    assert_alike(again, whole)


@pytest.mark.parametrize("name", UNTRIED_FAMILIES)
def test_knobs_that_cannot_be_tried_without_values_are_tried_with_them(name: str) -> None:
    """Without storage there is a reason why they are not known, and none why they cannot be set."""
    family = UNTRIED_FAMILIES[name]
    full = family.built()
    with torch.device("meta"):
        without = AutoModelForCausalLM.from_config(full.config).eval()
    untried = DecoderKnobs(without)
    assert untried.untried_reason is not None
    assert (untried.num_experts, untried.default_top_k) == (6, family.top_k)
    assert (untried.top_k_unsupported_reason, untried.blocks_unsupported_reason) == (None, None)
    knobs = DecoderKnobs(full)
    assert (knobs.untried_reason, knobs.failure, knobs.blocks_unsupported_reason) == (None, None, None)
    assert (knobs.top_k_unsupported_reason is not None) == (name == "jetmoe")
    for top_k, kept in SETTINGS:
        setting = None if name == "jetmoe" else top_k
        small = reference(family, full, setting, kept)
        with knobs.applied(setting, kept):
            assert_alike(answer(full, PADDED), answer(small, PADDED))


@pytest.mark.parametrize("name", ["GlmMoeDsaConfig", "HYV4Config"])
def test_blocks_that_take_over_what_another_computes_cannot_be_skipped(name: str) -> None:
    """Top-k can be set in them; where each block has its own indexer, blocks can be skipped too."""
    full = indexed(name, "full", "shared", "full", "shared").built()
    knobs = DecoderKnobs(full)
    reason = "some of its blocks take over what another block computes (indexer_types)"
    assert (knobs.blocks_unsupported_reason, knobs.top_k_unsupported_reason) == (reason, None)
    family = indexed(name, "full", "full", "full", "full")
    full = family.built()
    knobs = DecoderKnobs(full)
    small = reference(family, full, 2, (0, 1, 3))
    with knobs.applied(2, (0, 1, 3)):
        assert_alike(answer(full, ONE), answer(small, ONE))


def test_a_block_with_two_layers_of_the_cache_is_not_skipped() -> None:
    knobs = DecoderKnobs(longcat(3).built())
    assert knobs.blocks_unsupported_reason == "it has 4 blocks, and its text config counts 8 layers"
    assert (knobs.failure, knobs.num_experts, knobs.default_top_k) == (None, 6, 3)


@pytest.mark.parametrize(("top_k", "kept"), [(1, (0, 1, 3)), (2, (1, 2, 3))])
@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_with_a_picture(name: str, top_k: int, kept: tuple[int, ...]) -> None:
    """The blocks of Qwen3-VL that get features of deeper vision blocks are the first ones that run, as when built."""
    family = VISION_FAMILIES[name]
    assert family.picture is not None
    full, inputs = family.built(), family.picture()
    knobs = DecoderKnobs(full)
    setting = turnable(family, top_k)
    small = reference(family, full, setting, kept)
    with knobs.applied(setting, kept):
        found = answer(full, inputs)
        assert_alike(found, answer(small, inputs))
    other = {**inputs, "pixel_values": 1 - inputs["pixel_values"]}
    with knobs.applied(setting, kept):
        assert not torch.allclose(answer(full, other)[1], found[1], atol=1e-3)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_ran_is_counted_by_the_blocks_of_the_full_model(name: str) -> None:
    family = FAMILIES[name]
    full = family.built()
    knobs = DecoderKnobs(full)
    assert (knobs.num_total_blocks, knobs.default_top_k) == (NUM_BLOCKS, family.top_k)
    assert knobs.num_experts == (None if family.top_k is None else 6)
    assert (knobs.routed_blocks, knobs.blocks_unsupported_reason) == (family.routed, None)
    top_k = turnable(family, 2)
    kept = (0, 1, 3)
    with knobs.applied(top_k, kept), knobs.counted() as counted, torch.inference_mode():
        full(input_ids=IDS[:1])
        assert counted.blocks_run == [0, 1, 3]
        expected = {block: 2 for block in family.routed if block in kept}
        if family.routed and family.routed[0] in kept:
            expected[family.routed[0]] = 3
        assert counted.experts_per_token == expected
        assert experts_at(knobs, top_k, kept) == {block: expected.get(block) for block in kept}
        counted.clear()
        assert (counted.blocks_run, counted.experts_per_token) == ([], {})
    assert not any(module._forward_hooks for module in full.modules())


def test_without_the_first_block_with_experts_every_other_is_turned() -> None:
    full = TEXT_FAMILIES["deepseek_v3"].built()
    knobs = DecoderKnobs(full)
    assert experts_at(knobs, 2, (0, 1, 2, 3)) == {0: None, 1: 3, 2: 2, 3: 2}
    assert experts_at(knobs, 2, (0, 2, 3)) == {0: None, 2: 2, 3: 2}
    assert experts_at(knobs, None, (0, 2)) == {0: None, 2: 3}


@pytest.mark.parametrize("name", ["olmoe", "gpt_oss", "llava, olmoe"])
def test_after_restore_the_model_is_the_same_object_by_object(name: str, tmp_path: Path) -> None:
    full = FAMILIES[name].built()
    full.save_pretrained(tmp_path / "before")
    layers, config = blocks_of(full), full.config.to_dict()
    held = [(name, id(tensor)) for name, tensor in full.state_dict(keep_vars=True).items()]
    knobs = DecoderKnobs(full)
    knobs.apply(1, (0, 3))
    assert len(blocks_of(full)) == 2
    knobs.apply(2, (1, 2, 3))
    assert len(blocks_of(full)) == 3
    knobs.restore()
    assert blocks_of(full) is layers
    assert full.config.to_dict() == config
    assert [(name, id(tensor)) for name, tensor in full.state_dict(keep_vars=True).items()] == held
    full.save_pretrained(tmp_path / "after")
    names = sorted(path.name for path in (tmp_path / "before").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "after").iterdir())
    for each in names:
        assert (tmp_path / "before" / each).read_bytes() == (tmp_path / "after" / each).read_bytes()


def test_turned_puts_back_what_was_in_force_also_after_an_error() -> None:
    full = TEXT_FAMILIES["olmoe"].built()
    knobs = DecoderKnobs(full)
    knobs.apply(2, (0, 1, 3))
    with pytest.raises(KeyError), knobs.applied(1, (0, 2)):
        raise KeyError
    assert [block.self_attn.layer_idx for block in blocks_of(full)] == [0, 1, 2]
    assert [block.mlp.gate.top_k for block in blocks_of(full)] == [3, 2, 2]
    with pytest.raises(ConfigurationError):
        knobs.apply(7, (0, 1))
    assert len(blocks_of(full)) == 3
    knobs.restore()
    assert [block.self_attn.layer_idx for block in blocks_of(full)] == [0, 1, 2, 3]
    assert [block.mlp.gate.top_k for block in blocks_of(full)] == [3, 3, 3, 3]


def test_lists_of_the_text_config_follow_the_blocks() -> None:
    """Kinds of blocks by place; blocks named by index get their new places."""
    full = TEXT_FAMILIES["gpt_oss"].built()
    knobs = DecoderKnobs(full)
    with knobs.applied(None, (0, 2, 3)):
        assert full.config.layer_types == ["sliding_attention", "sliding_attention", "full_attention"]
        assert full.config.num_hidden_layers == 3
    full = TEXT_FAMILIES["qwen3_moe, block 1 dense"].built()
    knobs = DecoderKnobs(full)
    with knobs.applied(None, (1, 2)):
        assert full.config.mlp_only_layers == [0]
    with knobs.applied(None, (0, 2)):
        assert full.config.mlp_only_layers == []
    assert full.config.mlp_only_layers == [1]


@pytest.mark.parametrize(
    ("top_k", "blocks", "message"),
    [
        (0, ALL_BLOCKS, "top-k 0 is not possible; give 1 to 6, the experts of a block"),
        (7, ALL_BLOCKS, "top-k 7 is not possible; give 1 to 6, the experts of a block"),
        (1, (), "active blocks [] are not possible; give ascending indices from 0 to 3"),
        (1, (0, 4), "active blocks [0, 4] are not possible; give ascending indices from 0 to 3"),
        (1, (-1, 0), "active blocks [-1, 0] are not possible; give ascending indices from 0 to 3"),
        (1, (1, 1), "active blocks [1, 1] are not possible; give ascending indices from 0 to 3"),
    ],
)
def test_a_setting_that_is_not_possible(top_k: int, blocks: tuple[int, ...], message: str) -> None:
    knobs = DecoderKnobs(TEXT_FAMILIES["olmoe"].built())
    with pytest.raises(ConfigurationError) as raised:
        knobs.validate(top_k, blocks)
    assert str(raised.value) == message


def test_a_dense_model_has_no_top_k() -> None:
    knobs = DecoderKnobs(TEXT_FAMILIES["llama"].built())
    assert (knobs.num_experts, knobs.default_top_k, knobs.routed_blocks) == (None, None, ())
    assert knobs.top_k_unsupported_reason == "the model is dense"
    with pytest.raises(ConfigurationError, match="top-k 2 cannot be set: the model is dense; give none for it"):
        knobs.validate(2, ALL_BLOCKS)
    knobs.validate(None, (0, 3))


def test_phimoe_ignores_top_k() -> None:
    full = PHIMOE.built()
    knobs = DecoderKnobs(full)
    assert knobs.top_k_unsupported_reason == "it ignores top-k: set to 1, its routers chose 2 experts for a token"
    with pytest.raises(ConfigurationError, match="top-k 1 cannot be set: it ignores top-k.*or its own 2"):
        knobs.apply(1, ALL_BLOCKS)
    assert {module.top_k for module in full.modules() if hasattr(module, "top_k")} == {2}
    assert experts_at(knobs, 2, (0, 2)) == {0: 2, 2: 2}
    small = reference(PHIMOE, full, None, (0, 2))
    with knobs.applied(2, (0, 2)):
        assert_alike(answer(full, PADDED), answer(small, PADDED))


@pytest.mark.parametrize("kept", [(0, 1, 2), (1, 2, 3), (0, 3)])
def test_llama4_computes_all_experts_and_skips_blocks(kept: tuple[int, ...]) -> None:
    full = LLAMA4.built()
    knobs = DecoderKnobs(full)
    assert knobs.top_k_unsupported_reason is not None and knobs.top_k_unsupported_reason.startswith(
        "it computes all its experts"
    )
    assert (knobs.default_top_k, knobs.routed_blocks, knobs.blocks_unsupported_reason) == (2, (1, 3), None)
    assert experts_at(knobs, None, ALL_BLOCKS) == dict.fromkeys(ALL_BLOCKS)
    small = reference(LLAMA4, full, None, kept)
    with knobs.applied(None, kept):
        text = full.config.get_text_config()
        assert text.moe_layers == small.config.get_text_config().moe_layers
        with torch.inference_mode():
            torch.testing.assert_close(full(**PADDED).logits, small(**PADDED).logits, rtol=1e-5, atol=1e-5)
        assert_alike(answer(full, PADDED), answer(small, PADDED))
        try:
            expected = answer(small, PADDED, cache_implementation="static")
        except TypeError as error:
            pytest.skip(f"Llama 4 has no static cache in transformers {transformers.__version__}: {error}")
        assert_alike(answer(full, PADDED, cache_implementation="static"), expected)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        (GEMMA3N, "its last 2 blocks use the keys and values of other blocks"),
        (GEMMA4_SHARING, "its last 2 blocks use the keys and values of other blocks"),
        (GEMMA4_EMBEDDINGS, "each of its blocks has its own embedding, sliced from one table"),
    ],
    ids=["gemma3n", "gemma4 sharing", "gemma4 embeddings"],
)
def test_gemmas_blocks_cannot_be_skipped(family: KnobFamily, reason: str) -> None:
    full = family.built()
    knobs = DecoderKnobs(full)
    assert knobs.blocks_unsupported_reason == reason
    with pytest.raises(ConfigurationError, match=f"blocks of this model cannot be skipped: {reason}; give all 4"):
        knobs.apply(None, (0, 1, 2))
    assert len(blocks_of(full)) == NUM_BLOCKS
    knobs.validate(None, ALL_BLOCKS)


def test_gemma4s_blocks_share_one_top_k() -> None:
    """Each router that is turned gets a config of its own; that of the others, and of the experts, stays."""
    full = GEMMA4.built()
    knobs, layers = DecoderKnobs(full), blocks_of(full)
    assert (knobs.num_experts, knobs.default_top_k, knobs.routed_blocks) == (6, 3, ALL_BLOCKS)
    with knobs.applied(1, ALL_BLOCKS):
        assert [block.router.config.top_k_experts for block in layers] == [3, 1, 1, 1]
        assert all(part.config is full.config for block in layers for part in (block, block.self_attn, block.experts))
    assert all(block.router.config is full.config for block in layers)


def test_fields_in_which_blocks_differ_follow_the_blocks() -> None:
    full = GEMMA4.built()
    before = full.config.to_dict()
    wide = {"head_dim": 16, "num_key_value_heads": 1}
    assert before["per_layer_config"] == {"1": wide, "3": wide}
    with DecoderKnobs(full).applied(None, (0, 2, 3)):
        assert full.config.to_dict()["per_layer_config"] == {"2": wide}
        assert [each.head_dim for each in full.config.per_layer_config] == [8, 8, 16]
    assert full.config.to_dict() == before


def test_a_hybrid_keeps_a_block_with_attention() -> None:
    knobs = DecoderKnobs(TEXT_FAMILIES["qwen3_next"].built())
    with pytest.raises(ConfigurationError, match=r"leave no attention; keep at least one of \[1\]"):
        knobs.validate(2, (0, 2, 3))
    knobs.validate(2, (0, 1))


def test_one_block_with_experts_leaves_nothing_to_turn() -> None:
    knobs = DecoderKnobs(TEXT_FAMILIES["olmoe"].built((0,)))
    assert knobs.top_k_unsupported_reason == "only block 0 has experts, and the first such block keeps its own number"
    knobs.validate(3, (0,))


def test_blocks_that_a_config_names_in_a_way_without_a_rule_are_refused() -> None:
    full = TEXT_FAMILIES["olmoe"].built()
    full.config.global_attn_layers = [1, 3]
    assert (
        DecoderKnobs(full).blocks_unsupported_reason == "its config names blocks by their indices in global_attn_layers"
    )


class DerivedKinds(OlmoeConfig):
    """As Jamba's: the kinds follow from the places, whatever blocks are there."""

    @property
    def layers_block_type(self) -> list[str]:
        return ["attention" if place % 2 else "mamba" for place in range(self.num_hidden_layers)]


def test_lists_that_a_config_derives_from_places_are_refused() -> None:
    config = DerivedKinds(**TEXT_FAMILIES["olmoe"].make(ALL_BLOCKS, 3).to_dict())
    reason = DecoderKnobs(OlmoeForCausalLM(config).eval()).blocks_unsupported_reason
    assert reason == "its config derives layers_block_type from the places of the blocks"


class OwnKinds(OlmoeModel):
    """A decoder that makes a list by block of its own: by the places, or by a list of its config."""

    def __init__(self, config: OlmoeConfig) -> None:
        super().__init__(config)
        places = range(config.num_hidden_layers)
        self.kinds = list(getattr(config, "kind_types", None) or (place % 2 for place in places))


@pytest.mark.parametrize(
    ("listed", "reason"),
    [(None, "its decoder derives kinds from the places of the blocks"), ([1, 1, 0, 1], None)],
)
def test_a_decoders_own_list_must_follow_from_the_config(listed: list[int] | None, reason: str | None) -> None:
    config = OlmoeConfig(**TEXT_FAMILIES["olmoe"].make(ALL_BLOCKS, 3).to_dict())
    if listed is not None:
        config.kind_types = listed
    model = OlmoeForCausalLM(config)
    model.model = OwnKinds(config)
    assert DecoderKnobs(model.eval()).blocks_unsupported_reason == reason


def test_operations_move_with_a_knob_that_acts() -> None:
    """7 tokens through 3 products of 32 x 24 in 3 blocks, 2 experts fewer: 2 * 7 * 3 * 32 * 24 * 3 * 2."""
    full = TEXT_FAMILIES["olmoe"].built()
    knobs = DecoderKnobs(full)
    delta = flops_delta(lambda: full(input_ids=IDS[:1, :7]), knobs.applied(1, ALL_BLOCKS))
    assert delta.changed and delta.before - delta.applied == 193_536
    same = flops_delta(lambda: full(input_ids=IDS[:1, :7]), knobs.applied(3, ALL_BLOCKS))
    assert not same.changed
