"""What `knobprof verify` says of a run's folder, of one that was edited, and of one that lacks a part."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiment_core_utils.l_results_csv_cleaning import write_tables
from experiment_core_utils.primitives.errors import ResultsRefused
from experiment_core_utils.records.caveats import caveat
from experiment_core_utils.records.conclusion import save_conclusion
from experiment_core_utils.records.result_files import RESULT_FILES
from experiment_core_utils.records.setting_result import (
    SettingResult,
    read_setting,
    save_setting_result,
    setting_file_name,
)
from experiments.analyses.sweeps import load_sweep
from experiments.core_exp.closing_lines import concluded
from experiments.core_exp.verify_run import main, result_faults, verify
from tests.experiments.hand_made_sweep import result, setting
from tests.hand_made_records import measured_sample, staged_run

NUMBER = re.compile(r"(?<=[:\[ ])-?[0-9]+\.?[0-9]*(?:e[+-]?[0-9]+)?(?=[,\]}\s])")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two settings of six samples, as a run leaves them."""
    made = []
    for top_k, total_s in ((2, 0.5), (8, 0.8)):
        samples = [measured_sample(at, staged_run(0.2, total_s - 0.2 + at / 100, (0.01, 0.02))) for at in range(6)]
        made.append(SettingResult.from_content(result(setting("low", top_k), samples), "made"))
    for each in made:
        save_setting_result(each, tmp_path / setting_file_name(each))
    write_tables(made, "signs", tmp_path)
    found = concluded(made, tmp_path).conclusion
    assert found is not None
    save_conclusion(found, "0001", tmp_path)
    return tmp_path


def test_a_folder_that_nobody_touched_is_valid(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = verify(folder)
    assert (found.word, found.faults, found.num_results, found.num_unchecked) == ("VALID", (), 2, 0)
    assert main([str(folder)]) == 0 and capsys.readouterr().out == "VALID: 2 results, as the run wrote them\n"


def test_a_part_that_some_answers_have_none_of_is_no_edit(tmp_path: Path) -> None:
    """Two of three answers end with their first token; the mean of decoding is over all three."""
    samples = [measured_sample(0, staged_run(None, 0.5, (0.3,)))]
    samples += [measured_sample(at, staged_run(None, 0.5, ())) for at in (1, 2)]
    made = SettingResult.from_content(result(setting("low", 2), samples), "made")
    assert made.aggregate_stats["T_LLM_decode_mean"] == pytest.approx(100.0)
    path = tmp_path / setting_file_name(made)
    assert [place for place in result_faults(path, made) if "aggregate_stats" in place] == []


def test_a_caveat_that_its_figures_do_not_show_is_an_edit(folder: Path) -> None:
    """One that the run noted stays: nothing else in the file shows it."""
    path = min(folder.glob(RESULT_FILES))
    made = read_setting(path).with_keys(provenance=read_setting(path).provenance.with_keys(run_uid="1"))
    for kind, figures, places in (
        ("answers_empty", {"fraction": 0.5}, ["answers_empty"]),
        ("shared_cores", {"num_processes": 2}, []),
    ):
        provenance = made.provenance.with_caveats([caveat(kind, **figures)])
        found = list(result_faults(path, made.with_keys(digest="1", provenance=provenance)))
        assert [each.split(": ")[1].split(" ")[0] for each in found] == places


def test_every_number_of_a_result_that_is_changed_is_an_edit(folder: Path) -> None:
    path = min(folder.glob(RESULT_FILES))
    text = path.read_text()
    places = list(NUMBER.finditer(text))
    assert len(places) > 200
    for place in places[::7]:
        other = "7" if place[0] != "7" else "6"
        path.write_text(text[: place.start()] + other + text[place.end() :])
        with pytest.raises(ResultsRefused):
            read_setting(path)
    # Spaces are no content.
    path.write_text(text.replace('"accuracy": ', '"accuracy":  '))
    assert verify(folder).word == "VALID"


def test_times_that_were_scaled_everywhere_are_an_edit_for_every_reader(folder: Path) -> None:
    for path in folder.glob(RESULT_FILES):
        scaled = re.sub(r'("T_\w+": )([0-9.]+)', lambda found: f"{found[1]}{float(found[2]) * 1.3}", path.read_text())
        path.write_text(scaled)
    assert verify(folder).word == "EDITED"
    with pytest.raises(ResultsRefused, match="was EDITED: its digest is that of another content"):
        load_sweep(folder)


def signed(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A result that was changed by somebody who knows how to make its digest."""
    content = json.loads(path.read_text())
    change(content)
    content.pop("digest")
    save_setting_result(SettingResult.from_content(content, "made"), path)


def test_a_figure_that_is_not_that_of_its_samples_is_an_edit_whatever_its_digest(folder: Path) -> None:
    path = min(folder.glob(RESULT_FILES))
    signed(path, lambda content: content["aggregate_stats"].update(T_total_mean=123.0))
    places = [fault.place for fault in verify(folder).faults if fault.word == "EDITED"]
    assert any("aggregate_stats.T_total_mean is 123.0, and the samples' mean is" in place for place in places)
    # The table is of the result before.
    assert any("signs_settings.csv is not that of the results: " in place for place in places)


def test_a_cell_of_a_table_and_a_word_of_the_conclusion_are_edits(folder: Path) -> None:
    table, conclusion = folder / "signs_settings.csv", folder / "conclusion.json"
    before = table.read_text(), conclusion.read_text()
    table.write_text(before[0].replace("low", "high", 1))
    assert verify(folder).word == "EDITED"
    table.write_text(before[0])
    conclusion.write_text(before[1].replace('"word": "', '"word": "surely '))
    (fault,) = verify(folder).faults
    assert fault.word == "EDITED" and "conclusion.json is not that of the results: word is " in fault.place
    conclusion.write_text(before[1])
    assert verify(folder).word == "VALID"


def test_a_result_under_another_name_is_an_edit(folder: Path) -> None:
    path = min(folder.glob(RESULT_FILES))
    shutil.move(path, path.with_name(path.name.replace("topk2", "topk4").replace("topk8", "topk4")))
    assert any("its content belongs to signs_imgsize" in fault.place for fault in verify(folder).faults)


def test_what_is_not_there_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "signs_samples.csv").unlink()
    assert main([str(folder)]) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first == f"INCOMPLETE: {folder}/signs_samples.csv is not there; `knobprof tables {folder}` writes it"
    assert last == "INCOMPLETE: 2 results"


def test_a_result_without_a_sample_has_no_figures_to_check(folder: Path) -> None:
    result = read_setting(min(folder.glob(RESULT_FILES)))
    none = result.with_keys(per_sample_results=[], aggregate_stats={"T_total_mean": None, "T_total_n": 0})
    assert list(result_faults(folder / setting_file_name(none), none)) == []
