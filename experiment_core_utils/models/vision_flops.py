"""In: the shape of a vision tower with its projector, and patches; out: floating-point operations.

Convention and exclusions as in `decoder_flops`; interpolating positions is not counted either. Every block of a tower
counts, those after the last one whose output is used among them, because transformers runs them all.
"""

import itertools
from dataclasses import dataclass

from experiment_core_utils.primitives.errors import ConfigurationError


@dataclass(frozen=True)
class ProjectorShape:
    """Linear layers from vision features to the decoder's width, one after the other.

    Attributes:
        widths: of the features and after each layer.
        dropped_tokens: of each picture that do not enter it (the class token).
        merged: tokens that stand side by side in one feature.
        copies: projectors of this shape that run on as many features (one for each depth that is passed on).
    """

    widths: tuple[int, ...]
    dropped_tokens: int = 0
    merged: int = 1
    copies: int = 1

    def flops(self, tokens: int) -> int:
        """For one picture of `tokens` tokens out of the tower."""
        features = (tokens - self.dropped_tokens) // self.merged
        products = sum(wide * narrow for wide, narrow in itertools.pairwise(self.widths))
        return self.copies * 2 * features * products


@dataclass(frozen=True)
class VisionShape:
    """A vision transformer with a plain MLP.

    Attributes:
        hidden: width of the residual stream.
        mlp_width: inner width of the MLP.
        num_blocks: that run.
        patch_values: pixels * channels (* frames) of a patch.
        class_tokens: tokens beside the patches.
        has_pooling_head: whether one query attends to all tokens at the end (SigLIP); its answer is not used, but runs.
    """

    hidden: int
    mlp_width: int
    num_blocks: int
    patch_values: int
    class_tokens: int
    has_pooling_head: bool
    projector: ProjectorShape

    def flops(self, patches: int) -> int:
        """Tower and projector for one picture, whose tokens attend to each other and to no other picture."""
        if patches < 1 or patches % self.projector.merged:
            raise ConfigurationError(
                f"a picture of {patches} patches is not possible; give a multiple of {self.projector.merged}"
            )
        tokens = patches + self.class_tokens
        embedding = 2 * patches * self.patch_values * self.hidden
        linear = 2 * tokens * (4 * self.hidden**2 + 2 * self.hidden * self.mlp_width)
        attention = 4 * tokens**2 * self.hidden
        head = self._pooling_flops(tokens) if self.has_pooling_head else 0
        return embedding + self.num_blocks * (linear + attention) + head + self.projector.flops(tokens)

    def _pooling_flops(self, tokens: int) -> int:
        """One query over all tokens: query and output, keys and values, attention, and an MLP on the answer."""
        linear = 2 * (2 + 2 * tokens) * self.hidden**2
        return linear + 4 * tokens * self.hidden + 2 * 2 * self.hidden * self.mlp_width
