"""Tiny random models of the families whose knobs are turned, each also as it is *built* with a smaller setting.

All have 4 blocks. `make(kept, top_k)` is the config of the model that has the blocks `kept` only and chooses `top_k`
experts in each, written by hand: what follows from the places of the blocks is written here again, not derived.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import CLIPVisionConfig, LlamaConfig, OlmoeConfig, PreTrainedConfig

from tests.models.tiny_families import (
    IMAGE_TOKEN,
    VISION_END,
    VISION_START,
    VOCABULARY,
    build,
    config_class,
    mrope,
    picture_config,
)

NUM_BLOCKS = 4
ALL_BLOCKS = tuple(range(NUM_BLOCKS))
# Weights wide enough that a block or an expert more or less is seen in every logit.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_GPT_OSS_KINDS = ("sliding_attention", "full_attention", "sliding_attention", "full_attention")
_HYBRID_KINDS = ("linear_attention", "full_attention", "linear_attention", "linear_attention")


@dataclass(frozen=True)
class KnobFamily:
    """A family, and what its full model must say of itself.

    Attributes:
        make: config of the model built with these blocks and this many experts.
        top_k: experts for a token as trained; None for a dense family.
        routed: blocks with experts.
        picture: inputs of a prompt with a picture.
    """

    make: Callable[[Sequence[int], int], PreTrainedConfig]
    top_k: int | None = 3
    routed: tuple[int, ...] = ALL_BLOCKS
    picture: Callable[[], dict[str, torch.Tensor]] | None = None

    def built(self, kept: Sequence[int] = ALL_BLOCKS, top_k: int | None = None) -> Any:
        """A random model, in evaluation mode; skips where this version of transformers has no such family."""
        config = self.make(tuple(kept), top_k or self.top_k or 0)
        model = build(config)
        return enlarge_norms(model)


def enlarge_norms(model: nn.Module) -> nn.Module:
    """Random scales of norms too, so that a norm of the wrong block is seen."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def _text(name: str, kept: Sequence[int], **chosen: Any) -> Any:
    return config_class(name)(**{**_SIZES, "num_hidden_layers": len(kept), **chosen})


# --- text models --------------------------------------------------------------------------------------------------


def _llama(kept: Sequence[int], _top_k: int = 0) -> LlamaConfig:
    config: LlamaConfig = _text("LlamaConfig", kept)
    return config


def _olmoe(kept: Sequence[int], top_k: int) -> OlmoeConfig:
    config: OlmoeConfig = _text("OlmoeConfig", kept, num_experts=6, num_experts_per_tok=top_k)
    return config


def _qwen2_moe(kept: Sequence[int], top_k: int) -> PreTrainedConfig:
    sizes = {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 20}
    return _text("Qwen2MoeConfig", kept, num_experts=6, num_experts_per_tok=top_k, **sizes)


def _qwen3_moe(kept: Sequence[int], top_k: int) -> PreTrainedConfig:
    dense = [kept.index(1)] if 1 in kept else []
    sizes = {"head_dim": 8, "moe_intermediate_size": 12, "num_experts": 6}
    return _text("Qwen3MoeConfig", kept, num_experts_per_tok=top_k, mlp_only_layers=dense, **sizes)


