"""A decoder as data: its sizes, and the part of a setting that its engines run at.

A family of models makes the description of its config; engines, KV cache and kernels know no config and no family.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from experiment_core_utils.primitives.errors import ConfigurationError


@dataclass(frozen=True)
class DecoderDescription:
    """Blocks of RMSNorm, attention with shared or unshared keys, rotary positions, and SwiGLU: dense, or of experts
    chosen by softmax. What a block has of this is seen by its weights (`BlockWeights`).
    """

    width: int  #: H, of the states between blocks
    num_heads: int  #: query heads
    num_kv_heads: int
    head_width: int  #: D
    num_experts: int  #: E, of each block with experts; 1 without such
    expert_width: int  #: I, between the two products of an expert; of a dense block where there are no experts
    head_rows: int  #: V, logits of the output head
    norm_eps: float
    default_top_k: int  #: experts per token of the first block with experts, whatever the setting
    normalise_top_k: bool  #: whether the chosen experts' weights are made to sum to 1


class EngineKnobs(NamedTuple):
    """The decoder's part of a setting: experts per token of every block with experts but the first, and the active
    blocks.
    """

    top_k: int
    blocks: tuple[int, ...]

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by which a prefill of the modules takes them."""
        return {"top_k": self.top_k, "active_blocks": self.blocks}

    def refuse_impossible(self, num_experts: int, num_blocks: int) -> None:
        """Raises ConfigurationError for more experts or blocks than a decoder has, or blocks without block 0.

        Args:
            num_experts: 1 of a dense one.
        """
        if not 1 <= self.top_k <= num_experts:
            having = f"the model has {num_experts} experts a block" if num_experts > 1 else "the model is dense"
            raise ConfigurationError(f"top_k {self.top_k} is not possible: {having}")
        is_ascending = list(self.blocks) == sorted(set(self.blocks))
        if not self.blocks or self.blocks[0] != 0 or not is_ascending or self.blocks[-1] >= num_blocks:
            raise ConfigurationError(
                f"active blocks {list(self.blocks)} are not possible: give ascending indices below {num_blocks} that "
                "begin with block 0"
            )


def check_pause(blocks_run: int, num_total_blocks: int) -> None:
    """Raises ConfigurationError for a pause that is not after 1 to all of the blocks."""
    if not 1 <= blocks_run <= num_total_blocks:
        raise ConfigurationError(
            f"a pause after {blocks_run} blocks is not possible; give 1 to {num_total_blocks} blocks"
        )


def check_rest(blocks: tuple[int, ...], ran: int) -> None:
    """Raises ConfigurationError for active blocks without one of the first blocks, which have run."""
    if blocks[:ran] != tuple(range(ran)):
        raise ConfigurationError(
            f"blocks {list(blocks)} leave out one of the first {ran}, which have run; choose more blocks, or pause "
            "earlier"
        )
