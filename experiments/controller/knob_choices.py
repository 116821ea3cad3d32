"""What may be chosen for a request, and the setting that a choice puts in force.

A table or a baseline chooses among measured settings, whatever knobs the model has. The two-stage controller chooses in
a `KnobSpace`, where a choice is made of a tier, which acts before the vision encoder, and of top-k and a number of
blocks, which act inside the language model. The number counts block 0, which always runs; top-k is that of the blocks
after the first, which keeps the model's own. Decode steps run at what was chosen for the prefill.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from experiment_core_utils.config.block_choice import BlockChoice
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.knobs import (
    TIERS,
    KnobLimits,
    KnobSetting,
    decoder_label,
    target_of_value,
    tier_target,
)

TOP_KS = (4, 5, 6, 7, 8)
# Of 16 blocks 12, 13, 14, 15 or 16 run.
MOST_BLOCKS_LEFT_OUT = 4


@dataclass(frozen=True)
class KnobChoice:
    """The knobs of one request."""

    vision: str  #: see `VisionTarget.value`: a tier, such as `1008 tokens`, or `own`
    top_k: int | None  #: experts per token in the blocks after the first; None in a model without experts
    num_active_blocks: int  #: blocks that run, block 0 counted

    @property
    def key(self) -> str:
        """The name of the setting in results: `tier-low_topk8_blocks16`."""
        return f"{target_of_value(self.vision).label}_{decoder_label(self.top_k, self.num_active_blocks)}"

    @property
    def has_all_knobs(self) -> bool:
        """Whether it is one of tier, top-k and blocks, as the two-stage controller chooses them."""
        return self.vision in TIERS and self.top_k is not None

    @property
    def tier(self) -> str:
        """`vision` of a choice that has all knobs."""
        assert self.vision in TIERS
        return self.vision

    @property
    def experts(self) -> int:
        """`top_k` of a choice that has all knobs."""
        assert self.top_k is not None
        return self.top_k


@dataclass(frozen=True)
class KnobSpace:
    """The choices that are possible for one model; each tuple ascends, tiers by their crops."""

    tiers: tuple[str, ...]
    top_ks: tuple[int, ...]
    block_counts: tuple[int, ...]
    num_total_blocks: int  #: of the model
    first_top_k: int  #: experts per token of the first block, whatever is chosen

    def choices(self) -> tuple[KnobChoice, ...]:
        """All choices: tier by tier, within it by top-k, within that by blocks."""
        return tuple(KnobChoice(*values) for values in product(self.tiers, self.top_ks, self.block_counts))

    @property
    def full(self) -> KnobChoice:
        """The choice with the highest value of every knob."""
        return KnobChoice(self.tiers[-1], self.top_ks[-1], self.block_counts[-1])

    def check(self, choice: KnobChoice) -> KnobChoice:
        """Returns the choice; raises ConfigurationError for one outside the space."""
        allowed: Sequence[tuple[str, str | int | None, tuple[str | int, ...]]] = (
            ("tier", choice.vision, self.tiers),
            ("top_k", choice.top_k, self.top_ks),
            ("num_active_blocks", choice.num_active_blocks, self.block_counts),
        )
        for name, given, values in allowed:
            if given not in values:
                raise ConfigurationError(
                    f"{name} {given!r} cannot be chosen; choose among {', '.join(map(str, values))}"
                )
        return choice

    def setting(self, choice: KnobChoice, blocks: BlockChoice) -> KnobSetting:
        """The setting to put in force: block 0 and the most important others, without scores the first ones.

        Raises:
            ConfigurationError: a choice outside the space, or scores that do not fit the model's blocks.
        """
        self.check(choice)
        active = blocks.blocks(choice.num_active_blocks, self.num_total_blocks)
        return KnobSetting(tier_target(choice.tier), choice.top_k, active)


def published_space(limits: KnobLimits) -> KnobSpace:
    """The published space: all tiers, top-k 4 to 8 as far as the model allows, and all blocks or up to four fewer.

    Raises:
        ConfigurationError: a knob that the model does not have, or fewer experts or blocks than this takes.
    """
    reason = limits.vision_unsupported_reason or limits.top_k_unsupported_reason or limits.blocks_unsupported_reason
    if limits.default_top_k is None or reason is not None:
        raise ConfigurationError(
            f"the controller sets tier, top-k and blocks; this model lacks one ({reason or 'it has no experts'}); "
            "give a mixture-of-experts model whose crops can be set"
        )
    own, total = limits.default_top_k, limits.num_total_blocks
    top_ks = tuple(top_k for top_k in TOP_KS if top_k <= own)
    if not top_ks or total <= MOST_BLOCKS_LEFT_OUT:
        raise ConfigurationError(
            f"a model of {total} blocks and {own} experts per token is too small for a controller; it needs "
            f"{MOST_BLOCKS_LEFT_OUT + 1} blocks and {TOP_KS[0]} experts per token"
        )
    return KnobSpace(tuple(TIERS), top_ks, tuple(range(total - MOST_BLOCKS_LEFT_OUT, total + 1)), total, own)
