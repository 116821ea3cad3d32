"""A knob beside the published ones in frames, E1, E2, E3 and the report."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiment_core_utils.knobs.interface import Knob, KnobLimits, KnobRequest, Level, RequestedValues
from experiment_core_utils.knobs.registry import register_knob, unregister_knob
from experiment_core_utils.primitives.flag_fields import Part
from experiment_core_utils.records.columns import HEADINGS, SLOPE_KEYS
from experiment_core_utils.records.setting_result import published_names
from experiment_core_utils.saved_results.terminal import closing_table
from experiment_core_utils.tables.frames import settings_frame as all_columns
from experiments.analyses.charts.knob_charts import FURTHER_COLOURS, knob_colour
from experiments.analyses.charts.style import BLUE, GREEN, ORANGE, PURPLE
from experiments.analyses.knobs.grid import grids_of, knobs_of
from experiments.analyses.latency.estimator import caveats_of
from experiments.analyses.latency.features import timed_samples
from experiments.analyses.report.analyses import analyse
from experiments.analyses.report.content import report_of
from experiments.analyses.stages.analysis import generations_of
from experiments.analyses.stages.scaling import line_knobs, stage_lines
from experiments.analyses.sweeps import load_sweep, samples_frame, settings_frame
from experiments.core_exp import e1_stage_latency, e2_knob_pareto
from tests.experiments.hand_made_sweep import result, setting
from tests.hand_made_records import measured_sample, staged_run


class Heat(Knob[float]):
    """A number that makes a prefill take as many times 0.25 s."""

    name, title, plural, flags = "heat", "heat", "heats", Part
    neutral = 1.0

    def own(self, limits: KnobLimits) -> float:
        return 1.0

    def requested(self, request: KnobRequest) -> RequestedValues[float]:
        return RequestedValues((1.0,))

    def label(self, value: float) -> str:
        return f"heat{value:g}"

    def parsed(self, label: str) -> float | None:
        return float(label.removeprefix("heat")) if label.startswith("heat") else None

    def level(self, value: float) -> Level:
        return value

    def of_level(self, level: Level) -> float:
        return float(level)


@pytest.fixture(autouse=True)
def heat() -> Iterator[None]:
    register_knob(Heat())
    yield
    unregister_knob("heat")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """3 and 4 blocks at heat 1, which names leave out, 1.5 and 2."""
    folder = tmp_path / "run"
    folder.mkdir()
    for blocks in (3, 4):
        for value in (1.0, 1.5, 2.0):
            own = setting(blocks=blocks).replaced(heat=value)
            samples = [measured_sample(number, staged_run(prefill_s=0.25 * value)) for number in range(2)]
            (folder / f"signs_imgsize{own.key}.json").write_text(json.dumps(result(own, samples)))
    return folder


def test_it_is_a_column_of_its_name(folder: Path) -> None:
    sweep = load_sweep(folder)
    frame = settings_frame(sweep)
    assert frame["heat"].tolist() == [1.0, 1.5, 2.0, 1.0, 1.5, 2.0]
    results = [each.result for each in sweep.settings]
    assert set(all_columns(results)) | set(samples_frame(sweep)) <= {"heat", *published_names()}
    titles = {"vision", "top-k", "blocks", "heat"}
    known = "|".join(map(re.escape, sorted(titles | HEADINGS, key=len, reverse=True)))
    assert re.fullmatch(rf"(?: *(?:{known}))+", closing_table(results).splitlines()[0])
    samples = samples_frame(sweep)
    assert samples["heat"].tolist() == [1.0, 1.0, 1.5, 1.5, 2.0, 2.0] * 2
    assert samples["vision"].tolist() == ["low"] * 12 and samples["num_active_blocks"].dtype == "int64"


def test_e1_has_lines_of_its_levels_within_those_of_the_published_knobs(folder: Path) -> None:
    generations = generations_of(load_sweep(folder))
    assert line_knobs(generations) == ("num_active_blocks", "top_k", "heat")
    levels = [line.levels for line in stage_lines(generations) if line.stage == "prefill"]
    # All, by blocks, by blocks and top-k, by all three.
    assert levels[:3] == [{}, {"num_active_blocks": 3}, {"num_active_blocks": 4}]
    assert levels[5:7] == [{"num_active_blocks": 3, "top_k": 2, "heat": heat} for heat in (1.0, 1.5)]
    assert len(levels) == 1 + 2 + 2 + 6
    assert e1_stage_latency.main([str(folder)]) == 0
    breakdown = json.loads((folder / "analysis" / "e1_stage_latency_breakdown.json").read_text())
    pooled, *_, last = breakdown["prefill_vs_input_tokens"]
    knobs = ("top_k", "num_active_blocks", "heat")
    names = {"heat", *published_names()}
    assert {name for name in last if not name.startswith(SLOPE_KEYS)} <= names
    table = pd.read_csv(folder / "analysis" / "e1_line_fits.csv")
    assert {name for name in table if not name.startswith(SLOPE_KEYS)} <= names
    assert [pooled[name] for name in knobs] == [None] * 3 and [last[name] for name in knobs] == [2, 4, 2.0]


def test_e2_turns_it_in_a_colour_of_its_own(folder: Path) -> None:
    (grid,) = grids_of(load_sweep(folder))
    assert knobs_of(grid.points) == ("vision", "top_k", "num_active_blocks", "heat")
    assert e2_knob_pareto.main([str(folder), "--num_draws", "100"]) == 0
    (task,) = json.loads((folder / "analysis" / "e2_knob_grid_results.json").read_text())["tasks"]
    assert task["settings"][0].keys() <= {"heat", *published_names()}
    assert [each["heat"] for each in task["settings"]] == [1.0, 1.5, 2.0] * 2
    # Of 875 to 1250 ms heat explains all.
    (share,) = [each["share"] for each in task["effects"]["latency_mean"]["terms"] if each["knobs"] == ["heat"]]
    assert share == pytest.approx(1.0)
    names = ("vision", "top_k", "num_active_blocks", "sweep")
    assert [knob_colour(name) for name in names] == [BLUE, ORANGE, GREEN, PURPLE]
    # Which of these it is, the knobs before it say, as those of other tests in the same process.
    assert knob_colour("heat") in FURTHER_COLOURS


def test_e3_says_that_it_has_no_term_for_it(folder: Path) -> None:
    samples = timed_samples(samples_frame(load_sweep(folder)))
    assert np.unique(samples.wholes["heat"]).tolist() == [1.0, 1.5, 2.0]
    sentences = [each.sentence for each in caveats_of(samples)]
    assert [each for each in sentences if "heat" in each] == [
        "heat had 3 values, and the estimator has no term for it: it predicts what they have in common; fit it on "
        "results of one value"
    ]


def test_the_report_has_a_column_of_it(folder: Path) -> None:
    table = report_of(analyse([folder])).settings
    labels = [column.label for column in table.columns]
    assert labels[:5] == ["setting", "vision", "top-k", "blocks", "heat"]
    assert [row[4].text for row in table.rows] == ["1", "1.5", "2"] * 2
