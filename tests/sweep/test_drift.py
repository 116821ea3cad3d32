"""A control setting measured again: ratios, files, and the notes in results, with scripted times and clock."""

import json
import time
from pathlib import Path
from threading import Timer

import pytest

from experiment_core_utils.meters.stability import drift_ratio
from experiment_core_utils.primitives.errors import OutOfMemory, ResultsError
from experiment_core_utils.primitives.files import write_json_atomically
from experiment_core_utils.primitives.interruption import StopRequest
from experiment_core_utils.records.caveats import caveat
from experiment_core_utils.records.ledger import Ledger
from experiment_core_utils.records.setting_result import Drift
from experiment_core_utils.sweep.drift import (
    NOT_CLOSED,
    DriftCheck,
    Totals,
    drift_caveat,
    drift_path,
    fill_in_drift,
    read_drift,
    wait_for_last_readings,
)
from experiment_core_utils.sweep.measurer import RunContext
from tests.hand_made_records import measured_sample, part, result_of

WEIGHTS = caveat("random_weights")


class Script:
    """Gives the next times at each call, or raises."""

    def __init__(self, *totals: Totals | OutOfMemory) -> None:
        self._totals = list(totals)

    def __call__(self) -> Totals:
        found = self._totals.pop(0)
        if isinstance(found, OutOfMemory):
            raise found
        return found


def times(factor: float) -> Totals:
    return {5: 1.0 * factor, 7: 2.0 * factor, 9: 4.0 * factor}


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path, "f00d", trackers=tmp_path / "trackers")


def check(folder: Path, script: Script, every: int = 2, rank: int = 0, run: str = "0007") -> DriftCheck:
    seconds = iter(range(100, 1000))
    context = RunContext(run, rank, {rank: ()}, Ledger(folder, "f00d", trackers=folder), folder, StopRequest())
    return DriftCheck(folder, context, "control", every, script, clock=lambda: float(next(seconds)))


def save(drift: DriftCheck, ledger: Ledger, folder: Path, key: str, run: str = "0007", is_old: bool = False) -> None:
    """A file from before caveats were records has sentences alone."""
    now = {"caveats": [WEIGHTS.sentence]} | ({} if is_old else {"caveat_records": [WEIGHTS]})
    made = result_of(part(measured_sample(0)))
    provenance = made.provenance.with_keys(experiment_id=run, **now)
    content = made.with_keys(provenance=provenance, drift=drift.unfilled()).content()
    write_json_atomically(content, folder / f"{key}.json")
    ledger.mark_done(key, f"{key}.json")


def saved(folder: Path, key: str) -> dict:
    return json.loads((folder / f"{key}.json").read_text())


def test_the_ratio_is_the_median_over_samples() -> None:
    assert drift_ratio({1: 1.0, 2: 2.0, 3: 4.0}, {1: 3.0, 2: 2.2, 3: 4.0}) == pytest.approx(1.1)
    assert drift_ratio({1: 1.0}, {2: 1.0}) is None


@pytest.mark.parametrize("is_old", [False, True])
def test_each_setting_gets_the_readings_around_it(tmp_path: Path, ledger: Ledger, is_old: bool) -> None:
    drift = check(tmp_path, Script(times(1.0), times(1.02), times(1.25)))
    drift.begin()
    for number, key in enumerate(("a", "b", "c")):
        drift.after(is_last=number == 2)
        save(drift, ledger, tmp_path, key, is_old=is_old)
        assert saved(tmp_path, key)["drift"][0]["reason"] == NOT_CLOSED
    fill_in_drift(tmp_path, ledger, "abc")
    before = saved(tmp_path, "c")
    fill_in_drift(tmp_path, ledger, "abc")
    assert saved(tmp_path, "c") == before
    around = {key: [saved(tmp_path, key)["drift"][0][when] for when in ("before", "after")] for key in "abc"}
    assert around == {
        "a": [1.0, pytest.approx(1.02)],
        "b": [1.0, pytest.approx(1.02)],
        "c": [pytest.approx(1.02), pytest.approx(1.25)],
    }
    assert saved(tmp_path, "a")["provenance"]["caveats"] == [WEIGHTS.sentence]
    provenance = saved(tmp_path, "c")["provenance"]
    assert provenance["caveats"] == [
        WEIGHTS.sentence,
        "drift: machine speed changed by up to 25 % during this run; do not compare times across it",
    ]
    if is_old:
        assert "caveat_records" not in provenance
    else:
        assert [each["kind"] for each in provenance["caveat_records"]] == ["random_weights", "drift"]
        assert provenance["caveat_records"][1]["figures"] == {"ratio": pytest.approx(1.25), "when": "after"}
    readings = read_drift(drift_path(tmp_path, 0))
    assert [(each.when, each.num_settings_before, each.since_start_s) for each in readings] == [
        ("start", 0, 1.0), ("between", 2, 2.0), ("end", 3, 3.0),
    ]  # fmt: skip
    assert readings[2].total_s == (1.25, 2.5, 5.0) and readings[2].sample_ids == (5, 7, 9)


