"""Questions as users ask them, each answered by one command on a stored run, with lines that are worked out by hand."""

import json
from pathlib import Path

import pytest

from experiment_core_utils.records.caveats import Caveat, caveat_fields
from experiments.analyses.recorded_table import table_of, write_table
from experiments.analyses.sweeps import load_sweep
from experiments.core_exp.choose import main
from tests.experiments.core_exp.test_conclusion_scenes import OWN, setting_of_key
from tests.experiments.hand_made_sweep import PROVENANCE, result, write
from tests.hand_made_records import measured_sample, staged_run

FEW, SMALL = "own_topk2_blocks4", "tier-low_topk4_blocks4"
# Seconds and joules of a request, and which of 100 charts, 100 texts and 10 maps are right.
MEASURED = {
    OWN: (0.4, 4.0, (100, 90, 10)),
    FEW: (0.24, 2.4, (60, 90, 5)),
    SMALL: (0.16, 1.6, (100, 45, 10)),
}
TYPES = ("chart",) * 100 + ("text",) * 100 + ("map",) * 10


def stored_run(folder: Path, keys: tuple[str, ...] = tuple(MEASURED), caveats: tuple[Caveat, ...] = ()) -> Path:
    """A run in rounds: of a request's time, 0.8 to 1.2 of the setting's by its question; the first ones of each type
    are right, and a wrong answer is another one than the right one.
    """
    results = []
    for at, key in enumerate(keys):
        seconds, joules, right = MEASURED[key]
        is_right = [number < own for own, size in zip(right, (100, 100, 10), strict=True) for number in range(size)]
        samples = [
            measured_sample(
                number,
                staged_run(None, seconds * (0.8 + 0.4 * (number % 5) / 4), ()),
                prediction=str(float(is_right[number])),
                question_type=TYPES[number],
            )
            for number in range(len(TYPES))
        ]
        one = result(setting_of_key(key), samples) | {"is_reference": key == OWN}
        one["setting_order"] = {"how": "rounds", "seed": 1, "position": at, "num_settings": len(keys)}
        one["provenance"] = PROVENANCE | caveat_fields(caveats)
        for sample in one["per_sample_results"]:
            sample["energy_j"] = joules
        results.append(one)
    return write(folder, *results)


