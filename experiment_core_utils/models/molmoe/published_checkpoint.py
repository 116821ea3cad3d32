"""In: a checkpoint in the published Hugging Face layout of MolmoE; out: config and tensors of the native classes."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import CLIPVisionConfig, OlmoeConfig

from experiment_core_utils.models.molmoe.configuration_molmoe import MolmoeConfig
from experiment_core_utils.models.molmoe.modeling_molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.primitives.errors import ConfigurationError

PUBLISHED_MODEL_TYPE = "molmo"
IMAGE_TOKEN_IDS = {"image_start": 50280, "image_end": 50281, "image_patch": 50282, "image_column": 50283}
EOS_TOKEN_ID = 50279

_TEXT = "model.language_model."
_TOWER = "model.vision_tower."
_CONNECTOR = "model.connector."

_RENAMED = {
    "model.transformer.ln_f.weight": _TEXT + "norm.weight",
    "lm_head.weight": "lm_head.weight",
    "model.vision_backbone.pad_embed": _CONNECTOR + "pad_embed",
    "model.vision_backbone.image_vit.class_embedding": _TOWER + "embeddings.class_embedding",
    "model.vision_backbone.image_vit.positional_embedding": _TOWER + "embeddings.position_embedding.weight",
}
_PATTERNS = (
    (r"model\.transformer\.blocks\.(\d+)\.attn\.attn_out\.weight", _TEXT + r"layers.\1.self_attn.o_proj.weight"),
    (r"model\.transformer\.blocks\.(\d+)\.attn\.attn_norm\.weight", _TEXT + r"layers.\1.input_layernorm.weight"),
    (r"model\.transformer\.blocks\.(\d+)\.attn\.([qk])_norm\.weight", _TEXT + r"layers.\1.self_attn.\2_norm.weight"),
    (r"model\.transformer\.blocks\.(\d+)\.mlp\.ff_norm\.weight", _TEXT + r"layers.\1.post_attention_layernorm.weight"),
    (r"model\.transformer\.blocks\.(\d+)\.mlp\.gate\.weight", _TEXT + r"layers.\1.mlp.gate.weight"),
    (r"model\.vision_backbone\.image_vit\.pre_ln\.(weight|bias)", _TOWER + r"pre_layernorm.\1"),
    (
        r"model\.vision_backbone\.image_vit\.transformer\.resblocks\.(\d+)\.attention\.w([qkv])\.(weight|bias)",
        _TOWER + r"layers.\1.self_attn.\2_proj.\3",
    ),
    (
        r"model\.vision_backbone\.image_vit\.transformer\.resblocks\.(\d+)\.attention\.wo\.(weight|bias)",
        _TOWER + r"layers.\1.self_attn.out_proj.\2",
    ),
    (
        r"model\.vision_backbone\.image_vit\.transformer\.resblocks\.(\d+)\.feed_forward\.w([12])\.(weight|bias)",
        _TOWER + r"layers.\1.mlp.fc\2.\3",
    ),
    (
        r"model\.vision_backbone\.image_vit\.transformer\.resblocks\.(\d+)\.attention_norm\.(weight|bias)",
        _TOWER + r"layers.\1.layer_norm1.\2",
    ),
    (
        r"model\.vision_backbone\.image_vit\.transformer\.resblocks\.(\d+)\.ffn_norm\.(weight|bias)",
        _TOWER + r"layers.\1.layer_norm2.\2",
    ),
    (r"model\.vision_backbone\.image_pooling_2d\.w([qkv])\.(weight|bias)", _CONNECTOR + r"\1_proj.\2"),
    (r"model\.vision_backbone\.image_pooling_2d\.wo\.(weight|bias)", _CONNECTOR + r"out_proj.\1"),
    (r"model\.vision_backbone\.image_projector\.w1\.weight", _CONNECTOR + "gate_proj.weight"),
    (r"model\.vision_backbone\.image_projector\.w3\.weight", _CONNECTOR + "up_proj.weight"),
    (r"model\.vision_backbone\.image_projector\.w2\.weight", _CONNECTOR + "down_proj.weight"),
)
_FUSED_QKV = re.compile(r"model\.transformer\.blocks\.(\d+)\.attn\.att_proj\.weight")
_EXPERT = re.compile(r"model\.transformer\.blocks\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
_EMBEDDING = ("model.transformer.wte.embedding", "model.transformer.wte.new_embedding")
_PATCH_EMBEDDING = "model.vision_backbone.image_vit.patch_embedding.weight"


def config_from_published(published: Mapping[str, Any]) -> MolmoeConfig:
    """The native config for a published `config.json`; raises ConfigurationError for another kind of Molmo."""
    if published.get("block_type") != "moe" or published.get("norm_after"):
        raise ConfigurationError(
            f"this is not a MolmoE config: block_type is {published.get('block_type')!r}, norm_after is "
            f"{published.get('norm_after')!r}; give a checkpoint with block_type 'moe' and norm before the blocks"
        )
    vision = published["vision_backbone"]
    width = published["d_model"]
    expert_width = published["mlp_hidden_size"] or published["mlp_ratio"] * width
    text = OlmoeConfig(
        vocab_size=published["embedding_size"] + published["additional_vocab_size"],
        hidden_size=width,
        intermediate_size=expert_width // 2,
        num_hidden_layers=published["n_layers"],
        num_attention_heads=published["n_heads"],
        num_key_value_heads=published["n_kv_heads"],
        num_experts=published["moe_num_experts"],
        num_experts_per_tok=published["moe_top_k"],
        norm_topk_prob=False,
        rms_norm_eps=published["layer_norm_eps"],
        rope_parameters={"rope_type": "default", "rope_theta": published["rope_theta"]},
        max_position_embeddings=published["max_position_embeddings"],
        clip_qkv=published["clip_qkv"],
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=published["pad_token_id"],
    )
    tower = CLIPVisionConfig(
        hidden_size=vision["image_emb_dim"],
        intermediate_size=vision["image_mlp_dim"],
        num_hidden_layers=vision["image_num_layers"],
        num_attention_heads=vision["image_num_heads"],
        image_size=vision["image_default_input_size"][0],
        patch_size=vision["image_patch_size"],
        hidden_act=vision["image_mlp_activations"],
        layer_norm_eps=vision["image_norm_eps"],
    )
    return MolmoeConfig(
        text_config=text,
        vision_config=tower,
        head_vocab_size=published["embedding_size"],
        vision_feature_layers=tuple(published["vit_layers"]),
        pooling_size=published["image_pooling_h"],
        projector_hidden_size=expert_width // 2,
        image_start_token_id=IMAGE_TOKEN_IDS["image_start"],
        image_end_token_id=IMAGE_TOKEN_IDS["image_end"],
        image_patch_token_id=IMAGE_TOKEN_IDS["image_patch"],
        image_column_token_id=IMAGE_TOKEN_IDS["image_column"],
        bos_token_id=EOS_TOKEN_ID,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=published["pad_token_id"],
    )


def convert_published_tensors(published: Mapping[str, torch.Tensor], config: MolmoeConfig) -> dict[str, torch.Tensor]:
    """Native state dict from published tensors; every tensor must be used.

    `att_proj` rows are q, k, v; experts are stacked as [E, 2 I, H] (gate, then up) and [E, H, I]; the embedding
    table is `embedding` followed by `new_embedding`; patch columns run over (row, column, channel).

    Raises:
        ConfigurationError: a tensor with a name that is not known, or one that is missing.
    """
    native: dict[str, torch.Tensor] = {}
    experts: dict[tuple[int, str], dict[int, torch.Tensor]] = {}
    unknown = []
    for name, tensor in published.items():
        if match := _FUSED_QKV.fullmatch(name):
            native.update(_split_qkv(int(match[1]), tensor, config))
        elif match := _EXPERT.fullmatch(name):
            experts.setdefault((int(match[1]), match[3]), {})[int(match[2])] = tensor
        elif name == _PATCH_EMBEDDING:
            native[_TOWER + "embeddings.patch_embedding.weight"] = _patch_convolution(tensor, config)
        elif name not in _EMBEDDING:
            renamed = _native_name(name)
            if renamed is None:
                unknown.append(name)
            else:
                native[renamed] = tensor
    if unknown:
        raise ConfigurationError(f"{len(unknown)} tensors with unknown names, for example {unknown[0]!r}")
    missing = [name for name in _EMBEDDING if name not in published]
    if missing:
        raise ConfigurationError(f"tensors {missing} are missing from the checkpoint")
    native[_TEXT + "embed_tokens.weight"] = torch.cat([published[name] for name in _EMBEDDING])
    native.update(_stack_experts(experts, config))
    return native


def _native_name(name: str) -> str | None:
    if name in _RENAMED:
        return _RENAMED[name]
    for pattern, replacement in _PATTERNS:
        if match := re.fullmatch(pattern, name):
            return match.expand(replacement)
    return None


def _split_qkv(block: int, fused: torch.Tensor, config: MolmoeConfig) -> dict[str, torch.Tensor]:
    text = config.text_config
    head_dim = text.hidden_size // text.num_attention_heads
    kv_rows = head_dim * text.num_key_value_heads
    parts = fused.split([text.hidden_size, kv_rows, kv_rows])
    return {
        f"{_TEXT}layers.{block}.self_attn.{letter}_proj.weight": part for letter, part in zip("qkv", parts, strict=True)
    }


def _patch_convolution(weight: torch.Tensor, config: MolmoeConfig) -> torch.Tensor:
    side = config.vision_config.patch_size
    return weight.view(-1, side, side, 3).permute(0, 3, 1, 2).contiguous()


def _stack_experts(
    experts: dict[tuple[int, str], dict[int, torch.Tensor]], config: MolmoeConfig
) -> dict[str, torch.Tensor]:
    stacked = {}
    count = config.text_config.num_experts
    for block in range(config.text_config.num_hidden_layers):
        parts = {}
        for kind in ("gate", "up", "down"):
            tensors = experts.get((block, kind), {})
            if sorted(tensors) != list(range(count)):
                raise ConfigurationError(
                    f"block {block} has {len(tensors)} {kind} projections, the config says {count} experts"
                )
            parts[kind] = torch.stack([tensors[index] for index in range(count)])
        prefix = f"{_TEXT}layers.{block}.mlp.experts."
        stacked[prefix + "gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], dim=1)
        stacked[prefix + "down_proj"] = parts["down"]
    return stacked


def load_published_checkpoint(folder: Path, dtype: torch.dtype) -> MolmoeForConditionalGeneration:
    """The native model from a folder with published `config.json` and safetensors, on the CPU, in evaluation mode.

    Raises:
        ConfigurationError: no safetensors, or tensors that do not fit the config one to one.
    """
    published = json.loads((folder / "config.json").read_text())
    config = config_from_published(published)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigurationError(f"{folder} holds a MolmoE config but no *.safetensors files")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors.update({name: tensor.to(dtype) for name, tensor in load_file(file).items()})
    native = convert_published_tensors(tensors, config)
    with torch.device("meta"):
        expected = {name: tensor.shape for name, tensor in MolmoeForConditionalGeneration(config).state_dict().items()}
    if {name: tensor.shape for name, tensor in native.items()} != expected:
        differing = sorted(
            name
            for name in native.keys() | expected.keys()
            if name not in native or native[name].shape != expected.get(name)
        )
        raise ConfigurationError(f"{folder}: tensors do not fit the config, for example {differing[0]!r}")
    model = MolmoeForConditionalGeneration(config).to(dtype)
    model.load_state_dict(native, strict=True, assign=True)
    return model.eval()
