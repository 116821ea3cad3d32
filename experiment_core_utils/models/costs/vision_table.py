"""Operations of vision stages by formula, and their shapes, by a function for each way to build one.

Convention and exclusions are those of `decoder.py`; interpolating positions is not counted either. Every block of a
tower counts, those after the last one whose output is used among them, because transformers runs them all.

Whatever a function does not know is refused by name, so that no formula is applied to a model that it does not fit.
"""

import itertools
from dataclasses import dataclass
from typing import Any

from experiment_core_utils.models.costs.decoder_table import NotInTable, unknown
from experiment_core_utils.primitives.errors import ConfigurationError


@dataclass(frozen=True)
class ProjectorShape:
    """Linear layers from vision features to the decoder's width, one after the other."""

    widths: tuple[int, ...]  #: of the features and after each layer
    dropped_tokens: int = 0  #: of each picture that do not enter it (the class token)
    merged: int = 1  #: tokens that are side by side in one feature
    copies: int = 1  #: projectors of this shape that run on as many features (one for each depth that is passed on)
    gated_width: int = 0  #: inner width of a gated MLP on what comes out; 0 without one

    def flops(self, tokens: int) -> int:
        """FLOPs of one picture of `tokens` tokens out of the tower."""
        features = (tokens - self.dropped_tokens) // self.merged
        products = sum(wide * narrow for wide, narrow in itertools.pairwise(self.widths))
        products += 3 * self.widths[-1] * self.gated_width
        return self.copies * 2 * features * products


@dataclass(frozen=True)
class QueryProjectorShape:
    """Learned queries that attend to a picture's tokens, and two layers on each of their answers (Aria)."""

    hidden: int  #: width of the tokens
    text_hidden: int  #: the decoder's width
    queries: tuple[tuple[int, int], ...]  #: (tokens of a picture, queries for it), for each size of a picture

    @property
    def merged(self) -> int:
        """Tokens that are merged into one feature: always 1, since none are merged."""
        return 1

    def flops(self, tokens: int) -> int:
        """FLOPs of one picture of `tokens` tokens out of the tower."""
        known = dict(self.queries)
        if tokens not in known:
            raise ConfigurationError(f"a picture of {tokens} patches is not possible; give one of {sorted(known)}")
        queries = known[tokens]
        # Queries and keys and values are projected twice, and so are answers.
        linear = 2 * (4 * queries + 4 * tokens) * self.hidden**2
        layers = 2 * queries * (self.hidden * self.text_hidden + self.text_hidden**2)
        return linear + 4 * queries * tokens * self.hidden + layers


@dataclass(frozen=True)
class WindowShape:
    """Blocks whose patches attend only to those of the same window."""

    num_blocks: int  #: that do so
    side: int  #: patches on the side of a window; windows at the right and lower edge are what is left

    def pairs(self, grid: tuple[int, int]) -> int:
        """Queries times keys in all windows of a picture of (rows, columns) of patches."""
        rows, columns = (self._squares(length) for length in grid)
        return rows * columns

    def _squares(self, length: int) -> int:
        whole, rest = divmod(length, self.side)
        return whole * self.side**2 + rest**2


@dataclass(frozen=True)
class VisionShape:
    """A vision transformer."""

    hidden: int  #: width of the residual stream
    mlp_width: int  #: inner width of the MLP
    num_blocks: int  #: that run
    patch_values: int  #: pixels * channels (* frames) of a patch
    class_tokens: int  #: tokens beside the patches
    #: whether one query attends to all tokens at the end (SigLIP); its answer is not used, but runs
    has_pooling_head: bool
    projector: ProjectorShape | QueryProjectorShape
    is_gated: bool = False  #: whether the MLP has three products, not two
    windows: WindowShape | None = None  #: None where every block attends to the whole picture

    def flops(self, patches: int, grid: tuple[int, int] | None = None) -> int:
        """Tower and projector for one picture, whose tokens attend to each other and to no other picture.

        Args:
            patches: of the picture.
            grid: (rows, columns) of them; needed where there are windows.

        Raises:
            ConfigurationError: a number of patches that cannot be, or windows and no grid.
        """
        if patches < 1 or patches % self.projector.merged:
            raise ConfigurationError(
                f"a picture of {patches} patches is not possible; give a multiple of {self.projector.merged}"
            )
        tokens = patches + self.class_tokens
        embedding = 2 * patches * self.patch_values * self.hidden
        mlp = (3 if self.is_gated else 2) * self.hidden * self.mlp_width
        linear = 2 * tokens * (4 * self.hidden**2 + mlp)
        attention = 4 * self._pairs(tokens, grid) * self.hidden
        head = self._pooling_flops(tokens) if self.has_pooling_head else 0
        return embedding + self.num_blocks * linear + attention + head + self.projector.flops(tokens)

    def _pairs(self, tokens: int, grid: tuple[int, int] | None) -> int:
        """Queries times keys, of all blocks."""
        if self.windows is None:
            return self.num_blocks * tokens**2
        if grid is None:
            raise ConfigurationError(
                f"a picture of {tokens} patches is not enough to know of a tower whose patches attend in windows; give "
                "their rows and columns, too"
            )
        whole = (self.num_blocks - self.windows.num_blocks) * tokens**2
        return whole + self.windows.num_blocks * self.windows.pairs(grid)

    def _pooling_flops(self, tokens: int) -> int:
        """One query over all tokens: query and output, keys and values, attention, and an MLP on the answer."""
        linear = 2 * (2 + 2 * tokens) * self.hidden**2
        return linear + 4 * tokens * self.hidden + 2 * 2 * self.hidden * self.mlp_width


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


def glm4v_vision(config: Any) -> PatchVision:
    """Vision stage of GLM-4.1V and GLM-4.5V: gated MLPs of the width of the features, one product that merges, one
    layer and a gated MLP.
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
