"""How many vision tokens a number of crops becomes, and how many crops a number of vision tokens takes."""

from dataclasses import dataclass
from typing import Literal

from experiment_core_utils.primitives.errors import ImpossibleCombination

FEATURES_PER_CROP = 144
# Beyond this, a picture alone fills a context of 32768 tokens.
MOST_CROPS = 512


def tokens_of_crops(num_crops: int, features_per_crop: int = FEATURES_PER_CROP, *, has_overview: bool = True) -> int:
    """Theoretical vision tokens of `num_crops` crops and the overview crop: one for each pooled image feature.

    A model may drop some of them where crops overlap: `actual_vision_tokens` of a result counts those in the prompt.
    """
    return (num_crops + has_overview) * features_per_crop


@dataclass(frozen=True)
class TokenUnit:
    """What a number of vision tokens is made of in a family of models; MolmoE's crops by default."""

    #: None where a picture is taken in its own shape, so that every number of tokens can be requested
    features_per_crop: int | None = FEATURES_PER_CROP
    #: whether a crop of the whole picture is beside its crops, and also beside a single one
    overview: Literal["always", "beside several", "never"] = "always"

    def crops_of(self, tokens: int) -> int | None:
        """Crops beside the overview crop that `tokens` suffice for, such as `tokens // 144 - 1`; None without crops.

        Raises:
            ImpossibleCombination: fewer than 1 crop or 1 token, or more than 512 crops of 144 tokens.
        """
        features, beside = self.features_per_crop, int(self.overview != "never")
        if features is None:
            crops, least, most = None, 1, tokens_of_crops(MOST_CROPS)
            what, too_many = "a picture takes at least 1", ""
        else:
            crops, most = max(tokens // features - beside, 1), (MOST_CROPS + beside) * features
            least = (1 + (self.overview == "always")) * features
            what = f"{'the overview crop and one more crop take' if least > features else 'one crop takes'} {least}"
            too_many = f": they take {crops} crops"
        if tokens < least:
            raise ImpossibleCombination(f"{tokens} vision tokens are too few: {what}; give at least that")
        if tokens > most + ((features or 1) - 1):
            raise ImpossibleCombination(f"{tokens} vision tokens are too many{too_many}; give at most {most}")
        return crops


MOLMOE_TOKENS = TokenUnit()
