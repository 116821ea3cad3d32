"""Published figures against the tables that they come from."""

from pathlib import Path

import pandas as pd
import pytest

from experiment_core_utils.primitives.files import REPOSITORY
from experiments.core_exp import choose, verify_run

EVIDENCE = REPOSITORY / "docs" / "evidence"
SMOLLM2 = EVIDENCE / "smollm2_135m"
STUDY = EVIDENCE / "study"


def lines_of(page: Path) -> list[str]:
    return [line.strip() for line in page.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    ("folder", "num_results"),
    [(SMOLLM2, 9), (STUDY / "questions", 7),
     *((STUDY / task, 8) for task in ("vqa", "reading", "counting", "knowledge"))],
)  # fmt: skip
def test_published_results_are_as_their_run_wrote_them(
    folder: Path, num_results: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify_run.main([str(folder)]) == 0
    assert capsys.readouterr().out == f"VALID: {num_results} results, as the run wrote them\n"


def test_the_prices_of_the_front_page_are_those_of_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert choose.main([str(SMOLLM2)]) == 0
    printed = [line.strip() for line in capsys.readouterr().out.splitlines()]
    begin = next(at for at, line in enumerate(printed) if line.startswith("over all: reference"))
    readme = lines_of(REPOSITORY / "README.md")
    assert printed[begin] in readme and readme[readme.index(printed[begin]) + 1] == printed[begin + 1]


def test_the_table_of_the_pretrained_model_is_that_of_its_results() -> None:
    table = pd.read_csv(SMOLLM2 / "reference-questions_settings.csv")
    rows = {
        f"| {'float32' if row['number_format'] == 'own' else row['number_format']} | {row['num_active_blocks']} "
        f"| {row['accuracy']:.3f} | {row['T_total_mean_ms']:.1f} | {row['energy_passes_j_per_request']:.2f} |"
        for row in table.to_dict("records")
    }
    page = [line.replace(", the reference", "") for line in lines_of(EVIDENCE / "smollm2_135m.md")]
    shown = [line for line in page if line.startswith(("| float", "| bfloat"))]
    assert len(shown) == 5 and set(shown) <= rows


def test_the_pretrained_model_on_two_machines_is_as_both_measured_it() -> None:
    folders = SMOLLM2, STUDY / "questions"
    tables = [pd.read_csv(folder / "reference-questions_settings.csv", index_col="setting") for folder in folders]
    shown = lines_of(EVIDENCE / "smollm2_135m.md")
    for blocks in (30, 29, 28):
        keys = f"own_blocks{blocks}", "own_blocks30" if blocks == 30 else f"own_blocks{blocks}_answer64"
        figures = [
            f"{row['accuracy']:.3f} | {row['T_total_mean_ms']:.1f} | {100 * row['T_total_share_of_reference']:.0f}"
            for row in (table.loc[key] for table, key in zip(tables, keys, strict=True))
        ]
        assert f"| {blocks} | {' | '.join(figures)} |" in shown