def asked(folder: Path, *words: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main([str(folder), *words]) == 0
    return capsys.readouterr().out.splitlines()


def line_of(folder: Path, about: str, *words: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines below one type, without their indentation."""
    lines = asked(folder, *words, capsys=capsys)
    at = next(place for place, line in enumerate(lines) if line.startswith(f"  {about}: "))
    found = []
    for line in lines[at + 1 :]:
        if not line.startswith("    "):
            break
        found.append(line.strip())
    return found


@pytest.mark.parametrize(
    ("about", "words", "expected"),
    [
        # Charts in 200 ms: 160 ms, all 100 right; of none wrong in n the bound of Clopper and Pearson is 0.025^(1/n).
        (
            "chart",
            ["--budget_ms", "200"],
            [f"mean of 200 ms or less: surely {SMALL}, 160 ms, accuracy 1.000 [0.964, 1.000], 40 % of the time"],
        ),
        # The same of texts: the only one in time has 45 of 100 right.
        (
            "text",
            ["--budget_ms", "200"],
            [f"mean of 200 ms or less: surely {SMALL}, 160 ms, accuracy 0.450 [0.350, 0.553], 40 % of the time"],
        ),
        # 250 ms are enough for 240, and nothing is lost.
        (
            "text",
            ["--budget_ms", "250"],
            [f"mean of 250 ms or less: surely {FEW}, 240 ms, accuracy 0.900 [0.824, 0.951], 60 % of the time"],
        ),
        # Half the joules: 2.4 of 4 are too many.
        (
            "text",
            ["--budget_j", "2"],
            [f"mean of 2 J or less: surely {SMALL}, 1.6 J, accuracy 0.450 [0.350, 0.553], 40 % of the time"],
        ),
        # 80 % of charts right: 60 of 100 are too few.
        (
            "chart",
            ["--min_accuracy", "0.8"],
            [f"accuracy of at least 0.800: surely {SMALL}, accuracy 1.000 [0.964, 1.000], 40 % of the time"],
        ),
        # 200 of 210 are right as it is, and 155 are not enough.
        (
            "over all",
            ["--min_accuracy", "0.85"],
            [f"accuracy of at least 0.850: surely {OWN}, accuracy 0.952 [0.914, 0.977], 100 % of the time"],
        ),
        # 95 % within 320 ms: of 100 none is late at most 192, which has 0.95^100 = 0.0059, times 2 x 3 x 3: likely.
        (
            "chart",
            ["--budget_p95_ms", "320"],
            [
                f"p95 of 320 ms or less: none is sure, the nearest (likely) is {SMALL}, 192 ms, accuracy 1.000 "
                "[0.964, 1.000], 40 % of the time"
            ],
        ),
        # Of 210 none is late in 2e-5 of all cases.
        (
            "over all",
            ["--budget_p95_ms", "320"],
            [f"p95 of 320 ms or less: surely {SMALL}, 192 ms, accuracy 0.738 [0.673, 0.796], 40 % of the time"],
        ),
        # What no setting does is said of the fastest.
        (
            "chart",
            ["--budget_ms", "50"],
            [
                f"mean of 50 ms or less: none is sure, the nearest (surely not) is {SMALL}, 160 ms, accuracy 1.000 "
                "[0.964, 1.000], 40 % of the time"
            ],
        ),
    ],
)
def test_what_fits(
    about: str, words: list[str], expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert line_of(stored_run(tmp_path), about, *words, capsys=capsys) == expected


@pytest.mark.parametrize(
    ("about", "loss", "expected"),
    [
        ("chart", "0", f"identical answers to all of these: {SMALL}, 40 % ["),
        ("text", "0", f"identical answers to all of these: {FEW}, 60 % ["),
        # 45 of 210 answers are lost.
        ("over all", "0", f"no loss: none is sure, the nearest (surely not) is {SMALL}, 40 % ["),
        # Without a changed answer in 100, a loss L has a p-value of (1 - L)^100 / 2, times 2 x 3 / 0.9: 2e-4 of 10
        # points, 0.02 of 5, and with the draws of the family's largest lead just above 0.05.
        ("chart", "0.1", f"surely not worse by 10 points or more: {SMALL}, 40 % ["),
        ("text", "0.1", f"surely not worse by 10 points or more: {FEW}, 60 % ["),
        ("chart", "0.03", f"a loss below 3 points: none is sure, the nearest (can't tell) is {SMALL}, 40 % ["),
    ],
)
def test_what_a_loss_buys(
    about: str, loss: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = line_of(stored_run(tmp_path), about, "--accept_loss", loss, capsys=capsys)
    assert line.startswith(expected)


def test_half_the_joules_at_three_points_are_two_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    price, joules = line_of(stored_run(tmp_path), "chart", "--accept_loss", "0.03", "--budget_j", "2", capsys=capsys)
    assert price.startswith("a loss below 3 points: ") and joules.startswith(f"mean of 2 J or less: surely {SMALL}, ")


def test_without_a_question_the_list_says_what_differs_by_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """100 charts in 40 % and 100 texts in 60 % of the time are 50 %, with 190 of 200 right. Ten maps are too few."""
    lines = asked(stored_run(tmp_path), capsys=capsys)
    assert lines[0] == (
        f"prices, in percent of that of the reference {OWN}, the model as it is, by accepted loss of accuracy:"
    )
    both = "surely not worse by 10 points or more, identical answers to all of these: "
    assert lines[2].startswith(f"    {both}{SMALL}, 40 % [") and lines[5].startswith(f"    {both}{FEW}, 60 % [")
    assert lines[7].startswith("  over all: reference 0.952 in 400 ms; 210 questions can exclude losses down to 2.3")
    assert lines[7].endswith("; 10 of them are of types too small to be shown") and not any(
        "map" in each for each in lines
    )
    assert lines[-1].startswith(
        f"  routed by type (chart {SMALL}, text {FEW}): accuracy 0.950 (+0.0 points) in 50 % [50, 50] of the time; "
    )


def test_without_the_reference_a_budget_is_answered_and_a_loss_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = stored_run(tmp_path, (FEW, SMALL))
    why = "no prices: the reference, which is the model as it is, was not measured on the same samples"
    assert asked(folder, capsys=capsys) == [why]
    assert asked(folder, "--accept_loss", "0.1", "--budget_ms", "200", capsys=capsys)[:3] == [
        why,
        "  chart: 100 questions",
        f"    mean of 200 ms or less: surely {SMALL}, 160 ms, accuracy 1.000 [0.964, 1.000]",
    ]


def test_an_invalid_run_names_no_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = stored_run(tmp_path, caveats=(Caveat.of("foreign_load_cpu", cpu_fraction=0.9),))
    (line,) = asked(folder, "--budget_ms", "200", capsys=capsys)
    assert line.startswith("INVALID: background load: other processes used 90% of the CPUs")


def test_a_table_of_a_run_is_asked_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table has no types of questions and one decimal of milliseconds."""
    folder = stored_run(tmp_path / "run")
    table = tmp_path / "table.json"
    write_table(table_of([each.result for each in load_sweep(folder).settings]), table)
    by_folder = line_of(folder, "over all", "--budget_ms", "200", capsys=capsys)
    assert line_of(table, "over all", "--budget_ms", "200", capsys=capsys) == by_folder


def test_the_answer_as_json_is_the_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = json.loads("".join(asked(stored_run(tmp_path), "--accept_loss", "0.1", "--json", capsys=capsys)))
    chart = found["types"][0]
    assert (chart["question_type"], chart["num_samples"], chart["reference_ms"]) == ("chart", 100, pytest.approx(400))
    (price,) = chart["prices"]
    assert (price["setting"], price["word"], price["is_identical"]) == (SMALL, "yes", True)
    assert price["time_ratio"] == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--accept_loss", "1.5"], "--accept_loss"),
        (["--budget_ms", "0"], "--budget_ms"),
        (["--budget_s", "1"], "--budget_s"),
    ],
)
def test_a_question_that_cannot_be_is_refused_in_one_line(
    words: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(stored_run(tmp_path)), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line
