"""Scenes of a run: terminal, page, Python, E2 and `status` say the same sentence of each."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.text import Text

import knob_profiler as kp
from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import own_target, tier_target
from experiment_core_utils.records.caveats import Caveat, caveat, caveat_fields
from experiment_core_utils.records.conclusion import Conclusion, saved_conclusion
from experiment_core_utils.records.ledger import Ledger, RunPlan, write_plan
from experiment_core_utils.records.result_files import CONCLUSION_FILE, RESULT_FILES
from experiment_core_utils.records.run_report import RunReport
from experiment_core_utils.records.settings import SettingFailure
from experiment_core_utils.saved_results.terminal import FRONT_HEADING
from experiments.analyses.knobs.conclusion import invalid_tasks, why_invalid
from experiments.analyses.knobs.grid import grids_of
from experiments.analyses.report.analyses import analyse
from experiments.analyses.report.content import report_of
from experiments.core_exp.closing_lines import closing_lines, concluded, concluded_and_saved
from experiments.core_exp.e2_knob_pareto import main as e2
from tests.experiments.hand_made_sweep import PROVENANCE, result, write
from tests.hand_made_records import failed_sample, measured_sample, staged_run

OWN = "own_topk4_blocks4"
N = 200


@dataclass(frozen=True)
class Measured:
    """A setting of a scene: seconds of a request, and of how many of the samples, the first, the answer is right."""

    seconds: float
    right: int = N


def scene(
    folder: Path, settings: Mapping[str, Measured], num: int = N, noise: float = 0.01, caveats: tuple[Caveat, ...] = (),
    order: str = "rounds", failures: int = 0,
) -> Path:  # fmt: skip
    """A folder of results. A sample's times are its own factor times the setting's, with noise of each run."""
    generator = np.random.default_rng(7)
    factors = generator.uniform(0.5, 1.5, num)
    results = []
    for at, (key, each) in enumerate(settings.items()):
        knobs = setting_of_key(key)
        times = each.seconds * factors * np.exp(noise * generator.standard_normal(num))
        samples = [
            measured_sample(number, staged_run(None, float(time), ()), prediction=str(float(number < each.right)))
            for number, time in enumerate(times)
        ]
        one = result(knobs, samples) | {"is_reference": key == OWN, "num_failed_samples": failures}
        one["setting_order"] = {"how": order, "seed": 1, "position": at, "num_settings": len(settings)}
        one["failed_samples"] = [vars(failed_sample(number, "torn")) for number in range(num, num + failures)]
        one["provenance"] = PROVENANCE | caveat_fields(caveats)
        results.append(one)
    return write(folder, *results)


def setting_of_key(key: str) -> Setting:
    vision, top_k, blocks = key.split("_")
    target = own_target() if vision == "own" else tier_target(vision.removeprefix("tier-"))
    running = RunningBlocks.of(tuple(range(int(blocks.removeprefix("blocks")))))
    return Setting.of(vision=target, top_k=int(top_k.removeprefix("topk")), num_active_blocks=running)


def said_everywhere(folder: Path, capsys: pytest.CaptureFixture[str]) -> Conclusion:
    """The conclusion, of which every reader shows the sentence."""
    loaded = kp.load(folder)
    found = loaded.conclusion
    report = RunReport("0007", True, loaded.settings, {}, (), folder, None)
    saved = concluded_and_saved(report, None)
    line = f"conclusion: {found.sentence}"
    assert closing_lines(report, saved).count(line) == 1
    assert line == f"conclusion: {report_of(analyse([folder])).headlines[0].sentence}"
    code = e2([str(folder), "--num_draws", "100", "--output_dir", str(folder / "analysis"), "--strict"])
    assert code == (4 if found.voided_by else 0)
    assert capsys.readouterr().out.splitlines()[0] == line
    again = saved_conclusion(folder, "0007")
    assert isinstance(again, Conclusion) and again.lines == found.lines and saved_conclusion(folder, "0008") is None
    return found


def test_idle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half the time is sure, and so is that no answer got worse; a tier that is wrong on a quarter is out."""
    low = Measured(0.1, right=150)
    settings = {OWN: Measured(0.4), "tier-high_topk2_blocks4": Measured(0.2), "tier-low_topk2_blocks4": low}
    found = said_everywhere(scene(tmp_path, settings), capsys)
    assert (found.setting, found.against, found.word) == ("tier-high_topk2_blocks4", OWN, "yes")
    assert (found.num_samples, found.num_pictures, found.num_rounds) == (200, 200, 200)
    assert found.nearest is not None and found.nearest.time_ratio == pytest.approx(0.5, abs=0.005)
    assert found.sentence.startswith(
        "take tier-high_topk2_blocks4 instead of own_topk4_blocks4 (the reference, which is the model as it is: "
    )
    assert ", accuracy 1.000): faster: yes (" in found.sentence and " 0.50 times as long [0.50, 0.50]" in found.sentence
    assert "; not worse by 0.02: yes (1.000, +0.000 [" in found.sentence and "; 200 samples)" in found.sentence
    # Python, terminal, page and JSON have one word of each setting; the reference's is that of the conclusion.
    results = kp.load(tmp_path)
    report = RunReport("0007", True, results.settings, {}, (), tmp_path, None)
    words = {OWN: "no", "tier-high_topk2_blocks4": "yes", "tier-low_topk2_blocks4": "yes"}
    front, of_run = results.front(), concluded(report.results, report.output_dir).front
    assert dict(of_run) == words
    assert {row.setting: (row.word, row.status) for row in front.itertuples()} == {
        key: (word, "established") for key, word in words.items() if key != OWN
    }
    assert (front["p_value"] <= 0.05).all()
    settings_of_e2 = json.loads((tmp_path / "analysis" / "e2_pareto_frontiers.json").read_text())["fronts"][0][
        "settings"
    ]
    assert {each["key"]: each["word"] for each in settings_of_e2} == words
    page = report_of(analyse([tmp_path])).settings
    (column,) = [at for at, each in enumerate(page.columns) if each.label == FRONT_HEADING]
    assert sorted(row[column].text or "" for row in page.rows) == sorted(words.values())


