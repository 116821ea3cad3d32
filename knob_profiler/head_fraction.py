"""A knob of one's own in one file: the fraction of its features that the output layer reads."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from pydantic import Field
from torch import nn

from experiment_core_utils.knobs.listed_knob import NumberKnob
from experiment_core_utils.knobs.registry import register_knob
from experiment_core_utils.primitives.flag_fields import Listed, Part


class HeadFlags(Part):
    """The flags of the output layer."""

    head_fraction_list: Listed[Annotated[float, Field(gt=0, le=1)]] | None = Field(
        default=None, description="fractions of its features that the output layer reads (default: 1)"
    )
    head_reads_last: bool = Field(default=False, description="the output layer reads the last features, not the first")


class HeadFraction(NumberKnob):
    """The fraction of its features that the output layer reads; the others are 0."""

    name, title, prefix, flags = "head_fraction", "head", "head", HeadFlags
    at_rest, most = 1.0, 1
    keeps_costs = True  # Features that are 0 are multiplied, too.

    @contextmanager
    def applied(self, model: Any, value: Any) -> Iterator[None]:
        """A context in which hooks of the output layer set the other features to 0."""
        head: nn.Linear = model.lm_head
        count = max(1, round(value * head.in_features))

        def without_the_rest(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            features = inputs[0].clone()
            features[..., count:] = 0
            return (features, *inputs[1:])

        handle = head.register_forward_pre_hook(without_the_rest)
        try:
            yield
        finally:
            handle.remove()


register_knob(HeadFraction())
