"""Where a sweep's time goes: a step inside another counts once, and every step that is timed is there."""

import time
from unittest.mock import patch

import pytest

from experiments.benchmarks.sweep_efficiency import STEPS, PartTimes


@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner, name, _ in STEPS], ids=str)
def test_every_step_is_found_and_put_back(owner: object, name: str) -> None:
    before = getattr(owner, name)
    with patch.object(owner, name, print):
        assert getattr(owner, name) is print
    assert getattr(owner, name) is before


def test_a_step_inside_another_counts_to_the_outer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two readings of the clock for the outer step alone: 10 and 13 seconds.
    readings = iter([10.0, 13.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(readings))
    times = PartTimes()
    inner = times.timed(lambda: "done", "inner")
    assert times.timed(inner, "outer")() == "done"
    assert dict(times.seconds) == {"outer": 3.0}
