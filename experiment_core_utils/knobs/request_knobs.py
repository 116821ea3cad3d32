"""The base of knobs that the request to a server carries."""

from typing import Any

from experiment_core_utils.knobs.interface import CannotBeSeen, KnobRequest, Turned
from experiment_core_utils.knobs.listed_knob import ListedKnob

_NO_SERVER = "only a request to a server carries it; give --endpoint, or drop it"


class ServerKnob(ListedKnob):
    """A knob of a request. At rest the request does not name it, and the server does what it does by itself.

    A class of it has `request_fields`.
    """

    page = "how_to/profile_a_server.md"

    def no_knob_reason(self, request: KnobRequest) -> str | None:
        return None if request.limits.variants else _NO_SERVER

    def prove(self, proof: Any, setting: Turned, model: Any) -> CannotBeSeen | None:
        """The request has it, and nothing else decides."""
        return None
