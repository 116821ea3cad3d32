"""The knob of active transformer blocks, and which of them run for a number."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from experiment_core_utils.knobs.block_choice import (
    NO_SCORES,
    BlockChoice,
    choice_by_scores,
    choice_by_sets,
    own_scores_in,
)
from experiment_core_utils.knobs.interface import (
    CannotBeSeen,
    Knob,
    KnobLimits,
    KnobRequest,
    Level,
    RequestedValues,
    Turned,
    number_after,
)
from experiment_core_utils.primitives.errors import ConfigurationError, KnobDidNotAct
from experiment_core_utils.primitives.flag_fields import Count, FilePath, Listed, Metavar, Part
from experiment_core_utils.primitives.grids import distinct, possible


class BlockFlags(Part):
    """The flags of active blocks."""

    alternatives = (("importance_scores_file", "block_sets_file"),)

    num_active_blocks_list: Annotated[Listed[Count], Metavar("BLOCKS")] | None = Field(
        default=None,
        description="numbers of active blocks, block 0 counted "
        "(default: all; where scores choose them, three quarters, too)",
    )
    importance_scores_file: FilePath | None = Field(
        default=None,
        description="JSON of block -> score that chooses the blocks; none: the first blocks (default: "
        "block_importance.json in the model's folder, where there is one)",
    )
    block_sets_file: FilePath | None = Field(default=None, description="JSON of number of blocks -> active blocks")

    @cached_property
    def block_choice(self) -> BlockChoice | None:
        """What the files name; None leaves it to the scores in the model's folder."""
        if self.block_sets_file is not None:
            return choice_by_sets(self.block_sets_file)
        if self.importance_scores_file is None:
            return None
        if str(self.importance_scores_file) == NO_SCORES:
            return BlockChoice()
        return choice_by_scores(self.importance_scores_file)

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        # Made here, so that a wrong file is reported at once.
        _ = self.block_choice
        return self


@dataclass(frozen=True)
class RunningBlocks:
    """The blocks that run."""

    count: int  #: block 0 counted
    #: indices of the blocks, ascending, block 0 among them; None where only their number was read from a name
    chosen: tuple[int, ...] | None = None

    @classmethod
    def of(cls, indices: Sequence[int]) -> Self:
        """The blocks of these indices."""
        return cls(len(indices), tuple(indices))

    @property
    def indices(self) -> tuple[int, ...]:
        """`chosen` of blocks that are known; raises ValueError where only their number is."""
        if self.chosen is None:
            raise ValueError(f"{self.count} blocks were read from a name; choose them by BlockChoice.blocks")
        return self.chosen


class BlockCount(Knob[RunningBlocks]):
    """How many transformer blocks of the decoder run; block 0 always does."""

    meaning = "transformer blocks that run"
    name, title, plural, flags = "num_active_blocks", "blocks", "block counts", BlockFlags
    page = "knobs/transformer_blocks_knob.md"
    untouched_stages = ("T_vision_total",)
    published = (name,)

    def own(self, limits: KnobLimits) -> RunningBlocks | None:
        """It is None where no block is shown."""
        return None if limits.num_total_blocks is None else RunningBlocks.of(range(limits.num_total_blocks))

    def requested(self, request: KnobRequest) -> RequestedValues[RunningBlocks]:
        """See `Knob.requested`; by default all blocks.

        Where it is known which blocks matter, or random weights make that no question, three quarters of them, too.
        """
        limits, given = request.limits, request.flags.num_active_blocks_list
        total = limits.num_total_blocks
        if self.name in limits.unsupported:
            return self.fixed(request, "num_active_blocks_list", limits.unsupported[self.name])
        assert total is not None
        choice = request.flags.block_choice
        # Scores are looked at with the choice of blocks itself: it is not a single value that they rule out.
        sets = choice if choice is not None and choice.sets is not None else BlockChoice()
        default = distinct((-(-3 * total // 4), total)) if fewer_by_default(request) else (total,)
        counts, left_out = possible(given or default, lambda count: len(sets.blocks(count, total)))
        chosen = block_choice_of(request)
        values = tuple(RunningBlocks.of(chosen.blocks(count, total)) for count in counts)
        return RequestedValues(values, left_out, is_given=bool(given))

    def fingerprint(self, request: KnobRequest) -> tuple[object, ...]:
        """It is empty, since scores and sets count by themselves."""
        return ()

    def label(self, value: RunningBlocks) -> str:
        return f"blocks{value.count}"

    def parsed(self, label: str) -> RunningBlocks | None:
        count = number_after("blocks", label)
        return None if count is None else RunningBlocks(count)

    def level(self, value: RunningBlocks) -> Level:
        return value.count

    def of_level(self, level: Level) -> RunningBlocks:
        if not isinstance(level, int):
            raise ConfigurationError(f"{level!r} is not a number of blocks; give a whole number")
        return RunningBlocks(level)

    def read(self, result: Any) -> RunningBlocks | None:
        return None if result.num_active_blocks is None else RunningBlocks(int(result.num_active_blocks))

    def full_grid(self, limits: KnobLimits) -> Mapping[str, Sequence[Level]]:
        """There are at most five numbers, evenly spread from three quarters to all."""
        total = limits.num_total_blocks
        assert total is not None
        left_out = total // 4
        steps = min(left_out, 4)
        counts = (total - round(step * left_out / max(steps, 1)) for step in range(steps, -1, -1))
        return {"num_active_blocks_list": tuple(counts)}

    def prove(self, proof: Any, setting: Turned, model: Any) -> CannotBeSeen | None:
        """The blocks that ran in prefill and decode, and the layers of the cache, are compared."""
        active = setting.value(self.name).indices
        if proof.blocks_run is None:
            return CannotBeSeen("the model shows no blocks")
        if proof.blocks_run != active or proof.blocks_run_decode != active:
            raise KnobDidNotAct(f"{setting.key}: blocks {proof.blocks_run} ran instead of {active}")
        if proof.cache_layers is not None and proof.cache_layers != len(active):
            raise KnobDidNotAct(f"{setting.key}: the cache contains {proof.cache_layers} layers")
        return None


def block_choice_of(request: KnobRequest) -> BlockChoice:
    """What the flags name; else the scores in the model's folder, which random weights have no use for; else neither.

    Raises:
        ConfigurationError: the scores in the folder cannot be read.
    """
    given: BlockChoice | None = request.flags.block_choice
    if given is not None:
        return given
    return BlockChoice() if request.random_weights else own_scores_in(request.folder)


def fewer_by_default(request: KnobRequest) -> bool:
    """Whether fewer blocks run without being requested: with scores, sets, `none` or random weights."""
    is_named = request.flags.importance_scores_file is not None
    return is_named or request.random_weights or block_choice_of(request).is_made


ACTIVE_BLOCKS = BlockCount()


def blocks_of(setting: Turned) -> tuple[int, ...]:
    """Indices of the blocks that run at a setting."""
    blocks: RunningBlocks = setting.value(ACTIVE_BLOCKS.name)
    return blocks.indices


def num_blocks_of(setting: Turned) -> int:
    """The number of blocks that run at a setting, block 0 counted."""
    blocks: RunningBlocks = setting.value(ACTIVE_BLOCKS.name)
    return blocks.count
