"""A knob of three volumes beside the three that every model may have, for tests of what goes over all knobs."""

from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import Field

from experiment_core_utils.knobs.interface import Knob, KnobLimits, KnobRequest, Level, RequestedValues
from experiment_core_utils.knobs.registry import register_knob, unregister_knob
from experiment_core_utils.primitives.flag_fields import Listed, Part


class VolumeFlags(Part):
    volume_list: Listed[int] | None = Field(default=None, description="volumes")


class Volume(Knob[int]):
    name, title, plural, flags = "volume", "volume", "volumes", VolumeFlags
    neutral = 3

    def own(self, limits: KnobLimits) -> int:
        return 3

    def requested(self, request: KnobRequest) -> RequestedValues[int]:
        return RequestedValues(tuple(request.flags.volume_list or (3,)), (), bool(request.flags.volume_list))

    def label(self, value: int) -> str:
        return f"volume{value}"

    def parsed(self, label: str) -> int | None:
        number = label.removeprefix("volume")
        return int(number) if number != label and number.isdecimal() else None

    def level(self, value: int) -> Level:
        return value

    def of_level(self, level: Level) -> int:
        return int(level)


@contextmanager
def volume_knob() -> Iterator[None]:
    """A context in which the knob is registered."""
    register_knob(Volume())
    try:
        yield
    finally:
        unregister_knob("volume")
