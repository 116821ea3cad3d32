"""A run against results of lm-eval and lmms-eval, and two of these: shared questions, figures, notes and errors."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.core_exp.compare_runs import main
from experiments.core_exp.export import export
from tests.experiments.hand_made_sweep import reference, result, setting, write
from tests.hand_made_records import measured_sample

STAMPED = {"timestamp": "2026-03-01T12:00:00+00:00"}
DATE = "2026-03-02T10-00-00.000001"
# Questions by their place in the split, and their answers; the last two share a text.
ASKED = {3: ("which sign?", "stop"), 0: ("how many?", "4"), 9: ("what colour?", "red"), 5: ("what colour?", "blue")}


def run(folder: Path, scores: Mapping[int, float], asked: Mapping[int, tuple[str, str]] = ASKED) -> Path:
    """The model as it is, and a setting at which every answer is wrong."""
    made = [
        replace(
            measured_sample(number, prediction=f"{score}"),
            references=(asked[number][1],),
            metadata={"question": asked[number][0], "prompt": f"Question: {asked[number][0]}\nAnswer:"},
        )
        for number, score in scores.items()
    ]
    wrong = [replace(each, prediction="0.0") for each in made]
    return write(folder, reference(made, **STAMPED), result(setting(), wrong, **STAMPED))


def lm_eval(
    folder: Path, rows: Sequence[Mapping[str, Any]], figures: Mapping[str, Any] | None = None, **content: Any
) -> Path:
    """Files as lm-eval 0.4.13 writes them; rows have doc_id, question, answer, response and scores."""
    folder.mkdir(parents=True)
    lines = []
    for row in rows:
        doc = {"q": row["question"], "gold": row["answer"]}
        scores = row["scores"]
        lines.append(
            {
                "doc_id": row["doc_id"],
                "doc": doc,
                "target": row["answer"],
                "arguments": {"gen_args_0": {"arg_0": f"Q: {row['question']} A:", "arg_1": {"until": ["\n"]}}},
                "resps": [[row["response"]]],
                "filtered_resps": [row["response"]],
                "filter": row.get("filter", "none"),
                "metrics": list(scores),
                "doc_hash": f"hash of {doc}",
                **scores,
            }
        )
    (folder / f"samples_their_signs_{DATE}.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    results = {"results": {"their_signs": {"alias": "their_signs", **(figures or {})}}, "model_name": "org/model"}
    path = folder / f"results_{DATE}.json"
    path.write_text(json.dumps(results | content))
    return path


def row(number: int, score: float, question: str | None = None, answer: str | None = None) -> dict[str, Any]:
    own = ASKED.get(number, ("", ""))
    return {
        "doc_id": number,
        "question": own[0] if question is None else question,
        "answer": own[1] if answer is None else answer,
        "response": f"{score}",
        "scores": {"read_off": score},
    }


def lines_of(tmp_path: Path, *arguments: object) -> tuple[dict[str, dict[str, Any]], list[str]]:
    assert main([*map(str, arguments), "--output", str(tmp_path / "found.json")]) == 0
    content = json.loads((tmp_path / "found.json").read_text())
    return {each["setting"]: each for each in content["lines"]}, content["notes"]


def test_accuracies_are_of_shared_questions_whatever_their_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = run(tmp_path / "ours", {3: 1.0, 0: 0.5, 9: 1.0, 5: 0.0})
    # 0 has another answer and is another question; 12 is question 9 at another place; 5 is told apart by its place.
    rows = [
        row(5, 0.75),
        row(12, 0.5, "What  colour?", "RED"),
        row(0, 1.0, answer="14"),
        row(3, 0.25),
        row(7, 1.0, "?"),
    ]
    # 0.7 is the mean of all five.
    theirs = lm_eval(tmp_path / "theirs" / "model", rows, {"read_off,none": 0.7})
    lines, notes = lines_of(tmp_path, ours, tmp_path / "theirs")
    assert lines["own_topk4_blocks4"]["n"] == 3
    # Scores 1, 1 and 0 of the run; 0.25, 0.5 and 0.75 of theirs.
    assert lines["own_topk4_blocks4"]["one"] == pytest.approx(2 / 3)
    assert lines["own_topk4_blocks4"]["other"] == pytest.approx(0.5)
    assert lines["own_topk4_blocks4"]["change"] == pytest.approx(-1 / 6)
    assert lines["tier-low_topk2_blocks3"]["one"] == 0.0
    # Fewer than 6 pictures have no interval.
    assert lines["own_topk4_blocks4"]["verdict"] == "CANNOT TELL" and lines["own_topk4_blocks4"]["interval"] is None
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "B changes accuracy by -0.167: CANNOT TELL (own_topk4_blocks4)"
    assert notes == [
        "signs: 4 questions of the run, 5 of lm-eval's their_signs, and the 3 that are in both are compared; the run "
        "is scored by read_off, theirs by read_off,none; prompts differ in 3",
        "B has no times, joules, FLOPs or memory of a request: lm-eval measures none",
    ]
    turned, _ = lines_of(tmp_path, theirs, ours)
    assert turned["own_topk4_blocks4"]["change"] == pytest.approx(1 / 6)


def test_rows_of_one_text_and_answer_are_told_apart_by_their_place_alone(tmp_path: Path) -> None:
    ours = run(tmp_path / "ours", {9: 1.0, 5: 1.0})
    again = [row(at, 0.75, *ASKED[5]) for at in (12, 13)]
    theirs = lm_eval(tmp_path / "theirs", [row(11, 1.0, *ASKED[9]), row(9, 0.25), *again], {"read_off,none": 0.6875})
    lines, _ = lines_of(tmp_path, ours, theirs)
    # Question 5 is at neither place of its text.
    assert (lines["own_topk4_blocks4"]["n"], lines["own_topk4_blocks4"]["other"]) == (1, 0.25)


def test_an_interval_excludes_no_change_where_every_answer_is_worse(tmp_path: Path) -> None:
    asked = {number: (f"question {number}?", f"answer {number}") for number in range(40)}
    ours = run(tmp_path / "ours", dict.fromkeys(asked, 1.0), asked)
    rows = [row(number, float(number % 4 == 0), *asked[number]) for number in reversed(asked)]
    lines, _ = lines_of(tmp_path, ours, lm_eval(tmp_path / "theirs", rows, {"read_off,none": 0.25}))
    line = lines["own_topk4_blocks4"]
    assert line["change"] == pytest.approx(-0.75) and line["verdict"] == "WORSE"
    assert -1 <= line["interval"][0] < -0.75 < line["interval"][1] < 0


def test_a_figure_that_is_not_the_mean_of_its_samples_is_said(tmp_path: Path) -> None:
    ours = run(tmp_path / "ours", {3: 1.0, 0: 0.5})
    theirs = lm_eval(tmp_path / "theirs", [row(3, 1.0), row(0, 0.5)], {"read_off,none": 0.9})
    assert lines_of(tmp_path, ours, theirs)[1][-1] == (
        "B: read_off,none of their_signs is 0.9000 in the results file, and its samples' mean is 0.7500"
    )


@pytest.mark.parametrize("to", ["lm-eval", "lmms-eval"])
def test_an_exported_setting_is_the_run_again(tmp_path: Path, to: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ours = run(tmp_path / "ours", {3: 1.0, 0: 0.5, 9: 1.0, 5: 0.0})
    folders, _ = export(ours, to, tmp_path / "out")
    page = tmp_path / "page.html"
    lines, _ = lines_of(tmp_path, ours, next(each for each in folders if "own" in each.name), "--report", page)
    assert (lines["own_topk4_blocks4"]["n"], lines["own_topk4_blocks4"]["verdict"]) == (4, "IDENTICAL")
    assert lines["tier-low_topk2_blocks3"]["verdict"] != "IDENTICAL"
    assert f"own_topk4_blocks4 ({to})" in page.read_text()
    assert capsys.readouterr().out.startswith("B answers are identical on these 4 samples (own_topk4_blocks4)")


@pytest.mark.parametrize("to", ["lm-eval", "lmms-eval"])
def test_exported_settings_are_compared_each_with_its_own(
    tmp_path: Path, to: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The answers of the model as it is are another at one question of the second run; the other setting's are not."""
    ours = run(tmp_path / "ours", {3: 1.0, 0: 0.5, 9: 1.0, 5: 0.0})
    other = run(tmp_path / "other", {3: 1.0, 0: 0.75, 9: 1.0, 5: 0.0})
    export(ours, to, tmp_path / "out")
    export(other, to, tmp_path / "out_of_other")
    low, own = "tier-low_topk2_blocks3", "own_topk4_blocks4"
    for first in (ours, tmp_path / "out"):
        lines, notes = lines_of(tmp_path, first, tmp_path / "out_of_other")
        assert set(lines) == {low, own, "all 2 settings"}
        assert (lines[low]["verdict"], lines[low]["n"]) == ("IDENTICAL", 4)
        assert lines[own]["change"] == pytest.approx(0.25 / 4) and lines[own]["verdict"] == "CANNOT TELL"
        about = [note for note in notes if note.startswith("B is an exported run, of which answers alone are compared")]
        assert len(about) == 1
        assert not any("measures none" in note for note in notes)
        assert capsys.readouterr().out.startswith("B changes accuracy by +0.031: CANNOT TELL (all 2 settings)")


