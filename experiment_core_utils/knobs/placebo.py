"""The knob of a control: the reference, measured a second time in each round."""

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
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.flag_fields import Part

_LABELS = {"none": "placebo-none", "again": "placebo"}


class PlaceboFlags(Part):
    """The flag of the control."""

    placebo: bool = Field(
        default=False,
        description="measure the reference a second time in each round: a control that no reader chooses or compares",
    )


class Placebo(Knob[str]):
    """A setting that is `again` is the one without it, and does the same."""

    meaning = "whether a setting is measured again as a control"
    name, title, plural, flags = "placebo", "placebo", "placebos", PlaceboFlags
    neutral, turned_by_run = "none", True

    def own(self, limits: KnobLimits) -> str:
        return self.neutral

    def requested(self, request: KnobRequest) -> RequestedValues[str]:
        """A placebo stands beside the grid."""
        return RequestedValues((self.neutral,))

    def fingerprint(self, request: KnobRequest) -> tuple[object, ...]:
        """Other settings are the same beside it."""
        return ()

    def label(self, value: str) -> str:
        return _LABELS[value]

    def parsed(self, label: str) -> str | None:
        return next((value for value, own in _LABELS.items() if own == label), None)

    def level(self, value: str) -> Level:
        return value

    def of_level(self, level: Level) -> str:
        if level not in _LABELS:
            raise ConfigurationError(f"{level!r} is not a value of {self.name}; give {' or '.join(_LABELS)}")
        return str(level)

    def order(self, value: str) -> tuple[float, ...]:
        return (float(value != self.neutral),)

    def prove(self, proof: Any, setting: Turned, model: Any) -> CannotBeSeen | None:
        """There is nothing to act."""
        return None


PLACEBO = Placebo()
