"""The knob of vision tokens: fractions of what the model takes by itself, tiers, and numbers of tokens."""

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
    #: the same as a fraction of those that the model takes of the picture by itself
    fraction: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.min_crops <= self.max_crops:
            raise ConfigurationError(
                f"crop range {self.min_crops}-{self.max_crops} is empty or starts below 1; give 1 <= min <= max"
            )

    @property
    def counts_crops(self) -> bool:
        """Whether crops are bounded, and not tokens."""
        return self.tokens is None and self.fraction is None


TIERS = {"low": CropRange(1, 3), "medium": CropRange(4, 8), "high": CropRange(9, 15)}
OWN = "own"
OF_OWN = " of own"
# Of the vision tokens that the model takes by itself.
DEFAULT_FRACTIONS = (0.25, 0.5, 1.0)
MOST_FRACTION = 16
VisionFraction = Annotated[float, Field(gt=0, le=MOST_FRACTION), Metavar("FRACTION")]


_FRACTION = "frac-"


@dataclass(frozen=True)
class VisionTarget:
    """The vision knob: a fraction of what the model takes by itself, a tier by name or a number of vision tokens; or
    what the model takes by itself.
    """

    label: str  #: part of result file names: ``frac-0.5``, ``tier-low``, ``tokens1008`` or ``own``
    tier: str | None  #: name of the tier, None for others
    tokens: int | None  #: the token target, None for others
    #: how many crops a picture may be cut into; None for what the model takes by itself, and for a number of tokens
    #: that was read from a name, whose crops depend on the model
    crops: CropRange | None

    @property
    def fraction(self) -> float | None:
        """The fraction of the model's own vision tokens, None for others."""
        return None if self.crops is None else self.crops.fraction

    @property
    def value(self) -> str:
        """Names the target among the values of the vision knob: ``0.5 of own``, ``low``, ``1008 tokens`` or ``own``."""
        if self.fraction is not None:
            return f"{self.label.removeprefix(_FRACTION)}{OF_OWN}"
        return self.tier or (self.label if self.tokens is None else f"{self.tokens} tokens")

    @property
    def order(self) -> tuple[float, float, float]:
        """A sort key: fractions, tiers and numbers of tokens ascend, each among themselves; what the model takes by
        itself comes last, before fractions above 1 alone.
        """
        if self.fraction is not None:
            return (0, 0, self.fraction) if self.fraction < 1 else (MOST_CROPS, MOST_CROPS, self.fraction)
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


def fraction_target(fraction: float) -> VisionTarget:
    """The target of a fraction of what the model takes by itself, which is `own_target` for 1."""
    if fraction == 1:
        return own_target()
    written = repr(float(fraction)).removesuffix(".0")
    return VisionTarget(f"{_FRACTION}{written}", None, None, CropRange(1, MOST_CROPS, fraction=fraction))


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
    fraction = _read_fraction(number) if value == f"{number}{OF_OWN}" else None
    if fraction is not None:
        return fraction
    return named_tokens(int(number)) if unit == "tokens" and number.isdecimal() else tier_target(value)


def _read_fraction(text: str) -> VisionTarget | None:
    """The target of a fraction other than 1 as a label has it; None for another text."""
    try:
        fraction = float(text)
    except ValueError:
        return None
    target = fraction_target(fraction) if 0 < fraction <= MOST_FRACTION else own_target()
    return target if target.label == f"{_FRACTION}{text}" else None


