"""Two sides of the same settings: ratios, intervals and verdicts, sides of several runs, and exit codes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from experiment_core_utils.primitives.contrasts import ScoreContrasts
from experiments.analyses.charts.chart import Dots, Rule
from experiments.analyses.charts.run_charts import runs_chart
from experiments.analyses.two_runs import RunDifference, verdict_of
from experiments.core_exp.compare_runs import main
from tests.experiments.hand_made_sweep import PROVENANCE, result, setting, write, write_signed
from tests.hand_made_records import measured_sample, staged_run

ROUNDS = {"how": "rounds", "seed": 0, "position": None, "num_settings": 2}
TWO = ((2, 3), (4, 3))
TWELVE = tuple((top_k, blocks) for top_k in (1, 2, 4) for blocks in (1, 2, 3, 4))
SAMPLES = range(20)


def run_of(
    folder: Path,
    factor: float,
    samples: Sequence[int] = SAMPLES,
    settings: Sequence[tuple[int, int]] = TWO,
    noise: float = 0.0,
    seed: int = 0,
    **more: Any,
) -> Path:
    """Samples of 1000 to 1190 ms times the factor, in rounds; half a second of each is prefill and decode."""
    generator, results = np.random.default_rng(seed), []
    for top_k, blocks in settings:
        seconds = [
            factor * (1 + 0.01 * (number % 100)) * np.exp(noise * generator.standard_normal()) for number in samples
        ]
        made = [
            measured_sample(number, staged_run(vision_s=float(total) - 0.5))
            for number, total in zip(samples, seconds, strict=True)
        ]
        stored = result(setting(top_k=top_k, blocks=blocks), made)
        results.append(stored | {"setting_order": ROUNDS} | more)
    return write(folder, *results)


def side_of(folder: Path, factors: Sequence[float], seed: int = 0, **more: Any) -> Path:
    """A run for each factor, each with noise of its own."""
    for number, factor in enumerate(factors, 1):
        run_of(folder / str(number), factor, noise=0.01, seed=seed + number, **more)
    return folder


def lines_of(tmp_path: Path, *arguments: object) -> dict[tuple[str, str], dict[str, Any]]:
    assert main([*map(str, arguments), "--output", str(tmp_path / "lines.json")]) == 0
    content = json.loads((tmp_path / "lines.json").read_text())
    return {(each["setting"], each["quantity"]): each for each in content["lines"]}


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


def test_two_runs_of_one_thing_on_a_machine_3_percent_slower(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every setting is 3 % slower on its samples, which says nothing of what was compared."""
    before = run_of(tmp_path / "a", 1.0, range(50), TWELVE, noise=0.03, seed=1)
    after = run_of(tmp_path / "b", 1.03, range(50), TWELVE, noise=0.03, seed=2)
    found = lines_of(tmp_path, before, after)
    latency = [each for (_, quantity), each in found.items() if quantity == "latency"]
    assert [each["verdict"] for each in latency] == ["CANNOT TELL"] * 13
    together = latency[-1]
    assert together["setting"] == "all 12 settings" and together["is_pooled"] and together["n"] == 600
    assert together["change"] == pytest.approx(1.03, abs=0.005) and together["interval_of_samples"][0] > 1.02
    assert main([str(before), str(after), "--fail_on_slower"]) == 0
    printed = capsys.readouterr().out
    assert "on these samples, which cannot be told from a change between two runs (2.0% each), CANNOT TELL" in printed
    assert "knobprof compare --run measures" in printed
    # As if every run were equally fast, which this one is not.
    wrong = lines_of(tmp_path, before, after, "--between_runs", 0)
    assert sum(each["verdict"] == "SLOWER" for each in wrong.values()) >= 11


