"""The knob of vision tokens: tiers, numbers of tokens, and what the model takes by itself."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

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
from experiment_core_utils.knobs.token_units import MOLMOE_TOKENS, MOST_CROPS, TokenUnit
from experiment_core_utils.primitives.errors import ConfigurationError, ImpossibleCombination
from experiment_core_utils.primitives.flag_fields import LargeNumber, Listed, Metavar, Part
from experiment_core_utils.primitives.grids import possible
from experiment_core_utils.primitives.texts import did_you_mean


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
    def order(self) -> tuple[int, int, int]:
        """A sort key: tiers and numbers of tokens ascend, each among themselves; what the model takes comes last."""
        low, high = (0, 0) if self.crops is None else (self.crops.min_crops, self.crops.max_crops)
        return (low, high, self.tokens or 0) if self.label != OWN else (MOST_CROPS, MOST_CROPS, 0)

    @property
    def bounds(self) -> CropRange | None:
        """`crops` of a target that is known for its model; raises ValueError for one that was read from a name."""
        if self.crops is None and self.tokens is not None:
            raise ValueError(f"{self.label} was read from a name; make it by token_target of the model's unit")
        return self.crops


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
    number, _, unit = value.partition(" ")
    return named_tokens(int(number)) if unit == "tokens" and number.isdecimal() else tier_target(value)


class VisionFlags(Part):
    """The flags of vision tokens."""

    alternatives = (("tier_list", "vision_tokens_list"),)

    tier_list: Annotated[Listed[str], Metavar("TIER")] | None = Field(
        default=None,
        description=f"numbers of vision tokens by name, among {' '.join(TIERS)} and {OWN}, the model's own crops or "
        f"pixels (default: {' '.join(TIERS)})",
    )
    vision_tokens_list: Annotated[Listed[LargeNumber], Metavar("TOKENS")] | None = Field(
        default=None, description="vision tokens, instead of tiers"
    )

    def targets_and_left_out(self, unit: TokenUnit) -> tuple[tuple[VisionTarget, ...], tuple[str, ...]]:
        """The possible values of the vision knob, every tier where none is given, and why others are left out.

        Args:
            unit: of the model's vision tokens.
        """
        if self.vision_tokens_list is not None:
            return possible(self.vision_tokens_list, lambda tokens: token_target(tokens, unit))
        return self.tiers, ()

    @property
    def vision_targets(self) -> tuple[VisionTarget, ...]:
        """The possible values of the vision knob in MolmoE."""
        return self.targets_and_left_out(MOLMOE_TOKENS)[0]

    @cached_property
    def tiers(self) -> tuple[VisionTarget, ...]:
        """The tiers that are given by name, without any all of them."""
        return tuple(tier_target(each) for each in self.tier_list or TIERS)

    @model_validator(mode="after")
    def _check_tiers(self) -> Self:
        # Made here, so that a wrong name is reported at once.
        _ = self.tiers
        return self


class VisionTokens(Knob[VisionTarget]):
    """How many crops or pixels a picture may take, by a tier, by a number of vision tokens, or as the model does it."""

    meaning = "tier of image crops or target of vision tokens; sorts by the tokens that were there"
    changes_tokens = True
    name, title, plural, flags = "vision", "vision", "vision targets", VisionFlags
    published = ("tier", "vision_tokens_target")
    is_sorted_in_plans = False

    def own(self, limits: KnobLimits) -> VisionTarget:
        return own_target()

    def requested(self, request: KnobRequest) -> RequestedValues[VisionTarget]:
        """The default is the three tiers."""
        flags, limits = request.flags, request.limits
        if self.name not in limits.unsupported:
            values, left_out = flags.targets_and_left_out(limits.token_unit)
            return RequestedValues(values, left_out, is_given=True)
        reason = limits.unsupported[self.name]

        def only_own(target: object) -> VisionTarget:
            if target != own_target():
                raise ImpossibleCombination(
                    f"--tier_list and --vision_tokens_list do nothing for {request.model}: {reason}; drop them"
                )
            return own_target()

        given = flags.vision_tokens_list or (flags.tiers if flags.tier_list else (own_target(),))
        values, left_out = possible(given, only_own)
        return RequestedValues(values, left_out, is_given=True)

    def label(self, value: VisionTarget) -> str:
        return value.label

    def cell(self, value: VisionTarget) -> Level:
        return value.tokens or self.level(value)

    def listed(self, value: VisionTarget) -> str:
        return value.label

    def parsed(self, label: str) -> VisionTarget | None:
        """A number of tokens has no crops yet."""
        tokens = number_after("tokens", label)
        if tokens is not None:
            return named_tokens(tokens)
        tier = label.removeprefix("tier-")
        return own_target() if label == OWN else tier_target(tier) if tier != label and tier in TIERS else None

    def level(self, value: VisionTarget) -> Level:
        return value.value

    def of_level(self, level: Level) -> VisionTarget:
        return target_of_value(str(level))

    def order(self, value: VisionTarget) -> tuple[float, ...]:
        """The model's own comes after all others."""
        return value.order

    def published_fields(self, value: VisionTarget | None) -> dict[str, Level | None]:
        tier, tokens = (None, None) if value is None else (value.tier, value.tokens)
        return {"tier": tier, "vision_tokens_target": tokens}

    def read(self, result: Any) -> VisionTarget:
        tier, tokens = result.tier, result.vision_tokens_target
        return tier_target(tier) if tier is not None else named_tokens(tokens) if tokens is not None else own_target()

    def prove(self, proof: Any, setting: Turned, model: Any) -> CannotBeSeen | None:
        """Requests have their crops before any model runs, and results count them."""
        return None


VISION_TOKENS = VisionTokens()


def vision_of(setting: Turned) -> VisionTarget:
    """The vision target of a setting."""
    target: VisionTarget = setting.value(VISION_TOKENS.name)
    return target
