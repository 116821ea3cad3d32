"""The study's arithmetic on tables of a few questions, whose values are worked out by hand."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiment_core_utils.primitives.errors import ResultsError
from experiments.benchmarks.transfer_study import (
    ALL_OTHERS,
    NUM_HALVES,
    TaskTable,
    break_even,
    by_model,
    errors_of,
    fastest,
    half_frame,
    line_frames,
    machine_frame,
    main,
    markdown,
    task_table,
    transfer_frames,
)

NAN = float("nan")


def table(
    points: object, ms: object, *, name: str = "task", settings: tuple[str, ...] = ("own", "low"),
    pictures: tuple[str, ...] = (), prompts: object = 10.0, tokens: object = 4.0,
) -> TaskTable:  # fmt: skip
    """A table whose answers are the settings' names; each question has a picture of its own unless given otherwise."""
    scores = np.asarray(points, dtype=float)
    values = [np.broadcast_to(np.asarray(each, dtype=float), scores.shape) for each in (scores, ms, prompts, tokens)]
    names = np.array(pictures or [f"picture {number}" for number in range(scores.shape[1])])
    answers = np.repeat(np.array(settings)[:, None], len(names), axis=1)
    return TaskTable(name, settings, names, np.array(values), answers)


def test_losses_and_times_of_the_questions_that_have_them() -> None:
    own = table([[100, 100, 0, 100], [100, 0, 0, 100]], [[10, NAN, 20, 30], [5, 4, 10, 15]])
    assert own.losses.tolist() == [0, 25] and own.mean_ms.tolist() == [20, 10]


def test_the_limit_of_a_loss_is_by_pictures() -> None:
    """Of the draws of two pictures, a with two questions, a quarter are a twice: 100 of 4. Of three single questions
    one in 27 draws is lost three times.
    """
    points, ms = [[100, 100, 100], [0, 100, 100]], np.ones((2, 3))
    assert table(points, ms, pictures=("a", "a", "b")).upper_losses.tolist() == [0, 50]
    assert table(points, ms).upper_losses.tolist() == [0, 100]


def test_halves_keep_the_questions_of_a_picture_together() -> None:
    own = table(np.ones((2, 7)), np.ones((2, 7)), pictures=("d", "a", "b", "a", "c", "d", "d"))
    halves = [(set(one.pictures), set(other.pictures)) for one, other in own.halves()]
    assert len(halves) == NUM_HALVES and all(len(one) == len(other) == 2 and not one & other for one, other in halves)
    assert len({tuple(sorted(one)) for one, _ in halves}) == 6


def test_the_fastest_setting_of_those_that_may_lose_so_much() -> None:
    own = table(np.ones((4, 1)), [[10], [8], [6], [7]], settings=("own", "a", "b", "c"))
    assert fastest(own, np.array([0, 4.9, 5.1, 5.0])) == "c"
    assert fastest(own, np.array([0, 5.1, 5.1, 5.1])) == "own"


def test_two_of_forty_questions_that_are_lost() -> None:
    """In a half of 20 there are none, one or both with a chance of 20 x 19 / (40 x 39) = 24.4, 51.3 and 24.4 %. The
    mean accepts one (5 points), the limit none; where the half has none, the other one loses 10 points. Five standard
    deviations of 500 halves are 10 points.
    """
    points = np.full((2, 40), 100.0)
    points[1, [3, 17]] = 0
    (row, whole) = half_frame([table(points, np.array([[10.0], [4.0]]) + np.zeros((2, 40)))]).to_dict("records")
    assert row == {"run": "`task`", **{key: figure for key, figure in whole.items() if key != "run"}}
    assert row["mean: another setting, %"] == pytest.approx(75.6, abs=10)
    lost = row["limit: another setting, %"]
    assert lost == pytest.approx(24.4, abs=10)
    assert row["limit: loses over 5 points, %"] == row["mean: loses over 5 points, %"] == pytest.approx(lost)
    assert row["limit: mean loss"] == pytest.approx(lost / 10)
    assert row["limit: time, %"] == pytest.approx(100 - 0.6 * lost)


