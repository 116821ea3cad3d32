"""In: a transformers config; out: the shapes that its operations follow from, by an explicit table of `model_type`s.

A new family is an entry: a function that maps the config's fields. It comes with a tiny model of the family in
`tests/models/tiny_families.py`, on which its formulas are compared with counted operations. The config is that of the
model as it was trained; weights, their precision and their packing play no part.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from experiment_core_utils.models.decoder_flops import BlockShape, DecoderShape, ExpertsShape, MlpShape
from experiment_core_utils.models.molmoe.flops import vision_flops as molmoe_vision_flops
from experiment_core_utils.models.vision_flops import ProjectorShape, VisionShape
from experiment_core_utils.primitives.errors import ProfilerError


class NotInTable(ProfilerError):
    """No formula is known for an architecture, or for a way in which it is configured; the message says which."""


@dataclass(frozen=True)
class CropVision:
    """Vision stage of a model that cuts pictures into crops of one size."""

    flops_per_crop: int


@dataclass(frozen=True)
class PatchVision:
    """Vision stage of a model that takes pictures of any size."""

    shape: VisionShape


Vision = CropVision | PatchVision
Mlp = MlpShape | ExpertsShape


# --- decoders -----------------------------------------------------------------------------------------------------


def _gated(config: Any) -> list[Mlp]:
    return [MlpShape(config.intermediate_size)] * config.num_hidden_layers


def _plain(config: Any) -> list[Mlp]:
    return [MlpShape(config.intermediate_size, is_gated=False)] * config.num_hidden_layers


def _olmoe(config: Any) -> list[Mlp]:
    experts = ExpertsShape(config.num_experts, config.num_experts_per_tok, config.intermediate_size)
    return [experts] * config.num_hidden_layers


def _mixtral(config: Any) -> list[Mlp]:
    experts = ExpertsShape(config.num_local_experts, config.num_experts_per_tok, config.intermediate_size)
    return [experts] * config.num_hidden_layers


def _qwen2_moe(config: Any) -> list[Mlp]:
    return _qwen_moe(config, shared_width=config.shared_expert_intermediate_size, has_shared_gate=True)


def _qwen_moe(config: Any, shared_width: int = 0, has_shared_gate: bool = False) -> list[Mlp]:
    dense = MlpShape(config.intermediate_size)
    experts = ExpertsShape(
        config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size, shared_width, has_shared_gate
    )
    step, always_dense = config.decoder_sparse_step, set(config.mlp_only_layers)
    if experts.num_experts == 0:
        return [dense] * config.num_hidden_layers
    return [
        experts if (block + 1) % step == 0 and block not in always_dense else dense
        for block in range(config.num_hidden_layers)
    ]


# Each gives the MLP of every block.
_DECODERS: dict[str, Callable[[Any], list[Mlp]]] = {
    "llama": _gated,
    "mistral": _gated,
    "qwen2": _gated,
    "qwen3": _gated,
    "qwen3_vl_text": _gated,
    "starcoder2": _plain,
    "olmoe": _olmoe,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen_moe,
    "qwen3_vl_moe_text": _qwen_moe,
}


def _decoder(config: Any, head_rows: int | None = None) -> DecoderShape:
    """`head_rows` where the head has not as many rows as the embedding."""
    mlps_of = _DECODERS.get(config.model_type)
    if mlps_of is None:
        raise NotInTable(_unknown(config.model_type, _DECODERS))
    if getattr(config, "is_heterogeneous", False):
        raise NotInTable(f"the config of this {config.model_type} says that its blocks differ in size")
    # Whether these fields exist depends on the family.
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    query_width = config.num_attention_heads * head_size
    kv_width = (config.num_key_value_heads or config.num_attention_heads) * head_size
    blocks = [
        BlockShape(query_width, kv_width, window, mlp)
        for window, mlp in zip(_windows(config), mlps_of(config), strict=True)
    ]
    return DecoderShape.of_blocks(config.hidden_size, blocks, head_rows or config.vocab_size)


def _windows(config: Any) -> list[int | None]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [window] * config.num_hidden_layers
    known = {"full_attention": None, "sliding_attention": window}
    foreign = [f"{kind} in block {block}" for block, kind in enumerate(kinds) if kind not in known]
    if foreign:
        raise NotInTable(f"no formula is known for the attention of this {config.model_type}: {', '.join(foreign)}")
    return [known[kind] for kind in kinds]


# --- vision -------------------------------------------------------------------------------------------------------


def _llava_vision(config: Any) -> CropVision:
    tower, text = config.vision_config, config.text_config
    if tower.model_type == "clip_vision_model":
        class_tokens, has_pooling_head = 1, False
    elif tower.model_type == "siglip_vision_model":
        # Older versions of transformers have no such field, and always the head.
        class_tokens, has_pooling_head = 0, getattr(tower, "vision_use_head", True)
    else:
        raise NotInTable(_unknown(tower.model_type, ("clip_vision_model", "siglip_vision_model")))
    patch = _one_number(tower, "patch_size")
    chosen = config.vision_feature_layer
    stacked = tower.hidden_size * (1 if isinstance(chosen, int) else len(chosen))
    shape = VisionShape(
        hidden=tower.hidden_size,
        mlp_width=tower.intermediate_size,
        num_blocks=tower.num_hidden_layers,
        patch_values=tower.num_channels * patch**2,
        class_tokens=class_tokens,
        has_pooling_head=has_pooling_head,
        projector=ProjectorShape(
            (stacked, text.hidden_size, text.hidden_size),
            dropped_tokens=int(config.vision_feature_select_strategy == "default"),
        ),
    )
    return CropVision(shape.flops((_one_number(tower, "image_size") // patch) ** 2))


def _qwen3_vl_vision(config: Any) -> PatchVision:
    tower = config.vision_config
    merged = tower.spatial_merge_size**2
    wide = tower.hidden_size * merged
    depths = {depth for depth in tower.deepstack_visual_indexes if depth < tower.depth}
    shape = VisionShape(
        hidden=tower.hidden_size,
        mlp_width=tower.intermediate_size,
        num_blocks=tower.depth,
        patch_values=tower.in_channels
        * _one_number(tower, "temporal_patch_size")
        * _one_number(tower, "patch_size") ** 2,
        class_tokens=0,
        has_pooling_head=False,
        projector=ProjectorShape((wide, wide, tower.out_hidden_size), merged=merged, copies=1 + len(depths)),
    )
    return PatchVision(shape)


def _molmoe_vision(config: Any) -> CropVision:
    return CropVision(molmoe_vision_flops(config, 1))


def _one_number(config: Any, field: str) -> int:
    value = getattr(config, field)
    if not isinstance(value, int):
        raise NotInTable(f"no formula is known for {config.model_type} with {field} {value}; it must be one number")
    return value


# --- models -------------------------------------------------------------------------------------------------------


def _text_only(config: Any) -> tuple[DecoderShape, None]:
    return _decoder(config), None


_VISION_MODELS: dict[str, Callable[[Any], tuple[DecoderShape, Vision]]] = {
    "llava": lambda config: (_decoder(config.text_config), _llava_vision(config)),
    "qwen3_vl": lambda config: (_decoder(config.text_config), _qwen3_vl_vision(config)),
    "qwen3_vl_moe": lambda config: (_decoder(config.text_config), _qwen3_vl_vision(config)),
    "molmoe": lambda config: (_decoder(config.text_config, config.head_vocab_size), _molmoe_vision(config)),
}


def shapes_of(config: Any) -> tuple[DecoderShape, Vision | None]:
    """Decoder and vision stage of an architecture; the latter is None for a text model.

    Raises:
        NotInTable: it is not known.
    """
    known = {**dict.fromkeys(_DECODERS, _text_only), **_VISION_MODELS}
    shapes = known.get(config.model_type)
    if shapes is None:
        raise NotInTable(_unknown(config.model_type, known))
    return shapes(config)


def _unknown(model_type: str, known: Any) -> str:
    return f"no formula is known for {model_type!r}; there are formulas for {', '.join(sorted(known))}"
