"""Operations of a vision tower with its projector by formula, from its shape and the number of patches.

Convention and exclusions as in `decoder.py`; interpolating positions is not counted either. Every block of a tower
counts, those after the last one whose output is used among them, because transformers runs them all.
"""

import itertools
from dataclasses import dataclass

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
