"""The run-time knobs as values: vision targets, one setting of all knobs, and the active blocks of a block count."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from experiment_core_utils.primitives.errors import ConfigurationError, ImpossibleCombination
from experiment_core_utils.primitives.texts import did_you_mean
from experiment_core_utils.primitives.vision_tokens import MOLMOE_TOKENS, MOST_CROPS, TokenUnit


@dataclass(frozen=True)
class CropRange:
    """How many crops a picture may be cut into, the overview crop not counted, both ends included."""

    min_crops: int
    max_crops: int
    #: the number of vision tokens that is requested in place of crops, for models that take a picture in its own shape
    tokens: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.min_crops <= self.max_crops:
            raise ConfigurationError(
                f"crop range {self.min_crops}-{self.max_crops} is empty or starts below 1; give 1 <= min <= max"
            )


TIERS = {"low": CropRange(1, 3), "medium": CropRange(4, 8), "high": CropRange(9, 15)}
OWN = "own"


@dataclass(frozen=True)
class VisionTarget:
    """The vision knob: a tier by name, a number of vision tokens, or what the model takes by itself."""

    label: str  #: part of result file names: ``tier-low``, ``tokens1008`` or ``own``
    tier: str | None  #: name of the tier, None for others
    tokens: int | None  #: the token target, None for others
    #: how many crops a picture may be cut into; None for what the model takes by itself, and for a number of tokens
    #: that was read from a name, whose crops depend on the model
    crops: CropRange | None

    @property
    def value(self) -> str:
        """Names the target among the values of the vision knob: ``low``, ``1008 tokens`` or ``own``."""
        return self.tier or (self.label if self.tokens is None else f"{self.tokens} tokens")

    @property
    def order(self) -> tuple[int, int, int, str]:
        """A sort key: tiers and numbers of tokens ascend, each among themselves; what the model takes comes last."""
        low, high = (0, 0) if self.crops is None else (self.crops.min_crops, self.crops.max_crops)
        return (low, high, self.tokens or 0, self.label) if self.label != OWN else (MOST_CROPS, MOST_CROPS, 0, OWN)


def own_target() -> VisionTarget:
    """The crops or pixels that a model takes by itself, no bounds given."""
    return VisionTarget(OWN, None, None, None)


def tier_target(name: str) -> VisionTarget:
    """The target of a tier, or `own_target` by its name; raises ConfigurationError for an unknown name."""
    if name == OWN:
        return own_target()
    if name not in TIERS:
        known = (OWN, *TIERS)
        raise ConfigurationError(f"unknown tier {name!r}{did_you_mean(name, known)}; choose among {', '.join(known)}")
    return VisionTarget(f"tier-{name}", name, None, TIERS[name])


def token_target(tokens: int, unit: TokenUnit = MOLMOE_TOKENS) -> VisionTarget:
    """The target of as many crops as `tokens` suffice for in a model; see `TokenUnit.crops_of`, also for its error."""
    crops = unit.crops_of(tokens)
    found = CropRange(1, MOST_CROPS, tokens) if crops is None else CropRange(crops, crops)
    return replace(named_tokens(tokens), crops=found)


def named_tokens(tokens: int) -> VisionTarget:
    """The target of a number of vision tokens by name only, whose crops are not known without the model."""
    return VisionTarget(f"tokens{tokens}", None, tokens, None)


def target_of_value(value: str) -> VisionTarget:
    """The target that `VisionTarget.value` names, see `named_tokens`; raises ConfigurationError for another text."""
    tokens = re.fullmatch(r"([0-9]+) tokens", value)
    return tier_target(value) if tokens is None else named_tokens(int(tokens[1]))


def decoder_label(top_k: int | None, num_active_blocks: int) -> str:
    """Part of result file names: ``topk8_blocks16``, in a model without experts ``topknone_blocks16``."""
    return f"topk{'none' if top_k is None else top_k}_blocks{num_active_blocks}"


@dataclass(frozen=True)
class KnobSetting:
    """One setting of all knobs."""

    vision: VisionTarget  #: crops per picture, with the crops of a number of tokens
    #: experts per token in the blocks after the first with experts, which keeps the model's own number; None in a model
    #: without experts
    top_k: int | None
    active_blocks: tuple[int, ...]  #: indices of the blocks that run, ascending, block 0 among them

    def __post_init__(self) -> None:
        if self.vision.crops is None and self.vision.tokens is not None:
            raise ValueError(f"{self.vision.label} was read from a name; make it by token_target of the model's unit")

    @property
    def num_active_blocks(self) -> int:
        """Blocks that run, block 0 counted."""
        return len(self.active_blocks)

    @property
    def experts(self) -> int:
        """`top_k` of a model that has experts."""
        assert self.top_k is not None
        return self.top_k

    @property
    def key(self) -> str:
        """Names the setting within a run, for ledgers and messages."""
        return f"{self.vision.label}_{self.decoder_label}"

    @property
    def decoder_label(self) -> str:
        """See `decoder_label`."""
        return decoder_label(self.top_k, self.num_active_blocks)


_KEY = re.compile(r"(own|tier-[a-z]+|tokens[0-9]+)_topk(none|[0-9]+)_blocks([0-9]+)")


def values_of_key(key: str) -> tuple[VisionTarget, int | None, int]:
    """Vision target, top-k and number of active blocks of a setting, from its `KnobSetting.key`.

    Raises:
        ConfigurationError: a text that is no such key.
    """
    found = _KEY.fullmatch(key)
    if found is None:
        raise ConfigurationError(
            f"{key!r} is not a key of a setting; give one such as tier-low_topk8_blocks16 or own_topknone_blocks16"
        )
    vision, top_k, blocks = found.groups()
    value = f"{vision.removeprefix('tokens')} tokens" if vision.startswith("tokens") else vision.removeprefix("tier-")
    return target_of_value(value), None if top_k == "none" else int(top_k), int(blocks)


@dataclass(frozen=True)
class KnobLimits:
    """What can be set in a model."""

    num_total_blocks: int  #: transformer blocks of the decoder
    num_experts: int | None  #: that a router chooses from; None in a model without experts
    default_top_k: int | None  #: experts per token that the model was trained with; None without experts
    #: why a knob cannot be set; None where it can
    vision_unsupported_reason: str | None = None
    top_k_unsupported_reason: str | None = None
    blocks_unsupported_reason: str | None = None
    #: why it is known only of the loaded model whether top-k and blocks can be set; None where it is known before
    untried_reason: str | None = None
    token_unit: TokenUnit = MOLMOE_TOKENS  #: of numbers of vision tokens


def reference_setting(limits: KnobLimits) -> KnobSetting:
    """The model as it is: its own crops or pixels, its own number of experts, all blocks."""
    return KnobSetting(own_target(), limits.default_top_k, tuple(range(limits.num_total_blocks)))


def select_active_blocks(count: int, total: int, importance: Mapping[int, float] | None = None) -> tuple[int, ...]:
    """Which `count` of `total` blocks run.

    Block 0 always runs. The others are taken by descending importance, equal scores in favour of the earlier block;
    without scores the first `count` run.

    Raises:
        ImpossibleCombination: `count` outside 1..total.
        ConfigurationError: scores that leave out a block or name one that is not there.
    """
    if not 1 <= count <= total:
        raise ImpossibleCombination(f"{count} active blocks are not possible; the model has {total}, give 1 to {total}")
    if importance is None:
        return tuple(range(count))
    unknown = sorted(block for block in importance if block >= total)
    if unknown:
        raise ConfigurationError(
            f"the importance scores name blocks {unknown}, the model has blocks 0 to {total - 1}; give its own scores"
        )
    missing = [block for block in range(1, total) if block not in importance]
    if missing:
        raise ConfigurationError(
            f"the importance scores leave out blocks {missing}; give a score for each block from 1 to {total - 1}"
        )
    ranked = sorted(range(1, total), key=lambda block: (-importance[block], block))
    return tuple(sorted((0, *ranked[: count - 1])))
