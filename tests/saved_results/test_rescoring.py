"""Stored answers scored again, and settings compared in pairs, without a model."""

import json
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import VisionTarget, own_target, tier_target, token_target
from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError, SampleError
from experiment_core_utils.records.caveats import Caveat
from experiment_core_utils.records.sample_result import Metadata, SampleResult
from experiment_core_utils.saved_results.rescoring import compare_folder, rescore, stored_answer
from experiment_core_utils.saved_results.tasks_command import main as tasks_command
from experiment_core_utils.tasks.interface import Answer, Scoring
from experiment_core_utils.tasks.registry import get_metric
from tests.experiments import hand_made_sweep as sweep
from tests.hand_made_records import SETTING, ReadOff, failed_sample, measured_sample, part, stored_result

FULL = Setting.of(vision=tier_target("low"), top_k=4, num_active_blocks=RunningBlocks.of((0, 1, 2, 3)))
FULL_FILE = "signs_imgsizetier-low_crops2_topk4_blocks4.json"
SMALL_FILE = "signs_imgsizetier-low_crops2_topk2_blocks3.json"


class Strict(ReadOff):
    """All or nothing: what `ReadOff` gives 1 stays, the rest is 0."""

    def score(self, answers: list[Answer]) -> Scoring:
        scores = [replace(score, value=float(score.value == 1), details={}) for score in super().score(answers).scores]
        return Scoring(tuple(scores), sum(score.value or 0 for score in scores) / len(scores))


@dataclass(frozen=True)
class Refusing(ReadOff):
    """A metric that these answers do not fit."""

    def score(self, answers: list[Answer]) -> Scoring:
        raise SampleError("no options to choose from")


def write(folder: Path, name: str, setting: Setting, *predictions: str, failed: int = 0) -> dict[str, Any]:
    samples = [
        measured_sample(index, prediction=text, image_id=f"p{index // 2}") for index, text in enumerate(predictions)
    ]
    failures = tuple(failed_sample(len(samples) + index, "unreadable") for index in range(failed))
    content = stored_result(part(*samples, failures=failures), setting)
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(content))
    return json.loads(json.dumps(content))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    write(folder, FULL_FILE, FULL, "1", "1", "0.5", "1")
    write(folder, SMALL_FILE, SETTING, "1", "0.5", "?", "0", failed=1)
    return folder


def test_the_same_metric_gives_the_same_file(results: Path) -> None:
    done = rescore(results, ReadOff(), None)
    assert done.output == results / "rescored_read_off"
    for name in (FULL_FILE, SMALL_FILE):
        before, after = json.loads((results / name).read_text()), json.loads((done.output / name).read_text())
        origin, _ = after.pop("rescored"), after.pop("digest")
        # Results that were made by hand lack the caveats of their answers.
        before["provenance"] |= {name: after["provenance"].get(name, []) for name in ("caveats", "caveat_records")}
        after["provenance"] = {"caveats": [], "caveat_records": []} | after["provenance"]
        assert after == before
        assert origin == {"file": name, "metric_before": "read_off", "accuracy_before": before["accuracy"]}


def test_thinking_is_not_scored_again_either(tmp_path: Path) -> None:
    """Also in files from before answers were noted; a noted answer counts as it is."""
    content = write(tmp_path, FULL_FILE, FULL, "1", "1", "0.5")["per_sample_results"]
    predictions = ("<think>0</think>1", "?", "hm</think> 0.5")
    first, noted, last = (
        SampleResult.model_validate(each | {"pred": pred}) for each, pred in zip(content, predictions, strict=True)
    )
    answers = [stored_answer(each).prediction for each in (first, noted.with_keys(answer="1"), last)]
    assert answers == ["1", "1", "0.5"]


def test_another_metric_changes_scores_and_nothing_else(results: Path) -> None:
    measured = {path.name: path.read_bytes() for path in results.iterdir()}
    done = rescore(results, Strict("strict"), None)
    assert {path.name: path.read_bytes() for path in results.glob("*.json")} == measured
    small, full = done.after  # in order of their names
    assert (full.accuracy, small.accuracy) == (0.75, 0.25)  # was 0.875 and 0.375
    assert (full.metric, small.num_unparsed, small.share_failed) == ("strict", 1, 0.2)
    assert [sample.accuracy for sample in small.per_sample_results] == [1.0, 0.0, 0.0, 0.0]
    assert [sample.parse_status for sample in small.per_sample_results] == ["text", "text", "unparsed", "text"]
    assert full.content()["accuracy_by_type"] == {"reading": {"accuracy": 0.75, "num_samples": 4}}
    assert full.aggregate_stats == done.before[1].aggregate_stats
    (csv_path,) = done.csv_paths
    assert csv_path == done.output / "signs_settings.csv"
    assert pd.read_csv(csv_path)["accuracy"].tolist() == [0.25, 0.75]


