"""The knob of dynamic experts: how much of the router's probability the experts of a token must have together."""

from typing import Any

from pydantic import Field

from experiment_core_utils.knobs.interface import (
    CannotBeSeen,
    Knob,
    KnobLimits,
    KnobRequest,
    Level,
    RequestedValues,
    Turned,
)
from experiment_core_utils.knobs.top_k import TOP_K, experts_of
from experiment_core_utils.primitives.errors import ConfigurationError, KnobDidNotAct
from experiment_core_utils.primitives.flag_fields import Fraction, Listed, Part

# Sums of probabilities are computed twice, in float32.
_ROUNDING = 1e-5


class ExpertMassFlags(Part):
    """The flags of dynamic experts."""

    expert_mass_list: Listed[Fraction] | None = Field(
        default=None,
        description="fractions of the router's probability: a token uses the fewest experts that have so much of it, "
        "at most top-k; 1.0: all top-k (default: 1.0)",
    )


class ExpertMass(Knob[float]):
    """The probability that the experts of a token have at least together, in the blocks that top-k acts on.

    A token uses its n most likely experts: the fewest whose probabilities sum to the value or more, and all top-k where
    those have less. The probabilities are those of the router's softmax over all experts, also in a model that scales
    the weights of the chosen experts to a sum of 1; it does so after the choice, over the n experts. Where a router
    has a sigmoid for each expert, it is the expert's share in the sum of those of the token's top-k experts.
    """

    name, title, plural, flags = "expert_mass", "expert mass", "expert masses", ExpertMassFlags
    untouched_stages = ("T_vision_total",)
    neutral = 1.0

    def own(self, limits: KnobLimits) -> float | None:
        return None if limits.default_top_k is None else 1.0

    def requested(self, request: KnobRequest) -> RequestedValues[float]:
        """The default is all top-k experts; what cannot have another top-k cannot have this."""
        given, limits = request.flags.expert_mass_list, request.limits
        reason = limits.unsupported.get(self.name) or limits.unsupported.get(TOP_K.name)
        if reason is not None:
            return self.fixed(request, "expert_mass_list", reason)
        return RequestedValues(given or (1.0,), is_given=bool(given))

    def label(self, value: float) -> str:
        return f"mass{value}"

    def parsed(self, label: str) -> float | None:
        number = label.removeprefix("mass")
        try:
            value = float(number)
        except ValueError:
            return None
        return value if self.label(value) == label and 0 < value <= 1 else None

    def level(self, value: float) -> Level:
        return value

    def of_level(self, level: Level) -> float:
        if not isinstance(level, int | float) or not 0 < level <= 1:
            raise ConfigurationError(f"{level!r} is not an expert mass; give a number above 0, at most 1")
        return float(level)

    def prove(self, proof: Any, setting: Turned, model: Any) -> CannotBeSeen | None:
        """Experts of each token in a prefill and decode steps, and their probabilities, are compared."""
        mass, top_k = mass_of(setting), experts_of(setting)
        if mass == self.neutral:
            return None
        counted = proof.counted.get(self.name)
        if not counted:
            return CannotBeSeen("no block with experts after the first one runs")
        for stage in counted["mean_experts_per_token"]:
            fewest, most = counted["fewest_experts"][stage], counted["most_experts"][stage]
            least, spare = counted["least_mass"][stage], counted["most_mass_without_last"][stage]
            where = f"{setting.key}: in the {stage}"
            if fewest < 1 or (top_k is not None and most > top_k):
                raise KnobDidNotAct(f"{where} a token uses {fewest} to {most} experts instead of 1 to {top_k}")
            if least is not None and least < mass - _ROUNDING:
                raise KnobDidNotAct(f"{where} the experts of a token have {least:.6f} of the probability, not {mass}")
            if spare is not None and spare >= mass + _ROUNDING:
                raise KnobDidNotAct(f"{where} a token's experts have {spare:.6f} of the probability without the last")
        return None


EXPERT_MASS = ExpertMass()


def mass_of(setting: Turned) -> float:
    """The expert mass of a setting; 1.0 for all top-k experts, and in a model without experts."""
    return float(setting.value(EXPERT_MASS.name))