def test_a_single_run_a_side_has_the_variance_that_is_stated(tmp_path: Path) -> None:
    """Without noise all there is is 1.96 times the root of two runs' 0.03^2."""
    runs = run_of(tmp_path / "a", 1.0), run_of(tmp_path / "b", 1.2)
    line = lines_of(tmp_path, *runs, "--between_runs", 0.03)["all 2 settings", "latency"]
    half = 1.959964 * 2**0.5 * 0.03
    assert line["interval"] == pytest.approx([1.2 * np.exp(-half), 1.2 * np.exp(half)], rel=1e-6)
    assert (line["verdict"], line["run_deviation"], line["pictures"]) == ("SLOWER", 0.03, 20)
    # One figure of each side whose ratio is the change: geometric means in ms.
    assert line["one"] == pytest.approx(1000 * np.exp(np.mean(np.log1p(0.01 * np.arange(20)))))
    assert line["other"] / line["one"] == pytest.approx(line["change"])
    assert main([*map(str, runs), "--fail_on_slower"]) == 1
    assert main([*map(str, reversed(runs)), "--fail_on_slower"]) == 0


def test_a_run_beside_other_load_varies_by_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = {"rank": 0, "sm_clock_mhz": None, "memory_clock_mhz": None, "temperature_c_max": None, "power_w_max": None,
            "power_throttled_s": None, "thermal_throttled_s": None, "foreign_cpu_share": 0.8,
            "cpu_frequency_mhz": None}  # fmt: skip
    on_cpu = PROVENANCE | {"hardware": {"device": "cpu", "gpu_name": None, "cpu": "Scripted CPU"}}
    one = run_of(tmp_path / "a", 1.0, provenance=on_cpu)
    line = lines_of(tmp_path, one, run_of(tmp_path / "b", 1.2, conditions=[load], provenance=on_cpu))
    assert line["all 2 settings", "latency"]["run_deviation"] == pytest.approx(0.16)
    assert line["all 2 settings", "latency"]["verdict"] == "CANNOT TELL"
    assert "vary by 16.0% (--between_runs), with other processes on 80% of the CPUs" in capsys.readouterr().out
    # Quiet runs on a CPU vary by more than those on a GPU.
    quiet = lines_of(tmp_path, one, run_of(tmp_path / "e", 1.2, provenance=on_cpu))
    assert quiet["all 2 settings", "latency"]["run_deviation"] == 0.07
    # On a GPU the host's load is not that of the device.
    gpu = run_of(tmp_path / "c", 1.0), run_of(tmp_path / "d", 1.2, conditions=[load])
    assert lines_of(tmp_path, *gpu)["all 2 settings", "latency"]["run_deviation"] == 0.02


def test_one_setting_that_got_slower_does_not_fail(tmp_path: Path) -> None:
    """What fails is the line of all settings."""
    one = run_of(tmp_path / "a", 1.0)
    other = run_of(tmp_path / "b", 1.2, settings=TWO[:1])
    run_of(tmp_path / "b", 0.84, settings=TWO[1:])
    found = lines_of(tmp_path, one, other)
    assert [found[key, "latency"]["verdict"] for key in ("tier-low_topk2_blocks3", "tier-low_topk4_blocks3")] == [
        "SLOWER", "FASTER",
    ]  # fmt: skip
    assert main([str(one), str(other), "--fail_on_slower"]) == 0