def _deepseek_v3(kept: Sequence[int], top_k: int) -> PreTrainedConfig:
    latent = {"kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 6}
    routing = {"n_routed_experts": 6, "n_group": 2, "topk_group": 1, "num_experts_per_tok": top_k}
    dense = sum(block < 1 for block in kept)
    sizes = {"moe_intermediate_size": 12, "num_key_value_heads": 4, "first_k_dense_replace": dense}
    return _text("DeepseekV3Config", kept, **latent, **routing, **sizes)


def _gpt_oss(kept: Sequence[int], top_k: int) -> PreTrainedConfig:
    kinds = [_GPT_OSS_KINDS[block] for block in kept]
    experts = {"num_local_experts": 6, "num_experts_per_tok": top_k}
    return _text("GptOssConfig", kept, head_dim=8, sliding_window=4, layer_types=kinds, **experts)


def _qwen3_next(kept: Sequence[int], top_k: int) -> PreTrainedConfig:
    linear = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
    experts = {"num_experts": 6, "num_experts_per_tok": top_k, "moe_intermediate_size": 12}
    sizes = {"head_dim": 8, "shared_expert_intermediate_size": 12, "linear_num_value_heads": 4}
    kinds = [_HYBRID_KINDS[block] for block in kept]
    return _text("Qwen3NextConfig", kept, layer_types=kinds, **linear, **experts, **sizes)


def _llama4(kept: Sequence[int], top_k: int) -> PreTrainedConfig:
    return _text(
        "Llama4TextConfig",
        kept,
        head_dim=8,
        intermediate_size_mlp=20,
        num_local_experts=4,
        num_experts_per_tok=top_k,
        moe_layers=[position for position, block in enumerate(kept) if block in (1, 3)],
        no_rope_layers=[int(block != 2) for block in kept],
        layer_types=["full_attention" if block == 2 else "chunked_attention" for block in kept],
        attention_chunk_size=8,
    )


_THETAS = (1e4, 0, 500.0, 2e3)
_SWA_KINDS = ("full_attention", "sliding_attention", "full_attention", "sliding_attention")


def _by_theta(name: str, kept: Sequence[int], **chosen: Any) -> Any:
    """Bases of the positions by block, in a list whose name no rule knows; a base of 0 means no positions."""
    thetas, kinds = [_THETAS[block] for block in kept], [_SWA_KINDS[block] for block in kept]
    return _text(name, kept, sliding_window=4, layer_types=kinds, layer_rope_theta=thetas, **chosen)


def _gemma4(kept: Sequence[int], **chosen: Any) -> PreTrainedConfig:
    """Heads of blocks with full attention are wider, and these blocks have fewer keys."""
    kinds = [_GPT_OSS_KINDS[block] for block in kept]
    heads = {"head_dim": 8, "global_head_dim": 16, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
    tables = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 0}
    return _text("Gemma4TextConfig", kept, sliding_window=4, layer_types=kinds, **{**heads, **tables, **chosen})


def _gemma4_experts(kept: Sequence[int], top_k: int) -> PreTrainedConfig:
    experts = {"num_experts": 6, "top_k_experts": top_k, "moe_intermediate_size": 12}
    return _gemma4(kept, enable_moe_block=True, **experts)


TEXT_FAMILIES: dict[str, KnobFamily] = {
    "llama": KnobFamily(_llama, None, ()),
    "olmoe": KnobFamily(_olmoe),
    "mixtral": KnobFamily(
        lambda kept, k: _text("MixtralConfig", kept, num_local_experts=6, num_experts_per_tok=k, sliding_window=4)
    ),
    "qwen2_moe": KnobFamily(_qwen2_moe),
    "qwen3_moe, block 1 dense": KnobFamily(_qwen3_moe, routed=(0, 2, 3)),
    "deepseek_v3": KnobFamily(_deepseek_v3, routed=(1, 2, 3)),
    "gpt_oss": KnobFamily(_gpt_oss),
    "granitemoe": KnobFamily(
        lambda kept, k: _text("GraniteMoeConfig", kept, num_local_experts=6, num_experts_per_tok=k)
    ),
    "qwen3_next": KnobFamily(_qwen3_next),
}
GEMMA4 = KnobFamily(_gemma4_experts)

# Families with a list about blocks whose name no rule knows.
BY_THETA_FAMILIES: dict[str, KnobFamily] = {
    "granite_swa": KnobFamily(lambda kept, _k: _by_theta("GraniteSWAConfig", kept), None, ()),
    "granitemoe_swa": KnobFamily(
        lambda kept, k: _by_theta("GraniteMoeSWAConfig", kept, num_local_experts=6, num_experts_per_tok=k)
    ),
}

# Families that cannot run a prompt without values.
_LATENT = {"kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 6}


def _inkling(kept: Sequence[int], top_k: int) -> PreTrainedConfig:
    window = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "sliding_window_size": 4}
    experts = {"moe_intermediate_size": 12, "n_routed_experts": 6, "n_shared_experts": 1, "num_experts_per_tok": top_k}
    kinds = [("hybrid", "hybrid_sliding", "hybrid_sliding", "hybrid")[block] for block in kept]
    sizes = {"head_dim": 8, "d_rel": 4, "rel_extent": 16, "mlp_layer_types": ["sparse"] * len(kept)}
    return _text("InklingTextConfig", kept, layer_types=kinds, **window, **experts, **sizes)


def _qwen4_exp(kept: Sequence[int], top_k: int) -> PreTrainedConfig:
    linear = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
    experts = {"num_experts": 6, "num_experts_per_tok": top_k, "moe_intermediate_size": 12}
    sizes = {"head_dim": 8, "shared_expert_intermediate_size": 12, "linear_num_value_heads": 4}
    indexer = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4}
    mixing = {"indexer_compress_ratio": 2, "hc_count": 2, "hc_lowrank": 8, "output_gate_type": "sigmoid"}
    kinds = [_HYBRID_KINDS[block] for block in kept]
    return _text("Qwen4ExpTextConfig", kept, layer_types=kinds, **linear, **experts, **sizes, **indexer, **mixing)


