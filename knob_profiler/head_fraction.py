"""A knob of one's own in one file: the fraction of its features that the output layer reads."""

from contextlib import AbstractContextManager, contextmanager
from typing import Annotated, Any

from pydantic import Field
from torch import nn

from experiment_core_utils.knobs.interface import Knob, KnobLimits, KnobRequest, Level, RequestedValues
from experiment_core_utils.knobs.registry import register_knob
from experiment_core_utils.primitives.flag_fields import Listed, Part


class HeadFlags(Part):
    """The flags of the output layer."""

    head_fraction_list: Listed[Annotated[float, Field(gt=0, le=1)]] | None = Field(
        default=None, description="fractions of its features that the output layer reads (default: 1)"
    )
    head_reads_last: bool = Field(default=False, description="the output layer reads the last features, not the first")


class HeadFraction(Knob[float]):
    """The fraction of its features that the output layer reads; the others are 0."""

    name, title, plural, flags = "head_fraction", "head", "fractions of the head", HeadFlags
    neutral = 1.0

    def own(self, limits: KnobLimits) -> float:
        return 1.0

    def requested(self, request: KnobRequest) -> RequestedValues[float]:
        given = request.flags.head_fraction_list
        return RequestedValues(given or (1.0,), is_given=bool(given))

    def label(self, value: float) -> str:
        return f"head{value}"

    def parsed(self, label: str) -> float | None:
        number = label.removeprefix("head")
        return float(number) if number != label and number.replace(".", "", 1).isdecimal() else None

    def level(self, value: float) -> Level:
        return value

    def of_level(self, level: Level) -> float:
        return float(level)

    def flops(self, flops: Any, value: float) -> Any:
        """Features that are 0 are multiplied, too."""
        return flops

    def step_bytes(self, num_bytes: float, value: float) -> float:
        """Their weights are read, too."""
        return num_bytes

    @contextmanager
    def _reading(self, head: nn.Linear, count: int) -> Any:
        def without_the_rest(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            kept = inputs[0].clone()
            kept[..., count:] = 0
            return (kept, *inputs[1:])

        handle = head.register_forward_pre_hook(without_the_rest)
        try:
            yield
        finally:
            handle.remove()

    def applied(self, model: Any, value: float) -> AbstractContextManager[object]:
        return self._reading(model.lm_head, max(1, round(value * model.lm_head.in_features)))


register_knob(HeadFraction())
