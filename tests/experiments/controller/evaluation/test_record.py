"""An evaluation of hand-made outcomes as JSON and as rows, and the command on a hand-made grid."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiment_core_utils.primitives.files import REPOSITORY
from experiment_core_utils.records.caveats import Caveat
from experiments.controller.evaluate_controller import build_parser, main, reference_caveats
from experiments.controller.evaluation.record import Budget, content_of, evaluate, rows_of, table_lines
from experiments.controller.evaluation.replay import PerSampleOracle, best_static, possible, replay, requests_in
from experiments.controller.knob_choices import choice_of
from experiments.controller.lookup import build, save
from experiments.controller.measured_grid import load_grid
from tests.experiments.controller.hand_made_requests import grid
from tests.experiments.hand_made_sweep import result, setting, write
from tests.hand_made_records import measured_sample, staged_run

BUDGETS = (0.05, 0.5, 1.0)
DOCUMENT = REPOSITORY / "docs" / "controller" / "evaluation.md"


def made():
    found = grid()
    outcomes = [
        best_static(found, BUDGETS),
        replay(build(found, "mean"), found, BUDGETS),
        replay(PerSampleOracle(found), found, BUDGETS),
    ]
    could = possible(found, BUDGETS)
    budgets = [Budget(s, can, float(could[at].mean())) for at, (s, can) in enumerate(zip(BUDGETS, (False, True, True),
                                                                                          strict=True))]  # fmt: skip
    return evaluate("replay", outcomes, requests_in(found), budgets, could, ("lookup_mean", "absent"))


def test_the_oracles_gain_is_allocated():
    """At 0.5 s static and lookup have 2 of 4 in time, the oracle 3; at 1 s static and lookup 3, the oracle 4."""
    content = content_of(made())
    at = {name: [each["share_of_oracle_gain"] for each in policy["at_budgets"]]
          for name, policy in content["policies"].items()}  # fmt: skip
    # At 0.05 s nothing is in time, so that there is no gain.
    assert at == {"best_static": [None, 0.0, 0.0], "lookup_mean": [None, 0.0, 0.0], "oracle": [None, 1.0, 1.0]}
    whole = content["policies"]["oracle"]["over_meetable_budgets"]
    assert whole["num_budgets"] == 2
    # (3/4 + 4/4) / 2
    assert whole["accuracy_in_time"] == pytest.approx(0.875)
    assert whole["share_of_oracle_gain"] == 1.0
    assert whole["share_of_oracle_gain_reason"] is None


def test_differences_are_at_each_budget_and_over_the_meetable_ones():
    content = content_of(made())
    budgets = [(each["policy"], each["budget_ms"]) for each in content["paired"]]
    assert budgets == [
        (policy, budget) for policy in ("best_static", "oracle") for budget in (50.0, 500.0, 1000.0, None)
    ]
    over = content["paired"][-1]
    assert over["baseline"] == "lookup_mean"
    # (1/4 + 1/4) / 2
    assert over["accuracy_in_time"]["difference"] == pytest.approx(0.25)
    low, high = over["accuracy_in_time"]["ci95"]
    # Four requests cannot show it.
    assert -1.0 < low < 0.0 < 0.25 < high <= 1.0


def test_budgets_that_no_setting_meets_stand_apart():
    lines = table_lines(made())
    heads = [line for line in lines if line.startswith("budget")]
    assert heads == ["budget 500.0 ms", "budget 1000.0 ms", "budget 50.0 ms, which no setting can meet"]
    content = content_of(made())
    assert [each["meetable"] for each in content["budgets"]] == [False, True, True]
    assert [each["share_possible"] for each in content["budgets"]] == [0.0, 1.0, 1.0]


def test_rows_are_the_same_figures_flat():
    rows = rows_of(made())
    assert len(rows) == 3 * 3
    oracle = next(row for row in rows if (row["policy"], row["budget_ms"]) == ("oracle", 1000.0))
    assert oracle["accuracy"] == 1.0
    # Of 100, 200, 200 and 600 ms.
    assert oracle["latency_p50_ms"] == pytest.approx(200)
    assert oracle["most_frequent_choice"] == "tier-low_topk4_blocks12"
    assert oracle["num_different_choices"] == 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two settings of a run with eight samples: the low tier takes 0.5 s and is right on the even ones, high 1 s."""

    def samples(vision_s: float, scores: list[str]):
        return [measured_sample(at, staged_run(vision_s=vision_s), prediction=score) for at, score in enumerate(scores)]

    low, high = samples(0.0, ["1.0", "0.0"] * 4), samples(0.5, ["1.0"] * 8)
    return write(tmp_path / "run", result(setting("low", 2, 3), low), result(setting("high", 2, 3), high))


