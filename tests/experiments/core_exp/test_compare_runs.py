"""Two runs of the same settings: ratios, intervals and verdicts, and the command's exit code."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from experiment_core_utils.primitives.statistics import bounded_mean_interval
from experiments.analyses.charts.chart import Dots, Rule
from experiments.analyses.charts.run_charts import runs_chart
from experiments.analyses.two_runs import RunDifference, mean_ratio, verdict_of
from experiments.core_exp.compare_runs import main
from tests.experiments.hand_made_sweep import result, setting, write
from tests.hand_made_records import measured_sample, staged_run


def run_of(folder: Path, factor: float, samples: range = range(20), drift: float | None = None) -> Path:
    """Top-k 2 and 4, samples of 1000 to 1190 ms times the factor; half a second of each is prefill and decode."""
    seconds = [factor * (1 + 0.01 * (number % 100)) for number in samples]
    made = [
        measured_sample(number, staged_run(vision_s=total - 0.5))
        for number, total in zip(samples, seconds, strict=True)
    ]
    reading = [] if drift is None else [{"rank": 0, "control": "c", "before": 1.0, "after": drift, "reason": None}]
    return write(folder, *(result(setting(top_k=top_k), made) | {"drift": reading} for top_k in (2, 4)))


def lines_of(tmp_path: Path, *runs: Path) -> dict[tuple[str, str], dict[str, object]]:
    assert main([*map(str, runs), "--output", str(tmp_path / "lines.json")]) == 0
    content = json.loads((tmp_path / "lines.json").read_text())
    return {(each["setting"], each["quantity"]): each for each in content["lines"]}


def test_the_ratio_of_means_is_fiellers() -> None:
    one, other = np.array([10.0, 12.0, 14.0, 9.0, 15.0, 12.0]), np.array([20.0, 25.0, 27.0, 19.0, 31.0, 22.0])
    numbers = np.arange(6)
    ends = mean_ratio(one, numbers, other, numbers, 0.025, is_paired=True)
    # At each end r, Student's t of other - r * one is at its 2.5 % bound.
    t = stats.t.isf(0.025, 5)
    found = [stats.ttest_1samp(other - ratio * one, 0).statistic for ratio in ends or ()]
    assert found == pytest.approx([t, -t])
    apart = mean_ratio(one, numbers, other, numbers, 0.025, is_paired=False)
    assert apart is not None and ends is not None and apart[0] < ends[0] < ends[1] < apart[1]
    assert mean_ratio(one[:5], numbers[:5], other[:5], numbers[:5], 0.025, is_paired=True) is None


def test_a_ratio_has_no_end_below_0_and_drift_widens_it() -> None:
    """The second run's times spread so far that its mean is not shown to be above 0."""
    one, other = np.array([10.0, 12.0, 14.0, 9.0, 15.0, 12.0]), np.array([1.0, 2.0, 900.0, 1.0, 3.0, 2.0])
    numbers = np.arange(6)
    assert stats.ttest_1samp(other, 0).statistic < stats.t.isf(0.025, 5)
    for is_paired in (True, False):
        ends = mean_ratio(one, numbers, other, numbers, 0.025, is_paired=is_paired)
        assert ends is not None and ends[0] == 0 < ends[1]


@pytest.mark.parametrize(
    ("ends", "verdict"),
    [
        ((0.90, 0.97), "FASTER"),
        ((1.01, 1.30), "SLOWER"),
        ((0.99, 1.01), "SAME"),
        ((1.005, 1.015), "SAME"),
        ((0.95, 1.05), "CANNOT TELL"),
        (None, "CANNOT TELL"),
    ],
)
def test_the_verdict_by_the_interval(ends: tuple[float, float] | None, verdict: str) -> None:
    assert verdict_of(ends, (1 / 1.02, 1.02), 1.0, ("FASTER", "SLOWER")) == verdict


def test_a_slower_run_is_reported_and_fails_on_request(tmp_path: Path) -> None:
    before, after = run_of(tmp_path / "a", 1.0), run_of(tmp_path / "b", 1.1)
    found = lines_of(tmp_path, before, after)
    line = found["tier-low_topk2_blocks3", "mean latency"]
    assert line["verdict"] == "SLOWER" and line["is_paired"] and line["change"] == pytest.approx(1.1, rel=1e-3)
    assert line["interval"] == pytest.approx([1.1, 1.1], rel=1e-3)
    # 20 pictures allow no verdict on a P95.
    tail = found["tier-low_topk2_blocks3", "P95 latency"]
    assert (tail["verdict"], tail["interval"]) == ("CANNOT TELL", None)
    assert main([str(before), str(after), "--fail_on_slower"]) == 1
    assert main([str(after), str(before), "--fail_on_slower"]) == 0
    assert main([str(before), str(before), "--fail_on_slower"]) == 0


def test_a_run_that_drifted_by_more_says_nothing(tmp_path: Path) -> None:
    runs = run_of(tmp_path / "a", 1.0), run_of(tmp_path / "b", 1.1, drift=1.2)
    line = lines_of(tmp_path, *runs)["tier-low_topk2_blocks3", "mean latency"]
    assert line["verdict"] == "CANNOT TELL"
    assert line["interval"] == pytest.approx([1.1 / 1.2, 1.1 * 1.2], rel=1e-3)


