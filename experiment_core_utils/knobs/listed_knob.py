"""The base of knobs whose values a flag lists, and which leave everything as it is at rest."""

from typing import ClassVar

from experiment_core_utils.knobs.interface import Knob, KnobLimits, KnobRequest, Level, RequestedValues
from experiment_core_utils.primitives.errors import ConfigurationError


class ListedKnob(Knob[Level]):
    """A knob of whole numbers, or of words, which its flag lists. The default is at rest.

    A class of it sets `neutral` to `at_rest`, and says what turns it: `applied`, `request_fields` or an adapter.
    """

    flag: ClassVar[str]  #: that lists its values
    prefix: ClassVar[str]  #: of its label
    at_rest: ClassVar[str]  #: its level there

    def own(self, limits: KnobLimits) -> Level:
        return self.at_rest

    def requested(self, request: KnobRequest) -> RequestedValues[Level]:
        reason = self.no_knob_reason(request)
        if reason is not None:
            return self.fixed(request, self.flag, reason)
        given = getattr(request.flags, self.flag)
        return RequestedValues(tuple(given or (self.at_rest,)), is_given=bool(given))

    def no_knob_reason(self, request: KnobRequest) -> str | None:
        """Why the model takes it at rest alone; None where it can be turned."""
        return None

    def label(self, value: Level) -> str:
        return f"{self.prefix}{value}"

    def parsed(self, label: str) -> Level | None:
        text = label.removeprefix(self.prefix)
        return None if text == label else self.at_rest if text == self.at_rest else self.read_level(text)

    def read_level(self, text: str) -> Level | None:
        """The value that is written so in a label; here a whole number. None for another text."""
        return int(text) if text.isdecimal() and int(text) > 0 and text == str(int(text)) else None

    def level(self, value: Level) -> Level:
        return value

    def of_level(self, level: Level) -> Level:
        if self.parsed(f"{self.prefix}{level}") != level:
            raise ConfigurationError(f"{level!r} is not a value of {self.name}; give one that {self.flag} takes")
        return level

    def order(self, value: Level) -> tuple[float, ...]:
        """At rest comes last."""
        return (float("inf"),) if isinstance(value, str) else (float(value),)
