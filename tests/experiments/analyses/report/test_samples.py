"""The samples of a report: which ones, their pictures, and why a picture is not there."""

import shlex
from base64 import b64decode
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from experiment_core_utils.records.provenance import Provenance, TaskDescription
from experiment_core_utils.records.setting_result import SettingResult
from experiment_core_utils.tasks.content import with_picture_digest
from experiment_core_utils.tasks.registry import load_data_file, load_task
from experiments.analyses.report.analyses import analyse
from experiments.analyses.report.content import report_of
from experiments.analyses.report.page import page_of
from experiments.analyses.report.samples import Pictures, _by_id, chosen_ids, sample_section
from experiments.analyses.sweeps import load_sweep
from tests.experiments.hand_made_sweep import reference, result, setting, write
from tests.hand_made_records import measured_sample

MARKUP = "<b onclick=alert(1)>blue</b>"


def content(*predictions: str) -> list[Any]:
    return [measured_sample(at, prediction=text) for at, text in enumerate(predictions)]


def test_those_that_settings_differ_in_are_chosen_first(tmp_path: Path) -> None:
    """Of ids 0 to 9, 0 and 5 differ, 1 and 2 are wrong everywhere, the others right everywhere."""
    folder = write(
        tmp_path, result(setting("low"), content(*"0001111111")), result(setting("high"), content(*"1001101111"))
    )  # fmt: skip
    samples = _by_id(load_sweep(folder).settings)
    # Half of 4 differ, half of what is left is wrong.
    assert chosen_ids(samples, 1.0, 4) == [0, 5, 1, 3]
    assert chosen_ids(samples, 1.0, 8) == [0, 5, 1, 2, 3, 6, 7, 9]
    # Samples of a kind that is not there leave their room to others.
    assert chosen_ids({at: samples[at] for at in (3, 4, 6)}, 1.0, 2) == [3, 6]


def test_each_answer_is_beside_the_settings_that_gave_it(tmp_path: Path) -> None:
    folder = write(
        tmp_path, result(setting("low"), content("1", "1", "none")), result(setting("high"), content("0", "1", "none")),
        reference(content("1", "0", "none")),
    )  # fmt: skip
    found = sample_section(load_sweep(folder).settings)
    assert found.intro == "2 of 3 samples, those that settings differ in first."
    assert found.settings == ["tier-low_topk2_blocks3", "tier-high_topk2_blocks3", "own_topk4_blocks4"]
    first, second = found.samples
    assert (first.title, first.question, first.expected) == ("signs, sample 0", "what?", "stop")
    assert first.verdict == "right at 2 of 3 settings" and first.differs and first.wrong == [1]
    right, wrong = first.answers
    assert (right.text, right.is_right) == ("1", True)
    assert right.settings == "tier-low_topk2_blocks3, own_topk4_blocks4 (reference)"
    assert (wrong.text, wrong.is_right, wrong.score, wrong.numbers) == ("0", False, "0 of 1", [1])
    assert second.verdict == "right at 2 of 3 settings" and second.wrong == [2]
    assert first.picture is None and first.no_picture_reason == "the data of signs are not read again for a page"


def test_an_answer_of_all_settings_names_none(tmp_path: Path) -> None:
    folder = write(tmp_path, result(setting("low"), content("1")), result(setting("high"), content("1")))
    (shown,) = sample_section(load_sweep(folder).settings).samples
    assert [each.settings for each in shown.answers] == ["all settings"] and not shown.differs and shown.wrong == []


def described(name: str, split: str, command: str = "knobprof profile") -> Provenance:
    return Provenance(task=TaskDescription(name=name, split=split), command=command)


def stored(picture_sha256: str | None, sample_id: int = 1) -> Any:
    sample = SettingResult.from_content(result(setting(), content("1", "1")), "a file").per_sample_results[sample_id]
    return sample.with_keys(picture_sha256=picture_sha256)


def pixels(uri: str | None) -> Image.Image:
    assert uri is not None and uri.startswith("data:image/jpeg;base64,")
    return Image.open(BytesIO(b64decode(uri.partition(",")[2])))


def test_a_generated_picture_is_made_again_and_must_be_the_one_that_was_measured() -> None:
    sample = with_picture_digest(load_task("reference_vqa", "validation")[1])
    pictures = Pictures(described("reference_vqa", "validation"))
    uri, reason = pictures.of(stored(sample.picture_sha256))
    assert reason is None and sample.image is not None
    shown = pixels(uri).convert("RGB")
    assert max(shown.size) <= 240
    # Of a lossy copy the mean colour is the same.
    one, other = (np.asarray(each.convert("RGB"), dtype=float).mean(axis=(0, 1)) for each in (shown, sample.image))
    assert one == pytest.approx(other, abs=4)
    assert pictures.of(stored("0" * 64)) == (
        None, "the picture is another now than when it was measured"
    )  # fmt: skip


def test_pictures_of_own_data_are_read_by_the_flags_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "own data").mkdir()
    Image.new("RGB", (640, 480), (200, 30, 30)).save(tmp_path / "own data" / "red.png")
    table = tmp_path / "own data" / "rows.jsonl"
    row = '{"image": "red.png", "question": "which colour?", "answer": "red"}\n'
    table.write_text(2 * row)
    digest = with_picture_digest(load_data_file(table)[1]).picture_sha256
    command = shlex.join(["python", "acc_lat_profiling.py", "--data_file", str(table), "--num_samples", "2"])
    pictures = Pictures(described("rows", "all", command))
    uri, reason = pictures.of(stored(digest))
    assert reason is None and pixels(uri).size == (240, 180)
    # Another file is no picture of this run, and a result without a digest cannot show that it is.
    assert pictures.of(stored(None))[0] is None
    Image.new("RGB", (640, 480), (30, 30, 200)).save(tmp_path / "own data" / "red.png")
    assert Pictures(described("rows", "all", command)).of(stored(digest)) == (
        None, "the picture is another now than when it was measured"
    )  # fmt: skip
    table.unlink()
    picture, reason = Pictures(described("rows", "all", command)).of(stored(digest))
    assert picture is None and str(reason).startswith("the data cannot be read again: --data_file")


@pytest.mark.parametrize(
    "flags",
    [
        "profile --data_file 'torn",
        "profile --task_module tasks.py --data_dir d",
        "profile --knob_module knobs.py --data_dir d",
        "profile --data_dir d",
        "",
    ],
)
def test_no_code_of_a_task_runs_and_no_broken_command_ends_the_page(flags: str) -> None:
    picture, reason = Pictures(described("mine", "all", f"knobprof {flags}")).of(stored("0" * 64))
    assert picture is None and reason is not None


def test_texts_of_samples_are_escaped_on_the_page(tmp_path: Path) -> None:
    made = result(setting(), content("1", "0"))
    for sample in made["per_sample_results"]:
        sample["metadata"] |= {"question": MARKUP, "prompt": f"User: {MARKUP}", "options": [MARKUP], "answer_index": 0}
        sample["metadata"]["answers"] = [MARKUP]
        sample["pred"] = MARKUP
    made["provenance"]["final_prompt"] = {"sample_id": 0, "text": f"<s>{MARKUP}", "token_ids": [1, [7, 576], 2]}
    page = page_of(report_of(analyse([write(tmp_path, made)])))
    assert "<b onclick" not in page
    shown = page[page.index('<section id="samples">') :]
    assert shown.count("&lt;b onclick=alert(1)&gt;blue&lt;/b&gt;") == 2 * 5 + 1
    assert "ids: [1, [7, 576], 2]" in shown