def three_tasks() -> list[TaskTable]:
    """The low setting takes half of the time and loses 0, 10 and 2 points; a fourth task is of another model."""
    tasks = [table([[100, 100], [100 - loss] * 2], [[10, 30], [5, 15]], name=name)
             for name, loss in (("a", 0), ("b", 10), ("c", 2))]  # fmt: skip
    return [*tasks, table([[1], [1]], [[1], [1]], settings=("all", "few"))]


def test_choices_on_other_tasks() -> None:
    long, short = transfer_frames(three_tasks())
    assert [tuple(row) for row in long.itertuples(index=False)] == [
        ("a", "`low`", "**b +10.0, 50 %**; c +2.0, 50 %"),
        ("b", "`own`", "a +0.0, 100 %; c +0.0, 100 %"),
        ("c", "`low`", "a +0.0, 50 %; **b +10.0, 50 %**"),
        (ALL_OTHERS, "`own`", "a +0.0, 100 %"),
        (ALL_OTHERS, "`low`", "**b +10.0, 50 %**; c +2.0, 50 %"),
    ]
    one, others = short.to_dict("records")
    assert list(one.values())[:2] == ["one other task", 6] and list(others.values())[:2] == [ALL_OTHERS, 3]
    assert list(one.values())[2:] == pytest.approx([200 / 3, 100 / 3, 22 / 6, 200 / 3])
    assert list(others.values())[2:] == pytest.approx([200 / 3, 100 / 3, 4, 200 / 3])


def test_tasks_of_a_model_are_compared_at_common_settings() -> None:
    wide = table(np.ones((3, 1)), [[1], [2], [3]], settings=("own", "mid", "low"))
    (first, second), _ = by_model([wide, *three_tasks()[:1], three_tasks()[3]])
    assert first.settings == second.settings == ("own", "low") and first.values[1].tolist() == [[1], [3]]


def test_another_machine_shares_some_questions_in_another_order() -> None:
    """Of q1, q2 and q3 the second machine did not time q3 and has q9. Shares of time are 6 / 10 and 45 / 50."""
    first = table(np.ones((2, 3)), [[4, 6, 50], [2, 4, 1]], pictures=("q1", "q2", "q3"))
    second = table(np.ones((2, 4)), [[20, NAN, 30, 7], [18, 2, 27, 7]], pictures=("q2", "q3", "q1", "q9"))
    second.answers[1, 0] = "another"
    (row,) = machine_frame(first, second).to_dict("records")
    assert (row["setting"], row["questions"], row["same answers"]) == ("`low`", 2, 1)
    # Draws are of q1 alone (50 %), q2 alone (66.7 %) or both, each less 90 %.
    assert [row[key] for key in ("two CPU cores, %", "H200, %", "difference")] == pytest.approx([60, 90, -30])
    assert (row["95 %"], row["carries over"]) == ("-40.0 to -23.3", "no")
    assert machine_frame(first, first).to_dict("records")[0]["carries over"] == "yes"


def test_lines_of_prompt_and_answer() -> None:
    """The reference takes 4 + 0.1 prompt + 2 answer, the setting 2 + 0.1 prompt + 2.5 answer: at its mean request, 20
    and 8 tokens, the reference takes 22 ms, for which the setting answers (22 - 2 - 2) / 2.5 = 7.2 tokens.
    """
    prompts, tokens = np.array([10, 30, 20, 20.0]), np.array([[4, 12, 6, 10], [3, 3, 9, 20.0]])
    ms = np.array([[4], [2]]) + 0.1 * prompts + np.array([[2], [2.5]]) * tokens
    own = table(np.ones((2, 4)), ms, prompts=prompts, tokens=tokens)
    # A sum of squares that is 0 but for rounding.
    assert own.line(1) == pytest.approx([2, 0.1, 2.5], rel=1e-6)
    assert break_even(own, 1) == pytest.approx(-0.8, abs=1e-6) and break_even(own, 0) == pytest.approx(0, abs=1e-6)
    assert break_even(table(np.ones((2, 4)), ms, prompts=prompts), 1) is None
    line, mean = errors_of(own.of_questions(np.array([0, 1, 2])), own.of_questions(np.array([3])), 0)
    measured, fitted = 26.0, (13 + 31 + 18) / 3
    assert line == pytest.approx(0, abs=1e-4) and mean == pytest.approx(100 * (1 - fitted / measured))


