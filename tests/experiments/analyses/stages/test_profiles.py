"""Host and device time of the decoder's parts from a trace made by hand, and from a real profile."""

import gzip
from pathlib import Path
from typing import Any

import pytest

from experiment_core_utils.measuring.profiles import TorchProfiles
from experiment_core_utils.primitives.errors import ResultsError
from experiments.analyses.stages.profiles import PARTS, PartTime, load_profiles, profiled_stages
from tests.scripted.scripted_model import ScriptedModel


def span(name: str, begin: float, length: float, category: str = "user_annotation", **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "tid": 1, "ts": begin, "dur": length, "args": args}


# Microseconds. Prefill 0 to 100: attention 10 to 40, ffn 40 to 90 with routing 45 to 55 and experts 60 to 85.
HOST = [
    span("prefill", 0, 100),
    span("attention", 10, 30),
    span("ffn", 40, 50),
    span("routing", 45, 10),
    span("experts", 60, 25),
    span("decode", 200, 50),
    span("attention", 200, 20),
    span("decode", 300, 50),
    span("aten::mm", 12, 5, "cpu_op"),
]


def test_host_times_by_hand() -> None:
    found = profiled_stages(HOST)
    assert found is not None and set(found) == {"prefill", "decode"}
    prefill, decode = found["prefill"], found["decode"]
    # other: 10 before attention and 10 after the ffn; the rest of the ffn: 50 - 10 - 25.
    host = {"attention": 30.0, "routing": 10.0, "experts": 25.0, "ffn_other": 15.0, "norm": 0, "head": 0, "other": 20.0}
    assert {name: part.host_ms for name, part in prefill.parts.items()} == {k: v / 1e3 for k, v in host.items()}
    assert tuple(prefill.parts) == PARTS
    assert prefill.whole.host_ms == pytest.approx(0.1)
    assert prefill.ffn() == PartTime(pytest.approx(0.05), None)
    assert (decode.calls, decode.whole.host_ms) == (2, pytest.approx(0.1))
    assert decode.parts["attention"] == PartTime(0.02, None)


def test_what_a_part_launched_is_its_device_time_wherever_it_ran() -> None:
    device = [
        span("launch", 15, 1, "cuda_runtime", correlation=1),
        span("kernel", 500, 40, "kernel", correlation=1),
        span("launch", 70, 1, "cuda_driver", correlation=2),
        span("kernel", 540, 60, "kernel", correlation=2),
        span("launch", 95, 1, "cuda_runtime", correlation=3),
        span("copy", 600, 5, "gpu_memcpy", correlation=3),
        # Between the stages, so in none: choosing the token.
        span("launch", 150, 1, "cuda_runtime", correlation=4),
        span("kernel", 700, 9, "kernel", correlation=4),
    ]
    found = profiled_stages([*HOST, *device])
    assert found is not None
    parts = found["prefill"].parts
    assert (parts["attention"].device_ms, parts["experts"].device_ms, parts["other"].device_ms) == (0.04, 0.06, 0.005)
    assert found["prefill"].whole.device_ms == pytest.approx(0.105)
    assert found["prefill"].ffn().device_ms == pytest.approx(0.06)
    assert found["decode"].whole.device_ms == 0.0


def test_a_trace_without_parts_has_no_breakdown() -> None:
    assert profiled_stages([span("prefill", 0, 100)]) is None


def profile_into(folder: Path) -> None:
    profiles = TorchProfiles(folder, "minimal", False, True, ["tier-low_topk2_blocks2"], [7])
    profiles.take(ScriptedModel(), "tier-low_topk2_blocks2", 7, {"input_ids": [1]}, 4)


def test_absent_profiles_say_how_to_get_them(tmp_path: Path) -> None:
    found, reason = load_profiles(tmp_path)
    assert not found and reason is not None and "--use_profiler" in reason
    profile_into(tmp_path)
    found, reason = load_profiles(tmp_path)
    assert not found and reason is not None and "from before parts" in reason


def test_a_broken_profile_is_named(tmp_path: Path) -> None:
    profile_into(tmp_path)
    (trace,) = tmp_path.glob("*.json.gz")
    trace.write_bytes(b"no trace")
    with pytest.raises(ResultsError, match=trace.name):
        load_profiles(tmp_path)


@pytest.mark.parametrize("content", [b"[", b"[" * 100_000, b"null", b'{"traceEvents": 3}', b'{"traceEvents": [3]}'])
def test_a_trace_of_something_else_is_named(tmp_path: Path, content: bytes) -> None:
    profile_into(tmp_path)
    (trace,) = tmp_path.glob("*.json.gz")
    trace.write_bytes(gzip.compress(content))
    with pytest.raises(ResultsError, match=trace.name):
        load_profiles(tmp_path)


def test_a_trace_whose_bytes_were_changed_is_named(tmp_path: Path) -> None:
    profile_into(tmp_path)
    (trace,) = tmp_path.glob("*.json.gz")
    trace.write_bytes(trace.read_bytes()[:10] + b"\xff" * 100)
    with pytest.raises(ResultsError, match=trace.name):
        load_profiles(tmp_path)
