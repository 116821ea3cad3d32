"""The knob of how many requests run together, each of which then takes as long as all of them."""

from typing import Any

from experiment_core_utils.knobs.interface import CannotBeSeen, KnobRequest, Turned
from experiment_core_utils.knobs.listed_knob import NumberKnob

_OF_A_SERVER = "a server puts requests together itself; give --concurrency or --request_rate, or drop it"


class BatchSize(NumberKnob):
    """Requests that run together, each sample with those after it; its times are those of the batch.

    Throughput and energy count all requests of the batch, FLOPs those of one without padding.
    """

    name, at_rest, prefix = "batch_size", 1, "batch"
    meaning, most = "requests that run together", 4096
    turned_by_run = True

    def no_knob_reason(self, request: KnobRequest) -> str | None:
        return _OF_A_SERVER if request.limits.variants else super().no_knob_reason(request)

    def prove(self, proof: Any, setting: Turned, model: Any) -> CannotBeSeen | None:
        """The requests of a batch are answered alone, too, and their tokens or logits are compared."""
        return None


BATCH_SIZE = BatchSize()


def batch_size_of(setting: Turned) -> int:
    """How many requests run together at a setting."""
    return int(setting.value(BATCH_SIZE.name))
