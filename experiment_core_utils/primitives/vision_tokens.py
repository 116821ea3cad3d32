"""How many vision tokens a number of crops becomes, and how many crops a number of vision tokens takes."""

from experiment_core_utils.primitives.errors import ImpossibleCombination

FEATURES_PER_CROP = 144
# Beyond this, a picture alone fills a context of 32768 tokens.
MOST_CROPS = 512


def tokens_of_crops(num_crops: int, features_per_crop: int = FEATURES_PER_CROP, *, has_overview: bool = True) -> int:
    """Theoretical vision tokens of `num_crops` crops and the overview crop: one for each pooled image feature.

    A model may drop some of them where crops overlap: `actual_vision_tokens` of a result counts those in the prompt.
    """
    return (num_crops + has_overview) * features_per_crop


def crops_of_tokens(tokens: int) -> int:
    """Crops beside the overview crop that `tokens` vision tokens suffice for: `tokens // 144 - 1`.

    Raises:
        ImpossibleCombination: fewer than 1 crop, or more than 512.
    """
    crops = tokens // FEATURES_PER_CROP - 1
    if crops < 1:
        raise ImpossibleCombination(
            f"{tokens} vision tokens are too few: the overview crop and one more crop take {tokens_of_crops(1)}; "
            f"give at least that"
        )
    if crops > MOST_CROPS:
        raise ImpossibleCombination(
            f"{tokens} vision tokens are too many: they take {crops} crops; give at most {tokens_of_crops(MOST_CROPS)}"
        )
    return crops