UNTRIED_FAMILIES: dict[str, KnobFamily] = {
    "inkling_text": KnobFamily(_inkling),
    "qwen4_exp": KnobFamily(_qwen4_exp),
    "jetmoe": KnobFamily(
        lambda kept, k: _text("JetMoeConfig", kept, kv_channels=8, num_local_experts=6, num_experts_per_tok=k), 2
    ),
}


def _latent_dsa(name: str, indexers: Sequence[str], kept: Sequence[int], top_k: int) -> PreTrainedConfig:
    index = {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 2, "indexer_types": [indexers[i] for i in kept]}
    experts = {"moe_intermediate_size": 12, "n_routed_experts": 6, "num_experts_per_tok": top_k}
    kinds = {"mlp_layer_types": ["dense" if block == 0 else "sparse" for block in kept]}
    sizes = {"num_key_value_heads": 4, "head_dim": 4}
    return _text(name, kept, **_LATENT, **index, **experts, **kinds, **sizes)


def indexed(name: str, *indexers: str) -> KnobFamily:
    """A family that attends to the tokens that an indexer chose, "full" in a block or "shared" with an earlier one."""
    return KnobFamily(lambda kept, k: _latent_dsa(name, indexers, kept, k), routed=(1, 2, 3))


def longcat(top_k: int) -> KnobFamily:
    """Blocks with two attentions, each of which has its own layer of the cache; the top-k counts experts without
    weights too.
    """
    experts = {"moe_topk": top_k, "n_routed_experts": 6, "zero_expert_num": 2, "expert_ffn_hidden_size": 12}
    return KnobFamily(
        lambda kept, _k: config_class("LongcatFlashConfig")(
            **{
                **{name: value for name, value in _SIZES.items() if name != "intermediate_size"},
                **_LATENT,
                **experts,
                "num_layers": len(kept),
                "ffn_hidden_size": 24,
                "num_key_value_heads": 4,
                "head_dim": 4,
            }
        ),
        top_k,
    )


# --- vision-language models ---------------------------------------------------------------------------------------


