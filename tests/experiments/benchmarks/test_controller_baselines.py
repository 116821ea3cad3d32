"""The rows of the benchmark on a table whose figures are known by hand."""

from pathlib import Path

import numpy as np
import pytest

from experiments.analyses.recorded_table import RecordedTable, write_table
from experiments.benchmarks.controller_baselines import _over_seeds, main, slowness_of

ORIGIN = {
    "model": "hand-made", "task": "signs", "split": "validation", "metric": "em", "precision": "float32",
    "hardware": {"device": "cpu", "gpu_name": None, "cpu": "none"}, "versions": {}, "num_threads": 1, "caveats": [],
}  # fmt: skip


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Every sample scores 0.5 in 0.1 s at the low tier, 1 in 1 s at the high one."""
    scores, seconds = np.array([[0.5] * 16, [1.0] * 16]), np.array([[0.1] * 16, [1.0] * 16])
    settings = "tier-low_topk4_blocks12", "tier-high_topk8_blocks16"
    pictures, prompts = (tuple(f"{kind} {at}" for at in range(16)) for kind in ("picture", "read"))
    made = RecordedTable(settings, tuple(range(16)), pictures, scores, seconds, seconds, 1.0, ORIGIN, prompts)
    write_table(made, tmp_path / "table.json")
    return tmp_path / "table.json"


def rows(printed: str) -> dict[str, list[str]]:
    return {line[:24].strip(): line[24:].split() for line in printed.splitlines()[2:]}


def test_budgets_of_each_request(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(table), "--splits", "0", "1"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("2 splits, 28 budgets that some setting meets, 16 pictures")
    found = {line.split()[0]: line.split()[1:] for line in printed.splitlines()[2:]}
    # At 13 of 14 budgets only the low tier is in time, at the last the high one too: (13 x 0.5 + 1) / 14.
    for name in ("oracle", "best_static", "lookup_in_time", "lookup_mean", "prompts_in_time", "regression"):
        assert found[name][:2] == ["0.536", "0.0"], name
    assert found["static_tier-high_topk8_blocks16"][:2] == ["0.071", "92.9"]
    assert found["static_tier-high_topk8_blocks16"][3] == "-0.464"
    assert main([str(table), "--splits", "0", "--learned", "0:x"]) == 2


def test_budgets_of_a_stream(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(table), "--splits", *map(str, range(6)), "--stream"]) == 0
    found = rows(capsys.readouterr().out)
    # 0.1 s by 0.35, 0.4 … 0.95 s, which is 0.1 x 20 x (1 / 7 + … + 1 / 19) = 2.196, and 1 by 1, over 14 budgets.
    assert found["one setting by mean"][:3] == ["0.536", "0.228", "0.0"]
    # Of a share of 0.35 to 1, (share - 0.1) / 0.9 of the requests run at the high tier, with 0.5 more: 0.639 in the
    # mean. They are drawn by sample and budget, the same in every split: within four standard deviations of 16 x 14
    # draws, of which one is 0.5 x sqrt(0.17 / 224) = 0.014; of 5 % late ones sqrt(0.05 x 0.95 / 224) = 1.5 %.
    assert float(found["mean: mix"][0]) == pytest.approx(0.5 + 0.5 * 0.639, abs=0.055)
    assert float(found["late: mix"][2]) == pytest.approx(100 * 0.05 * 13 / 14, abs=5.8)


def test_seeds_that_differ_make_the_interval_wide() -> None:
    # Of 3 budgets for each of 8 requests: 1.5 and 2.1 points by the two seeds, 1.8 by the table.
    of = [np.column_stack([np.full(8, points), np.zeros(8), np.full(8, 3.0)]) for points in (1.5, 2.1, 1.8)]
    pictures = [f"picture {at}" for at in range(8)]
    assert _over_seeds(np.stack(of[:2]), of[2], pictures) == ("+0.000 [-0.100, +0.100]", "-0.100, +0.100")
    # The second seed judges two requests alone: (8 x -0.1 + 2 x 0.1) / 10.
    of[1][2:] = 0
    assert _over_seeds(np.stack(of[:2]), of[2], pictures)[0].startswith("-0.060 [-0.100, ")


def test_a_machine_that_becomes_slower(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(table), "--splits", "0", "1", "--changing_speed"]) == 0
    found = {tuple(line[:42].split("  ", 1)): line[42:].split() for line in capsys.readouterr().out.splitlines()[2:]}
    by_name = {(kind.strip(), name.strip()): values for (kind, name), values in found.items()}
    assert by_name["none", "lookup_few_knobs_feedback"] == by_name["none", "lookup_few_knobs"] == ["0.536", "0.0", "%"]
    # At the last of 14 budgets alone the high tier is in time, and that in the first half of the stream only.
    slower = {name: values for (kind, name), values in by_name.items() if kind == "1.5 x slower"}
    assert slower["lookup_few_knobs"] == ["0.500", "3.6", "%"]
    # The table that knows the speed takes the low tier then: (13 x 0.5 + 0.75) / 14. With feedback one answer is late.
    assert slower["knows the speed"][:4] == ["0.518", "0.0", "%", "+0.018"]
    assert slower["lookup_few_knobs_feedback"][:4] == ["0.518", "0.0", "%", "+0.018"]
    # The high tier is in time for half of the stream, the low one worth half: equal, and the low one is faster.
    assert slower["best_static"][:3] == ["0.500", "0.0", "%"]


def test_how_the_speed_changes() -> None:
    generator = np.random.default_rng(0)
    assert slowness_of(generator, 4, None).tolist() == [1.0, 1.0, 1.5, 1.5]
    assert slowness_of(generator, 4, 0.0).tolist() == [1.0] * 4
    # 500 stretches of 40 requests are about 250 independent values: a standard error of 4.5 % of the deviation, and of
    # 0.06 of the correlation 1/e after 40 requests.
    logs = np.log(slowness_of(generator, 20_000, 0.35))
    assert logs.std() == pytest.approx(0.35, rel=0.15)
    assert np.corrcoef(logs[:-40], logs[40:])[0, 1] == pytest.approx(np.exp(-1), abs=0.2)
