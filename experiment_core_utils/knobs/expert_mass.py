"""The knob of dynamic experts: how much of the router's probability the experts of a token must have together."""

from typing import Any

from pydantic import Field

from experiment_core_utils.knobs.interface import CannotBeSeen, KnobLimits, KnobRequest, Turned
from experiment_core_utils.knobs.listed_knob import NumberKnob
from experiment_core_utils.knobs.top_k import TOP_K, experts_of
from experiment_core_utils.primitives.errors import KnobDidNotAct
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


class ExpertMass(NumberKnob):
    """The probability that the experts of a token have at least together, in the blocks that top-k acts on.

    A token uses its n most likely experts: the fewest whose probabilities sum to the value or more, and all top-k where
    those have less. The probabilities are those of the router's softmax over all experts, also in a model that scales
    the weights of the chosen experts to a sum of 1; it does so after the choice, over the n experts. Where a router
    has a sigmoid for each expert, it is the expert's share in the sum of those of the token's top-k experts.
    """

    name, plural, flags, prefix = "expert_mass", "expert masses", ExpertMassFlags, "mass"
    untouched_stages = ("T_vision_total",)
    at_rest, most, page = 1.0, 1, "knobs/moe_topk_knob.md#dynamic-experts"

    def own(self, limits: KnobLimits) -> float | None:
        return None if limits.default_top_k is None else 1.0

    def no_knob_reason(self, request: KnobRequest) -> str | None:
        """What cannot have another top-k cannot have this."""
        return super().no_knob_reason(request) or request.limits.unsupported.get(TOP_K.name)

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
