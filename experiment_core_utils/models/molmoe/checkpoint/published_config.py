"""The config and the tokenizer of a Molmo checkpoint in the published Hugging Face layout."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CLIPVisionConfig,
    Olmo2Config,
    OlmoeConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from experiment_core_utils.models.common.vendor_errors import vendor_errors_named
from experiment_core_utils.models.molmoe.configuration_molmoe import MolmoeConfig
from experiment_core_utils.primitives.errors import ConfigurationError, first_line

PUBLISHED_MODEL_TYPE = "molmo"
EOS_TOKEN_ID = 50279
# Tokens inside a prompt's image part, and their ids' names in the native config.
IMAGE_TOKENS = {
    "<im_start>": "image_start_token_id",
    "<im_end>": "image_end_token_id",
    "<im_patch>": "image_patch_token_id",
    "<im_col>": "image_column_token_id",
}
MOLMOE_TOKEN_IDS = {
    "<|endoftext|>": EOS_TOKEN_ID,
    "<im_start>": 50280,
    "<im_end>": 50281,
    "<im_patch>": 50282,
    "<im_col>": 50283,
    "<|image|>": 50284,
}

# What the native classes do, where a config says it.
_FIXED: Mapping[str, Any] = {
    "activation_type": "swiglu",
    "alibi": False,
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
    "rope": True,
    "rope_impl": "llama",
    "scale_logits": False,
    "use_cls_feature": False,
    "weight_tying": False,
}
# How the blocks of MolmoE are made, and those of each dense decoder: Qwen2's of Molmo-7B-D and 72B, OLMo 2's of 7B-O.
_BLOCKS = ("attention_layer_norm", "norm_after", "qkv_bias")
_MOLMOE_BLOCKS = (True, False, False)
_DENSE_BLOCKS: Mapping[tuple[Any, ...], type[Qwen2Config | Olmo2Config]] = {
    (False, False, True): Qwen2Config,
    (True, True, False): Olmo2Config,
}
_DENSE_FIXED: Mapping[str, Any] = {"clip_qkv": None, "tie_word_embeddings": False, "include_bias": False}
# The code beside a dense checkpoint has them, and its config does not.
_DENSE_VISION: Mapping[str, Any] = {
    "image_emb_dim": 1024,
    "image_mlp_dim": 4096,
    "image_num_layers": 23,
    "image_num_heads": 16,
    "image_default_input_size": [336, 336],
    "image_patch_size": 14,
    "image_mlp_activations": "quick_gelu",
    "image_norm_eps": 1e-5,
}
_DENSE_ADDED_ROWS = 128


def config_from_published(published: Mapping[str, Any], source: Path | None = None) -> MolmoeConfig:
    """The native config for a published `config.json`.

    Args:
        source: its folder, for messages; the tokenizer of a dense model is read there, for the ids of special tokens.

    Raises:
        ConfigurationError: a kind of Molmo that is not native, a key is missing, or a value that it cannot have.
    """
    is_dense = "d_model" not in published and "hidden_size" in published
    kind = "Molmo" if is_dense else "MolmoE"
    named = "" if source is None else f" in {source}"
    try:
        if is_dense:
            return _dense_config(published, source)
        _refuse_other_kinds(published)
        return _native_config(published)
    except KeyError as error:
        raise ConfigurationError(f"the {kind} config{named} lacks the key {error}") from error
    except (StrictDataclassError, TypeError, ValueError, IndexError) as error:
        raise ConfigurationError(f"the {kind} config has a value that cannot be used: {first_line(error)}") from error


def _refuse_other_kinds(published: Mapping[str, Any]) -> None:
    if published.get("block_type") != "moe" or published.get("norm_after"):
        raise ConfigurationError(
            f"this is not a MolmoE config: block_type is {published.get('block_type')!r}, norm_after is "
            f"{published.get('norm_after')!r}; give a checkpoint with block_type 'moe' and norm before the blocks, "
            "such as allenai/MolmoE-1B-0924, or a dense one, such as allenai/Molmo-7B-D-0924"
        )
    blocks = dict(zip(_BLOCKS, _MOLMOE_BLOCKS, strict=True))
    _refuse_other_values(published, {**_FIXED, **blocks}, "MolmoE")


def _refuse_other_values(published: Mapping[str, Any], fixed: Mapping[str, Any], kind: str) -> None:
    other = [f"{key} {published[key]!r}" for key, value in sorted(fixed.items()) if published.get(key, value) != value]
    if other:
        raise ConfigurationError(f"this {kind} config asks for what the native model does not do: {', '.join(other)}")


def _dense_config(published: Mapping[str, Any], folder: Path | None) -> MolmoeConfig:
    _refuse_other_values(published, {**_FIXED, **_DENSE_FIXED}, "Molmo")
    blocks = tuple(bool(published.get(key)) for key in _BLOCKS)
    if blocks not in _DENSE_BLOCKS:
        found = ", ".join(f"{key} {value}" for key, value in zip(_BLOCKS, blocks, strict=True))
        raise ConfigurationError(
            f"this Molmo config has blocks of no native decoder: {found}; give one with qkv_bias alone, such as "
            "allenai/Molmo-7B-D-0924, or with both others, such as allenai/Molmo-7B-O-0924"
        )
    if folder is None:
        raise ValueError("the ids of special tokens are in its tokenizer; give its folder")
    tokenizer = read_published_tokenizer(folder)
    eos = tokenizer.eos_token_id
    pad = eos if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    heads, inner = published["num_attention_heads"], published["intermediate_size"]
    text = _DENSE_BLOCKS[blocks](
        vocab_size=published["embedding_size"] + published.get("additional_vocab_size", _DENSE_ADDED_ROWS),
        hidden_size=published["hidden_size"],
        # It counts gates and the values that they multiply.
        intermediate_size=inner // 2,
        num_hidden_layers=published["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=published.get("num_key_value_heads") or heads,
        rms_norm_eps=published["layer_norm_eps"],
        rope_parameters={"rope_type": "default", "rope_theta": published["rope_theta"]},
        max_position_embeddings=published["max_position_embeddings"],
        eos_token_id=eos,
        pad_token_id=pad,
    )
    return MolmoeConfig(
        text_config=text,
        vision_config=_tower_config(published.get("vision_backbone", _DENSE_VISION)),
        head_vocab_size=published["embedding_size"],
        vision_feature_layers=tuple(published.get("vit_layers", (-2, -9))),
        pooling_size=published.get("image_pooling_h", 2),
        projector_hidden_size=inner // 2,
        # Neither Qwen2 nor OLMo has a token for the beginning, and the end stands there.
        bos_token_id=eos if tokenizer.bos_token_id is None else tokenizer.bos_token_id,
        eos_token_id=eos,
        pad_token_id=pad,
        **_image_token_ids(tokenizer, folder),
    )


def _image_token_ids(tokenizer: PreTrainedTokenizerBase, folder: Path) -> dict[str, Any]:
    ids = tokenizer.get_vocab()
    missing = sorted(set(IMAGE_TOKENS) - set(ids))
    if missing or tokenizer.eos_token_id is None:
        lacking = ", ".join(missing) or "a token for the end of a text"
        raise ConfigurationError(f"the tokenizer in {folder} is not a Molmo's: it lacks {lacking}")
    return {name: ids[token] for token, name in IMAGE_TOKENS.items()}


def _native_config(published: Mapping[str, Any]) -> MolmoeConfig:
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
    return MolmoeConfig(
        text_config=text,
        vision_config=_tower_config(published["vision_backbone"]),
        head_vocab_size=published["embedding_size"],
        vision_feature_layers=tuple(published["vit_layers"]),
        pooling_size=published["image_pooling_h"],
        projector_hidden_size=expert_width // 2,
        bos_token_id=EOS_TOKEN_ID,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=published["pad_token_id"],
        **dict[str, Any]({name: MOLMOE_TOKEN_IDS[token] for token, name in IMAGE_TOKENS.items()}),
    )


def _tower_config(vision: Mapping[str, Any]) -> CLIPVisionConfig:
    return CLIPVisionConfig(
        hidden_size=vision["image_emb_dim"],
        intermediate_size=vision["image_mlp_dim"],
        num_hidden_layers=vision["image_num_layers"],
        num_attention_heads=vision["image_num_heads"],
        image_size=vision["image_default_input_size"][0],
        patch_size=vision["image_patch_size"],
        hidden_act=vision["image_mlp_activations"],
        layer_norm_eps=vision["image_norm_eps"],
    )


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def load_published_tokenizer(folder: Path, config: MolmoeConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint of this config; raises ConfigurationError as `read_published_tokenizer`, or where a
    special token has another id than in MolmoE.
    """
    tokenizer = read_published_tokenizer(folder)
    # Those of a dense model are in its config as the tokenizer has them.
    expected = {} if config.num_experts is None else MOLMOE_TOKEN_IDS
    ids = tokenizer.get_vocab()
    other = [
        f"{token} has id {ids.get(token)}, not {wanted}"
        for token, wanted in expected.items()
        if ids.get(token) != wanted
    ]
    if other:
        raise ConfigurationError(f"the tokenizer in {folder} is not MolmoE's: {', '.join(other)}")
    return tokenizer


def read_published_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in `tokenizer.json` and `tokenizer_config.json`, padding on the left.

    Read directly: `AutoTokenizer` would want to run the code that a published config names.

    Raises:
        ConfigurationError: a file is missing or cannot be read.
    """
    for name in TOKENIZER_FILES:
        if not (folder / name).is_file():
            raise ConfigurationError(f"{folder} has no usable tokenizer or image processor: {name} is not there")
    with vendor_errors_named(f"the tokenizer in {folder} cannot be read"):
        tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(
            folder, padding_side="left", trust_remote_code=False
        )
    return tokenizer