def test_lines_of_a_run_leave_out_settings_of_one_length() -> None:
    tokens = np.array([[5.0] * 12, [4.0, 8.0] * 6])
    own = table(np.ones((2, 12)), 3 + tokens, prompts=np.linspace(10, 30, 12), tokens=tokens)
    errors, lines = line_frames([own])
    assert errors["run"].tolist() == ["`task`"] and lines["setting"].tolist() == ["`task` `low`"]
    # 3 + 5 ms of the reference are an answer of 5 tokens; its own have 6 in the mean.
    figures = lines[["mean tokens", "longer by", "may be longer by"]].iloc[0].tolist()
    assert figures == pytest.approx([6, 1, 0], abs=1e-5)


def written(folder: Path, voided_by: tuple[str, ...] = ()) -> Path:
    """Two questions at the reference, at its own limit of answers, and at another; rows in no order."""
    rows = [
        ("own_answer64", 7, "q7", 0.0, 9.0, 12, 3, "x"), ("own", 7, "q7", 1.0, 8.0, 12, 3, "y"),
        ("own", 2, "q2", 2.0, NAN, 10, 5, "z"), ("own_answer8", 7, "q7", 0.5, 4.0, 12, 2, "y"),
        ("own_answer8", 2, "q2", 0.0, NAN, 10, 1, "w"), ("own_answer64", 2, "q2", 0.0, NAN, 10, 5, "v"),
    ]  # fmt: skip
    columns = ["setting", "sample_id", "image_id", "accuracy", "T_total_ms", "prompt_tokens", "output_tokens", "pred"]
    pd.DataFrame(rows, columns=columns).to_csv(folder / "task_samples.csv", index=False)
    keys = ["own_answer64", "own_answer8", "own"]
    settings = pd.DataFrame({"setting": keys, "is_reference": [False, False, True], "metric_best": 2.0})
    settings.to_csv(folder / "task_settings.csv", index=False)
    (folder / "conclusion.json").write_text(json.dumps({"voided_by": voided_by}))
    return folder


def test_a_run_is_read_with_the_reference_first_and_without_its_twin(tmp_path: Path) -> None:
    read = task_table(written(tmp_path))
    assert (read.settings, read.pictures.tolist()) == (("own", "own_answer8"), ["q2", "q7"])
    assert read.values[0].tolist() == [[100, 50], [0, 25]] and read.of_timed.values[1].tolist() == [[8], [4]]
    assert read.values[2:].tolist() == [[[10, 12], [10, 12]], [[5, 3], [1, 2]]]
    assert read.answers.tolist() == [["z", "y"], ["w", "y"]]


def test_a_run_that_is_not_valid_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ResultsError, match="is INVALID: other_load; measure it again"):
        task_table(written(tmp_path, ("other_load",)))
    assert main([str(tmp_path / "nowhere")]) == 1
    assert capsys.readouterr().err.endswith("has no table of samples; give the folder of all runs of the study\n")


def test_markdown_has_two_digits_and_no_minus_zero() -> None:
    frame = pd.DataFrame({"run": ["a", "b"], "n": [1, 20], "ms": [-0.004, 1234.5]})
    assert markdown(frame) == "| run | n | ms |\n| --- | --- | --- |\n| a | 1 | 0.00 |\n| b | 20 | 1234.50 |"
