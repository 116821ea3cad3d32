"""In: power readings taken beside a run, and windows inside it; out: the energy of each window, apportioned. Pure.

A window of a batch or a request is too short for a counter of its own. Its energy is the integral of the power readings
over it, from readings taken by a thread of their own: nothing is read between tokens. It holds whatever else the device
did in that window, and its idle power.
"""

import math
from collections.abc import Sequence

from experiment_core_utils.meters.instruments import Instruments
from experiment_core_utils.meters.power_integral import energy_of_trace
from experiment_core_utils.primitives.energy_records import PowerTrace
from experiment_core_utils.primitives.records import ApportionedEnergy

NOT_ASKED = "energy was not asked for"


def energy_of_part(traces: Sequence[PowerTrace], begin_s: float, end_s: float, reason: str | None) -> ApportionedEnergy:
    """Energy of all traced devices between two moments of the traces' clock; None where that of any is missing.

    Where devices tell of their power in several ways, source and basis name all of them, joined by "+".

    Args:
        reason: why there is no trace, where there is none.
    """
    parts = [energy_of_trace(trace, begin_s, end_s, has_steps_at_ends=True) for trace in traces]
    missing = [f"{part.origin.device}: {part.reason}" for part in parts if part.joules is None]
    if missing or not parts:
        return no_energy("; ".join(missing) or reason)
    return ApportionedEnergy(
        energy_j=math.fsum(part.joules for part in parts if part.joules is not None),
        energy_bound_j=math.fsum(part.bound_j for part in parts if part.bound_j is not None),
        energy_method="apportioned",
        energy_source=_labels([part.origin.source for part in parts]),
        energy_basis=_labels([part.origin.basis for part in parts]),
        energy_reason=None,
    )


def _labels(names: Sequence[str]) -> str:
    return "+".join(dict.fromkeys(names))


def no_energy(reason: str | None) -> ApportionedEnergy:
    """No figure."""
    return ApportionedEnergy(
        energy_j=None,
        energy_bound_j=None,
        energy_method=None,
        energy_source=None,
        energy_basis=None,
        energy_reason=reason,
    )


def why_no_power(using: Instruments) -> str | None:
    """Why nothing can be apportioned with these instruments; None where they read power."""
    if using.probes:
        return None
    told = [why for name, why in using.missing.items() if not name.startswith("energy counter")]
    return f"no power reading of the device that computes ({'; '.join(told) or 'none was given'})"


def share_of_query(batch_j: float | None, query_tokens: int, batch_tokens: int) -> float | None:
    """A query's part of its batch's energy: batch_j * query_tokens / batch_tokens, so that the parts add up.

    Tokens are true ones, input and output: padding and what a row computes after its end are spread over all queries
    of the batch. A rule, not a measurement: an output token costs more than an input token.
    """
    return None if batch_j is None else batch_j * query_tokens / batch_tokens