def test_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What voids a run is in the sentence, which names no setting."""
    settings = {OWN: Measured(0.4), "tier-high_topk2_blocks4": Measured(0.2)}
    folder = scene(tmp_path, settings, caveats=(caveat("foreign_load_cpu", cpu_fraction=0.93),))
    found = said_everywhere(folder, capsys)
    assert (found.setting, found.voided_by, found.changes) == (None, ("foreign_load_cpu",), ())
    assert found.sentence == (
        "INVALID: background load: other processes used 93% of the CPUs during this setting; stop them and measure the "
        "setting again (tier-high_topk2_blocks4; 2 of 2 settings)"
    )
    results = kp.load(folder)
    assert invalid_tasks(grids_of(results.sweep), results.sweep.settings) == why_invalid([found])
    assert set(results.front()["status"]) == {None}
    (axes,) = results.plot().axes
    assert "no verdicts, since the run is INVALID" in "".join(each.get_text() for each in axes.figure.findobj(Text))
    report = RunReport("0007", True, results.settings, {}, (), folder, None)
    table, *lines = closing_lines(report)
    assert "front" not in table and sum("background load" in each for each in lines) == 1
    assert lines[-1].endswith(", INVALID")
    concluded_of_it = concluded(report.results, report.output_dir)
    assert [concluded_of_it.exit_code(report, is_strict=strict) for strict in (False, True)] == [0, 4]
    failed = replace(report, failed={"x": SettingFailure("OutOfMemory", "no memory", 3)})
    assert concluded_of_it.exit_code(failed, is_strict=True) == 1


def test_one_after_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of settings that did not take turns a change of speed may be the difference."""
    settings = {OWN: Measured(0.4), "tier-high_topk2_blocks4": Measured(0.35)}
    found = said_everywhere(scene(tmp_path, settings, order="blocked"), capsys)
    assert (found.setting, found.word) == (None, "can't tell")
    assert "of settings that were measured one after another shows no change of the machine" in found.sentence


def test_all_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {OWN: Measured(0.4, 0), "tier-high_topk2_blocks4": Measured(0.2, 0)}
    found = said_everywhere(scene(tmp_path, settings), capsys)
    assert found.sentence.startswith("no setting is named: no answer was right at any setting; compare pred")
    page = " ".join(each.sentence for each in report_of(analyse([tmp_path])).headlines)
    assert "0.000" not in page and "accura" not in page.replace(found.sentence, "")


def test_all_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The cheapest of three that are all right, though few samples show little."""
    settings = {OWN: Measured(0.4), "tier-high_topk2_blocks4": Measured(0.2), "tier-low_topk2_blocks4": Measured(0.1)}
    many = said_everywhere(scene(tmp_path / "many", settings), capsys)
    assert (many.setting, many.word, many.as_fast) == ("tier-low_topk2_blocks4", "yes", ())
    # Where no answer differs, 2 in the error, (2 x 2 x 1)^(1/2) / n, is to be 0.02 / (2.27 + 0.84): n = 311 or more.
    few = said_everywhere(scene(tmp_path / "few", settings, num=16), capsys)
    assert (few.setting, few.word, few.samples_needed) == (OWN, "can't tell", 320)
    assert few.sentence.endswith("; 16 samples); about 320 samples would decide")


def test_one_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = said_everywhere(scene(tmp_path, {OWN: Measured(0.4)}), capsys)
    assert found.sentence == "no setting is named: one setting was measured; a choice needs two or more"


def test_tie(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two settings that are as fast, the cheaper one is taken and the other one named."""
    settings = {OWN: Measured(0.4), "tier-high_topk2_blocks4": Measured(0.2), "tier-high_topk3_blocks4": Measured(0.2)}
    found = said_everywhere(scene(tmp_path, settings), capsys)
    both = {"tier-high_topk2_blocks4", "tier-high_topk3_blocks4"}
    assert found.word == "yes" and {found.setting, *found.as_fast} == both
    assert found.sentence.endswith(f"; perhaps as fast: {found.as_fast[0]}")