def test_the_main_process_waits_for_the_last_readings_of_the_others(tmp_path: Path) -> None:
    late = check(tmp_path, Script(times(1.0), times(1.0)), rank=1)
    late.begin()
    began = time.monotonic()
    wait_for_last_readings(tmp_path, [1], "0007", 0.25, StopRequest())
    assert time.monotonic() - began >= 0.25
    other = Timer(0.3, late.after, kwargs={"is_last": True})
    other.start()
    wait_for_last_readings(tmp_path, [1], "0007", 60.0, StopRequest())
    assert read_drift(drift_path(tmp_path, 1))[-1].when == "end" and time.monotonic() - began < 50
    # A run without other processes has nothing to wait for.
    wait_for_last_readings(tmp_path, [], "0007", 60.0, StopRequest())


def test_a_run_that_resumes_has_its_own_start(tmp_path: Path, ledger: Ledger) -> None:
    first = check(tmp_path, Script(times(1.0)))
    first.begin()
    second = check(tmp_path, Script(times(2.0), times(2.0)), run="0008")
    second.begin()
    second.after(is_last=True)
    save(second, ledger, tmp_path, "a", run="0008")
    fill_in_drift(tmp_path, ledger, "a")
    readings = read_drift(drift_path(tmp_path, 0))
    assert [(each.experiment_id, each.ratio) for each in readings] == [("0007", 1.0), ("0008", 1.0), ("0008", 1.0)]
    assert saved(tmp_path, "a")["drift"] == [
        {
            "rank": 0,
            "control": "control",
            "num_settings_before": 0,
            "before": 1.0,
            "after": 1.0,
            "reason": None,
        }
    ]


def test_a_control_that_cannot_run_is_a_reading_with_a_reason(tmp_path: Path, ledger: Ledger) -> None:
    drift = check(tmp_path, Script(OutOfMemory("no room"), {}, times(1.0)), every=1)
    drift.begin()
    drift.after(is_last=False)
    save(drift, ledger, tmp_path, "a")
    drift.after(is_last=True)
    save(drift, ledger, tmp_path, "b")
    fill_in_drift(tmp_path, ledger, "ab")
    assert [(each.ratio, each.reason) for each in read_drift(drift_path(tmp_path, 0))] == [
        (None, "OutOfMemory: no room"),
        (None, "none of this process's first samples can be read"),
        (1.0, None),
    ]
    assert saved(tmp_path, "a")["drift"][0]["reason"].startswith("OutOfMemory: no room; none of")
    assert saved(tmp_path, "b")["drift"][0]["after"] == 1.0


def test_other_processes_keep_files_of_their_own_and_touch_no_result(tmp_path: Path, ledger: Ledger) -> None:
    drift = check(tmp_path, Script(times(1.0), times(1.5)), rank=3)
    drift.begin()
    drift.after(is_last=True)
    assert drift_path(tmp_path, 3) == tmp_path / "drift" / "rank3.json"
    assert [path.name for path in (tmp_path / "drift").iterdir()] == ["rank3.json"]


def test_switched_off_it_reads_and_writes_nothing(tmp_path: Path, ledger: Ledger) -> None:
    drift = check(tmp_path, Script(), every=0)
    drift.begin()
    assert drift.unfilled() == []
    drift.after(is_last=True)
    assert not drift_path(tmp_path, 0).exists()


def test_a_run_that_was_killed_is_filled_in_from_the_readings_that_there_are(tmp_path: Path, ledger: Ledger) -> None:
    killed = check(tmp_path, Script(times(1.0)))
    killed.begin()
    killed.after(is_last=False)
    save(killed, ledger, tmp_path, "a")
    fill_in_drift(tmp_path, ledger, ["a", "never measured"])
    (entry,) = saved(tmp_path, "a")["drift"]
    assert (entry["before"], entry["after"], entry["reason"]) == (1.0, None, "no reading after it")


def test_without_readings_there_are_reasons(tmp_path: Path, ledger: Ledger) -> None:
    drift = check(tmp_path, Script())
    drift.after(is_last=False)
    save(drift, ledger, tmp_path, "a")
    fill_in_drift(tmp_path, ledger, "a")
    (entry,) = saved(tmp_path, "a")["drift"]
    assert (entry["before"], entry["after"], entry["reason"]) == (
        None, None, "no reading before it; no reading after it",
    )  # fmt: skip


@pytest.mark.parametrize(("after", "says"), [(1.049, None), (1.06, "6 %"), (0.94, "6 %"), (None, None)])
def test_more_than_five_percent_is_a_caveat(after: float | None, says: str | None) -> None:
    found = drift_caveat([Drift(before=1.0, after=1.0), Drift(before=1.01, after=after)])
    assert (found is None) if says is None else (found is not None and f"by up to {says} during" in found.sentence)


@pytest.mark.parametrize("content", ["", "[]", '{"schema_version": 9, "readings": []}', '{"schema_version": 1}'])
def test_a_file_that_is_something_else_is_not_written_over(tmp_path: Path, content: str) -> None:
    drift_path(tmp_path, 0).parent.mkdir()
    drift_path(tmp_path, 0).write_text(content)
    with pytest.raises(ResultsError, match="rank0.json"):
        read_drift(drift_path(tmp_path, 0))