def _vision(**chosen: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
    return {**sizes, "image_size": 24, "patch_size": 8, **chosen}


def _square(image_tokens: int) -> dict[str, torch.Tensor]:
    """One picture of 24 x 24 pixels."""
    torch.manual_seed(2)
    prompt = torch.tensor([[10, *[IMAGE_TOKEN] * image_tokens, 11, 12]])
    return {"input_ids": prompt, "pixel_values": torch.rand(1, 3, 24, 24)}


def _several(image_tokens: int) -> dict[str, torch.Tensor]:
    """One picture in a list of pictures, as SmolVLM and LLaVA-NeXT (whole picture and one tile) take them."""
    inputs = _square(image_tokens)
    return {**inputs, "pixel_values": torch.rand(1, 1, 3, 24, 24)}


def _llava_next_picture() -> dict[str, torch.Tensor]:
    # The whole picture and one tile of 9 patches each; the tile's 3 rows end with a newline feature: 9 + 9 + 3.
    inputs = _square(21)
    return {**inputs, "pixel_values": torch.rand(1, 2, 3, 24, 24), "image_sizes": torch.tensor([[24, 24]])}


def _patches(patch_values: int) -> dict[str, torch.Tensor]:
    """One picture of 4 x 6 patches, 4 of which become a token."""
    torch.manual_seed(2)
    prompt = torch.tensor([[10, VISION_START, *[IMAGE_TOKEN] * 6, VISION_END, 11, 12]])
    return {
        "input_ids": prompt,
        "pixel_values": torch.rand(24, patch_values),
        "image_grid_thw": torch.tensor([[1, 4, 6]]),
        "mm_token_type_ids": (prompt == IMAGE_TOKEN).long(),
    }


def _sub(kept: Sequence[int], **chosen: Any) -> dict[str, Any]:
    return {**_SIZES, "num_hidden_layers": len(kept), **chosen}


_PATCH_TOWER = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32,
}  # fmt: skip


def _qwen3_vl_moe(kept: Sequence[int], top_k: int) -> PreTrainedConfig:
    text = _sub(kept, head_dim=8, num_experts=6, num_experts_per_tok=top_k, moe_intermediate_size=12, **mrope(1, 1, 2))
    tower = {**_PATCH_TOWER, "depth": 3, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2]}
    return picture_config("qwen3_vl_moe", text, tower)


def _qwen2_5_vl(kept: Sequence[int], _top_k: int) -> PreTrainedConfig:
    tower = {**_PATCH_TOWER, "window_size": 16, "fullatt_block_indexes": [1]}
    return picture_config("qwen2_5_vl", _sub(kept, **mrope(1, 1, 2)), tower)


def _glm4v_moe(kept: Sequence[int], top_k: int) -> PreTrainedConfig:
    dense = sum(block < 1 for block in kept)
    routing = {"n_routed_experts": 6, "num_experts_per_tok": top_k, "moe_intermediate_size": 12}
    rope = mrope(1, 1, 2, partial_rotary_factor=1.0)
    text = _sub(kept, head_dim=8, first_k_dense_replace=dense, **routing, **rope)
    return picture_config("glm4v_moe", text, {**_PATCH_TOWER, "image_size": 24})


def _glm4v(kept: Sequence[int], _top_k: int) -> PreTrainedConfig:
    text = _sub(kept, **mrope(1, 1, 2, partial_rotary_factor=1.0))
    return picture_config("glm4v", text, {**_PATCH_TOWER, "image_size": 24})


def _aria(kept: Sequence[int], top_k: int) -> PreTrainedConfig:
    text = _sub(kept, moe_num_experts=6, moe_topk=top_k, moe_num_shared_experts=1)
    return picture_config("aria", text, _vision(), projector_patch_to_query_dict={9: 4})


def _clip() -> CLIPVisionConfig:
    return CLIPVisionConfig(**_vision())


def _llava(kept: Sequence[int], top_k: int) -> PreTrainedConfig:
    return picture_config("llava", _olmoe(kept, top_k), _clip())


def _llava_next(kept: Sequence[int], _top_k: int) -> PreTrainedConfig:
    return picture_config("llava_next", _llama(kept), _clip(), image_grid_pinpoints=[[24, 24]])