def test_the_ends_of_a_tail_are_those_of_both_runs(tmp_path: Path) -> None:
    """One setting of 100 pictures, in disorder: each end of the two P95s fails with 0.0125.

    At most 89 of 100 are below it with 0.0115 and 90 with 0.0282; all 100 with 0.0059 and 99 with 0.0371: its ends are
    the 90th value and the last one.
    """
    order, runs = [7 * at % 100 for at in range(100)], []
    for name, factor in (("a", 1.0), ("b", 2.0)):
        made = [measured_sample(at, staged_run(vision_s=factor * (1 + 0.01 * at) - 0.5)) for at in order]
        runs.append(write(tmp_path / name, result(setting(), made) | {"drift": []}))
    line = lines_of(tmp_path, *runs)["tier-low_topk2_blocks3", "P95 latency"]
    assert line["interval"] == pytest.approx([2 * 1.89 / 1.99, 2 * 1.99 / 1.89], rel=1e-6)
    assert line["verdict"] == "SLOWER"


def test_a_run_is_the_same_as_itself(tmp_path: Path) -> None:
    run = run_of(tmp_path / "a", 1.0)
    found = lines_of(tmp_path, run, run)
    assert found["tier-low_topk4_blocks3", "mean latency"]["verdict"] == "SAME"
    # None of 20 changed; two settings are compared: (1 - p)^20 = 0.0125.
    accuracy = found["tier-low_topk4_blocks3", "accuracy"]
    assert accuracy["interval"] == pytest.approx([0.0125**0.05 - 1, 1 - 0.0125**0.05])
    assert accuracy["verdict"] == "CANNOT TELL"


def test_questions_on_one_picture_are_one_for_the_accuracy_too(tmp_path: Path) -> None:
    # Samples k and k + 10 are about picture k; the second run has both of picture 3 wrong.
    runs = []
    for name, wrong in (("a", ()), ("b", (3, 13))):
        made = [
            measured_sample(at, prediction="0.0" if at in wrong else "1.0", image_id=f"p{at % 10}") for at in range(20)
        ]
        runs.append(write(tmp_path / name, result(setting(), made)))
    line = lines_of(tmp_path, *runs)["tier-low_topk2_blocks3", "accuracy"]
    assert line["is_paired"] and line["change"] == pytest.approx(-0.1)
    # Two pairs of the same fate are one pair: of 10 pictures one is worse by 1.
    assert line["interval"] == pytest.approx(bounded_mean_interval([0.0] * 3 + [-1.0] + [0.0] * 6, worst=-1.0))
    same = lines_of(tmp_path, runs[0], runs[0])["tier-low_topk2_blocks3", "accuracy"]
    # None of 10 pictures changed: (1 - p)^10 = 0.025.
    assert same["interval"] == pytest.approx([0.025**0.1 - 1, 1 - 0.025**0.1])


def test_other_samples_are_compared_by_intervals(tmp_path: Path) -> None:
    runs = run_of(tmp_path / "a", 1.0), run_of(tmp_path / "b", 2.0, range(100, 120))
    line = lines_of(tmp_path, *runs)["tier-low_topk2_blocks3", "mean latency"]
    assert not line["is_paired"] and line["n"] == [20, 20] and line["verdict"] == "SLOWER"


def test_runs_without_a_common_setting_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = run_of(tmp_path / "a", 1.0)
    (tmp_path / "b").mkdir()
    other = write(tmp_path / "b", result(setting(blocks=2), [measured_sample(0)]))
    assert main([str(one), str(other)]) == 1
    assert "no setting of one task in common" in capsys.readouterr().err


def test_several_runs_are_compared_with_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [run_of(tmp_path / name, factor) for name, factor in (("a", 1.0), ("b", 1.1), ("c", 0.9))]
    assert main([*map(str, runs), "--output_dir", str(tmp_path / "out")]) == 0
    content = json.loads((tmp_path / "out" / "comparison.json").read_text())
    means = [each for each in content["lines"] if each["quantity"] == "mean latency"]
    assert content["runs"] == ["a", "b", "c"]
    assert [(each["run"], each["setting"], each["verdict"]) for each in means] == [
        ("b", "tier-low_topk2_blocks3", "SLOWER"), ("b", "tier-low_topk4_blocks3", "SLOWER"),
        ("c", "tier-low_topk2_blocks3", "FASTER"), ("c", "tier-low_topk4_blocks3", "FASTER"),
    ]  # fmt: skip
    # None of 20 changed; two settings of two runs are compared: (1 - p)^20 = 0.025 / 4.
    accuracy = next(each for each in content["lines"] if each["quantity"] == "accuracy")
    assert accuracy["interval"][1] == pytest.approx(1 - 0.00625**0.05)
    printed = capsys.readouterr().out
    assert "A: a\n" in printed and "run's" in printed and (tmp_path / "out" / "comparison.png").is_file()


def test_the_chart_of_runs_has_a_panel_for_each_quantity_and_a_series_for_each_run() -> None:
    lines = [
        RunDifference("signs", "s", quantity, True, (20, 20), 1.0, 1.1, 1.1, None, "CANNOT TELL", run)
        for run in ("b", "c")
        for quantity in ("mean latency", "accuracy")
    ]  # fmt: skip
    latency, accuracy = runs_chart(lines, "a").panels
    assert (latency.x.title, accuracy.x.title) == ("mean latency over that of a", "accuracy minus that of a")
    rule, *series = latency.marks
    assert isinstance(rule, Rule) and rule.at == 1
    assert [(each.name, list(each.y), each.x_intervals) for each in series if isinstance(each, Dots)] == [
        ("b", [pytest.approx(-0.15)], [(1.1, 1.1)]), ("c", [pytest.approx(0.15)], [(1.1, 1.1)]),
    ]  # fmt: skip
