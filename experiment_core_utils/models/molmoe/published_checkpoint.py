"""In: a checkpoint in the published Hugging Face layout of MolmoE; out: config and tensors of the native classes."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CLIPVisionConfig, OlmoeConfig
from transformers.models.olmoe.modeling_olmoe import OlmoeRotaryEmbedding

from experiment_core_utils.models.checkpoint_files import read_raw_config
from experiment_core_utils.models.molmoe.configuration_molmoe import MolmoeConfig
from experiment_core_utils.models.molmoe.modeling_molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.models.molmoe.published_layout import HEAD, LANGUAGE_MODEL, assemble, published_layout
from experiment_core_utils.models.tensor_files import Shape, find_tensors, read_tensor, refuse_misfit_tensors
from experiment_core_utils.primitives.errors import ConfigurationError, first_line

PUBLISHED_MODEL_TYPE = "molmo"
IMAGE_TOKEN_IDS = {"image_start": 50280, "image_end": 50281, "image_patch": 50282, "image_column": 50283}
EOS_TOKEN_ID = 50279
CPU = torch.device("cpu")
# What the native classes do, where a config says it.
_FIXED: Mapping[str, Any] = {
    "activation_type": "swiglu",
    "alibi": False,
    "attention_layer_norm": True,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": None,
    "image_padding_embed": "pad_and_partial_pad",
    "image_pooling_2d": "attention-meanq",
    "image_projector": "mlp",
    "layer_norm_type": "rms",
    "moe_interleave": False,
    "moe_shared_expert": False,
    "normalize_input_embeds": False,
    "qkv_bias": False,
    "rope": True,
    "rope_impl": "llama",
    "scale_logits": False,
    "use_cls_feature": False,
    "weight_tying": False,
}


def config_from_published(published: Mapping[str, Any]) -> MolmoeConfig:
    """The native config for a published `config.json`.

    Raises:
        ConfigurationError: another kind of Molmo, or a value that MolmoE cannot have.
        KeyError: a key is missing.
    """
    _refuse_other_kinds(published)
    try:
        return _native_config(published)
    except (StrictDataclassError, TypeError, ValueError, IndexError) as error:
        raise ConfigurationError(f"the MolmoE config has a value that cannot be used: {first_line(error)}") from error


def _refuse_other_kinds(published: Mapping[str, Any]) -> None:
    if published.get("block_type") != "moe" or published.get("norm_after"):
        raise ConfigurationError(
            f"this is not a MolmoE config: block_type is {published.get('block_type')!r}, norm_after is "
            f"{published.get('norm_after')!r}; give a checkpoint with block_type 'moe' and norm before the blocks, "
            "such as allenai/MolmoE-1B-0924 (the dense Molmo models are not supported)"
        )
    other = [f"{key} {published[key]!r}" for key, value in _FIXED.items() if published.get(key, value) != value]
    if other:
        raise ConfigurationError(f"this MolmoE config asks for what the native model does not do: {', '.join(other)}")


def _native_config(published: Mapping[str, Any]) -> MolmoeConfig:
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


def load_published_checkpoint(
    folder: Path, dtype: torch.dtype, device: torch.device = CPU
) -> MolmoeForConditionalGeneration:
    """The native model from a folder in the published layout, on `device` in evaluation mode.

    Beside the model itself there is one published tensor in memory at a time, and no second copy in another precision.

    Raises:
        ConfigurationError: no safetensors, files that are not whole, or tensors that do not fit the config one to one.
        KeyError: the config lacks a key.
    """
    config = config_from_published(read_raw_config(folder))
    with torch.device("meta"):
        model = MolmoeForConditionalGeneration(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    model.load_state_dict(_read_native(folder, config, shapes, dtype, device, shapes), strict=True, assign=True)
    # Buffers are in no checkpoint; the frequencies stay in float32 in every precision.
    model.model.language_model.rotary_emb = OlmoeRotaryEmbedding(config.text_config).to(device)
    embeddings = model.model.vision_tower.embeddings
    embeddings.position_ids = torch.arange(embeddings.num_positions, device=device).expand((1, -1))
    return model.eval()


def published_language_tensors(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tensors of `MolmoeForCausalLM` on the CPU; those of the vision part are evaluated by their headers, and not read.

    Raises:
        As `load_published_checkpoint`.
    """
    config = config_from_published(read_raw_config(folder))
    shapes = native_shapes(config)
    wanted = [name for name in shapes if name.startswith((LANGUAGE_MODEL, HEAD))]
    return _read_native(folder, config, shapes, dtype, CPU, wanted)


def native_shapes(config: MolmoeConfig) -> dict[str, Shape]:
    """The native model's tensors of a config."""
    with torch.device("meta"):
        model = MolmoeForConditionalGeneration(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _read_native(
    folder: Path,
    config: MolmoeConfig,
    shapes: Mapping[str, Shape],
    dtype: torch.dtype,
    device: torch.device,
    wanted: Iterable[str],
) -> dict[str, torch.Tensor]:
    stored = find_tensors(folder)
    layout = published_layout(config, shapes)
    expected = {name: tensor.shape for name, tensor in layout.items()}
    refuse_misfit_tensors({name: tensor.shape for name, tensor in stored.items()}, expected, str(folder))
    return assemble(layout, shapes, lambda name: read_tensor(name, stored[name]), dtype, device, wanted)