def test_measured_files_are_never_written_over(results: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    write(elsewhere, FULL_FILE, FULL, "0")
    for folder in (results, elsewhere):
        with pytest.raises(ConfigurationError, match="contains measured results such as signs_.*another --output"):
            rescore(results, Strict("strict"), folder)
    again = [rescore(results, Strict("strict"), tmp_path / "again").after for _ in range(2)]
    assert again[0] == again[1]


def test_a_metric_that_does_not_fit_is_one_line(results: Path) -> None:
    with pytest.raises(ConfigurationError, match="mc cannot score signs_.*: no options to choose from; choose another"):
        rescore(results, Refusing("mc"), None)
    assert not list(results.glob("rescored*"))


@pytest.mark.parametrize("key", ["per_sample_results", "num_failed_samples", "accuracy"])
def test_a_file_that_lacks_answers_is_one_line(results: Path, key: str) -> None:
    content = json.loads((results / FULL_FILE).read_text())
    del content[key]
    (results / FULL_FILE).write_text(json.dumps(content))
    with pytest.raises(ResultsError, match=f"{FULL_FILE} lacks '{key}'"):
        rescore(results, ReadOff(), None)


def test_a_choice_comes_back_with_its_options(results: Path) -> None:
    metadata = Metadata(answers=["blue"], image_id="x", options=["red", "blue"], answer_index=1)
    stored = SampleResult.model_construct(pred="B", question_type="art", metadata=metadata)
    assert stored_answer(stored) == Answer("B", ("blue",), ("red", "blue"), 1, "art", "x")


# --- comparing ----------------------------------------------------------------------------------------------------


def test_every_setting_stands_against_the_largest(results: Path) -> None:
    (found,) = compare_folder(results, None)
    assert (found.task, found.baseline, found.metric) == ("signs", "tier-low_topk4_blocks4", "read_off")
    (comparison,) = found.comparisons.values()
    # 1, 1, 0.5, 1 against 1, 0.5, 0, 0.
    assert (comparison.n, comparison.difference) == (4, -0.5)
    assert (comparison.better, comparison.worse, comparison.equal) == (0, 3, 1)
    (turned,) = compare_folder(results, "tier-low_topk2_blocks3")
    assert turned.comparisons["tier-low_topk4_blocks4"].difference == 0.5


def test_every_setting_stands_against_the_reference_where_there_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = sweep.write(tmp_path, sweep.result(sweep.setting("high", 8, 4)), sweep.reference())
    (found,) = compare_folder(folder, None)
    assert (found.baseline, list(found.comparisons)) == ("own_topk4_blocks4", ["tier-high_topk8_blocks4"])
    assert tasks_command(["compare", str(folder)]) == 0
    assert "read_off: settings against the reference, own_topk4_blocks4, on the" in capsys.readouterr().out


@pytest.mark.parametrize(
    "targets", [[tier_target("low"), tier_target("high")], [token_target(288), token_target(300)], [own_target()]]
)
def test_the_largest_setting_of_a_model_without_experts(tmp_path: Path, targets: list[VisionTarget]) -> None:
    """A model of one knob or two, whose top-k is null, and whose number of vision tokens may be its own."""
    for target, blocks in reversed(list(product(targets, (4, 3)))):
        setting = Setting.of(vision=target, top_k=None, num_active_blocks=RunningBlocks.of(tuple(range(blocks))))
        write(tmp_path / "results", f"signs_imgsize{setting.key}.json", setting, "1", "0.5")
    (found,) = compare_folder(tmp_path / "results", None)
    assert found.baseline == f"{targets[-1].label}_blocks4"
    assert len(found.comparisons) == 2 * len(targets) - 1


def test_tasks_in_one_folder_are_apart(results: Path) -> None:
    other = stored_result(part(measured_sample(0)), FULL, task="maps")
    (results / FULL_FILE.replace("signs", "maps")).write_text(json.dumps(other))
    maps, signs = compare_folder(results, None)
    assert (maps.task, dict(maps.comparisons), signs.task) == ("maps", {}, "signs")


def test_a_baseline_that_is_not_there_or_not_clear_is_one_line(results: Path) -> None:
    with pytest.raises(ConfigurationError, match="signs has no setting 'x'; give one of tier-low"):
        compare_folder(results, "x")
    one_block = FULL.replaced(top_k=8, num_active_blocks=RunningBlocks.of((0,)))
    write(results, "signs_imgsizetier-low_crops2_topk8_blocks1.json", one_block, "1")
    with pytest.raises(ConfigurationError, match="no setting has all knobs at their largest; give --baseline"):
        compare_folder(results, None)


def test_settings_scored_by_different_metrics_are_not_compared(results: Path) -> None:
    content = json.loads((results / SMALL_FILE).read_text())
    (results / SMALL_FILE).write_text(json.dumps({**content, "metric": "strict"}))
    with pytest.raises(ResultsError, match="signs is scored by read_off and by strict; rescore by one"):
        compare_folder(results, None)


def test_splits_are_apart_and_one_id_must_be_one_question(results: Path) -> None:
    content = json.loads((results / SMALL_FILE).read_text())
    content["per_sample_results"][2]["metadata"]["question"] = "Which other?"
    (results / SMALL_FILE).write_text(json.dumps(content))
    with pytest.raises(ResultsError, match="sample 2 is another question in tier-low_topk2_blocks3 than in"):
        compare_folder(results, None)
    content["provenance"]["task"]["split"] = "train"
    (results / SMALL_FILE).write_text(json.dumps(content))
    assert [len(each.comparisons) for each in compare_folder(results, None)] == [0, 0]


def test_what_differs_beside_the_knobs_is_reported(results: Path) -> None:
    content = json.loads((results / SMALL_FILE).read_text())
    content["provenance"]["experimental_variables"] = {"max_new_tokens": 3}
    (results / SMALL_FILE).write_text(json.dumps(content))
    (found,) = compare_folder(results, None)
    assert found.other_conditions == ("max_new_tokens (3, null)",)


def test_a_file_without_provenance_is_one_line(results: Path) -> None:
    (results / "odd_imgsizetier-low_crops2_topk2_blocks3.json").write_text('{"schema_version": 1}')
    with pytest.raises(ResultsError, match="lacks 'protocol_version': it is broken or something else"):
        compare_folder(results, None)


def test_rescoring_into_a_file_is_refused(results: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigurationError, match="taken is a file; give a folder"):
        rescore(results, ReadOff(), tmp_path / "taken")


def test_captions_are_compared_on_the_same_pictures(tmp_path: Path) -> None:
    """The same answers with one sample less on one side: their own IDFs differ, the paired difference is 0."""
    captions = ["a red square", "a blue circle on grey", "two stars above a square", "nothing but a dog"]
    for name, setting, count in ((FULL_FILE, FULL, 4), (SMALL_FILE, SETTING, 3)):
        samples = [
            replace(measured_sample(index, prediction="1", image_id=f"p{index}"), references=(text, text[2:]))
            for index, text in enumerate(captions[:count])
        ]
        content = stored_result(part(*samples), setting)
        for entry, text in zip(content["per_sample_results"], captions, strict=False):
            entry["pred"] = text[:12]
        (tmp_path / name).write_text(json.dumps(content))
    rescore(tmp_path, get_metric("cider_score"), tmp_path / "anew")
    stored = [json.loads((tmp_path / "anew" / name).read_text()) for name in (FULL_FILE, SMALL_FILE)]
    first, second = ([each["accuracy"] for each in side["per_sample_results"][:3]] for side in stored)
    assert first != second
    (found,) = compare_folder(tmp_path / "anew", None)
    (comparison,) = found.comparisons.values()
    assert (comparison.n, comparison.num_excluded, comparison.difference) == (3, 1, 0.0)


def test_answers_in_sentences_are_scored_again_by_the_relaxed_metric(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    content, path = write(folder, FULL_FILE, FULL, *"00000"), folder / FULL_FILE
    replies = "It says stop.", "It does not say stop.", "stop or go", "", "The sign says: STOP"
    for sample, reply in zip(content["per_sample_results"], replies, strict=True):
        sample["pred"] = reply
    path.write_text(json.dumps(content))
    (after,) = rescore(folder, get_metric("relaxed"), None).after
    assert (after.metric, after.accuracy, after.share_unparsed, after.share_empty) == ("relaxed", 0.4, 0.4, 0.2)
    assert [sample.accuracy for sample in after.per_sample_results] == [1, 0, 0, 0, 1]
    assert after.per_sample_results[0].score_details == {"em": 0, "em_lenient": 0}
    assert [each.kind for each in after.provenance.caveat_records] == ["answers_unparsed", "answers_empty"]
    # What no longer holds goes.
    found = [Caveat.of("answers_unparsed", fraction=1.0, metric="mc"), Caveat.of("random_weights")]
    content["provenance"] |= {"caveat_records": [each.model_dump() for each in found]}
    path.write_text(json.dumps(content))
    (again,) = rescore(folder, get_metric("em_lenient"), tmp_path / "again").after
    assert [each.kind for each in again.provenance.caveat_records] == ["random_weights", "answers_empty"]
