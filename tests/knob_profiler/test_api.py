"""A sweep as a function call: records, frames, the front and the page of one folder, which may be moved."""

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import knob_profiler as kp
from experiment_core_utils.config.profiling import ProfilingConfig
from experiment_core_utils.knobs.setting import setting_of
from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError
from experiment_core_utils.primitives.files import REPOSITORY
from experiment_core_utils.primitives.notebook_html import table
from experiment_core_utils.records.settings import SettingFailure
from knob_profiler.keywords import flags_of
from knob_profiler.pictures import front_svg


@pytest.fixture(scope="module")
def results(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> kp.Results:
    return kp.profile(
        tiny_checkpoint, "reference_vqa", tiers=["low"], top_k=[2, 4], active_blocks=[3], samples=2,
        output_dir=tmp_path_factory.mktemp("api") / "results", num_runs_per_sample=1, num_warmup_runs=0,
        max_repeats=0, max_new_tokens=2, num_threads=1, no_reference=True,
    )  # fmt: skip


def test_a_call_measures_what_it_names(results: kp.Results) -> None:
    assert [(each.tier, each.top_k, each.num_active_blocks) for each in results.settings] == [
        ("low", 2, 3),
        ("low", 4, 3),
    ]
    assert results.failed == {}
    frame = results.frame()
    assert list(frame["setting"]) == ["tier-low_topk2_blocks3", "tier-low_topk4_blocks3"]
    assert set(frame["task"]) == {"reference_vqa"} and (frame["T_total_mean_ms"] > 0).all()
    assert len(results.samples()) == 4


def test_it_shows_itself_in_one_line(results: kp.Results) -> None:
    shown = repr(results)
    assert shown == f"Results({str(results.folder)!r}: 2 settings of reference_vqa)"
    assert repr(kp.load(results.folder)) == shown
    failed = kp.Results(results.folder, (), {"tier-low_topk2_blocks3": SettingFailure("OutOfMemory", "no memory", 3)})
    assert repr(failed) == f"Results({str(results.folder)!r}: 0 settings of no task, 1 failed)"


def test_the_module_lists_its_published_names_alone() -> None:
    assert [name for name in dir(kp) if not name.startswith("__")] == [
        "ComparedResults", "Results", "compare", "load", "profile",
    ]  # fmt: skip
    assert {"__doc__", "__file__", "__name__"} <= set(dir(kp))


def test_the_front_names_cost_and_unit(results: kp.Results) -> None:
    front = results.front(num_draws=50)
    assert list(front.columns) == ["task", "setting", "accuracy", "latency_mean_ms", "word", "p_value", "status"]
    assert set(front["setting"]) <= set(results.frame()["setting"]) and len(front) >= 1
    assert front["latency_mean_ms"].is_monotonic_increasing
    with pytest.raises(ResultsError, match="no cost 'watts'; give one of latency_mean, .*flops"):
        results.front("watts")
    with pytest.raises(ResultsError, match="reference_vqa has no front of accuracy and mean energy of a request: "):
        results.front("energy")


def test_the_conclusion_is_a_record_and_in_the_folder(results: kp.Results) -> None:
    found = results.conclusion
    assert found.task == "reference_vqa" and results.conclusions() == [found]
    assert json.loads((results.folder / "conclusion.json").read_text())["sentence"] == found.sentence
    assert str(found).startswith(f"conclusion: {found.sentence}")


def test_other_settings_of_the_folder_are_left_out(results: kp.Results) -> None:
    first = kp.Results(results.folder, results.settings[:1], {})
    assert list(first.frame()["setting"]) == ["tier-low_topk2_blocks3"]


def test_a_folder_is_loaded_wherever_it_lies(results: kp.Results, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in results.folder.glob("*.json"):
        (moved / path.name).write_bytes(path.read_bytes())
    loaded = kp.load(str(moved))
    assert loaded.settings == results.settings
    assert loaded.frame().equals(results.frame())


def test_the_page_is_written_where_it_is_wanted(results: kp.Results, tmp_path: Path) -> None:
    assert results.report(tmp_path / "page.html") == tmp_path / "page.html"
    assert (tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_a_wrong_value_or_name_is_one_line() -> None:
    with pytest.raises(ConfigurationError, match=r"^unknown tier 'lwo' \(did you mean low"):
        kp.profile(tiers=["lwo"])
    with pytest.raises(ConfigurationError, match=r"^num_sample: .*\(did you mean samples or .*\?\); every flag "):
        kp.profile(num_sample=3)
    with pytest.raises(ConfigurationError, match=r"^tier: there is no such argument \(did you mean tiers\?\)"):
        kp.profile(tier="low")
    with pytest.raises(ConfigurationError, match=r"^sedd: there is no such argument \(did you mean seed\?\)"):
        kp.profile(sedd=1)
    with pytest.raises(ConfigurationError, match=r"^unknown tier 'lwo' \(did you mean low"):
        kp.profile(tier_list=["lwo"])
    with pytest.raises(ConfigurationError, match=r"^tier_list: given twice, also by its short name tiers; give one"):
        kp.profile(tiers=["low"], tier_list=["low"])
    with pytest.raises(ConfigurationError, match=r"^dry_run: this call measures; for a plan run the command"):
        kp.profile(dry_run=True)
    with pytest.raises(ConfigurationError, match=r"^output_dir: a path is missing; write \. for the current folder"):
        kp.profile(output_dir="")


def test_errors_name_the_arguments_that_were_typed() -> None:
    with pytest.raises(ConfigurationError, match=r"^samples: .*valid integer; write 12 without quotes \(given: '12'\)"):
        kp.profile(samples="12")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"^top_k: "):
        kp.profile(top_k=[4, "x"])  # type: ignore[list-item]
    with pytest.raises(ConfigurationError, match=r"^top_k_list: "):
        kp.profile(top_k_list=[4, "x"])
    with pytest.raises(ConfigurationError, match=r"^num_configs 3 is for sampling_strategy lhs, not for balanced"):
        kp.profile(num_configs=3)
    with pytest.raises(ConfigurationError, match=r"^data_file is the whole data set: task cannot act"):
        kp.profile(task="reference_vqa", data_file="a.csv")


def test_one_value_is_a_list_of_one() -> None:
    given = {"tiers": "low", "top_k": 4, "ids": np.array([3, 5]), "active_blocks": range(3, 5), "stop": "\n"}
    assert flags_of(given) == {
        "tier_list": ("low",), "top_k_list": (4,), "ids": (3, 5), "num_active_blocks_list": (3, 4), "stop": ("\n",),
    }  # fmt: skip
    assert flags_of({"samples": np.int64(3), "energy": "off", "stop": None}) == {
        "num_samples": 3, "energy": "off", "stop": None,
    }  # fmt: skip
    config = ProfilingConfig.of(**flags_of(given))
    assert (config.knobs.top_k_list, config.task.ids) == ((4,), (3, 5))


def test_a_notebook_shows_conclusion_front_and_table(results: kp.Results) -> None:
    shown = results._repr_html_()
    assert results.conclusion.sentence.split("'")[0] in html.unescape(shown)
    assert shown.count("<tr>") > 3 and "tier-low_topk4_blocks3" in shown
    assert not re.search(r"<script|src=|href=|@import|url\(", shown)
    failed = kp.Results(results.folder, results.settings, {"k": SettingFailure("OutOfMemory", "no <memory>", 3)})
    assert "k failed: no &lt;memory&gt;" in failed._repr_html_()
    empty = kp.Results(results.folder / "none", (), {})
    assert "is not a folder" in empty._repr_html_()


def test_the_pages_of_a_notebook_stay_small(results: kp.Results) -> None:
    first = results.settings[0]
    for each in (first, first.per_sample_results[0], results.sweep, setting_of(first)):
        assert len(repr(each)) < 400 and len(str(each)) < 400
    assert repr(setting_of(first)) == "Setting('tier-low_topk2_blocks3')"
    assert "tier-low_topk2_blocks3" in first._repr_html_() and "top-k" in setting_of(first)._repr_html_()
    # A row of the table, and a mark with its name in the picture.
    a_setting = len(table(dict.fromkeys(map(str, range(12)), True), [["x" * 30] * 12])) + 400
    assert len(results._repr_html_()) + 60 * a_setting < 100_000


def test_the_front_is_a_picture_that_shows_itself(results: kp.Results) -> None:
    figure = results.plot(num_draws=50)
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    (front,) = results._fronts("latency_mean", 50)
    drawn = front_svg(front, {point.key: point.word for point in front.front.points})
    assert "on the front" in drawn and "on the front" not in front_svg(front, {})
    assert drawn.count("<title>") == 2 and re.search("low_topk[24]_blocks3", drawn) and len(drawn) < 5000
    with pytest.raises(ResultsError, match=r"no cost 'latency_men' \(did you mean latency_mean\?\)"):
        results.plot("latency_men")


def test_runs_are_compared_as_data(results: kp.Results, tmp_path: Path) -> None:
    moved = shutil.copytree(results.folder, tmp_path / "moved")
    found = kp.compare(results, moved)
    frame = found.frame()
    assert {"run", "task", "setting", "quantity", "unit", "A", "B", "change", "low", "high", "verdict"} <= set(frame)
    latency = frame[frame["quantity"] == "latency"]
    assert list(latency["is_pooled"]) == [False, False, True] and set(latency["change"]) == {1.0}
    # Other load on the machine of the test makes the runs INVALID.
    assert found.verdict == (None if found.comparison.voided_by else latency["verdict"].iloc[-1])
    assert found.sentence == "; ".join(found.comparison.headlines)
    assert any("the same measurement" in each for each in found.sentences)
    assert "all 2 settings" in found._repr_html_() and found.sentence in repr(found)
    assert found.plot()._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    with pytest.raises(ResultsError, match=r"^one run is given; compare it with another"):
        kp.compare(results)


def test_the_import_alone_takes_no_torch() -> None:
    code = "import sys, knob_profiler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'profil'"):
        kp.profil  # noqa: B018


def test_a_run_without_any_result_raises_with_the_reasons(tmp_path: Path) -> None:
    """A limit that no sample can keep; the reason would be lost, as a later call only finds an empty folder."""
    with pytest.raises(ResultsError, match=r"^no setting gave a result: .*blocks3.* failed with SampleTimedOut: all "):
        kp.profile(
            tiers="low", top_k=2, active_blocks=3, samples=2, output_dir=tmp_path, no_reference=True,
            sample_timeout=0.001, max_config_retries=0, num_warmup_runs=0,
        )  # fmt: skip