def test_identical_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a difference the model as it is stays, and no number of samples would change that."""
    settings = {OWN: Measured(0.4), "tier-high_topk2_blocks4": Measured(0.4)}
    found = said_everywhere(scene(tmp_path, settings, noise=0.0), capsys)
    assert (found.setting, found.word, found.samples_needed) == (OWN, "can't tell", None)
    assert found.nearest is not None and found.nearest.time_ratio == 1.0


@pytest.mark.parametrize(
    ("failures", "voided_by"),
    # 2 of 202 are 1 %, 3 of 203 are more.
    [(2, ()), (3, ("samples_failed",))],
)
def test_too_many_failed_samples(tmp_path: Path, failures: int, voided_by: tuple[str, ...]) -> None:
    settings = {OWN: Measured(0.4), "tier-high_topk2_blocks4": Measured(0.2)}
    results = kp.load(scene(tmp_path, settings, failures=failures))
    found = results.conclusion
    assert found.voided_by == voided_by
    assert invalid_tasks(grids_of(results.sweep), results.sweep.settings) == why_invalid([found])
    assert (results.front("latency_p95")["status"].isna()).all() == bool(voided_by)
    assert not voided_by or found.sentence.startswith("INVALID: failed samples: 3 of 203; repair them, or leave them")


def test_an_unfinished_run(tmp_path: Path) -> None:
    """A setting of the plan that failed is no reason, one without any outcome is."""
    left = "tier-low_topk2_blocks4"
    folder = scene(tmp_path, {OWN: Measured(0.4), "tier-high_topk2_blocks4": Measured(0.2)})
    plan = RunPlan(1, "0007", "f00d", "signs", (OWN, "tier-high_topk2_blocks4", left), (left,), N, 1, 0, 1.0)
    write_plan(plan, folder)
    found = kp.load(folder).conclusion
    assert found.voided_by == ("unfinished",) and found.sentence == (
        f"INVALID: unfinished: 1 of 3 settings of the run in {folder} have no result; run the same command again to "
        "resume"
    )
    Ledger(folder, "f00d").mark_failed(left, SettingFailure("OutOfMemory", "no memory", 3))
    assert kp.load(folder).conclusion.voided_by == ()


@pytest.mark.parametrize(
    ("figures", "is_void"),
    [
        # 10 of 200 are 5 %.
        ({"num_kept": 10, "num_samples": 200}, False),
        ({"num_kept": 11, "num_samples": 200}, True),
    ],
)
def test_too_many_disturbed_samples(figures: dict[str, Any], is_void: bool) -> None:
    assert caveat("runs_discarded", num_runs=20, **figures).voids is is_void


def test_the_file_has_the_record_and_its_sentence(tmp_path: Path) -> None:
    folder = scene(tmp_path, {OWN: Measured(0.4), "tier-high_topk2_blocks4": Measured(0.2)})
    found = kp.load(folder).conclusion
    concluded_and_saved(RunReport(None, True, kp.load(folder).settings, {}, (), folder, None), None)
    content = json.loads((folder / CONCLUSION_FILE).read_text())
    assert content["sentence"] == found.sentence and content["setting"] == found.setting == "tier-high_topk2_blocks4"
    assert content["nearest"]["faster"] == "yes" and content["experiment_id"] is None
    assert saved_conclusion(folder, None) == found


@pytest.mark.parametrize("edited", ["sentence", "setting", "a result", "a further result"])
def test_a_conclusion_that_is_not_of_its_results_is_not_shown(edited: str, tmp_path: Path) -> None:
    folder = scene(tmp_path, {OWN: Measured(0.4), "tier-high_topk2_blocks4": Measured(0.2)})
    concluded_and_saved(RunReport("0007", True, kp.load(folder).settings, {}, (), folder, None), None)
    result = next(folder.glob(RESULT_FILES))
    if edited.endswith("result"):
        content = result.read_text().replace('"accuracy": ', '"accuracy":  ', 1)
        (result.with_name(f"x{result.name}") if edited == "a further result" else result).write_text(content)
    else:
        path = folder / CONCLUSION_FILE
        path.write_text(json.dumps(json.loads(path.read_text()) | {edited: "use topk2: it is free"}))
    assert saved_conclusion(folder, "0007") == (
        "not shown: conclusion.json is not of the results beside it; the same command writes it again"
    )
