"""Which setting a budget gets, with the aggregates worked out by hand, and the file that keeps a lookup."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError
from experiments.controller.lookup import build, load, main, predict, save
from tests.experiments.controller.hand_made_requests import FAST, MIDDLE, SLOW, grid, request


def test_the_entries_are_means_and_medians_over_samples():
    entries = build(grid()).entries
    # (0.1 + 0.1 + 0.1 + 0.2) / 4 = 0.125 s; the two in the middle are 0.1 s.
    assert entries[0].choice == FAST
    assert entries[0].latency_mean_ms == pytest.approx(125)
    assert entries[0].latency_median_ms == pytest.approx(100)
    assert [entry.accuracy for entry in entries] == [0.5, 0.5, 0.75]
    # 1.1 / 4 = 0.275 s, (0.2 + 0.3) / 2 = 0.25 s; 2.2 / 4 = 0.55 s, (0.5 + 0.6) / 2 = 0.55 s.
    assert [entry.latency_mean_ms for entry in entries] == pytest.approx([125, 275, 550])
    assert [entry.latency_median_ms for entry in entries] == pytest.approx([100, 250, 550])


@pytest.mark.parametrize(
    ("method", "tolerance", "budget_ms", "expected"),
    [
        # Fast and middle are equally accurate: the faster one.
        ("mean", 0.0, 300, FAST),
        ("mean", 0.0, 550.001, SLOW),
        ("mean", 0.0, 549, FAST),
        # 524 * 1.05 = 550.2
        ("mean", 0.05, 524, SLOW),
        ("mean", 0.05, 523, FAST),
        # None fits 90: the nearest is the fastest.
        ("mean", 0.0, 90, FAST),
        ("median", 0.0, 99, FAST),
    ],
)
def test_the_most_accurate_setting_that_fits(method, tolerance, budget_ms, expected):
    assert predict(build(grid(), method, tolerance), budget_ms).choice == expected


def test_mean_median_and_max_accuracy_differ_where_a_setting_fits_by_one_of_them():
    made = grid()
    # The middle choice is now right on requests 0, 1 and 3, the best of the two below 500 ms: mean 275, median 250.
    scores = made.scores.copy()
    scores[1, 3] = 1.0
    made = replace(made, scores=scores)
    assert predict(build(made, "mean"), 260).choice == FAST
    assert predict(build(made, "median"), 260).choice == MIDDLE
    assert predict(build(made, "max_accuracy"), 260).choice == MIDDLE
    # Mean below median: 0.1, 0.3, 0.3, 0.3 has mean 250 and median 300.
    total_s = made.total_s.copy()
    total_s[1] = [0.1, 0.3, 0.3, 0.3]
    made = replace(made, total_s=total_s)
    assert predict(build(made, "mean"), 260).choice == MIDDLE
    assert predict(build(made, "median"), 260).choice == FAST
    assert predict(build(made, "max_accuracy"), 260).choice == MIDDLE


def test_none_fits_says_so_and_gives_the_nearest():
    lookup = build(grid())
    entry = predict(lookup, 50)
    assert entry.choice == FAST
    assert not lookup.fits(entry, 50)
    assert lookup.fits(entry, 125)


def test_scores_count_as_shares_of_the_best_and_absent_ones_do_not_count():
    made = grid()
    scores = 10 * made.scores
    scores[2, 0] = np.nan
    total_s = made.total_s.copy()
    total_s[2, 1:] = np.nan
    entries = build(replace(made, scores=scores, best=np.full(4, 10.0), total_s=total_s)).entries
    # (1 + 1 + 0) / 3 over requests 1 to 3; one time, 400 ms.
    assert entries[2].accuracy == pytest.approx(2 / 3)
    assert (entries[2].num_scored, entries[2].num_measured) == (3, 1)
    assert entries[2].latency_mean_ms == pytest.approx(400)


def test_a_setting_without_times_is_no_entry():
    made = grid()
    total_s = made.total_s.copy()
    total_s[1] = np.nan
    assert [entry.choice for entry in build(replace(made, total_s=total_s)).entries] == [FAST, SLOW]
    total_s[:] = np.nan
    with pytest.raises(ResultsError, match="no setting has samples"):
        build(replace(made, total_s=total_s))


def test_every_request_gets_the_same():
    lookup = build(grid())
    assert lookup.name == "lookup_mean"
    assert {lookup.choose(request(sample_id), 0.6) for sample_id in range(4)} == {SLOW}


@pytest.mark.parametrize("budget_ms", [0, -1, float("nan"), float("inf")])
def test_a_budget_must_be_above_0(budget_ms):
    with pytest.raises(ConfigurationError, match="give one above 0"):
        predict(build(grid()), budget_ms)


def test_a_file_gives_back_what_was_saved(tmp_path: Path):
    lookup = build(grid(), "median", 0.1)
    save(lookup, tmp_path / "lookup.json")
    assert load(tmp_path / "lookup.json") == lookup
    assert lookup.sample_ids == {"signs": (0, 1, 2, 3)}


@pytest.mark.parametrize(
    "change",
    [{"kind": "other"}, {"schema_version": 2}, {"entries": []}, {"aggregation_method": "mode"}, {"entries": [{}]}],
)
def test_another_file_is_refused(tmp_path: Path, change):
    path = tmp_path / "lookup.json"
    save(build(grid()), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ResultsError, match=str(path)):
        load(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("latency_mean_ms", 10**400), ("latency_mean_ms", -1.0), ("latency_median_ms", 0), ("accuracy", "x"),
     ("accuracy", 10**400), ("top_k", 1.5), ("num_scored", None), ("tier", "../x"), ("num_measured", [])],
)  # fmt: skip
def test_an_entry_that_cannot_be_is_refused_with_its_field(tmp_path: Path, field: str, value: object) -> None:
    path = tmp_path / "lookup.json"
    save(build(grid()), path)
    content = json.loads(path.read_text())
    content["entries"][0][field] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ResultsError, match=rf"{path} is broken: entries\[0\]\.{field} is .*; build it again"):
        load(path)


def test_wrong_values_are_refused():
    with pytest.raises(ConfigurationError, match="--aggregation_method 'mode'"):
        build(grid(), "mode")
    for tolerance in (-0.1, float("inf"), float("nan")):
        with pytest.raises(
            ConfigurationError, match=f"--tolerance {tolerance:g} is not possible; give a finite number"
        ):
            build(grid(), "mean", tolerance)


def test_predict_prints_the_setting_and_whether_it_fits(tmp_path: Path, capsys):
    path = tmp_path / "lookup.json"
    save(build(grid()), path)
    assert main(["predict", str(path), "--budget_ms", "600", "50"]) == 0
    fits, nearest = capsys.readouterr().out.splitlines()
    assert fits == "600 ms: tier-high_topk8_blocks16, mean latency 550.0 ms, accuracy 0.750 of the best score"
    assert nearest.endswith("no setting fits, this is the nearest")
    assert main(["predict", str(path), "--budget_ms", "0"]) == 2
    assert main(["predict", str(tmp_path / "none.json"), "--budget_ms", "1"]) == 1
