"""Vision formulas against sums by hand."""

import pytest

from experiment_core_utils.models.costs.vision_table import (
    ProjectorShape,
    QueryProjectorShape,
    VisionShape,
    WindowShape,
)
from experiment_core_utils.primitives.errors import ConfigurationError


def tower(projector: ProjectorShape, class_tokens: int = 0, has_pooling_head: bool = False) -> VisionShape:
    """Two blocks of width 6, MLP 10; patches of 4 x 4 pixels in 3 channels."""
    return VisionShape(6, 10, 2, 48, class_tokens, has_pooling_head, projector)


def test_a_tower_with_a_class_token_by_hand() -> None:
    embedding = 2 * 9 * 48 * 6  # 9 patches -> 5184
    block = 2 * 10 * (4 * 36 + 2 * 60) + 4 * 100 * 6  # 10 tokens -> 7680
    projector = 2 * 9 * (6 * 8 + 8 * 8)  # without the class token -> 2016
    shape = tower(ProjectorShape((6, 8, 8), dropped_tokens=1), class_tokens=1)
    assert shape.flops(9) == embedding + 2 * block + projector == 22560


def test_merged_patches_and_several_projectors_by_hand() -> None:
    bare = tower(ProjectorShape((24,), merged=4)).flops(12)
    # 12 patches are 3 features of 4 * 6; three projectors of 24 x 24 and 24 x 8.
    shape = tower(ProjectorShape((24, 24, 8), merged=4, copies=3))
    assert shape.flops(12) - bare == 3 * 2 * 3 * (24 * 24 + 24 * 8) == 13824


def test_a_pooling_head_by_hand() -> None:
    projector = ProjectorShape((6, 8))
    # One query over 9 tokens: query and output products, keys and values of 9, scores and values, MLP on one.
    head = 2 * 36 + 2 * 36 + 2 * 9 * 36 * 2 + 4 * 9 * 6 + 2 * 2 * 6 * 10
    assert tower(projector, has_pooling_head=True).flops(9) - tower(projector).flops(9) == head == 1896


def test_windows_by_hand() -> None:
    """A picture of 6 x 9 patches in windows of 4 x 4: rows 4 + 2, columns 4 + 4 + 1."""
    projector = ProjectorShape((6, 8))
    windowed = VisionShape(6, 10, 2, 48, 0, False, projector, windows=WindowShape(num_blocks=1, side=4))
    sizes = [4 * 4, 4 * 4, 4 * 1, 2 * 4, 2 * 4, 2 * 1]
    pairs = sum(size**2 for size in sizes)  # -> 660
    assert tower(projector).flops(54) - windowed.flops(54, (6, 9)) == 4 * (54**2 - pairs) * 6 == 54144
    with pytest.raises(ConfigurationError, match="rows and columns"):
        windowed.flops(54)


def test_gated_mlps_by_hand() -> None:
    plain = tower(ProjectorShape((24, 8), merged=4)).flops(12)
    # One more product of 6 x 10 for each of 12 tokens in 2 blocks; 3 of 8 x 5 for each of 3 features.
    gated = VisionShape(6, 10, 2, 48, 0, False, ProjectorShape((24, 8), merged=4, gated_width=5), is_gated=True)
    assert gated.flops(12) - plain == 2 * 2 * 12 * 6 * 10 + 2 * 3 * 3 * 8 * 5 == 3600


def test_queries_by_hand() -> None:
    """2 queries for 9 tokens of width 6, into a decoder of width 8."""
    projector = QueryProjectorShape(hidden=6, text_hidden=8, queries=((9, 2), (16, 3)))
    ends = 2 * 2 * (6 * 6 * 2 + 6 * 6 * 2)  # queries twice, answers twice -> 576
    middle = 2 * 9 * (6 * 6 * 2) * 2  # keys and values, each twice -> 2592
    layers = 2 * 2 * (6 * 8 + 8 * 8)  # -> 448
    assert projector.flops(9) == ends + middle + 4 * 2 * 9 * 6 + layers == 4048
    with pytest.raises(ConfigurationError, match=r"10 patches .* \[9, 16\]"):
        projector.flops(10)


@pytest.mark.parametrize("patches", [0, -4, 6])
def test_pictures_that_are_not_possible(patches: int) -> None:
    with pytest.raises(ConfigurationError, match="multiple of 4"):
        tower(ProjectorShape((24, 8), merged=4)).flops(patches)
