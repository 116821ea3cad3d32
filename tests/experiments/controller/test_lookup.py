"""Which setting a budget gets, with the aggregates worked out by hand, and the file that keeps a lookup."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError
from experiment_core_utils.primitives.statistics import bounded_mean_interval
from experiment_core_utils.records.caveats import Caveat
from experiments.analyses.latency.estimator import LatencyEstimator
from experiments.controller.knob_choices import choice_of
from experiments.controller.lookup import build, late_limit, load, main, predict, save
from experiments.controller.measured_grid import MeasuredGrid
from experiments.controller.policies.baselines import one_knob_tables
from experiments.controller.policies.guarded_lookup import GuardedLookup
from experiments.core_exp.choose import main as choose
from tests.experiments.controller.hand_made_knobs import volume_knob
from tests.experiments.controller.hand_made_requests import FAST, MIDDLE, SLOW, grid, request
from tests.experiments.hand_made_sweep import result, setting, write
from tests.hand_made_records import measured_sample


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


def test_the_order_of_the_settings_decides_nothing():
    made = grid()
    # The slow choice stands first, the fast one last.
    made = replace(made, scores=made.scores[[2, 1, 0]], total_s=made.total_s[[2, 1, 0]])
    lookup = build(made, "mean")
    assert [entry.latency_mean_ms for entry in lookup.entries] == pytest.approx([550, 275, 125])
    # None fits: the fastest. Two of accuracy 0.5 fit: the faster one. All fit: the most accurate one.
    assert [predict(lookup, budget).latency_mean_ms for budget in (90, 300, 600)] == pytest.approx([125, 125, 550])
    # In time at 300 ms are 0.5, 0.5 and 0 of the answers and right, in the order of the fast to the slow choice.
    assert predict(build(made, "in_time"), 300).latency_mean_ms == pytest.approx(125)


def test_none_fits_says_so_and_gives_the_nearest():
    lookup = build(grid(), "mean")
    entry = predict(lookup, 50)
    assert entry.choice == FAST
    place = lookup.entries.index(entry)
    assert not lookup.at(50).fits[place]
    assert lookup.at(125).fits[place]


def test_scores_count_as_fractions_of_the_best_and_absent_ones_do_not_count():
    made = grid()
    scores = 10 * made.scores
    scores[2, 0] = np.nan
    total_s = made.total_s.copy()
    total_s[2, 1:] = np.nan
    entries = build(replace(made, scores=scores, best=np.full(4, 10.0), total_s=total_s), "mean").entries
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
    lookup = build(grid(), "mean")
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


def test_settings_without_tier_or_experts_are_kept(tmp_path: Path) -> None:
    choices = choice_of("own", None, 12), choice_of("300 tokens", None, 12), choice_of("low", None, 16)
    save(build(replace(grid(), choices=choices)), tmp_path / "lookup.json")
    again = load(tmp_path / "lookup.json")
    assert tuple(entry.choice for entry in again.entries) == choices
    assert [(entry.tier, entry.vision_tokens_target, entry.top_k) for entry in again.entries] == [
        (None, None, None), (None, 300, None), ("low", None, None)]  # fmt: skip
    # Two of four are right within 0.25 s at the second setting and at the first; the first is faster.
    assert predict(again, 250.0).choice == choices[0]


def test_a_further_knob_is_one_more_to_choose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lookup.json"
    with volume_knob():
        loud = MIDDLE.replaced(volume=3)
        choices = FAST.replaced(volume=1), MIDDLE.replaced(volume=1), loud
        made = replace(grid(), choices=choices)
        save(build(made, "mean"), path)
        assert tuple(entry.choice for entry in load(path).entries) == choices
        assert predict(load(path), 600).choice == loud == MIDDLE
        # At the largest values of the others, the volume alone: the second and the third; of equal volume, no tier.
        tables = {each.name: each for each in one_knob_tables(made)}
        assert tables["only_volume"].choose(request(), 0.3) == choices[1]
        assert tables["only_tier"].choose(request(), 0.3) == loud
        with pytest.raises(ConfigurationError, match="the estimator does not predict by volume, and the lookup has"):
            GuardedLookup(build(made), LatencyEstimator()).request_settings(request(output_tokens=3))
    assert main(["predict", str(path), "--budget_ms", "600"]) == 1
    assert "lookup.json: there is no knob volume here; known are vision, " in capsys.readouterr().err


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


def test_predict_prints_what_choose_says_and_what_a_controller_takes(tmp_path: Path, capsys) -> None:
    """The means are 125, 275 and 550 ms of 4 requests each, of which no claim about a mean is sure; without a reference
    there is no price.
    """
    path = tmp_path / "lookup.json"
    save(build(grid(), "mean"), path)
    assert main(["predict", str(path), "--budget_ms", "600", "50"]) == 0
    head, number, fits, taken, _, _, nearest, near = capsys.readouterr().out.splitlines()
    assert (head, number) == ("what fits:", "  over all: 4 questions")
    assert fits.startswith("    mean of 600 ms or less: surely tier-low_topk4_blocks12, 125 ms, accuracy 0.500 [")
    assert taken == "a controller by lookup_mean: 100 % tier-high_topk8_blocks16"
    assert nearest.startswith(
        "    mean of 50 ms or less: none is sure, the nearest (can't tell) is tier-low_topk4_blocks12, 125 ms, "
    )
    assert near == "a controller by lookup_mean: 100 % tier-low_topk4_blocks12; none fits, this is the nearest"
    assert main(["predict", str(path), "--budget_ms", "0"]) == 2
    assert main(["predict", str(tmp_path / "none.json"), "--budget_ms", "1"]) == 1


@pytest.mark.parametrize(
    ("method", "more", "budget_ms", "taken"),
    [
        # Of 400, 500, 600 and 700 ms, P95 is 685, of 100, 100, 100 and 200 ms 185: 5 ms over 180.
        ("p95", {}, 180, "100 % tier-low_topk4_blocks12; none fits, this is the nearest"),
        ("p95", {"tolerance": 0.1}, 650, "100 % tier-high_topk8_blocks16"),
        ("in_time", {}, 90, "100 % tier-low_topk4_blocks12; none fits, this is the nearest"),
        # None is late, but one of four may be.
        ("mean", {"max_late": 0.5}, 700, "100 % tier-low_topk4_blocks12; none fits, this is the nearest"),
        # The slow one for (300 - 125) / (550 - 125) of the requests.
        (
            "stream",
            {},
            300,
            "41 % tier-high_topk8_blocks16, 59 % tier-low_topk4_blocks12; 300.0 ms by mean over the stream",
        ),
        (
            "stream",
            {},
            100,
            "100 % tier-low_topk4_blocks12; 125.0 ms by mean over the stream; none fits, this is the nearest",
        ),
        (
            "stream",
            {"max_late": 0.1},
            150,
            "100 % tier-low_topk4_blocks12; 25.0 % of the stream late; none fits, this is the nearest",
        ),
    ],
)
def test_no_choice_of_a_controller_is_over_the_budget_without_saying_so(
    tmp_path: Path, capsys, method, more, budget_ms, taken
) -> None:
    lookup = build(grid(), method, **more)
    save(lookup, tmp_path / "lookup.json")
    assert main(["predict", str(tmp_path / "lookup.json"), "--budget_ms", str(budget_ms)]) == 0
    assert capsys.readouterr().out.endswith(f"\na controller by {lookup.name}: {taken}\n")


def test_the_answer_of_a_table_is_that_of_its_results(tmp_path: Path, capsys) -> None:
    samples = [measured_sample(at) for at in range(3)]
    folder = write(tmp_path / "run", result(setting("low"), samples), result(setting("high"), samples))
    path = tmp_path / "lookup.json"
    assert main(["build", str(folder), "--output", str(path), "--aggregation_method", "p95"]) == 0
    capsys.readouterr()
    assert choose([str(folder), "--budget_p95_ms", "2000"]) == 0
    asked = capsys.readouterr().out.splitlines()
    assert main(["predict", str(path), "--budget_ms", "2000"]) == 0
    assert capsys.readouterr().out.splitlines()[:-1] == asked


def test_a_table_that_lacks_pictures_is_built_again(tmp_path: Path, capsys) -> None:
    path = tmp_path / "lookup.json"
    save(build(grid()), path)
    content = json.loads(path.read_text())
    del content["pictures"], content["reference"]
    path.write_text(json.dumps(content))
    assert main(["predict", str(path), "--budget_ms", "600"]) == 1
    assert "does not say which samples are of one picture; build it again" in capsys.readouterr().err


def test_a_lookup_of_an_invalid_run_says_so_and_has_no_verdict(tmp_path: Path, capsys) -> None:
    load_record = Caveat.of("foreign_load_cpu", cpu_fraction=0.9).model_dump()
    samples = [measured_sample(at) for at in range(3)]
    folder = write(
        tmp_path / "run",
        result(setting("low"), samples, caveat_records=[load_record]),
        result(setting("high"), samples),
    )
    path, said = tmp_path / "lookup.json", "INVALID: background load: other processes used 90% of the CPUs"
    assert main(["build", str(folder), "--output", str(path)]) == 0
    first, built = capsys.readouterr().out.splitlines()
    assert first.startswith(said) and built.startswith(f"{path}: 2 settings")
    assert main(["predict", str(path), "--budget_ms", "2000", "3000"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(said) and len(lines) == 2
    assert all(line.startswith("a controller by lookup_few_knobs: 100 % ") for line in lines)
    (sentence,) = load(path).voided_by
    assert f"INVALID: {sentence}" == first


@pytest.mark.parametrize(
    ("method", "budget_ms", "expected"),
    [
        # Of 400, 500, 600 and 700 ms, P95 is 600 + 0.85 * 100 = 685; of fast ones 100 + 0.85 * 100 = 185.
        ("p95", 684, FAST),
        ("p95", 686, SLOW),
        # P99: 600 + 0.97 * 100 = 697.
        ("p99", 696, FAST),
        ("p99", 698, SLOW),
        ("p50", 551, SLOW),
        ("p50", 549, FAST),
    ],
)
def test_percentiles_of_the_latency(method, budget_ms, expected):
    assert predict(build(grid(), method), budget_ms).choice == expected


def test_in_time_counts_late_answers_as_wrong():
    lookup = build(grid(), "in_time")
    # At 600 ms the slow choice is in time and right on requests 0, 1 and 2; at 500 on 0 and 1, as fast and middle are
    # on two: the fastest of them.
    assert predict(lookup, 600).choice == SLOW
    assert predict(lookup, 500).choice == FAST
    assert lookup.at(600).accuracy.tolist() == [0.5, 0.5, 0.75]
    # At 399 the middle choice loses request 3, which it has wrong, and the slow one everything.
    assert lookup.at(399).accuracy.tolist() == [0.5, 0.5, 0.0]
    assert predict(lookup, 90).choice == FAST
    assert lookup.at(90).fits.tolist() == [False] * 3


def test_in_time_passes_over_samples_without_a_score():
    made = grid()
    scores = made.scores.copy()
    scores[2, 3] = np.nan
    # 0, 1 and 2 are right and in time, 3 is not known.
    assert build(replace(made, scores=scores), "in_time").at(600).accuracy[2] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("right_of_8", "budget_ms", "expected"),
    [
        # Differences of 0 or 1 between the third choice and the first, which is right nowhere. Of 8, 3 have the mean
        # 0.375 and the error 0.518 / sqrt(8) = 0.183, which is 2.05 of it; 4 are 0.5 / 0.189 = 2.65 of it. Student's t
        # with 7 degrees of freedom is beyond 2.365 in 5 %.
        (3, 250, 0),
        (4, 250, 2),
        # The largest one is right everywhere.
        (4, 500, 1),
        # No setting that turns one knob is in time at all.
        (1, 150, 2),
    ],
)
def test_by_default_more_than_one_knob_is_turned_only_where_that_is_surely_better(right_of_8, budget_ms, expected):
    choices = choice_of("low", 8, 16), SLOW, choice_of("low", 4, 12)
    scores = np.stack([np.zeros(8), np.ones(8), (np.arange(8) < right_of_8).astype(float)])
    made = replace(
        grid(), choices=choices, tasks=("signs",) * 8, sample_ids=tuple(range(8)), pictures=tuple("abcdefgh"),
        scores=scores, best=np.ones(8), total_s=np.array([[0.2], [0.4], [0.1]]) * np.ones(8), requests=None,
    )  # fmt: skip
    assert predict(build(made), budget_ms).choice == choices[expected]
    # The one that is right most often in time, by luck or not.
    assert predict(build(made, "in_time"), budget_ms).choice == choices[1 if budget_ms == 500 else 2]
    # Of the seven other samples as many are right: those without a score have no part in it.
    scores[0, 7] = np.nan
    assert predict(build(replace(made, scores=scores)), budget_ms).choice == choices[expected]


def test_the_chance_of_being_late_is_bounded_with_confidence():
    """The limit of Clopper and Pearson for none late of n is 1 - (1 - confidence) ** (1 / n)."""
    none = late_limit(np.array([0, 0]), np.array([4, 59]), 0.95)
    assert none == pytest.approx([1 - 0.05**0.25, 1 - 0.05 ** (1 / 59)])
    assert none[1] < 0.05
    # One late of four: the chance p at which at most one of four is late in 5 % of draws, (1-p)^4 + 4 p (1-p)^3 = 0.05.
    limit = late_limit(np.array([1]), np.array([4]), 0.95)[0]
    assert (1 - limit) ** 4 + 4 * limit * (1 - limit) ** 3 == pytest.approx(0.05)
    assert late_limit(np.array([4]), np.array([4]), 0.95) == [1.0]
    # None of four late is at most 52.7 % with confidence: the slow choice at 700 ms, not at 699.
    lookup = build(grid(), "mean", max_late=0.53)
    assert lookup.name == "lookup_mean_late0.53"
    assert (predict(lookup, 700).choice, predict(lookup, 699).choice) == (SLOW, FAST)
    assert predict(build(grid(), "mean", max_late=0.52), 700).choice == FAST
    assert predict(build(grid(), "mean", max_late=0.52, confidence=0.9), 700).choice == SLOW


def test_few_late_requests_are_not_enough_where_the_latency_itself_is_above_the_budget() -> None:
    made = grid()
    total_s = made.total_s.copy()
    # The slow choice is late once of four, but so much that its mean is 575 ms.
    total_s[2] = [0.1, 2.0, 0.1, 0.1]
    lookup = build(replace(made, total_s=total_s), "mean", max_late=0.8)
    # One late of four is at most 75.1 % with confidence.
    assert [predict(lookup, budget).choice for budget in (574, 576)] == [FAST, SLOW]


def with_runs() -> MeasuredGrid:
    """The middle choice takes 0.2 s in three of four runs of every request, and 0.6 s in the fourth."""
    made = grid()
    runs = np.repeat(made.total_s[None], 4, axis=0)
    runs[:, 1] = np.array([0.2, 0.2, 0.2, 0.6])[:, None]
    return replace(made, total_s=runs.mean(axis=0), runs_s=runs)


def test_slow_runs_count_in_lateness_and_percentiles(tmp_path: Path) -> None:
    lookup = build(with_runs(), "in_time")
    # Right on two of four, each in time in three of four runs: 0.5 * 0.75; the fast choice is always in time.
    assert lookup.at(250).accuracy.tolist() == pytest.approx([0.5, 0.375, 0.0])
    assert lookup.at(600).accuracy.tolist() == pytest.approx([0.5, 0.5, 0.75])
    # Of 16 runs 12 take 200 ms: the 95th percentile is at place 14.25.
    assert build(with_runs(), "p95").at(250).latency_ms[1] == pytest.approx(600)
    assert lookup.entries[1].latency_median_ms == pytest.approx(200)
    assert lookup.entries[1].latency_mean_ms == pytest.approx(300)
    # One late request in four is at most 75.1 % with confidence.
    kept = build(with_runs(), "mean", max_late=0.752)
    save(kept, tmp_path / "lookup.json")
    again = load(tmp_path / "lookup.json")
    for each in (kept, again):
        assert each.at(550).fits.tolist() == [True, True, False]
        assert build(with_runs(), "mean", max_late=0.75).at(550).fits.tolist() == [True, False, False]
    assert again.entries == kept.entries
    stream = build(with_runs(), "stream", max_late=0.2)
    assert stream._costs(250)[1].tolist() == [0.25] * 4


def test_parts_of_late_requests_have_a_limit_no_lower_than_gaffkes() -> None:
    """Of whole answers it is the same, of parts the beta distribution is wider."""
    generator = np.random.default_rng(5)
    some = (generator.integers(0, 4, 40) / 3).tolist()
    for parts in ([1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.5], some):
        (limit,) = late_limit(np.array([sum(parts)]), np.array([len(parts)]), 0.95)
        gaffke = bounded_mean_interval(parts, tail=0.05)
        assert gaffke is not None and limit >= gaffke[1] - 0.002


PROMPTS = ("read the sign", "read the word", "count the cars", "count the dogs")


def test_similar_prompts_have_a_table_of_their_own():
    lookup = build(replace(grid(), prompts=PROMPTS), "in_time", neighbourhood=0.5)
    # Requests 0 and 1 are read: the middle choice is right on both. 2 and 3 are counted: each choice is right on one
    # of them at most, the fast one soonest.
    assert lookup.choose(replace(request(7), prompt="read the plate"), 1.0) == MIDDLE
    assert lookup.choose(replace(request(8), prompt="count the birds"), 1.0) == FAST
    assert lookup.at(1000, "read it").accuracy.tolist() == [0.5, 1.0, 1.0]
    with pytest.raises(ResultsError, match="--neighbourhood needs the prompts"):
        build(grid(), "in_time", neighbourhood=0.5)


def test_a_file_keeps_options_and_samples(tmp_path: Path, capsys):
    made = replace(grid(), prompts=PROMPTS)
    made.total_s[1, 2] = np.nan
    lookup = build(made, "p95", 0.1, max_late=0.7, confidence=0.9, neighbourhood=0.5)
    path = tmp_path / "lookup.json"
    save(lookup, path)
    assert load(path) == lookup
    assert main(["predict", str(path), "--budget_ms", "900"]) == 2
    assert "--prompt TEXT goes with a table built with --neighbourhood" in capsys.readouterr().err
    assert main(["predict", str(path), "--budget_ms", "900", "--prompt", "read it"]) == 0
    # 400 and 500 ms: P95 is 400 + 0.95 * 100; the middle and the slow choice are right on both, the middle is faster.
    assert capsys.readouterr().out.endswith(f"a controller by {lookup.name}: 100 % tier-medium_topk4_blocks12\n")
    content = json.loads(path.read_text())
    content["entries"][0]["scores"].pop()
    path.write_text(json.dumps(content))
    with pytest.raises(ResultsError, match=r"entries have \[3, 4\] samples, not 4; build it again"):
        load(path)
