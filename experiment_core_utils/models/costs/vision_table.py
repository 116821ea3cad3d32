"""The shapes of vision stages, by a function for each way to build one.

Whatever a function does not know is refused by name, so that no formula is applied to a model that it does not fit.
"""

from dataclasses import dataclass
from typing import Any

from experiment_core_utils.models.costs.decoder_table import NotInTable, unknown
from experiment_core_utils.models.costs.vision import ProjectorShape, QueryProjectorShape, VisionShape, WindowShape


@dataclass(frozen=True)
class CropVision:
    """Vision stage of a model that cuts pictures into crops of one size."""

    flops_per_crop: int


@dataclass(frozen=True)
class PatchVision:
    """Vision stage of a model that takes pictures of any size."""

    shape: VisionShape


@dataclass(frozen=True)
class SizedCropVision:
    """Vision stage of a model that cuts pictures into crops of one of several sizes."""

    flops_of: tuple[tuple[int, int], ...]  #: (features that a crop gives, operations of a crop), for each size


Vision = CropVision | SizedCropVision | PatchVision


# --- crops --------------------------------------------------------------------------------------------------------


def molmoe_vision(config: Any) -> CropVision:
    """Vision stage of MolmoE: the blocks of a CLIP tower that run (Dosovitskiy et al. 2020), and the connector (Deitke
    et al. 2024).
    """
    vision = config.vision_config
    width, patches = vision.hidden_size, config.patches_per_side**2
    tokens = patches + 1
    depth = vision.num_hidden_layers
    blocks = depth if config.keep_unused_vision_blocks else max(depth + i for i in config.vision_feature_layers) + 1
    embedding = 2 * patches * 3 * vision.patch_size**2 * width
    linear = 2 * tokens * (4 * width**2 + 2 * width * vision.intermediate_size)
    attention = 4 * tokens**2 * width
    return CropVision(embedding + blocks * (linear + attention) + _molmoe_connector_flops(config))


def _molmoe_connector_flops(config: Any) -> int:
    width = config.vision_config.hidden_size
    stacked = width * len(config.vision_feature_layers)
    features, patches = config.features_per_crop, config.patches_per_side**2
    window = config.pooling_size**2
    query = 2 * features * stacked * width
    keys_and_values = 2 * 2 * patches * stacked * width
    attention = 4 * features * window * width
    output = 2 * features * width**2
    hidden = config.projector_hidden_size
    projector = 2 * features * (2 * width * hidden + hidden * config.text_config.hidden_size)
    return int(query + keys_and_values + attention + output + projector)


def llava_vision(config: Any) -> CropVision:
    """Vision stage of LLaVA and LLaVA-NeXT: a CLIP or SigLIP tower and two layers on each of its tokens.

    Rows and columns of padding are dropped, and row ends added, after the projector.
    """
    tower, text = config.vision_config, config.text_config
    if tower.model_type == "clip_vision_model":
        class_tokens, has_pooling_head = 1, False
    elif tower.model_type == "siglip_vision_model":
        # Older versions of transformers have no such field, and always the head.
        class_tokens, has_pooling_head = 0, getattr(tower, "vision_use_head", True)
    else:
        raise unknown(tower.model_type, ("clip_vision_model", "siglip_vision_model"))
    chosen = config.vision_feature_layer
    stacked = tower.hidden_size * (1 if isinstance(chosen, int) else len(chosen))
    projector = ProjectorShape(
        (stacked, text.hidden_size, text.hidden_size),
        dropped_tokens=int(config.vision_feature_select_strategy == "default"),
    )
    return _crop_vision(tower, projector, *_square(tower), class_tokens, has_pooling_head)


def internvl_vision(config: Any) -> CropVision:
    """Vision stage of InternVL: a tower with a class token, tokens of a square side by side, two layers."""
    tower, text = config.vision_config, config.text_config
    if tower.model_type != "internvl_vision":
        raise unknown(tower.model_type, ("internvl_vision",))
    if config.vision_feature_select_strategy != "default" or not isinstance(config.vision_feature_layer, int):
        raise NotInTable(
            f"no formula is known for internvl with vision_feature_select_strategy "
            f"{config.vision_feature_select_strategy!r} and vision_feature_layer {config.vision_feature_layer}; they "
            "must be 'default' and one number"
        )
    merged = int(1 / config.downsample_ratio) ** 2
    projector = ProjectorShape(
        (tower.hidden_size * merged, text.hidden_size, text.hidden_size), dropped_tokens=1, merged=merged
    )
    sides = two_numbers(tower, "patch_size"), two_numbers(tower, "image_size")
    return _crop_vision(tower, projector, *sides, class_tokens=1)


def idefics3_vision(config: Any) -> CropVision:
    """Vision stage of Idefics3 and SmolVLM: a SigLIP tower without its head, tokens of a square side by side, one
    layer.
    """
    tower = config.vision_config
    if tower.model_type not in ("idefics3_vision", "smolvlm_vision"):
        raise unknown(tower.model_type, ("idefics3_vision", "smolvlm_vision"))
    merged = config.scale_factor**2
    projector = ProjectorShape((tower.hidden_size * merged, config.text_config.hidden_size), merged=merged)
    return _crop_vision(tower, projector, *_square(tower))


