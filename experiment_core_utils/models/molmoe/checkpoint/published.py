"""Loading a MolmoE checkpoint in the published Hugging Face layout into the native classes."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CLIPVisionConfig, OlmoeConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.olmoe.modeling_olmoe import OlmoeRotaryEmbedding

from experiment_core_utils.models.common.checkpoint_files import (
    Shape,
    find_tensors,
    read_raw_config,
    read_tensor,
    refuse_misfit_tensors,
)
from experiment_core_utils.models.common.vendor_errors import vendor_errors_named
from experiment_core_utils.models.molmoe.configuration_molmoe import MolmoeConfig
from experiment_core_utils.models.molmoe.modeling_molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.primitives.errors import ConfigurationError, first_line

LANGUAGE_MODEL = "model.language_model."
HEAD = "lm_head."
_TOWER = "model.vision_tower."
_CONNECTOR = "model.connector."
_BACKBONE = "model.vision_backbone."


@dataclass(frozen=True)
class TensorRows:
    """Rows of a published tensor, and their place in a native one."""

    target: str  #: the native tensor
    into: tuple[int | slice, ...] = ()  #: index of the place in it; empty for the whole
    #: first row of the published tensor and the one after the last; None takes them all
    rows: tuple[int, int] | None = None
    #: order of the place's axes in which it takes the values, row by row; None where it is the natural one
    axes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class PublishedTensor:
    """A tensor of the published layout: its shape, and the parts that the native layout takes from it."""

    shape: Shape
    parts: tuple[TensorRows, ...]


def published_layout(config: MolmoeConfig, native: Mapping[str, Shape]) -> dict[str, PublishedTensor]:
    """Every tensor of the published checkpoint of this config, by name, in the order of the model.

    `att_proj` rows are q, k, v; experts are stacked as [E, 2 I, H] (gate, then up) and [E, H, I]; the embedding
    table is `embedding` followed by `new_embedding`; patch columns run over (row, column, channel).

    Args:
        native: shapes of the native model's tensors.
    """
    layout = dict(_embeddings(config))
    for block in range(config.text_config.num_hidden_layers):
        layout.update(_block(block, config))
    layout.update(_patches(config))
    layout.update(
        {source: PublishedTensor(native[target], (TensorRows(target),)) for source, target in _renamed(config)}
    )
    return layout


def _embeddings(config: MolmoeConfig) -> Iterator[tuple[str, PublishedTensor]]:
    target = LANGUAGE_MODEL + "embed_tokens.weight"
    rows, old, width = config.text_config.vocab_size, config.head_vocab_size, config.text_config.hidden_size
    for name, first, end in (("embedding", 0, old), ("new_embedding", old, rows)):
        part = TensorRows(target, (slice(first, end),))
        yield f"model.transformer.wte.{name}", PublishedTensor((end - first, width), (part,))


def _block(block: int, config: MolmoeConfig) -> Iterator[tuple[str, PublishedTensor]]:
    text = config.text_config
    source, target = f"model.transformer.blocks.{block}.", f"{LANGUAGE_MODEL}layers.{block}."
    width, inner = text.hidden_size, text.intermediate_size
    kv_rows = width // text.num_attention_heads * text.num_key_value_heads
    bounds = (0, width, width + kv_rows, width + 2 * kv_rows)
    qkv = tuple(
        TensorRows(f"{target}self_attn.{letter}_proj.weight", rows=(bounds[index], bounds[index + 1]))
        for index, letter in enumerate("qkv")
    )
    yield source + "attn.att_proj.weight", PublishedTensor((bounds[-1], width), qkv)
    gate_up, down = target + "mlp.experts.gate_up_proj", target + "mlp.experts.down_proj"
    for expert in range(text.num_experts):
        prefix = f"{source}mlp.experts.{expert}."
        gate_part = TensorRows(gate_up, (expert, slice(0, inner)))
        up_part = TensorRows(gate_up, (expert, slice(inner, 2 * inner)))
        yield prefix + "gate_proj.weight", PublishedTensor((inner, width), (gate_part,))
        yield prefix + "up_proj.weight", PublishedTensor((inner, width), (up_part,))
        yield prefix + "down_proj.weight", PublishedTensor((width, inner), (TensorRows(down, (expert,)),))


def _patches(config: MolmoeConfig) -> Iterator[tuple[str, PublishedTensor]]:
    vision = config.vision_config
    part = TensorRows(_TOWER + "embeddings.patch_embedding.weight", axes=(0, 2, 3, 1))
    shape = (vision.hidden_size, 3 * vision.patch_size**2)
    yield _BACKBONE + "image_vit.patch_embedding.weight", PublishedTensor(shape, (part,))


def _renamed(config: MolmoeConfig) -> Iterator[tuple[str, str]]:
    """Tensors that differ in name only."""
    yield "model.transformer.ln_f.weight", LANGUAGE_MODEL + "norm.weight"
    yield HEAD + "weight", HEAD + "weight"
    names = {
        "attn.attn_out": "self_attn.o_proj",
        "attn.attn_norm": "input_layernorm",
        "attn.q_norm": "self_attn.q_norm",
        "attn.k_norm": "self_attn.k_norm",
        "mlp.ff_norm": "post_attention_layernorm",
        "mlp.gate": "mlp.gate",
    }
    for block in range(config.text_config.num_hidden_layers):
        for source, target in names.items():
            yield f"model.transformer.blocks.{block}.{source}.weight", f"{LANGUAGE_MODEL}layers.{block}.{target}.weight"
    yield from _renamed_vision(config)


def _renamed_vision(config: MolmoeConfig) -> Iterator[tuple[str, str]]:
    vit = _BACKBONE + "image_vit."
    yield vit + "class_embedding", _TOWER + "embeddings.class_embedding"
    yield vit + "positional_embedding", _TOWER + "embeddings.position_embedding.weight"
    yield from _with_bias(vit + "pre_ln", _TOWER + "pre_layernorm")
    names = {f"attention.w{letter}": f"self_attn.{letter}_proj" for letter in "qkv"} | {
        "attention.wo": "self_attn.out_proj",
        "feed_forward.w1": "mlp.fc1",
        "feed_forward.w2": "mlp.fc2",
        "attention_norm": "layer_norm1",
        "ffn_norm": "layer_norm2",
    }
    for block in range(config.vision_config.num_hidden_layers):
        for source, target in names.items():
            yield from _with_bias(f"{vit}transformer.resblocks.{block}.{source}", f"{_TOWER}layers.{block}.{target}")
    yield _BACKBONE + "pad_embed", _CONNECTOR + "pad_embed"
    for source, target in {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "out_proj"}.items():
        yield from _with_bias(f"{_BACKBONE}image_pooling_2d.{source}", _CONNECTOR + target)
    for source, target in {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.items():
        yield f"{_BACKBONE}image_projector.{source}.weight", f"{_CONNECTOR}{target}.weight"


def _with_bias(source: str, target: str) -> Iterator[tuple[str, str]]:
    for kind in ("weight", "bias"):
        yield f"{source}.{kind}", f"{target}.{kind}"


def assemble(
    layout: Mapping[str, PublishedTensor],
    native: Mapping[str, Shape],
    read: Callable[[str], torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
    wanted: Iterable[str],
) -> dict[str, torch.Tensor]:
    """The native tensors in `wanted`, in `dtype` on `device`; each published tensor is read once and released.

    Beside what is returned there is one published tensor in memory at a time, in the precision that it is stored in.
    """
    made = {name: torch.empty(native[name], dtype=dtype, device=device) for name in wanted}
    for name, published in layout.items():
        parts = [part for part in published.parts if part.target in made]
        if not parts:
            continue
        tensor = read(name)
        for part in parts:
            place = made[part.target][part.into]
            if part.axes is not None:
                place = place.permute(part.axes)
            rows = tensor if part.rows is None else tensor[slice(*part.rows)]
            place.copy_(rows.reshape(place.shape))
    return made


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


def load_published_checkpoint(
    folder: Path, dtype: torch.dtype, device: torch.device = CPU
) -> MolmoeForConditionalGeneration:
    """The native model from a folder in the published layout, on `device` in evaluation mode.

    Beside the model itself there is one published tensor in memory at a time, and no second copy in another precision.

    Raises:
        ConfigurationError: no safetensors, files that are not whole, a config that lacks a key, or tensors that do not
            fit it one to one.
    """
    config = config_from_published(read_raw_config(folder), folder)
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
    config = config_from_published(read_raw_config(folder), folder)
    shapes = native_shapes(config)
    wanted = [name for name in shapes if name.startswith((LANGUAGE_MODEL, HEAD))]
    return _read_native(folder, config, shapes, dtype, CPU, wanted)


def native_shapes(config: MolmoeConfig) -> dict[str, Shape]:
    """Shapes of the native model's tensors for a config."""
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
