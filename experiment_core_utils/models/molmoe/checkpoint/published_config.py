"""The config and the tokenizer of a MolmoE checkpoint in the published Hugging Face layout."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CLIPVisionConfig, OlmoeConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from experiment_core_utils.models.common.vendor_errors import vendor_errors_named
from experiment_core_utils.models.molmoe.configuration_molmoe import MolmoeConfig
from experiment_core_utils.primitives.errors import ConfigurationError, first_line

PUBLISHED_MODEL_TYPE = "molmo"
IMAGE_TOKEN_IDS = {"image_start": 50280, "image_end": 50281, "image_patch": 50282, "image_column": 50283}
EOS_TOKEN_ID = 50279

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


def config_from_published(published: Mapping[str, Any], source: Path | None = None) -> MolmoeConfig:
    """The native config for a published `config.json`.

    Args:
        source: its file or folder, for messages.

    Raises:
        ConfigurationError: another kind of Molmo, a key is missing, or a value that MolmoE cannot have.
    """
    _refuse_other_kinds(published)
    try:
        return _native_config(published)
    except KeyError as error:
        named = "" if source is None else f" in {source}"
        raise ConfigurationError(f"the MolmoE config{named} lacks the key {error}") from error
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


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")

_EXPECTED = {
    "<|endoftext|>": EOS_TOKEN_ID,
    "<im_start>": IMAGE_TOKEN_IDS["image_start"],
    "<im_end>": IMAGE_TOKEN_IDS["image_end"],
    "<im_patch>": IMAGE_TOKEN_IDS["image_patch"],
    "<im_col>": IMAGE_TOKEN_IDS["image_column"],
    "<|image|>": 50284,
}


def load_published_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in `tokenizer.json` and `tokenizer_config.json`, padding on the left.

    Read directly: `AutoTokenizer` would want to run the code that a published config names.

    Raises:
        ConfigurationError: a file is missing or cannot be read, or a special token has another id than in MolmoE.
    """
    for name in TOKENIZER_FILES:
        if not (folder / name).is_file():
            raise ConfigurationError(f"{folder} has no usable tokenizer or image processor: {name} is not there")
    with vendor_errors_named(f"the tokenizer in {folder} cannot be read"):
        tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(
            folder, padding_side="left", trust_remote_code=False
        )
    ids = tokenizer.get_vocab()
    other = [
        f"{token} has id {ids.get(token)}, not {wanted}"
        for token, wanted in _EXPECTED.items()
        if ids.get(token) != wanted
    ]
    if other:
        raise ConfigurationError(f"the tokenizer in {folder} is not MolmoE's: {', '.join(other)}")
    return tokenizer
