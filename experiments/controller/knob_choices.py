"""What may be chosen for a request, and the setting that a choice puts in force.

A table or a baseline chooses among measured settings, whatever knobs the model has. The two-stage controller chooses in
a `KnobSpace`, where a choice is made of a tier, which acts before the vision encoder, and of top-k and a number of
blocks, which act inside the language model. The number counts block 0, which always runs; top-k is that of the blocks
after the first, which keeps the model's own. Decode steps run at what was chosen for the prefill.
"""

from dataclasses import dataclass
from itertools import product
from typing import Any

from experiment_core_utils.knobs.active_blocks import ACTIVE_BLOCKS, RunningBlocks, num_blocks_of
from experiment_core_utils.knobs.block_choice import BlockChoice
from experiment_core_utils.knobs.interface import Knob, KnobLimits, Level
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.top_k import TOP_K, experts_of
from experiment_core_utils.knobs.vision_tokens import TIERS, VISION_TOKENS, vision_of
from experiment_core_utils.primitives.errors import ConfigurationError

TOP_KS = (4, 5, 6, 7, 8)
# Of 16 blocks 12, 13, 14, 15 or 16 run.
MOST_BLOCKS_LEFT_OUT = 4
# The knobs that the two-stage controller chooses: that of stage 1, and those of stage 2.
CHOSEN: tuple[Knob[Any], ...] = (VISION_TOKENS, TOP_K, ACTIVE_BLOCKS)


def choice_of(*levels: Level | None) -> Setting:
    """The choice of these levels of `CHOSEN`, None for a knob that the model lacks; which blocks run is not in it."""
    values = zip(CHOSEN, levels, strict=True)
    return Setting({knob.name: None if level is None else knob.of_level(level) for knob, level in values})


def has_all_knobs(choice: Setting) -> bool:
    """Whether it is one of `CHOSEN` alone, with a tier, as the two-stage controller chooses them."""
    return vision_of(choice).tier is not None and set(choice.values) == {knob.name for knob in CHOSEN}


def chosen_experts(choice: Setting) -> int:
    """Experts per token of a choice that has all knobs."""
    top_k = experts_of(choice)
    assert top_k is not None
    return top_k


def decoder_part(choice: Setting) -> Setting:
    """What stage 2 chooses of a choice: the knobs that act inside the language model."""
    return choice.replaced(**{CHOSEN[0].name: None})


def tier_of(choice: Setting) -> str:
    """The tier of a choice that has all knobs."""
    tier = vision_of(choice).tier
    assert tier is not None
    return tier


@dataclass(frozen=True)
class KnobSpace:
    """The choices that are possible for one model; each tuple ascends, tiers by their crops."""

    tiers: tuple[str, ...]
    top_ks: tuple[int, ...]
    block_counts: tuple[int, ...]
    num_total_blocks: int  #: of the model
    first_top_k: int  #: experts per token of the first block, whatever is chosen

    @property
    def levels(self) -> tuple[tuple[Level, ...], ...]:
        """The levels of each of `CHOSEN`."""
        return self.tiers, self.top_ks, self.block_counts

    def choices(self) -> tuple[Setting, ...]:
        """All choices: tier by tier, within it by top-k, within that by blocks."""
        return tuple(choice_of(*values) for values in product(*self.levels))

    def at(self, *places: int) -> Setting:
        """The choice of the levels at these places, one for each of `CHOSEN`."""
        return choice_of(*(levels[place] for levels, place in zip(self.levels, places, strict=True)))

    @property
    def lowest(self) -> Setting:
        """The choice with the lowest value of every knob."""
        return self.at(0, 0, 0)

    @property
    def full(self) -> Setting:
        """The choice with the highest value of every knob."""
        return self.at(-1, -1, -1)

    def check(self, choice: Setting) -> Setting:
        """Returns the choice; raises ConfigurationError for one outside the space."""
        for knob, levels in zip(CHOSEN, self.levels, strict=True):
            level = choice.level(knob.name)
            if level not in levels:
                raise ConfigurationError(
                    f"{knob.name} {level!r} cannot be chosen; choose among {', '.join(map(str, levels))}"
                )
        return choice

    def setting(self, choice: Setting, blocks: BlockChoice) -> Setting:
        """The setting to put in force: block 0 and the most important others, without scores the first ones.

        Raises:
            ConfigurationError: a choice outside the space, or scores that do not fit the model's blocks.
        """
        self.check(choice)
        active = blocks.blocks(num_blocks_of(choice), self.num_total_blocks)
        return choice.replaced(num_active_blocks=RunningBlocks.of(active))


def published_space(limits: KnobLimits) -> KnobSpace:
    """The published space: all tiers, top-k 4 to 8 as far as the model allows, and all blocks or up to four fewer.

    Raises:
        ConfigurationError: a knob that the model does not have, or fewer experts or blocks than this takes.
    """
    reason = next((limits.unsupported[knob.name] for knob in CHOSEN if knob.name in limits.unsupported), None)
    if limits.default_top_k is None or limits.num_total_blocks is None or reason is not None:
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
