"""In: the folder of a run with --use_profiler; out: what each profiled request spent in the parts of the decoder."""

import gzip
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.primitives.files import read_regular_file
from experiments.core_exp.component_breakdown import StageParts, stage_parts

TRACES = "profiler_trace_config_*_sample_*.json.gz"
_HEADING = re.compile(r"setting (\S+), sample id (\d+), (\w+) profile on (\w+)")
HOW = "profile a few settings: acc_lat_profiling.py ... --num_samples 4 --use_profiler"


@dataclass(frozen=True)
class ProfiledRequest:
    """One profiled run of one request; `mode` and `device` as in the heading of its table."""

    trace: Path
    setting: str
    sample_id: int
    mode: str
    device: str
    stages: Mapping[str, StageParts]


def load_profiles(folder: Path) -> tuple[list[ProfiledRequest], str | None]:
    """All profiled requests of a run in order of file names, or none of them and why.

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
        stages = stage_parts(events)
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, RecursionError, zlib.error) as error:
        raise ResultsError(f"{path} or the table beside it cannot be read ({error}); remove both") from error
    if heading is None:
        raise ResultsError(f"{table} does not begin with the setting and the sample; remove it and {path.name}")
    if stages is None:
        return None
    return ProfiledRequest(path, heading[1], int(heading[2]), heading[3], heading[4], stages)
