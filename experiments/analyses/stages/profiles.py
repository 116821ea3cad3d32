"""The time of each part of the decoder by stage, from the Chrome trace of a profiled run.

Host time is that of the program while it issues the part's work; device time is that of the kernels and copies that the
part launched, wherever they ran. Both are given, because either can be what a stage waits for.
"""

import gzip
import json
import re
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.primitives.files import read_regular_file
from experiment_core_utils.records.stages import COMPONENTS, STAGES

# What a stage is cut into without overlap; `ffn` of the report is the sum of three of them.
PARTS = ("attention", "routing", "experts", "ffn_other", "norm", "head", "other")
IN_FFN = ("routing", "experts", "ffn_other")
_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_LAUNCHES = {"cuda_runtime", "cuda_driver"}


@dataclass(frozen=True)
class PartTime:
    """The time of one part in all calls of a stage; `device_ms` is None where nothing ran on a GPU."""

    host_ms: float
    device_ms: float | None


@dataclass(frozen=True)
class ProfiledStage:
    """One stage of a profiled run, and its parts."""

    calls: int  #: 1 for vision and prefill, one a step for decode
    whole: PartTime  #: all of it; on the host the length of the stage's ranges
    parts: Mapping[str, PartTime]  #: by the names in PARTS, which add up to `whole`

    def ffn(self) -> PartTime:
        """The time of routing, experts and the rest of the feed-forward parts together."""
        inside = [self.parts[name] for name in IN_FFN]
        on_device = [each.device_ms for each in inside if each.device_ms is not None]
        return PartTime(sum(each.host_ms for each in inside), sum(on_device) if on_device else None)


@dataclass(frozen=True)
class _Range:
    name: str
    begin: float
    end: float
    above: int | None  # place of the range around it


def profiled_stages(events: Iterable[Mapping[str, Any]]) -> dict[str, ProfiledStage] | None:
    """The stages by name; None where the trace has no ranges of components (made before they were recorded)."""
    kept = [event for event in events if event.get("ph") == "X"]
    by_thread: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for event in kept:
        if event.get("cat") == "user_annotation" and event["name"] in (*STAGES, *COMPONENTS):
            by_thread[event["tid"]].append(event)
    threads = {thread: _nested(ranges) for thread, ranges in by_thread.items()}
    if not any(each.name in COMPONENTS for ranges in threads.values() for each in ranges):
        return None
    host: dict[tuple[str, str], float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for ranges in threads.values():
        for place, each in enumerate(ranges):
            stage, part = _belonging(ranges, place)
            if stage is None:
                continue
            host[stage, part] += each.end - each.begin
            if each.name in STAGES:
                calls[stage] += 1
            elif each.above is not None:
                # A range's own time is what the ranges inside it leave.
                host[stage, _belonging(ranges, each.above)[1]] -= each.end - each.begin
    device = _device_times(kept, threads)
    return {
        stage: _stage(calls[stage], {part: host[stage, part] for part in PARTS}, device, stage)
        for stage in STAGES
        if calls[stage]
    }


def _stage(
    calls: int, host: Mapping[str, float], device: Mapping[tuple[str, str], float] | None, stage: str
) -> ProfiledStage:
    parts = {
        part: PartTime(micro / 1e3, None if device is None else device.get((stage, part), 0.0) / 1e3)
        for part, micro in host.items()
    }
    on_device = None if device is None else sum(each.device_ms or 0.0 for each in parts.values())
    return ProfiledStage(calls, PartTime(sum(each.host_ms for each in parts.values()), on_device), parts)


def _nested(events: Sequence[Mapping[str, Any]]) -> list[_Range]:
    """The ranges of one thread in order of their beginning, each with the range around it."""
    found: list[_Range] = []
    around: list[int] = []
    for event in sorted(events, key=lambda each: (each["ts"], -each["dur"])):
        begin, end = event["ts"], event["ts"] + event["dur"]
        while around and found[around[-1]].end <= begin:
            around.pop()
        found.append(_Range(event["name"], begin, end, around[-1] if around else None))
        around.append(len(found) - 1)
    return found


def _belonging(ranges: Sequence[_Range], place: int) -> tuple[str | None, str]:
    """Stage and part of a range's own time; no stage where none is around it."""
    name = ranges[place].name
    part = {"ffn": "ffn_other"}.get(name, name if name in COMPONENTS else "other")
    above: int | None = place
    while above is not None and ranges[above].name not in STAGES:
        above = ranges[above].above
    return (None if above is None else ranges[above].name), part


def _device_times(
    events: Sequence[Mapping[str, Any]], threads: Mapping[Any, Sequence[_Range]]
) -> dict[tuple[str, str], float] | None:
    """(stage, part) -> microseconds of what it launched; None where nothing ran on a device."""
    ran = [event for event in events if event.get("cat") in _ON_DEVICE]
    if not ran:
        return None
    launched = {event["args"]["correlation"]: event for event in events if event.get("cat") in _LAUNCHES}
    begins = {thread: [each.begin for each in ranges] for thread, ranges in threads.items()}
    times: dict[tuple[str, str], float] = defaultdict(float)
    for event in ran:
        launch = launched.get(event["args"]["correlation"])
        if launch is None or launch["tid"] not in threads:
            continue
        ranges = threads[launch["tid"]]
        place: int | None = bisect_right(begins[launch["tid"]], launch["ts"]) - 1
        while place is not None and place >= 0 and ranges[place].end < launch["ts"]:
            place = ranges[place].above
        if place is None or place < 0:
            continue
        stage, part = _belonging(ranges, place)
        if stage is not None:
            times[stage, part] += event["dur"]
    return times


TRACES = "profiler_trace_config_*_sample_*.json.gz"
_HEADING = re.compile(r"setting (\S+), sample id (\d+), (\w+) profile on (\w+)")
HOW = "profile a few settings: knobprof profile ... --num_samples 4 --use_profiler"


@dataclass(frozen=True)
class ProfiledRequest:
    """A profiled run of one request; `mode` and `device` as in the heading of its table."""

    trace: Path
    setting: str
    sample_id: int
    mode: str
    device: str
    stages: Mapping[str, ProfiledStage]


def load_profiles(folder: Path) -> tuple[list[ProfiledRequest], str | None]:
    """The profiled requests of a run in order of file names, or none of them and the reason.

    Raises:
        ResultsError: a trace, or the table beside it, is broken; it is named.
    """
    paths = sorted(folder.glob(TRACES))
    if not paths:
        return [], f"the folder has no profiles ({TRACES}); {HOW}"
    found = [request for path in paths if (request := _profile(path)) is not None]
    if not found:
        return [], f"the profiles are from before parts of the decoder were recorded in them; {HOW}"
    return found, None


def _profile(path: Path) -> ProfiledRequest | None:
    table = path.with_name(path.name.replace("profiler_trace_", "profiler_results_").replace(".json.gz", ".txt"))
    try:
        heading = _HEADING.match(read_regular_file(table).decode())
        events = json.loads(gzip.decompress(read_regular_file(path)))["traceEvents"]
        stages = profiled_stages(events)
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, RecursionError, zlib.error) as error:
        raise ResultsError(f"{path} or the table beside it cannot be read ({error}); remove both") from error
    if heading is None:
        raise ResultsError(f"{table} does not begin with the setting and the sample; remove it and {path.name}")
    if stages is None:
        return None
    return ProfiledRequest(path, heading[1], int(heading[2]), heading[3], heading[4], stages)
