"""The base of knobs that the request to a server carries."""

from typing import Any, ClassVar

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

_NO_SERVER = "only a request to a server carries it; give --endpoint, or drop it"


class ServerKnob(Knob[Level]):
    """A knob of a request. At rest the request does not name it, and the server does what it does by itself.

    A class of it sets `neutral` to `at_rest`, and has `request_fields`.
    """

    flag: ClassVar[str]  #: that lists its values
    prefix: ClassVar[str]  #: of its label
    at_rest: ClassVar[str]  #: its level there

    def own(self, limits: KnobLimits) -> Level:
        return self.at_rest

    def requested(self, request: KnobRequest) -> RequestedValues[Level]:
        """The default is at rest; a model in this process takes nothing else."""
        if not request.limits.variants:
            return self.fixed(request, self.flag, _NO_SERVER)
        given = getattr(request.flags, self.flag)
        return RequestedValues(tuple(given or (self.at_rest,)), is_given=bool(given))

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

    def prove(self, proof: Any, setting: Turned, model: Any) -> CannotBeSeen | None:
        """The request has it, and nothing else decides."""
        return None
