"""Loading a Molmo checkpoint in the published Hugging Face layout into the native classes."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from experiment_core_utils.models.common.checkpoint_files import (
    Shape,
    find_tensors,
    read_raw_config,
    read_tensor,
    refuse_misfit_tensors,
)
from experiment_core_utils.models.molmoe.checkpoint.published_config import config_from_published
from experiment_core_utils.models.molmoe.configuration_molmoe import MolmoeConfig
from experiment_core_utils.models.molmoe.modeling_molmoe import MolmoeForConditionalGeneration

LANGUAGE_MODEL = "model.language_model."
HEAD = "lm_head."
_TOWER = "model.vision_tower."
_CONNECTOR = "model.connector."
_BACKBONE = "model.vision_backbone."
CPU = torch.device("cpu")


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


_HEAD_NORMS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
_DENSE_OUTPUTS = {"attn_out": "self_attn.o_proj", "ff_out": "mlp.down_proj"}
# Weights of a block that differ in name only, by the decoder's `model_type`.
_RENAMED_IN_BLOCKS: Mapping[str, Mapping[str, str]] = {
    "olmoe": {
        "attn.attn_out": "self_attn.o_proj",
        "attn.attn_norm": "input_layernorm",
        **{f"attn.{source}": target for source, target in _HEAD_NORMS.items()},
        "mlp.ff_norm": "post_attention_layernorm",
        "mlp.gate": "mlp.gate",
    },
    "qwen2": {**_DENSE_OUTPUTS, "attn_norm": "input_layernorm", "ff_norm": "post_attention_layernorm"},
    # Its norms are after the parts.
    "olmo2": {
        **_DENSE_OUTPUTS,
        **_HEAD_NORMS,
        "attn_norm": "post_attention_layernorm",
        "ff_norm": "post_feedforward_layernorm",
    },
}


def published_layout(config: MolmoeConfig, native: Mapping[str, Shape]) -> dict[str, PublishedTensor]:
    """Every tensor of the published checkpoint of this config, by name, in the order of the model.

    `att_proj` rows are q, k, v; experts are stacked as [E, 2 I, H] (gate, then up) and [E, H, I]; `ff_proj` rows of a
    dense block are up, then gate; the embedding table is `embedding` followed by `new_embedding`; patch columns run
    over (row, column, channel).

    Args:
        native: shapes of the native model's tensors.
    """
    layout = dict(_embeddings(config))
    for block in range(config.text_config.num_hidden_layers):
        layout.update(_attention(block, config))
        layout.update(_dense_mlp(block, config) if config.num_experts is None else _experts(block, config))
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


def _attention(block: int, config: MolmoeConfig) -> Iterator[tuple[str, PublishedTensor]]:
    text = config.text_config
    source, target = f"model.transformer.blocks.{block}.", f"{LANGUAGE_MODEL}layers.{block}."
    width = text.hidden_size
    kv_rows = width // text.num_attention_heads * text.num_key_value_heads
    bounds = (0, width, width + kv_rows, width + 2 * kv_rows)
    shapes = {"weight": (bounds[-1], width)} | ({"bias": bounds[-1:]} if text.model_type == "qwen2" else {})
    for kind, shape in shapes.items():
        qkv = tuple(
            TensorRows(f"{target}self_attn.{letter}_proj.{kind}", rows=(bounds[index], bounds[index + 1]))
            for index, letter in enumerate("qkv")
        )
        name = "att_proj" if config.num_experts is None else "attn.att_proj"
        yield f"{source}{name}.{kind}", PublishedTensor(shape, qkv)


def _dense_mlp(block: int, config: MolmoeConfig) -> Iterator[tuple[str, PublishedTensor]]:
    width, inner = config.text_config.hidden_size, config.text_config.intermediate_size
    parts = tuple(
        TensorRows(f"{LANGUAGE_MODEL}layers.{block}.mlp.{name}.weight", rows=(place * inner, (place + 1) * inner))
        for place, name in enumerate(("up_proj", "gate_proj"))
    )
    yield f"model.transformer.blocks.{block}.ff_proj.weight", PublishedTensor((2 * inner, width), parts)


def _experts(block: int, config: MolmoeConfig) -> Iterator[tuple[str, PublishedTensor]]:
    text = config.text_config
    source, target = f"model.transformer.blocks.{block}.", f"{LANGUAGE_MODEL}layers.{block}."
    width, inner = text.hidden_size, text.intermediate_size
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
    yield (HEAD if config.num_experts else "model.transformer.ff_out.") + "weight", HEAD + "weight"
    for block in range(config.text_config.num_hidden_layers):
        for source, target in _RENAMED_IN_BLOCKS[config.text_config.model_type].items():
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
    decoder = model.model.language_model
    decoder.rotary_emb = type(decoder.rotary_emb)(config.text_config).to(device)
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