def test_exports_of_two_runs_in_one_folder_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = run(tmp_path / "ours", {3: 1.0})
    export(ours, "lm-eval", tmp_path / "out")
    (stored,) = ours.glob("*own*.json")
    stored.write_text(json.dumps(json.loads(stored.read_text()) | {"fingerprint": "another"}))
    next(ours.glob("*tier*.json")).unlink()
    export(ours, "lm-eval", tmp_path / "more")
    for each in (tmp_path / "more").iterdir():
        each.rename(tmp_path / "out" / f"again {each.name}")
    assert main([str(ours), str(tmp_path / "out")]) == 1
    found = capsys.readouterr().err
    assert "contains 3 results files" in found and "each exported setting of a run" in found


def test_two_harness_files_share_rows_of_one_digest(tmp_path: Path) -> None:
    one = lm_eval(tmp_path / "one", [row(3, 1.0), row(0, 0.0), row(5, 1.0)], {"read_off,none": 2 / 3})
    other = lm_eval(tmp_path / "other", [row(5, 1.0), row(3, 0.0), row(0, 0.0, answer="14")], {"read_off,none": 1 / 3})
    lines, _ = lines_of(tmp_path, one, other, "--output_dir", tmp_path / "files")
    assert lines["read_off,none"]["n"] == 2 and lines["read_off,none"]["change"] == -0.5
    assert (tmp_path / "files" / "comparison.json").is_file()


