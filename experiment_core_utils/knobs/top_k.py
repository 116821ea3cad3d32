"""The knob of experts per token (MoE top-k)."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from experiment_core_utils.knobs.interface import (
    CannotBeSeen,
    KnobLimits,
    KnobRequest,
    Level,
    RequestedValues,
    Turned,
)
from experiment_core_utils.knobs.listed_knob import NumberKnob
from experiment_core_utils.primitives.errors import ImpossibleCombination, KnobDidNotAct
from experiment_core_utils.primitives.flag_fields import Count, Listed, Metavar, Part
from experiment_core_utils.primitives.grids import distinct, possible


class TopKFlags(Part):
    """The flags of experts per token."""

    top_k_list: Annotated[Listed[Count], Metavar("EXPERTS")] | None = Field(
        default=None, description="numbers of experts per token (default: half the model's own number, and the whole)"
    )


class TopK(NumberKnob):
    """Experts per token in the blocks after the first with experts, which keeps the model's own number.

    Where blocks differ by themselves, a value is the most that a block chooses, and none chooses more than by itself.
    """

    meaning = "experts per token in the blocks after the first"
    name, title, plural, flags = "top_k", "top-k", "top-k", TopKFlags
    page = "knobs/moe_topk_knob.md"
    untouched_stages = ("T_vision_total",)
    published = (name,)

    def own(self, limits: KnobLimits) -> int | None:
        return limits.default_top_k

    def requested(self, request: KnobRequest) -> RequestedValues[Level]:
        """The default is half of the experts per token, and all of them."""
        given, limits, own = request.flags.top_k_list, request.limits, request.limits.default_top_k
        if self.name in limits.unsupported:
            return self.fixed(request, "top_k_list", limits.unsupported[self.name])
        assert own is not None and limits.num_experts is not None
        num_experts = limits.num_experts

        most, why = limits.top_k_limit or (num_experts, "")

        def within(top_k: int) -> int:
            if most < top_k <= num_experts:
                raise ImpossibleCombination(
                    f"--top_k_list {top_k} is not possible in {request.model}: {why}; give 1 to {most}"
                )
            if top_k > num_experts:
                raise ImpossibleCombination(
                    f"--top_k_list {top_k} is more than the {num_experts} experts of {request.model}; give 1 to {most}"
                )
            return top_k

        values, left_out = possible(given or distinct((max(own // 2, 1), own)), within)
        return RequestedValues(values, left_out, is_given=bool(given))

    def read(self, result: Any) -> int | None:
        return None if result.top_k is None else int(result.top_k)

    def full_grid(self, limits: KnobLimits) -> Mapping[str, Sequence[Level]]:
        """It is 1, 2, 4 ... and the model's own number."""
        own = limits.default_top_k
        assert own is not None
        return {"top_k_list": (*(2**power for power in range((own - 1).bit_length())), own)}

    def prove(self, proof: Any, setting: Turned, model: Any) -> CannotBeSeen | None:
        """The experts that routers chose for a token are counted."""
        if proof.experts_per_token is None:
            return CannotBeSeen("the model shows no experts")
        expected = tuple(model.expected_experts(setting))
        if proof.experts_per_token != expected:
            raise KnobDidNotAct(f"{setting.key}: {proof.experts_per_token} experts a token instead of {expected}")
        return None


TOP_K = TopK()


def experts_of(setting: Turned) -> int | None:
    """Experts per token of a setting; None in a model without experts."""
    top_k: int | None = setting.value(TOP_K.name)
    return top_k
