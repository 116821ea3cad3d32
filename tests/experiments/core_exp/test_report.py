"""A report's content by hand-made numbers, its escaping, and what it says of what is not there."""

import json
import re
from base64 import b64encode
from dataclasses import replace
from hashlib import sha256
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

from experiment_core_utils.saved_results.terminal import FRONT_HEADING
from experiments.analyses.charts.chart import Dots, Line, Rule, thinned
from experiments.analyses.charts.latency_charts import errors_chart, guardrail_chart, predicted_chart
from experiments.analyses.charts.plotly_charts import numbers, plotly_of
from experiments.analyses.latency.estimator import Prediction
from experiments.analyses.latency.guardrail import GuardrailCounts
from experiments.analyses.latency.stage_regression import PREDICTED
from experiments.analyses.latency.validation import Coverage, Errors, NoiseFloor, Repeatability, Validation
from experiments.analyses.report.analyses import analyse
from experiments.analyses.report.content import report_of, shared_command, without_folders
from experiments.analyses.report.findings import energy_findings
from experiments.analyses.report.page import page_of, plots_of
from experiments.analyses.report.parts import Report, ReportCaveat
from experiments.core_exp.report import main
from experiments.fitting.verdicts import fewest_for
from tests.experiments.analyses.latency.synthetic_samples import working_samples
from tests.experiments.hand_made_sweep import PROVENANCE, result, setting, write
from tests.experiments.reported_sweep import HOSTILE, reported_folder
from tests.hand_made_records import answered_sample, measured_sample, staged_run


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Top-k 2 with 2, 3 and 4 blocks, top-k 4 with 2 blocks: too few for a latency estimator."""
    return report_of(analyse([reported_folder(tmp_path_factory.mktemp("run"), num_settings=4)]))


def test_sweeps_side_by_side_are_one_page_with_one_table(tmp_path: Path) -> None:
    """E1 and E3 are of each sweep, the table and E2 of all."""
    model = PROVENANCE["model"] | {"dtype": "float32"}
    report = report_of(
        analyse(
            [
                write(tmp_path / "one", *(result(setting(tier)) for tier in ("low", "high"))),
                write(tmp_path / "two", result(setting("low"), fingerprint="beef", model=model)),
            ]
        )
    )
    assert report.subtitle.startswith("2 sweeps: bfloat16; float32 · 3 settings, 6 generations of signs")
    assert [column.label for column in report.settings.columns[:2]] == ["sweep", "setting"]
    assert [[value.text for value in row[:2]] for row in report.settings.rows] == [
        ["bfloat16", "tier-low_topk2_blocks3"],
        ["bfloat16", "tier-high_topk2_blocks3"],
        ["float32", "tier-low_topk2_blocks3"],
    ]
    assert [section.title for section in report.sections] == [
        "Where the time goes: bfloat16",
        "Where the time goes: float32",
        "What the knobs buy",
        "Predicting latency: bfloat16",
        "Predicting latency: float32",
    ]
    num_panels = sum(len(chart.panels) for section in report.sections for chart in section.charts)
    fronts = [each.panel for each in report.fronts if each.panel is not None]
    assert len(plots_of(report)) == num_panels + len(fronts)
    names = [mark.name for mark in fronts[0].marks if isinstance(mark, Line)]
    assert names == [None, "front of bfloat16 alone", "front of float32 alone"]
    assert report.sections[0].findings[0] == "The stage that takes longest is vision in all of the 2 settings."


def test_of_two_sweeps_one_against_the_other_stands_first(tmp_path: Path) -> None:
    """The one setting that both have takes 1 s in each, on 2 pictures."""
    model = PROVENANCE["model"] | {"dtype": "float32"}
    one, two = write(tmp_path / "one", result(setting())), write(tmp_path / "two", result(setting(), model=model))
    first, second = report_of(analyse([one, two])).headlines
    assert (first.about, first.word) == ("float32 against bfloat16", "can't tell")
    # The word is of the comparison, not of a cheaper setting.
    assert first.word_about == ""
    assert first.sentence.startswith("B takes 1.000 times as long as A: CANNOT TELL")
    assert first.more[0] == "A: bfloat16; B: float32"
    assert second.sentence.startswith("no setting is named") or second.word != "yes"


def test_sweeps_are_judged_together_and_one_that_shares_nothing_is_named(tmp_path: Path) -> None:
    """Of three sweeps each end of an interval may fail half as often as of two, so intervals are wider."""
    folders = []
    for at, (name, top_k) in enumerate((("bfloat16", 2), ("float32", 2), ("float16", 2), ("float64", 3))):
        samples = [measured_sample(number, staged_run(0.5 + 0.001 * at * number, 0.25, ())) for number in range(12)]
        model = PROVENANCE["model"] | {"dtype": name}
        folders.append(write(tmp_path / name, result(setting(top_k=top_k), samples, model=model)))
    ends = [
        float(re.findall(r"as long as A|\[([\d.]+), ", report_of(analyse(folders[:count])).headlines[0].sentence)[0])
        for count in (2, 3)
    ]
    assert ends[1] < ends[0] < 1
    found = report_of(analyse(folders)).headlines[:3]
    assert [each.about for each in found] == [f"{name} against bfloat16" for name in ("float32", "float16", "float64")]
    assert [each.more[:1] for each in found[:2]] == [["A: bfloat16; B: float32"], ["A: bfloat16; B: float16"]]
    assert found[2].word == "can't tell" and found[2].sentence.startswith("not compared: the runs have no setting")


def plots_in(report: Report, section: str) -> dict[str, Any]:
    """The plots of a section on the page, by their names."""
    (found,) = [each for each in report.sections if each.name == section]
    return plots_of(replace(report, sections=[found], fronts=[], instead=None))


def test_the_sentences_are_of_the_data(report: Report) -> None:
    (headline,) = report.headlines
    assert (headline.about, headline.word) == ("", "INVALID")
    assert headline.sentence == (
        f"INVALID: throttled: the GPU lowered its clocks ({HOSTILE}) during this setting; cool the GPU or "
        "lower its load, and measure the setting again (tier-low_topk2_blocks2; 4 of 4 settings)"
    )
    # Prefill is 81.2 ms with 2 blocks, 121.8 and 162.4 ms with 3 and 4.
    assert report.sections[0].findings == [
        "The stage that takes longest is vision in 2, prefill in 2 of the 4 settings.",
        "Decode takes at least half of the time: never (low).",
    ]


def caveats_of(report: Report) -> dict[str, ReportCaveat]:
    """By their texts."""
    return {each.text: each for group in report.caveats for each in group.caveats}


def test_each_caveat_is_shown_once_with_its_settings(report: Report) -> None:
    assert [group.about for group in report.caveats] == ["times", "accuracy"]
    caveats = caveats_of(report)
    # What voids the run is the line that a reader sees.
    assert report.caveats[0].caveats[0].voids and report.caveats[0].caveats[0].text.startswith("Throttling")
    assert caveats["Only 4 samples per setting: use --num_samples 500 or more before comparing accuracy."].scope is None
    throttled = caveats["Throttling: the GPU's clocks were lowered."]
    assert throttled.scope == "4 of 4 settings" and len(throttled.details) == 4
    assert throttled.details[0].startswith("signs tier-low_topk2_blocks2: throttled: ")
    assert f"({HOSTILE})" in throttled.details[0]
    assert (
        "With fewer than 20 samples the P95 is interpolated between the two slowest ones and depends on them alone; "
        "the fewest here are 4."
    ) in caveats


def test_failed_and_cut_samples_are_caveats(tmp_path: Path) -> None:
    one = result(setting(), [measured_sample(0), measured_sample(1)])
    one |= {"num_failed_samples": 3, "share_truncated": 0.5, "share_unparsed": 0.0}
    texts = list(caveats_of(report_of(analyse([write(tmp_path, one)]))))
    assert "Failed samples: 3 samples failed; figures are of those that ran." in texts
    assert "50 % of the answers were cut at the limit of output tokens, so their own length is not known." in texts
    assert not any("could not be read" in text for text in texts)


def test_the_table_has_what_some_setting_has(report: Report) -> None:
    labels = [column.label for column in report.settings.columns]
    assert labels[:4] == ["setting", "vision", "top-k", "blocks"] and FRONT_HEADING not in labels  # the run is INVALID
    assert report.legend == "" and "likely: 80 %" not in page_of(report)
    assert [column.label for column in report.settings.first.columns] == ["setting", "accuracy", "mean ms", "GFLOP"]
    assert "failed" not in labels and "J a request" not in labels
    rows = [dict(zip(labels, row, strict=True)) for row in report.settings.rows]
    assert [row["mean ms"].text for row in rows] == ["232.0", "298.0", "364.0", "232.0"]
    assert rows[0]["accuracy"].key == 0.5 and rows[0]["accuracy"].more.startswith("[")


def test_the_pictures_hold_the_numbers(report: Report) -> None:
    plots = plots_in(report, "e1")
    vision, prefill, decode = plots["e1_settings-0"]["data"]
    # Fastest first; equal ones keep their order.
    assert vision["hovertext"][0].startswith("<b>tier-low_topk2_blocks2</b>") and vision["x"] == [100.0] * 4
    assert prefill["x"] == [81.2, 81.2, 121.8, 162.4] and decode["x"] == [50.8, 50.8, 76.2, 101.6]
    # Each bar is named.
    names = plots["e1_settings-0"]["layout"]["yaxis"]["ticktext"]
    assert len(names) == 4 and names[0] == "tier-low_topk2_blocks2 · 232 ms"
    # Decode stands on vision and prefill.
    assert decode["base"] == [181.2, 181.2, 221.8, 262.4]
    # 50.8 ms of 232 ms.
    assert "decode: 50.8 ms, 21.9 %" in decode["hovertext"][0]
    front = plots_of(report)["front-0-latency_mean"]
    assert sum(len(trace["x"]) for trace in front["data"] if trace["hoverinfo"] == "text") == 4


def test_the_front_of_an_invalid_run_has_no_verdicts(report: Report) -> None:
    (panel,) = [each.panel for each in report.fronts if each.cost == "mean ms"]
    assert panel is not None and panel.title == "signs: no verdicts, since the run is INVALID"
    assert panel.note.startswith("4 settings, ") and "INVALID: throttled: " in panel.note
    (dots,) = [mark for mark in panel.marks if isinstance(mark, Dots) and mark.name == "setting"]
    assert dots.texts[0][0] == "tier-low_topk2_blocks2" and len(dots.texts[0]) == 3
    assert "front: " not in json.dumps(plots_of(report)) and "draws" not in json.dumps(plots_of(report))


def test_every_picture_is_one_for_plotly(report: Report) -> None:
    for section in report.sections:
        for plot in plots_in(report, section.name).values():
            go.Figure(plot)


def test_what_is_missing_is_reported(report: Report) -> None:
    reasons = {each.name: " ".join(each.reasons) for each in report.sections}
    assert "--use_profiler" in reasons["e1"]
    assert "no sample has an energy" in reasons["e2"]
    missing = {each.cost: each.reason for each in report.fronts if each.panel is None}
    # Each of 4 settings against 3 others, at 2.5 % over twice 3 comparisons: 0.95^n is below that from 107 on.
    assert (
        missing["P95 ms"] == f"a verdict on P95 needs {fewest_for(95, 0.025 / 6)} pictures with times, and there are 4"
    )
    assert missing["energy"].startswith("no sample has an energy") and report.first_front == "front-0-latency_mean"
    assert "4 settings with 16 samples are too few" in reasons["e3"] and not plots_in(report, "e3")


def test_random_weights_have_no_fronts(tmp_path: Path) -> None:
    report = report_of(analyse([reported_folder(tmp_path, random_weights=True, num_settings=4)]))
    names = list(plots_in(report, "e2"))
    assert names == [f"e2_effects_signs-{number}" for number in range(2)]
    assert "the weights are random" in report.sections[1].reasons[0]
    assert report.fronts == [] and report.instead is not None and report.instead[0] == "e1_settings-0"
    assert report.headlines[0].word == "no setting" or "random" in report.headlines[0].sentence
    assert report.subtitle.endswith("random weights")
    assert FRONT_HEADING not in [column.label for column in report.settings.columns]


def test_one_setting_and_answers_without_times_make_a_page(tmp_path: Path) -> None:
    samples = [answered_sample(number) for number in range(3)]
    report = report_of(analyse([write(tmp_path, result(setting(), samples))]))
    reasons = {each.name: " ".join(each.reasons) for each in report.sections}
    assert "answered in batches" in reasons["e1"] and "one setting" in reasons["e2"] and "no sample" in reasons["e3"]
    (headline,) = report.headlines
    assert headline.word == "no setting"
    assert headline.sentence == "no setting is named: one setting was measured; a choice needs two or more"


def test_no_text_of_results_is_markup(report: Report) -> None:
    page = page_of(report)
    start, library, rest = re.split(r"<script>(?=/\*\*)|(?<=</script>)\n<script>(?=\"use strict\")", page)
    assert "plotly.js" in library[:200]
    for part in (start, rest):
        assert "<img" not in part and "document.title=2</script>" not in part
    (plots,) = re.findall(r'<script type="application/json" id="plots">(.*?)</script>', start)
    # In the JSON the texts are escaped once more, for plotly, which reads tags.
    hovers = [
        text for plot in json.loads(plots).values() for trace in plot["data"] for text in trace.get("hovertext", [])
    ]
    hostile = [text for text in hovers if "example.org" in text]
    assert hostile and all("&lt;img" in text and "<img" not in text for text in hostile)


def test_only_the_page_s_own_scripts_may_run(report: Report) -> None:
    page = page_of(report)
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    hashes = [b64encode(sha256(each.encode()).digest()).decode() for each in scripts]
    policy = unescape(re.findall(r'Content-Security-Policy" content="(.*?)"', page)[0])
    assert len(hashes) == 2 and all(f"'sha256-{each}'" in policy for each in hashes)
    assert policy.startswith("default-src 'none'")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "run", result(setting()))
    assert main([str(folder)]) == 0 and (folder / "report.html").exists()
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    assert main([str(folder), "--output_dir", str(tmp_path)]) == 0 and (tmp_path / "report.html").exists()
    capsys.readouterr()
    assert main([str(tmp_path / "nothing")]) == 1
    assert main([str(folder), "--colour", "red"]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_a_page_that_cannot_be_written_is_refused_before_results_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link.html").symlink_to(tmp_path / "elsewhere")
    for output, reason in (
        (tmp_path, "Is a directory"),
        (tmp_path / "link.html", "is a link"),
        ("/dev/null", "device"),
    ):
        assert main([str(tmp_path / "no results"), "--output", str(output)]) == 2
        error = capsys.readouterr().err
        assert reason in error and error.count("\n") == 1


def test_numbers_and_dots_are_few() -> None:
    assert numbers([1 / 3]) == [0.333333]
    assert thinned(3, most=5) == [0, 1, 2] and thinned(9, most=3) == [0, 4, 8]


def test_the_estimator_s_pictures() -> None:
    samples = working_samples()
    columns = {name: np.full(len(samples), 10.0) for name in PREDICTED}
    left_out = Prediction(columns, columns, columns, np.zeros(len(samples), bool), np.zeros(len(samples), bool))
    found = Validation(
        left_out=left_out,
        estimator={"T_total": Errors(108, 0.08, 0.07, 0.04, 0.01)},
        linear={"T_total": Errors(108, 0.2, 0.2, 0.1, 0.0)},
        logs={"T_total": Errors(108, 0.1, 0.1, 0.06, 0.0)},
        repeatability={"T_total": Repeatability(0.05, 0.02)},
        coverage={"T_total": Coverage(0.9, 0.3)},
        num_folds=8,
        forest={"T_total": Errors(108, 0.1, 0.1, 0.05, 0.0)},
        noise={"T_total": NoiseFloor(108, 0.03, 0.02)},
        others={},
        totals={},
        after_vision={},
    )
    linear, logs, forest, estimator, noise, _aim = plotly_of(errors_chart(found).panels[0]).data
    assert (estimator.x, forest.x, logs.x, linear.x, noise.x) == ((4.0,), (5.0,), (6.0,), (10.0,), (2.0,))
    (predicted,) = predicted_chart(samples, found).panels
    assert "4.0 % off by setting, 8.0 % by request; 90 % of the requests" in predicted.note
    rings = plotly_of(predicted).data[-1]
    assert len(rings.x) == 27 and set(rings.y) == {10.0}
    curve = [GuardrailCounts(0.0, 20, 10, 2, 9, 1, 0.2, 1 / 9), GuardrailCounts(0.5, 20, 0, 0, 9, 9, None, 1.0)]
    broken, wasted, _aim = plotly_of(guardrail_chart(curve).panels[0]).data
    assert (broken.x, broken.y) == ((0.0,), (20.0,)) and (wasted.x, wasted.y) == ((0.0, 50.0), (11.1111, 100.0))
    assert "2 of 10 admitted were over budget" in broken.hovertext[0]


def test_measured_and_estimated_energies_are_not_compared_with_each_other() -> None:
    frame = pd.DataFrame(
        {
            "task": ["t"] * 5,
            "setting": ["a", "b", "c", "d", "e"],
            "energy_passes_j_per_output_token": [3.0, 0.25, float("nan"), 1.0, 0.5],
            "energy_kind": ["measured", "estimated", None, "measured", "estimated"],
        }
    )
    assert list(energy_findings(frame)) == [
        "Energy (measured): from 1 J an output token (t d) to 3 J (t a).",
        "Energy (estimated): from 0.25 J an output token (t b) to 0.5 J (t e).",
    ]
    assert list(energy_findings(frame.iloc[2:3])) == []


def test_commands_are_knobprof_s_without_folders_of_the_machine() -> None:
    assert shared_command(
        "python /home/me/.venv/bin/knobprof profile --output_dir /data/mine/run1 --tier_list low"
    ) == ("knobprof profile --output_dir run1 --tier_list low")
    assert shared_command("python3 core_exp/acc_lat_profiling.py --data_file /d/c.jsonl") == (
        "python3 core_exp/acc_lat_profiling.py --data_file c.jsonl"
    )
    assert shared_command("/usr/bin/python -m experiments.core_exp.acc_lat_profiling --data_file=/d/c.jsonl") == (
        "python -m experiments.core_exp.acc_lat_profiling --data_file=c.jsonl"
    )
    # A word with a space is one path; a path within a word is no folder of the machine.
    assert shared_command("python a.py '/my data/c d.jsonl' --prompt 'yes /or/no {question}'") == (
        "python a.py 'c d.jsonl' --prompt 'yes /or/no {question}'"
    )
    assert without_folders("the folder /data/mine/run1 is there; and/or https://a.b/c/d") == (
        "the folder run1 is there; and/or https://a.b/c/d"
    )
    assert without_folders(HOSTILE) == HOSTILE


def test_a_budget_is_a_line_in_fronts_by_latency_and_opens_the_guardrail(tmp_path: Path) -> None:
    found = analyse([reported_folder(tmp_path, num_settings=12)])
    plain, asked = report_of(found), report_of(found, budget_ms=250)
    for report, count in ((plain, 0), (asked, 1)):
        (panel,) = [each.panel for each in report.fronts if each.cost == "mean ms"]
        assert panel is not None
        assert sum(isinstance(mark, Rule) and mark.at == 250 for mark in panel.marks) == count
        charts = {chart.name for chart in report.sections[-1].charts}
        assert ("e3_guardrail" in charts) == bool(count) and "e3_errors" in charts
        assert any("budget" in each for each in report.sections[-1].findings) == bool(count)