def test_an_invalid_export_has_no_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = run(tmp_path / "ours", {3: 1.0})
    own = {"their_signs": {"voided_by": ["background load: other processes"]}}
    theirs = lm_eval(tmp_path / "theirs", [row(3, 1.0)], {"read_off,none": 1.0}, knobprof=own)
    lines_of(tmp_path, ours, theirs)
    out = capsys.readouterr().out
    assert out.startswith("INVALID: B ") and "INVALID: background load: other processes (B)" in out


def test_filters_and_metrics_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = run(tmp_path / "ours", {3: 1.0})
    rows = [
        row(3, 0.0) | {"filter": kept_by, "scores": {"exact_match": float(kept_by == "flexible-extract")}}
        for kept_by in ("flexible-extract", "strict-match")
    ]
    figures = {
        "exact_match,strict-match": 0.0,
        "exact_match,flexible-extract": 1.0,
        "exact_match_stderr,strict-match": 0,
    }
    theirs = lm_eval(tmp_path / "theirs", rows, figures)
    assert main([str(ours), str(theirs)]) == 2
    assert capsys.readouterr().err == (
        "error: their_signs of the harness has the metrics exact_match,flexible-extract, exact_match,strict-match; "
        "name one of them by --metric\n"
    )
    lines, _ = lines_of(tmp_path, ours, theirs, "--metric", "exact_match,flexible-extract")
    assert lines["own_topk4_blocks4"]["other"] == 1.0


def damaged(path: Path, what: str) -> Path:
    samples = next(path.parent.glob("samples_*"))
    if what == "no samples":
        samples.unlink()
    elif what == "torn":
        samples.write_text('{"doc_id": 0')
    elif what == "other":
        samples.write_text('{"id": 0}\n')
    elif what == "no results":
        path.write_text('{"scores": {}}')
    elif what == "twice":
        (path.parent / "results_2026-03-03T10-00-00.json").write_text(path.read_text())
    elif what == "elsewhere":
        samples.write_text(samples.read_text().replace("which sign?", "which one?"))
    elif what == "perplexity":
        samples.write_text(samples.read_text().replace('"read_off": 1.0', '"read_off": 12.5'))
    return path.parent if what == "twice" else path


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("no samples", "has no samples beside it (samples_*.jsonl); run the harness with --log_samples"),
        ("torn", "line 1 is no JSON"),
        ("other", "line 1 is no sample of lm-eval or lmms-eval: it has no doc_id"),
        ("no results", "has no object of tasks under 'results'"),
        ("twice", "contains 2 results files"),
        ("elsewhere", "share no question; give results of the same task and split"),
        ("perplexity", "read_off,none of their_signs is no score from 0 to 1; name another one by --metric"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    tmp_path: Path, what: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = run(tmp_path / "ours", {3: 1.0})
    theirs = damaged(lm_eval(tmp_path / "theirs", [row(3, 1.0)], {"read_off,none": 1.0}), what)
    assert main([str(ours), str(theirs)]) in (1, 2)
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


def test_another_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, other = run(tmp_path / "ours", {3: 1.0}), tmp_path / "rows.json"
    other.write_text("{}")
    assert main([str(ours), str(other)]) == 2
    assert "is not named as results are (results_DATE.json, DATE_results.json)" in capsys.readouterr().err
