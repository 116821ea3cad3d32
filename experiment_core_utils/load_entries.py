"""In: the loads of a setting's windows; out: their keys in the setting's file. Imports no torch."""

from collections.abc import Sequence
from typing import Any

from experiment_core_utils.meters.load_trace import memory_timeline, utilisation_of
from experiment_core_utils.primitives.records import SettingLoad


def load_entries(loads: Sequence[SettingLoad]) -> dict[str, Any]:
    """The top-level keys `compute_utilisation` and `memory_timeline`, one entry for each window; see
    `docs/results_schema.md`."""
    timelines = [{**_whose(each), **memory_timeline(each.trace)} for each in loads if each.has_timeline]
    return {
        "compute_utilisation": [
            {**_whose(each), "window_s": each.trace.samples[-1].at_s, **utilisation_of(each.trace)} for each in loads
        ],
        "memory_timeline": timelines or None,
    }


def _whose(load: SettingLoad) -> dict[str, Any]:
    return {"rank": load.rank, "experiment_id": load.experiment_id}