def test_settings_that_were_measured_one_after_another_have_no_verdict_on_latency(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `--order blocked` of commit dfe8f148 measured them."""
    blocked: dict[str, Any] = {"setting_order": ROUNDS | {"how": "blocked", "position": 0}}
    found = lines_of(tmp_path, run_of(tmp_path / "a", 1.0, **blocked), run_of(tmp_path / "b", 1.2, **blocked))
    line = found["tier-low_topk2_blocks3", "latency"]
    assert (line["interval"], line["verdict"]) == (None, "CANNOT TELL")
    assert found["tier-low_topk2_blocks3", "accuracy"]["verdict"] == "IDENTICAL"
    assert "latency has no verdict: the requests of a run waited for each other, or it" in capsys.readouterr().out


def test_several_runs_a_side_show_how_much_runs_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    factors = [1.0, 1.02, 0.98, 1.01, 0.99]
    before = side_of(tmp_path / "a", factors)
    slower = side_of(tmp_path / "b", [1.1 * each for each in reversed(factors)], seed=10)
    line = lines_of(tmp_path, before, slower)["all 2 settings", "latency"]
    # The factors' standard deviation is 0.0158.
    assert line["run_deviation"] == pytest.approx(0.0158, abs=0.002)
    assert line["verdict"] == "SLOWER" and line["change"] == pytest.approx(1.1, abs=0.01)
    assert main([str(before), str(slower), "--fail_on_slower"]) == 1
    alike = side_of(tmp_path / "c", [1.01 * each for each in reversed(factors)], seed=20)
    line = lines_of(tmp_path, before, alike)["all 2 settings", "latency"]
    assert line["verdict"] == "CANNOT TELL" and line["chance_of_same"] < 0.5
    capsys.readouterr()
    assert main([str(before), str(alike), "--fail_on_slower"]) == 0
    assert "--between_runs" not in capsys.readouterr().out


def test_equal_sides_are_found_the_same(tmp_path: Path) -> None:
    factors = [1.0, 1.003, 0.997, 1.002, 0.998]
    sides = side_of(tmp_path / "a", factors), side_of(tmp_path / "b", factors[::-1], seed=10)
    line = lines_of(tmp_path, *sides)["all 2 settings", "latency"]
    assert line["verdict"] == "SAME" and 0.8 < line["chance_of_same"] <= 1
    assert 1 / 1.02 < line["interval"][0] < 1 < line["interval"][1] < 1.02


def test_the_same_folder_twice_is_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path / "a", 1.0)
    verdicts = {(quantity, each["verdict"]) for (_, quantity), each in lines_of(tmp_path, run, run).items()}
    assert verdicts == {("latency", "SAME"), ("accuracy", "IDENTICAL")}
    assert "A and B are the same measurement: every sample is equal" in capsys.readouterr().out


def test_a_tail_of_few_pictures_is_left_out_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = run_of(tmp_path / "a", 1.0), run_of(tmp_path / "b", 1.1)
    assert not any(quantity == "P95 latency" for _, quantity in lines_of(tmp_path, *runs))
    # 0.95^113 is the first below 0.025 / 2 settings / 2 sides / 2 tests.
    assert capsys.readouterr().out.count("P95 is left out: it needs one run a side, and 113 pictures") == 1


def test_the_ends_of_a_tail_are_those_of_both_runs(tmp_path: Path) -> None:
    """One setting of 100 pictures, in disorder: each end of the two P95s fails with 0.0125.

    At most 89 of 100 are below it with 0.0115 and 90 with 0.0282; all 100 with 0.0059 and 99 with 0.0371: its ends are
    the 90th value and the last one. The first of a sample's runs counts.
    """
    order, runs = [7 * at % 100 for at in range(100)], []
    for name, factor in (("a", 1.0), ("b", 2.0)):
        made = [
            measured_sample(at, staged_run(vision_s=factor * (1 + 0.01 * at) - 0.5), staged_run(vision_s=9.0))
            for at in order
        ]
        runs.append(write(tmp_path / name, result(setting(), made) | {"setting_order": ROUNDS}))
    line = lines_of(tmp_path, *runs, "--between_runs", 0)["tier-low_topk2_blocks3", "P95 latency"]
    assert line["interval"] == pytest.approx([2 * 1.89 / 1.99, 2 * 1.99 / 1.89], rel=1e-6)
    assert (line["verdict"], line["is_pooled"]) == ("SLOWER", False)
    # Two runs that each vary by 1 % widen it by 1.96 times 1.4 %.
    wider = lines_of(tmp_path, *runs, "--between_runs", 0.01)["tier-low_topk2_blocks3", "P95 latency"]
    assert wider["interval"][1] == pytest.approx(2 * 1.99 / 1.89 * np.exp(1.959964 * 2**0.5 * 0.01), rel=1e-6)


def test_a_setting_alone_is_the_line_of_all(tmp_path: Path) -> None:
    runs = [run_of(tmp_path / name, factor, settings=((2, 3),)) for name, factor in (("a", 1.0), ("b", 1.2))]
    found = lines_of(tmp_path, *runs)
    assert [(key, each["is_pooled"]) for key, each in found.items()] == [
        (("tier-low_topk2_blocks3", "latency"), True), (("tier-low_topk2_blocks3", "accuracy"), True),
    ]  # fmt: skip


def test_questions_on_one_picture_are_one_for_the_accuracy_too(tmp_path: Path) -> None:
    # Samples k and k + 10 are about picture k; the second run has both of picture 3 wrong.
    runs = []
    for name, wrong in (("a", ()), ("b", (3, 13))):
        made = [
            measured_sample(at, prediction="0.0" if at in wrong else "1.0", image_id=f"p{at % 10}") for at in range(20)
        ]
        runs.append(write(tmp_path / name, result(setting(), made)))
    line = lines_of(tmp_path, *runs)["tier-low_topk2_blocks3", "accuracy"]
    assert line["change"] == pytest.approx(-0.1) and (line["n"], line["pictures"]) == (20, 10)
    pictures = np.arange(20) % 10
    scores = np.array([np.ones(20), np.where(pictures == 3, 0.0, 1.0)])
    assert line["interval"] == pytest.approx(ScoreContrasts.of(scores, pictures, reference=0).interval(1, 0))


def test_accuracies_of_several_settings_are_judged_together(tmp_path: Path) -> None:
    """Answers of 10 samples of 60 get wrong in one of two settings."""
    runs = []
    for name, wrong in (("a", range(0)), ("b", range(10))):
        right = [measured_sample(at) for at in range(60)]
        made = [measured_sample(at, prediction=str(float(at not in wrong))) for at in range(60)]
        results = result(setting(top_k=2), made), result(setting(top_k=4), right)
        runs.append(write(tmp_path / name, *results))
    found = lines_of(tmp_path, *runs)
    worse, equal, together = (
        found[key, "accuracy"] for key in ("tier-low_topk2_blocks3", "tier-low_topk4_blocks3", "all 2 settings")
    )
    changes = np.zeros((3, 60))
    changes[1, :10] = -1
    both = ScoreContrasts.of(changes, np.arange(60), reference=0)
    assert worse["interval"] == pytest.approx(both.interval(1, 0)) and worse["verdict"] == "WORSE"
    assert equal["interval"] == pytest.approx(both.interval(2, 0)) and equal["change"] == 0
    half = ScoreContrasts.of(np.array([np.zeros(60), changes[1] / 2]), np.arange(60), reference=0)
    assert together["change"] == pytest.approx(-1 / 12) and together["interval"] == pytest.approx(half.interval(1, 0))


def test_memory_is_compared_without_a_test(tmp_path: Path) -> None:
    runs = []
    for name, peaks in (("a", (1000, 2000)), ("b", (1010, 1000))):
        results = [
            result(setting(top_k=top_k))
            | {"memory": {"peak_memory_bytes": peak, "peak_reserved_bytes": None, "counted_memory_bytes": 5}}
            for top_k, peak in zip((2, 4), peaks, strict=True)
        ]
        runs.append(write(tmp_path / name, *results))
    found = {key: each for (key, quantity), each in lines_of(tmp_path, *runs).items() if quantity == "memory"}
    assert [(each["change"], each["verdict"]) for each in found.values()] == [
        (pytest.approx(1.01), "SAME"), (pytest.approx(0.5), "LESS"), (pytest.approx(0.505**0.5), "LESS"),
    ]  # fmt: skip


def test_memory_of_other_samples_has_no_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is of the longest request of a run, which the other run may not have."""
    memory = {"memory": {"peak_memory_bytes": None, "peak_reserved_bytes": None, "counted_memory_bytes": 1000}}
    longer = {"memory": {**memory["memory"], "counted_memory_bytes": 1500}}
    one, other = run_of(tmp_path / "a", 1.0, **memory), run_of(tmp_path / "b", 1.0, range(5, 35), **longer)
    found = [each for (_, quantity), each in lines_of(tmp_path, one, other).items() if quantity == "memory"]
    assert [(each["verdict"], each["interval"]) for each in found] == [("CANNOT TELL", None)] * 3
    said = capsys.readouterr().out
    assert "samples: A has 20, B 30, and the 15 that are in all runs are compared" in said
    assert "memory is of the longest request of a run: no verdict where samples differ" in said
    same = run_of(tmp_path / "c", 1.0, **longer)
    assert lines_of(tmp_path, one, same)["all 2 settings", "memory"]["verdict"] == "MORE"
    assert "samples: A has" not in capsys.readouterr().out


def test_samples_of_both_alone_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = run_of(tmp_path / "a", 1.0)
    assert lines_of(tmp_path, one, run_of(tmp_path / "b", 1.0, range(5, 60)))["all 2 settings", "latency"]["n"] == 30
    assert main([str(one), str(run_of(tmp_path / "c", 1.0, range(100, 120)))]) == 1
    assert "share no question" in capsys.readouterr().err


def test_a_served_model_is_compared_with_one_in_process_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The key of a server's own setting has no blocks; it shows neither number format nor execution."""
    whole = run_of(tmp_path / "process", 1.0, settings=[(4, 4)], is_reference=True)
    (path,) = run_of(tmp_path / "served", 2.0, settings=[(4, 3)], is_reference=True).glob("*.json")
    content = json.loads(path.read_text())
    content["provenance"]["model"] |= {"dtype": None, "execution": None}
    content["provenance"]["experimental_variables"]["endpoint"] = [{"variant": "m"}]
    write_signed(path, content)
    line = lines_of(tmp_path, path.parent, whole)["reference", "latency"]
    assert line["n"] == len(SAMPLES) and line["change"] == pytest.approx(0.5)
    assert "A: execution server; B: bfloat16, execution eager\n" in capsys.readouterr().out


def test_runs_without_a_common_setting_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = run_of(tmp_path / "a", 1.0)
    other = write(tmp_path / "b", result(setting(blocks=2), [measured_sample(0)]))
    assert main([str(one), str(other)]) == 1
    assert "no setting of one task in common" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["a"], "too few runs"),
        (["a", "b", "--", "--seed", "1"], "are for --run A B"),
        (["a", "b", "--checkout", ".", "."], "are for --run A B"),
        (["a", "--run", "", "", "--output_dir", "c"], "--run takes no folders"),
        (["--run", "", ""], "needs --output_dir"),
        (["--run", "", "", "--repeats", "1", "--output_dir", "c"], "--repeats"),
    ],
)
def test_what_does_not_go_together_is_refused(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert problem in capsys.readouterr().err


def test_several_runs_are_compared_with_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [run_of(tmp_path / name, factor) for name, factor in (("a", 1.0), ("b", 1.2), ("c", 0.8))]
    assert main([*map(str, runs), "--output_dir", str(tmp_path / "out")]) == 0
    content = json.loads((tmp_path / "out" / "comparison.json").read_text())
    latency = [each for each in content["lines"] if each["quantity"] == "latency"]
    assert content["sides"] == [{"label": label, "runs": 1} for label in "abc"]
    assert [(each["run"], each["setting"], each["verdict"]) for each in latency] == [
        (run, name, verdict)
        for run, verdict in (("b", "SLOWER"), ("c", "FASTER"))
        for name in ("tier-low_topk2_blocks3", "tier-low_topk4_blocks3", "all 2 settings")
    ]
    # Each of two is judged at half the level: Student's t at 1 - 0.0125.
    half = 2.241403 * 2**0.5 * 0.02
    assert latency[2]["interval"] == pytest.approx([1.2 * np.exp(-half), 1.2 * np.exp(half)], rel=1e-6)
    printed = capsys.readouterr().out
    assert "A: a\n" in printed and (tmp_path / "out" / "comparison.png").is_file()


def test_the_chart_of_runs_has_a_panel_for_each_quantity_and_a_series_for_each_run() -> None:
    lines = [
        RunDifference("signs", "s", quantity, False, 20, 20, 1.0, 1.1, 1.1, None, "CANNOT TELL", run=run)
        for run in ("b", "c")
        for quantity in ("latency", "accuracy")
    ]  # fmt: skip
    latency, accuracy = runs_chart(lines, "a").panels
    assert (latency.x.title, accuracy.x.title) == ("latency over that of a", "accuracy minus that of a")
    rule, *series = latency.marks
    assert isinstance(rule, Rule) and rule.at == 1
    assert [(each.name, list(each.y), each.x_intervals) for each in series if isinstance(each, Dots)] == [
        ("b", [pytest.approx(-0.15)], [(1.1, 1.1)]), ("c", [pytest.approx(0.15)], [(1.1, 1.1)]),
    ]  # fmt: skip


def test_identical_answers_are_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [run_of(tmp_path / name, factor, noise=0.01, seed=at) for at, (name, factor) in enumerate(TIMES.items())]
    found = lines_of(tmp_path, *runs)
    content = json.loads((tmp_path / "lines.json").read_text())
    own = [each for (_, quantity), each in found.items() if quantity == "accuracy"]
    assert [(each["verdict"], each["num_samples"]) for each in own] == [("IDENTICAL", 20)] * 3
    printed = capsys.readouterr().out.splitlines()
    # A row for each setting and one for both, which alone has the column of answers.
    (row,) = [each for each in printed if "IDENTICAL" in each]
    assert row.split()[:5] == ["all", "2", "settings", "40", "+0.000"]
    assert sum("x " in each for each in printed[1:]) == 3
    assert "answers are identical on these 20 samples (all 2 settings)" in content["headlines"][0]
    # One answer of one setting differs, with the same score: that setting is tested, the other is identical.
    path = next(runs[1].glob("*topk4*.json"))
    changed = json.loads(path.read_text())
    changed["per_sample_results"][7]["pred"] += " "
    write_signed(path, changed)
    found = lines_of(tmp_path, *runs)
    verdicts = {name: each["verdict"] for (name, quantity), each in found.items() if quantity == "accuracy"}
    assert list(verdicts.values()) == ["IDENTICAL", "CANNOT TELL", "CANNOT TELL"]


TIMES = {"a": 1.0, "b": 1.03}


@pytest.mark.parametrize(("between", "is_reachable"), [(None, False), ("0.02", False), ("0.005", True)])
def test_same_is_not_offered_where_runs_vary_by_more_than_the_margin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], between: str | None, is_reachable: bool
) -> None:
    runs = [run_of(tmp_path / name, 1.0, noise=0.001, seed=at) for at, name in enumerate("ab")]
    more = [] if between is None else ["--between_runs", between]
    line = lines_of(tmp_path, *runs, *more)["all 2 settings", "latency"]
    printed = capsys.readouterr().out
    # Student's 1.96 of a stated deviation times sqrt 2: 5.5 and 1.4 % of a log against 1.98.
    assert line["can_be_same"] is is_reachable and line["verdict"] == ("SAME" if is_reachable else "CANNOT TELL")
    assert ("SAME is out of reach: +-5.5% is more than 2.0%" in printed) is not is_reachable
    assert f"so that SAME {'can' if is_reachable else 'cannot'} be said of times and energies within 2.0%" in printed
    assert line["levels"] == ["sample", "picture"]


def test_the_spread_of_windows_is_in_an_energy_of_one_run_a_side(tmp_path: Path) -> None:
    runs = []
    for name, own in (("a", [1.0, 1.02, 0.98]), ("b", [1.0, 1.0, 1.0])):
        energy = {"passes": {"j_per_request_by_pass": own}}
        runs.append(run_of(tmp_path / name, TIMES[name], settings=TWO[:1], energy=energy))
        for path in runs[-1].glob("*topk*.json"):
            content = json.loads(path.read_text())
            for sample in content["per_sample_results"]:
                sample["energy_j"] = 2.0
            write_signed(path, content)
    found = {
        at: lines_of(tmp_path, *runs, "--between_runs", at)["tier-low_topk2_blocks3", "energy"] for at in ("0", "0.02")
    }
    # No spread of samples; logs of 1, 1.02 and 0.98 over three passes, and two degrees of freedom of each side.
    variance = np.log([1.0, 1.02, 0.98]).var(ddof=1) / 3
    assert np.log(found["0"]["interval"][1]) == pytest.approx(stats.t.isf(0.025, 2) * variance**0.5, rel=1e-6)
    assert found["0.02"]["interval"][1] > found["0"]["interval"][1]