def _internvl(kept: Sequence[int], _top_k: int) -> PreTrainedConfig:
    return picture_config("internvl", _sub(kept), _vision(image_size=[32, 32], patch_size=[8, 8]))


def _internvl_picture() -> dict[str, torch.Tensor]:
    # 16 patches, 4 of which become a token.
    return {**_square(4), "pixel_values": torch.rand(1, 3, 32, 32)}


def _smolvlm(kept: Sequence[int], _top_k: int) -> PreTrainedConfig:
    return picture_config("smolvlm", _sub(kept), _vision(), scale_factor=3, pad_token_id=0)


VISION_FAMILIES: dict[str, KnobFamily] = {
    "qwen3_vl_moe": KnobFamily(_qwen3_vl_moe, picture=lambda: _patches(3 * 2 * 4 * 4)),
    "glm4v_moe": KnobFamily(_glm4v_moe, routed=(1, 2, 3), picture=lambda: _patches(3 * 2 * 4 * 4)),
    "glm4v": KnobFamily(_glm4v, None, (), picture=lambda: _patches(3 * 2 * 4 * 4)),
    "aria": KnobFamily(_aria, picture=lambda: _square(4)),
    "llava, olmoe": KnobFamily(_llava, picture=lambda: _square(9)),
    "qwen2_5_vl": KnobFamily(_qwen2_5_vl, None, (), picture=lambda: _patches(3 * 2 * 4 * 4)),
    "internvl": KnobFamily(_internvl, None, (), picture=_internvl_picture),
    "llava_next": KnobFamily(_llava_next, None, (), picture=_llava_next_picture),
    "smolvlm": KnobFamily(_smolvlm, None, (), picture=lambda: _several(1)),
}


def _phi4_multimodal(kept: Sequence[int], _top_k: int) -> PreTrainedConfig:
    tower = _vision(image_size=32, crop_size=32, image_token_id=IMAGE_TOKEN)
    sound = {"hidden_size": 16, "intermediate_size": 20, "num_blocks": 1, "num_attention_heads": 2, "input_size": 8}
    sound |= {"ext_pw_out_channel": 16, "depthwise_separable_out_channel": 16, "nemo_conv_channels": 16}
    return _text("Phi4MultimodalConfig", kept, vision_config=tower, audio_config={**sound, "audio_token_id": 6})


def _phi4_picture() -> dict[str, torch.Tensor]:
    """The whole picture and one crop of 16 patches each, four joined: 2 rows of 2, each with one more, and one between
    both.
    """
    inputs = {**_square(13), "image_sizes": torch.tensor([[32, 32]]), "image_attention_mask": torch.ones(1, 2, 4, 4)}
    del inputs["pixel_values"]
    return {**inputs, "image_pixel_values": torch.rand(1, 2, 3, 32, 32)}


# It encodes pictures inside the prefill.
PHI4_MULTIMODAL = KnobFamily(_phi4_multimodal, None, (), picture=_phi4_picture)

# --- families of which a knob is refused --------------------------------------------------------------------------

LLAMA4 = KnobFamily(_llama4, 2, (1, 3))
PHIMOE = KnobFamily(lambda kept, k: _text("PhimoeConfig", kept, num_local_experts=6, num_experts_per_tok=k), 2)
GEMMA3N = KnobFamily(
    lambda kept, _k: _text(
        "Gemma3nTextConfig",
        kept,
        head_dim=8,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        activation_sparsity_pattern=[0.0] * len(kept),
    ),
    None,
    (),
)
GEMMA4_SHARING = KnobFamily(lambda kept, _k: _gemma4(kept, num_kv_shared_layers=2), None, ())
GEMMA4_EMBEDDINGS = KnobFamily(lambda kept, _k: _gemma4(kept, hidden_size_per_layer_input=8), None, ())