def test_the_command_writes_json_csv_and_figures(folder: Path, capsys):
    assert main([str(folder), "--budgets_ms", "600", "1100", "400", "--aggregation_method", "mean"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 10 and lines[-1].startswith("4 files in ")
    assert lines[0] == "Means over the 2 of 3 budgets that some setting keeps:"
    # All that choose by sample or by budget are right in time on the same requests.
    assert "oracle: accuracy within the budget 0.625, 0.0 % of the requests late" in lines
    assert main([str(folder), "--budgets_ms", "600", "1100", "400", "--aggregation_method", "mean", "--verbose"]) == 0
    out = folder / "analysis" / "controller_replay"
    content = json.loads((out / "controller_evaluation.json").read_text())
    assert content["num_requests"] + content["num_calibration_requests"] == 8
    assert [each["meetable"] for each in content["budgets"]] == [False, True, True]
    lookup = content["policies"]["lookup_mean"]["at_budgets"]
    assert [max(each["choices"]) for each in lookup] == ["tier-low_topk2_blocks3"] * 2 + ["tier-high_topk2_blocks3"]
    assert lookup[2]["accuracy"] == 1.0
    with (out / "controller_evaluation.csv").open() as file:
        rows = list(csv.DictReader(file))
    # Two static settings, random, lookup, oracle and the best static setting, at three budgets.
    assert len(rows) == 6 * 3
    assert (out / "controller_evaluation.png").stat().st_size > 1000
    # Half of the eight samples are behind the lookup.
    assert "n = 4 requests, 2 settings" in (out / "controller_evaluation.svg").read_text(encoding="utf-8")
    assert any("too few to compare policies" in caveat for caveat in content["caveats"])
    assert "budget 400.0 ms, which no setting can meet" in capsys.readouterr().out


def test_a_lookup_of_the_same_samples_is_a_caveat(folder: Path, tmp_path: Path, capsys):
    save(build(load_grid([folder])), tmp_path / "lookup.json")
    arguments = [str(folder), "--lookup", str(tmp_path / "lookup.json"), "--budgets_ms", "600"]
    assert main([*arguments, "--output_dir", str(tmp_path / "out")]) == 0
    content = json.loads((tmp_path / "out" / "controller_evaluation.json").read_text())
    assert content["num_requests"] == 8
    assert "the lookup was built of 8 of the 8 requests that it is evaluated on" in content["caveats"]
    assert "caveat: the lookup was built of 8 of the 8 requests" in capsys.readouterr().out


def test_an_invalid_run_is_named_before_the_findings(folder: Path, tmp_path: Path, capsys) -> None:
    path = sorted(folder.glob("*.json"))[0]
    content = json.loads(path.read_text())
    content["provenance"]["caveat_records"] = [Caveat.of("foreign_load_cpu", cpu_fraction=0.9).model_dump()]
    path.write_text(json.dumps(content))
    assert main([str(folder), "--budgets_ms", "600", "--output_dir", str(tmp_path / "out")]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("INVALID: background load: other processes used 90% of the CPUs")
    content = json.loads((tmp_path / "out" / "controller_evaluation.json").read_text())
    assert [f"INVALID: {each}" for each in content["voided_by"]] == [first]


def test_a_lookup_of_some_samples_is_evaluated_on_the_others(folder: Path, tmp_path: Path, capsys):
    """Of 8 samples 3 are behind the lookup, and each has a picture of its own: 5 are left."""
    whole = load_grid([folder])
    assert len(set(whole.pictures)) == 8
    save(build(whole.take(np.array([0, 2, 5]))), tmp_path / "lookup.json")
    arguments = [str(folder), "--lookup", str(tmp_path / "lookup.json"), "--budgets_ms", "600"]
    assert main([*arguments, "--output_dir", str(tmp_path / "out")]) == 0
    content = json.loads((tmp_path / "out" / "controller_evaluation.json").read_text())
    assert (content["num_calibration_requests"], content["num_requests"]) == (3, 5)
    assert not any("the lookup was built of" in caveat for caveat in content["caveats"])
    assert "caveat" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--budgets_ms", "0"], 2, "give one above 0"),
        (["--static", "tier-low_topk9_blocks3"], 2, "--static tier-low_topk9_blocks3 is not measured"),
        (["--num_samples", "3"], 2, "unknown flag --num_samples"),
        (["--calibration_share", "1"], 2, "give a fraction between 0 and 1"),
        (["--mode", "live", "--calibration_share", "0.3"], 2, "--mode live leaves nothing to split; drop one"),
        (["--changing_load", "30"], 2, "--changing_load 30 slows a running model; drop it, or give --mode live"),
        (["--mode", "live", "--changing_load", "0"], 2, "--changing_load 0 is not possible; give a finite"),
        (["--lookup", "some.json", "--calibration_share", "0.3"], 2, "--lookup leaves nothing to split; drop one"),
        (["--evaluation_seed", "-1"], 2, "--evaluation_seed -1 is not possible; give at least 0"),
        (["--lookup", "some.json", "--tolerance", "0"], 2, "drop it, or --lookup some.json"),
        (["--lookup", "some.json", "--aggregation_method", "mean"], 2, "drop it, or --lookup some.json"),
        (["--states", "states.pt"], 2, "--states states.pt is for --learned CHECKPOINT"),
        (["--margin", "0.1"], 2, "--margin 0.1 is of the guardrail, which needs --estimator FILE"),
        (["--margin", "0"], 2, "which needs --estimator FILE; give one, or drop it"),
        (["--tolerance", "inf"], 2, "--tolerance inf is not possible; give a finite number of at least 0"),
        (["--calibration_share", "nan"], 2, "--calibration_share nan is not possible; give a fraction between 0 and 1"),
        (["--lookup", "nowhere.json"], 1, "nowhere.json cannot be read"),
        (["--mode", "live", "--learned", "nowhere.pt", "--model_path", "no_model"], 1, "nowhere.pt"),
        (
            ["--mode", "live", "--learned", "a.pt", "--states", "b.pt"],
            2,
            "--states b.pt is for a replay: with --mode live",
        ),
        (["--mode", "live", "--dataset_name", "vqa", "ocr"], 2, "--dataset_name names 2 (vqa, ocr); give one"),
        (["--mode", "live", "--dataset_name", "a", "--seed", "1", "--dataset_name", "b"], 2, "one task, and"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(folder: Path, capsys, flags, code, message):
    assert main([str(folder), *flags]) == code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_every_key_and_column_is_documented():
    """Flags are on the page of commands, which is made from the parser."""
    text = DOCUMENT.read_text(encoding="utf-8")
    content = content_of(made())
    policy = content["policies"]["oracle"]
    names = {
        *content,
        *content["budgets"][0],
        *policy,
        *policy["at_budgets"][0],
        *policy["over_meetable_budgets"],
        *content["paired"][0],
        *content["paired"][0]["latency_ms"],
        *rows_of(made())[0],
    }
    assert {name for name in names if f"`{name}`" not in text} == set()


def test_what_the_reference_is_to_budgets_and_to_the_two_stages():
    given = build_parser().parse_args(["a", "--budget_shares", "0.5", "--learned", "two_stage.pt"])
    (caveat,) = reference_caveats(given, grid())
    assert "budgets are fractions of the time of" in caveat.sentence
    own = replace(grid(), reference=choice_of("own", 8, 16), reference_s=np.ones(4))
    (caveat,) = reference_caveats(given, own)
    assert caveat.sentence.endswith(
        "two_stage chooses among tiers: the reference, the model as it is (own_topk8_blocks16), is none of its choices"
    )
    assert reference_caveats(build_parser().parse_args(["a", "--budgets_ms", "9"]), own) == []
    # A tier's setting can be chosen.
    assert reference_caveats(given, replace(own, reference=own.choices[0])) == []
