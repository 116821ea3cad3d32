"""A table holds what the results hold, and is read as it was written."""

from pathlib import Path

import numpy as np
import pytest

from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.pipeline import run_profiling
from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.records.setting_result import SettingResult
from experiments.analyses.knobs.grid import grid_of_table
from experiments.analyses.recorded_table import RecordedTable, read_table, table_of, write_table
from tests.experiments.hand_made_sweep import ARRIVED, reference, result, setting
from tests.hand_made_records import answered_sample, measured_sample, staged_run


def two_settings() -> RecordedTable:
    """4 samples of own pictures; b is right on all and takes twice as long."""
    scores, seconds = np.array([[1.0, 0.0, 1.0, 0.0], [1.0] * 4]), np.array([[1.0, 1.1, 0.9, 1.0], [2.0] * 4])
    names = tuple("pqrs")
    return RecordedTable(("a", "b"), (0, 1, 2, 3), names, scores, seconds, 2 * seconds, 1.0, {}, names)


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    table = two_settings()
    table.seconds[0, 3] = table.scores[0, 3] = np.nan
    write_table(table, tmp_path / "new" / "table.json")
    again = read_table(tmp_path / "new" / "table.json")
    assert (again.settings, again.sample_ids, again.pictures, again.best) == (
        table.settings, table.sample_ids, table.pictures, 1.0)  # fmt: skip
    np.testing.assert_array_equal(again.scores, table.scores)
    np.testing.assert_allclose(again.seconds, table.seconds, atol=5e-5)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ResultsError, match="not a table of collect_table.py"):
        read_table(tmp_path / "other.json")


def test_a_table_keeps_every_run(tmp_path: Path) -> None:
    """Runs of 1 s and 2 s of one sample, and a single one of 1 s of another; none of one that was not measured."""
    samples = [measured_sample(0, staged_run(), staged_run(vision_s=1.5)), measured_sample(1), answered_sample(2)]
    write_table(table_of([SettingResult.from_content(result(setting(), samples), "a file")]), tmp_path / "table.json")
    table = read_table(tmp_path / "table.json")
    assert table.runs is not None
    np.testing.assert_allclose(table.runs[:, 0], [[1.0, 1.0, np.nan], [2.0, np.nan, np.nan]])
    np.testing.assert_allclose(table.seconds[0], [1.5, 1.0, np.nan])
    np.testing.assert_allclose(table.costs[0], [3.0, 1.0, np.nan])
    grid = grid_of_table(table)
    assert grid.runs_ms is not None and grid.runs_ms[1, 0, 0] == 2000
    assert grid.total_ms[0, 0] == 1500


def test_requests_that_waited_for_each_other_make_no_table() -> None:
    found = SettingResult.from_content(result(setting()) | ARRIVED, "a file")
    with pytest.raises(ResultsError, match="one by one; measure again without --request_rate"):
        table_of([found])


@pytest.mark.parametrize("in_grid", [False, True])
def test_a_table_says_which_setting_is_the_reference(tmp_path: Path, in_grid: bool) -> None:
    stored = [SettingResult.from_content(each, "a file") for each in (result(setting()), reference(in_grid=in_grid))]
    write_table(table_of(stored), tmp_path / "table.json")
    low, own = grid_of_table(read_table(tmp_path / "table.json")).points
    assert (low.is_reference, low.in_grid) == (False, True)
    assert (own.key, own.is_reference, own.in_grid) == ("own_topk4_blocks4", True, in_grid)
    write_table(table_of(stored[:1]), tmp_path / "older.json")
    assert "reference" not in (tmp_path / "older.json").read_text()
    assert not any(point.is_reference for point in grid_of_table(read_table(tmp_path / "older.json")).points)


def test_a_table_holds_what_the_results_hold(tiny_checkpoint: Path, tmp_path: Path) -> None:
    report = run_profiling(
        parse_config(
            ["--model_path", str(tiny_checkpoint), "--output_dir", str(tmp_path), "--num_samples", "3", "--tier_list",
             "low", "--top_k_list", "2", "4", "--num_active_blocks_list", "3", "--num_runs_per_sample", "2",
             "--num_warmup_runs", "0", "--max_repeats", "0", "--no_reference",
             "--max_new_tokens", "2",
             "--num_threads", "1"]
        )
    )  # fmt: skip
    table = table_of(report.results)
    assert table.settings == ("tier-low_topk2_blocks3", "tier-low_topk4_blocks3")
    sample = report.results[1].content()["per_sample_results"][2]
    assert table.sample_ids[2] == sample["sample_id"]
    assert table.pictures[2] == sample["metadata"]["image_id"]
    totals = [run["T_total"] / 1000 for run in sample["runs"]]
    assert table.seconds[1, 2] == pytest.approx(sum(totals) / 2)
    assert table.costs[1, 2] == pytest.approx(sum(totals))
    assert table.runs is not None and table.runs[:, 1, 2].tolist() == pytest.approx(totals)
    assert table.origin["caveats"] and table.origin["protocol_version"] == 2
    with pytest.raises(ResultsError, match="several runs, or none"):
        table_of([])
