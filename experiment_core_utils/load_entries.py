"""Load and memory along the windows of a setting, as its result has them. Imports no torch."""

from collections.abc import Sequence

from experiment_core_utils.meters.load_trace import memory_timeline, utilisation_of
from experiment_core_utils.primitives.records import SettingLoad
from experiment_core_utils.setting_result import MemoryTimeline, ProcessLoad


def loads_of(loads: Sequence[SettingLoad]) -> list[ProcessLoad]:
    """`compute_utilisation`: one entry for each window."""
    return [
        ProcessLoad.model_construct(
            rank=each.rank,
            experiment_id=each.experiment_id,
            window_s=each.trace.samples[-1].at_s,
            **utilisation_of(each.trace),
        )
        for each in loads
    ]


def timelines_of(loads: Sequence[SettingLoad]) -> list[MemoryTimeline] | None:
    """`memory_timeline`: one entry for each window; None where none was asked for."""
    timelines = [
        MemoryTimeline.model_construct(rank=each.rank, experiment_id=each.experiment_id, **memory_timeline(each.trace))
        for each in loads
        if each.has_timeline
    ]
    return timelines or None
