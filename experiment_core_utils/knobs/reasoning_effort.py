"""The knob of reasoning effort in the request to a server."""

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, StringConstraints

from experiment_core_utils.knobs.interface import CannotBeSeen, Level, Turned
from experiment_core_utils.knobs.request_knobs import ServerKnob
from experiment_core_utils.primitives.flag_fields import Listed, Metavar, Part

_WORD = "[a-z]+"
# What servers have, the cheapest first; another word comes after them.
_USUAL = ("none", "minimal", "low", "medium", "high", "xhigh")


class ReasoningEffortFlags(Part):
    """The flags of reasoning effort."""

    reasoning_effort_list: (
        Annotated[Listed[Annotated[str, StringConstraints(pattern=f"^{_WORD}$")]], Metavar("EFFORT")] | None
    ) = Field(
        default=None,
        description="with --endpoint: values of reasoning_effort, such as low high (default: the server's own)",
    )


class ReasoningEffort(ServerKnob):
    """How much a model that thinks should think, in the server's words."""

    meaning = "reasoning effort that the request names"
    name, title, plural, flags = "reasoning_effort", "reasoning effort", "reasoning efforts", ReasoningEffortFlags
    flag, prefix, at_rest = "reasoning_effort_list", "effort", "own"

    def read_level(self, text: str) -> Level | None:
        return text if re.fullmatch(_WORD, text) else None

    def order(self, value: Level) -> tuple[float, ...]:
        """Usual words ascend, others follow, the server's own comes last."""
        known = [*_USUAL, value, self.at_rest]
        return (float(known.index(value)),) if value != self.at_rest else (float("inf"),)

    def request_fields(self, value: Level) -> Mapping[str, Any]:
        return {} if value == self.at_rest else {self.name: value}

    def prove(self, proof: Any, setting: Turned, model: Any) -> CannotBeSeen | None:
        """A server may ignore it."""
        return CannotBeSeen("a server does not say whether it follows it")


REASONING_EFFORT = ReasoningEffort()