class VisionFlags(Part):
    """The flags of vision tokens."""

    alternatives = (
        ("tier_list", "vision_tokens_list"),
        ("tier_list", "vision_fraction_list"),
        ("vision_tokens_list", "vision_fraction_list"),
    )

    vision_fraction_list: Listed[VisionFraction] | None = Field(
        default=None,
        description="vision tokens as fractions of those that the model takes of a picture by itself (default: "
        f"{' '.join(f'{fraction:g}' for fraction in DEFAULT_FRACTIONS)})",
    )

    tier_list: Annotated[Listed[str], Metavar("TIER")] | None = Field(
        default=None,
        description=f"numbers of vision tokens by name, among {' '.join(TIERS)} and {OWN}, the model's own crops or "
        "pixels, instead of fractions",
    )
    vision_tokens_list: Annotated[Listed[LargeNumber], Metavar("TOKENS")] | None = Field(
        default=None, description="numbers of vision tokens, instead of fractions"
    )

    def targets_and_left_out(self, limits: KnobLimits) -> tuple[tuple[VisionTarget, ...], tuple[str, ...]]:
        """The possible values of the vision knob, and why others are left out; the default fractions, as far as they
        are possible, where none is given.
        """
        if self.vision_tokens_list is not None:
            return possible(self.vision_tokens_list, lambda tokens: token_target(tokens, limits.token_unit))
        if self.tier_list is not None:
            return self.tiers, ()
        fewer, more = limits.fraction_reasons

        def target(fraction: float) -> VisionTarget:
            reason = fewer if fraction < 1 else more if fraction > 1 else None
            if reason is not None:
                raise ImpossibleCombination(f"{fraction:g} of the model's own vision tokens: {reason}")
            return fraction_target(fraction)

        values, left_out = possible(self.vision_fraction_list or DEFAULT_FRACTIONS, target)
        return values, () if self.vision_fraction_list is None else left_out

    @property
    def vision_targets(self) -> tuple[VisionTarget, ...]:
        """The possible values of the vision knob in MolmoE."""
        return self.targets_and_left_out(KnobLimits(None, None, None))[0]

    @cached_property
    def tiers(self) -> tuple[VisionTarget, ...]:
        """The tiers that are given by name."""
        return tuple(tier_target(each) for each in self.tier_list or ())

    @model_validator(mode="after")
    def _check_tiers(self) -> Self:
        # Made here, so that a wrong name is reported at once.
        _ = self.tiers
        return self


class VisionTokens(Knob[VisionTarget]):
    """How many crops or pixels a picture may take: a fraction of what the model takes by itself, a tier, or a number of
    vision tokens.
    """

    meaning = "fraction of the model's own vision tokens, tier of crops or number of tokens; sorts by those there"
    changes_tokens = True
    name, title, plural, flags = "vision", "vision", "vision targets", VisionFlags
    page = "knobs/vision_tokens_knob.md"
    published = ("tier", "vision_tokens_target", "vision_fraction")
    is_sorted_in_plans = False

    def own(self, limits: KnobLimits) -> VisionTarget:
        return own_target()

    def requested(self, request: KnobRequest) -> RequestedValues[VisionTarget]:
        """The default is 1, 0.5 and 0.25 of the vision tokens that the model takes by itself."""
        flags, limits = request.flags, request.limits
        if self.name not in limits.unsupported:
            values, left_out = flags.targets_and_left_out(limits)
            return RequestedValues(values, left_out, is_given=True)
        reason = limits.unsupported[self.name]

        def only_own(target: object) -> VisionTarget:
            if target != own_target():
                raise ImpossibleCombination(
                    f"--vision_fraction_list, --tier_list and --vision_tokens_list do nothing for {request.model}: "
                    f"{reason}; drop them"
                )
            return own_target()

        fractions = map(fraction_target, flags.vision_fraction_list or (1.0,))
        given = flags.vision_tokens_list or flags.tiers or tuple(fractions)
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
        fraction = label.removeprefix(_FRACTION)
        if fraction != label:
            return _read_fraction(fraction)
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
        target = own_target() if value is None else value
        return {"tier": target.tier, "vision_tokens_target": target.tokens, "vision_fraction": target.fraction}

    def read(self, result: Any) -> VisionTarget:
        tier, tokens, fraction = result.tier, result.vision_tokens_target, result.vision_fraction
        if fraction is not None:
            return fraction_target(fraction)
        return tier_target(tier) if tier is not None else named_tokens(tokens) if tokens is not None else own_target()

    def prove(self, proof: Any, setting: Turned, model: Any) -> CannotBeSeen | None:
        """Requests have their crops before any model runs, and results count them."""
        return None


VISION_TOKENS = VisionTokens()


def vision_of(setting: Turned) -> VisionTarget:
    """The vision target of a setting."""
    target: VisionTarget = setting.value(VISION_TOKENS.name)
    return target
