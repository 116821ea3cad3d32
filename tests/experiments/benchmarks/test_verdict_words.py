"""The small form of the table of words, what makes it red, and its parts by hand."""

from pathlib import Path

import numpy as np
import pytest

from experiment_core_utils.primitives.replication import COUNTED, IN_ROUNDS
from experiments.analyses.knobs.objectives import ENERGY, LATENCY_MEAN, Objectives, objectives
from experiments.benchmarks.verdict_level import (
    BEGIN,
    EIGHT,
    END,
    Cell,
    Truth,
    answers,
    cases,
    cells_of,
    cost_words,
    grid_of,
    table_lines,
    write_page,
)


def test_no_word_is_wrong_more_often_than_it_may_be() -> None:
    """24 runs a cell: at 5 % more than 7 wrong ones are less likely than 1 : 10,000, at 20 % more than 13, and so are
    fewer than 17 whose intervals hold at 95 %. A word without a test was wrong in 40 to 100 %.
    """
    beyond = [each for each in cells_of(24, is_small=True) if each.is_beyond]
    assert not beyond, "\n".join(f"{each.table}, {each.world}, {each.column}: {each.percent:.0f} %" for each in beyond)


def test_not_worse_is_right_where_few_answers_change_and_all_for_the_worse() -> None:
    """Seven settings that lose 0.02 by 2 % of answers: of 240 runs 25 may say it of one; sign flips did in 15 %."""
    (case,) = [each for each in cases(is_small=True) if each.table == "accuracy"]
    found = [case.run(np.random.default_rng([7, number])) for number in range(240)]
    assert sum(each["not worse yes: wrong"] for each in found) <= 25
    # Fewer than 214 of 240 at 95 % are less likely than 1 : 10,000.
    assert sum(each["interval: holds"] for each in found) >= 214


def any_pair(of: object, log_costs: np.ndarray, replication: object) -> bool:
    truth = Truth(np.zeros(8), np.full(8, 0.8), 7)
    pictures = np.arange(log_costs.shape[1])
    scores = answers(8, pictures, [0.0] * 7, 0.06, np.random.default_rng(0))
    found = objectives(grid_of(EIGHT, scores, log_costs, pictures, replication), of, 20, 0)  # type: ignore[arg-type]
    assert isinstance(found, Objectives)
    return cost_words(found, truth)["any pair: wrong"]


def test_what_samples_share_makes_the_table_red_where_it_is_not_counted() -> None:
    """Windows of 0.5 % around parts of 1 %, and two days 2 % apart, judged as if samples were independent."""
    generator = np.random.default_rng(1)
    windows = [
        generator.normal(0, 0.005, (8, 1)) / 2**0.5 + generator.normal(0, 0.01, (8, 32)) / 2**0.5 for _ in range(12)
    ]
    assert sum(any_pair(ENERGY, each, COUNTED) for each in windows) >= 8
    days = [generator.normal(0, 0.02, 2)[np.arange(8) % 2][:, None] for _ in range(12)]
    times = [each + generator.normal(0, 0.01, (8, 32)) for each in days]
    assert sum(any_pair(LATENCY_MEAN, each, IN_ROUNDS) for each in times) >= 8


def test_the_truth_of_a_front_by_hand() -> None:
    # The second costs less at the same accuracy than the first; the third less than both, and loses 0.05; the fourth
    # costs most and is the best by 0.01, less than the margin.
    truth = Truth(np.array([0.0, -0.1, -0.2, 0.1]), np.array([0.8, 0.8, 0.75, 0.81]), 3)
    assert [truth.is_beaten(at) for at in range(4)] == [True, False, False, False]
    assert [truth.is_replaced(at) for at in range(4)] == [True, False, False, True]
    # Equal ones are on the front together.
    same = Truth(np.zeros(2), np.full(2, 0.8), 1)
    assert not same.is_beaten(0) and not same.is_replaced(0)


def test_answers_lose_what_they_should() -> None:
    scores = answers(4, np.arange(60_000) // 3, [0.0, 0.02, 0.03], 0.03, np.random.default_rng(2))
    assert scores.shape == (4, 60_000)
    # The error of a mean difference is 0.03^0.5 / 60000^0.5 = 0.0007, three times as many change together.
    assert scores.mean(axis=1) - scores[3].mean() == pytest.approx([0.0, -0.02, -0.03, 0.0], abs=0.005)
    assert (scores != scores[3]).mean(axis=1)[:3] == pytest.approx([0.03] * 3, abs=0.005)
    # What loses all that changes never gains.
    assert not (scores[2] > scores[3]).any()


def test_runs_are_the_same_in_any_number_of_processes() -> None:
    assert cells_of(2, seed=3, processes=2, is_small=True) == cells_of(2, seed=3, is_small=True)


def test_cells_that_chance_explains_and_others() -> None:
    def cell(column: str, number: int) -> Cell:
        return Cell("time", "steady", 16, column, 100, number)

    # Of 100 runs at 5 % 16 or more are wrong in less than one of 10,000.
    assert not cell("front no: wrong", 13).is_beyond and cell("front no: wrong", 16).is_beyond
    assert not cell("front likely: wrong likely", 30).is_beyond and cell("front likely: wrong likely", 40).is_beyond
    assert not cell("interval: holds", 88).is_beyond and cell("interval: holds", 80).is_beyond
    assert not cell("found as no", 0).is_beyond


def test_the_page_is_made_from_the_cells(tmp_path: Path) -> None:
    cells = [Cell("time", "steady", n, "front no: wrong", 200, number) for n, number in ((16, 3), (52, 90))]
    page = tmp_path / "page.md"
    page.write_text(f"# Words\n\n{BEGIN}\nold\n{END}\n\nThe end.\n")
    write_page(cells, page)
    text = page.read_text()
    assert "old" not in text and text.startswith("# Words") and text.endswith(f"{END}\n\nThe end.\n")
    assert "| steady | 16 | 1.5 |\n| steady | 52 | **45.0** |" in text
    assert "\n".join(table_lines(cells)) in text and "200 runs of each line" in text