def aria_vision(config: Any) -> SizedCropVision:
    """Vision stage of Aria: a SigLIP tower without its head, on crops of two sizes, and learned queries, more for
    larger crops.
    """
    tower = config.vision_config
    if tower.model_type != "idefics3_vision":
        raise unknown(tower.model_type, ("idefics3_vision",))
    queries = tuple(sorted(config.projector_patch_to_query_dict.items()))
    if len({number for _, number in queries}) < len(queries):
        raise NotInTable(f"no formula is known for aria where crops of several sizes give as many features: {queries}")
    projector = QueryProjectorShape(tower.hidden_size, config.text_config.hidden_size, queries)
    patch, _ = _square(tower)
    shape = _crop_shape(tower, projector, patch)
    return SizedCropVision(tuple((number, shape.flops(patches)) for patches, number in queries))


def _square(tower: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """(height, width) of a patch, and of a crop, from a tower's config."""
    patch, side = one_number(tower, "patch_size"), one_number(tower, "image_size")
    return (patch, patch), (side, side)


def _crop_vision(
    tower: Any,
    projector: ProjectorShape,
    patch: tuple[int, int],
    crop: tuple[int, int],
    class_tokens: int = 0,
    has_pooling_head: bool = False,
) -> CropVision:
    """Vision shape for crops of the size that the tower's config names."""
    patches = (crop[0] // patch[0]) * (crop[1] // patch[1])
    if patches % projector.merged:
        raise NotInTable(
            f"no formula is known for {tower.model_type} with {patches} patches, of which {projector.merged} become a "
            "token"
        )
    return CropVision(_crop_shape(tower, projector, patch, class_tokens, has_pooling_head).flops(patches))


def _crop_shape(
    tower: Any,
    projector: ProjectorShape | QueryProjectorShape,
    patch: tuple[int, int],
    class_tokens: int = 0,
    has_pooling_head: bool = False,
) -> VisionShape:
    return VisionShape(
        hidden=tower.hidden_size,
        mlp_width=tower.intermediate_size,
        num_blocks=tower.num_hidden_layers,
        patch_values=tower.num_channels * patch[0] * patch[1],
        class_tokens=class_tokens,
        has_pooling_head=has_pooling_head,
        projector=projector,
    )


# --- pictures of any size -----------------------------------------------------------------------------------------


def qwen3_vl_vision(config: Any) -> PatchVision:
    """Vision stage of Qwen3-VL: plain MLPs, and a projector for each depth that is passed on."""
    tower = config.vision_config
    depths = {depth for depth in tower.deepstack_visual_indexes if depth < tower.depth}
    return PatchVision(_patch_shape(tower, tower.intermediate_size, _merger(tower, copies=1 + len(depths))))


def qwen2_5_vl_vision(config: Any) -> PatchVision:
    """Vision stage of Qwen2.5-VL: gated MLPs, and windows in all blocks but some."""
    tower = config.vision_config
    side = one_number(tower, "window_size") // tower.spatial_merge_size // one_number(tower, "patch_size")
    whole = {block for block in tower.fullatt_block_indexes if 0 <= block < tower.depth}
    windows = WindowShape(tower.depth - len(whole), side * tower.spatial_merge_size)
    return PatchVision(_patch_shape(tower, tower.intermediate_size, _merger(tower), is_gated=True, windows=windows))


def glm4v_moe_vision(config: Any) -> PatchVision:
    """Vision stage of GLM-4.5V: gated MLPs of the width of the features, one product that merges, one layer and a gated
    MLP.
    """
    tower = config.vision_config
    merged, wide = tower.spatial_merge_size**2, tower.out_hidden_size
    projector = ProjectorShape(
        (tower.hidden_size * merged, wide, wide), merged=merged, gated_width=tower.intermediate_size
    )
    return PatchVision(_patch_shape(tower, wide, projector, is_gated=True))


def _merger(tower: Any, copies: int = 1) -> ProjectorShape:
    merged = tower.spatial_merge_size**2
    wide = tower.hidden_size * merged
    return ProjectorShape((wide, wide, tower.out_hidden_size), merged=merged, copies=copies)


def _patch_shape(
    tower: Any, mlp_width: int, projector: ProjectorShape, is_gated: bool = False, windows: WindowShape | None = None
) -> VisionShape:
    frames, patch = one_number(tower, "temporal_patch_size"), one_number(tower, "patch_size")
    return VisionShape(
        hidden=tower.hidden_size,
        mlp_width=mlp_width,
        num_blocks=tower.depth,
        patch_values=tower.in_channels * frames * patch**2,
        class_tokens=0,
        has_pooling_head=False,
        projector=projector,
        is_gated=is_gated,
        windows=windows,
    )


def one_number(config: Any, field: str) -> int:
    """A field's value as one number; some configs give a list with an entry for each side."""
    value = getattr(config, field)
    if not isinstance(value, int):
        raise NotInTable(f"no formula is known for {config.model_type} with {field} {value}; it must be one number")
    return value


def two_numbers(config: Any, field: str) -> tuple[int, int]:
    """(height, width) of a field that is one number or has an entry for each side."""
    value = getattr(config, field)
    height, width = (value, value) if isinstance(value, int) else value
    return height, width
