"""The search through the pipeline: its files, its journals, stopping and going on, failures, several processes."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiment_core_utils import measurement
from experiment_core_utils.k_results_aggregation import collect_finished
from experiment_core_utils.l_results_csv_cleaning import closing_table, places_of, search_sentence, setting_key
from experiment_core_utils.pareto_run import SEARCH_FILE, check_searchable
from experiment_core_utils.pipeline import RunReport, run_profiling
from experiment_core_utils.primitives.config import ProfilingConfig, parse_config
from experiment_core_utils.primitives.errors import ConfigurationError, OutOfMemory, Stopped, WorkerLost
from experiment_core_utils.primitives.interruption import StopRequest
from experiment_core_utils.primitives.journal import JOURNAL_VERSION, Journal
from experiment_core_utils.primitives.records import (
    FailedSample,
    FinishedSample,
    JournalHeader,
    MemoryReading,
    SettingFailure,
    ShareDone,
)
from experiment_core_utils.tasks.registry import get_metric

NUM_SAMPLES = 18
MEMORY = MemoryReading(None, None, 1, "no GPU")


def search_config(checkpoint: Path, output_dir: Path) -> ProfilingConfig:
    """A tiny random model: no answer is right, so that the fastest setting is as good as any."""
    return parse_config(
        ["--model_path", str(checkpoint), "--output_dir", str(output_dir), "--num_samples", str(NUM_SAMPLES),
         "--num_runs_per_sample", "1", "--num_warmup_runs", "0", "--num_threads", "1", "--max_new_tokens", "2",
         "--tier_list", "low", "--top_k_list", "2", "4", "--num_active_blocks_list", "3", "4", "--config_retry_delay",
         "0", "--pareto_search"]
    )  # fmt: skip


def settings_in(content: dict[str, Any]) -> list[str]:
    places = ("front", "undecided", "set_aside", "eliminated")
    return sorted(each["setting"] for place in places for each in content[place])


@pytest.fixture(scope="module")
def searched(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[ProfilingConfig, RunReport]:
    config = search_config(tiny_checkpoint, tmp_path_factory.mktemp("searched"))
    return config, run_profiling(config)


def test_every_setting_has_its_result_with_the_samples_of_its_rounds(
    searched: tuple[ProfilingConfig, RunReport],
) -> None:
    config, report = searched
    content = json.loads((config.output_dir / SEARCH_FILE).read_text())
    assert report.search == content
    assert settings_in(content) == sorted(setting_key(result) for result in report.results)
    assert len(report.results) == 4
    # The first round: half of a third of 18 samples; the same 3 for all, in the order of the seed.
    assert content["rounds"][0] == dict.fromkeys(settings_in(content), 3)
    for result in report.results:
        key = setting_key(result)
        assert result["num_samples"] == sum(each.get(key, 0) for each in content["rounds"])
        assert result["sample_ids"] == [sample["sample_id"] for sample in result["per_sample_results"]]
        assert result["provenance"]["experimental_variables"]["pareto_search"] is True
    standing = [each for place in ("front", "undecided") for each in content[place]]
    assert len({each["num_samples"] for each in standing}) == 1
    model_ms = sum(run["T_total"] for result in report.results for sample in result["per_sample_results"]
                   for run in sample["runs"])  # fmt: skip
    assert content["T_model"] == pytest.approx(model_ms)
    assert content["share"] == pytest.approx(content["T_model"] / content["T_model_full_grid"])
    for each in standing:
        (own,) = (result for result in report.results if setting_key(result) == each["setting"])
        assert json.loads((config.output_dir / each["result_file"]).read_text()) == own
        assert each["accuracy"] == own["accuracy"]
        assert each["T_total_mean"] == pytest.approx(own["aggregate_stats"]["T_total_mean"])
    # Once it is saved, its journals are gone.
    assert not list((config.output_dir / ".parts").glob("*.jsonl"))


def test_a_finished_search_is_not_done_again(searched: tuple[ProfilingConfig, RunReport]) -> None:
    config, report = searched
    again = run_profiling(config)
    assert again.experiment_id is None
    assert (again.search, again.results) == (report.search, report.results)
    # Another margin is another search.
    assert run_profiling(replace(config, pareto_margin=0.02)).experiment_id is not None


def test_the_table_says_where_each_setting_ended(searched: tuple[ProfilingConfig, RunReport]) -> None:
    _, report = searched
    assert report.search is not None
    lines = closing_table(report.results, places_of(report.search)).splitlines()
    assert lines[0].split()[-1] == "search"
    assert "samples" in lines[0]
    assert [line.split()[-1] for line in lines[1:]].count("front") == len(report.search["front"])
    assert lines[1].endswith("front")
    assert search_sentence(report.search).startswith(f"front of {len(report.search['front'])} settings (")


class Interrupted(Exception):
    """Stands for a kill: nothing after it runs."""


@pytest.fixture
def cut_after(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Breaks a run off once that many samples are in the journals."""

    def arm(samples: int) -> list[int]:
        appended: list[int] = []
        original = Journal.append

        def append(self: Journal, line: Any) -> None:
            if len(appended) == samples and isinstance(line, FinishedSample):
                raise Interrupted
            original(self, line)
            if isinstance(line, FinishedSample):
                appended.append(line.sample_id)

        monkeypatch.setattr(Journal, "append", append)
        return appended

    return arm


@pytest.mark.parametrize("samples", [0, 5, 12, 14])
def test_a_search_that_was_cut_off_goes_on_without_measuring_anything_twice(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_after: Any, samples: int
) -> None:
    config = search_config(tiny_checkpoint, tmp_path)
    before = cut_after(samples)
    try:
        run_profiling(config)
        complete = True
    except Interrupted:
        complete = False
    assert not complete or len(before) <= samples
    monkeypatch.undo()
    after = cut_after(10_000)
    report = run_profiling(config)
    assert report.search is not None
    measured = sum(result["num_samples"] for result in report.results)
    assert len(before) + len(after) == measured == sum(sum(each.values()) for each in report.search["rounds"])


def test_a_search_killed_while_it_saves_is_saved_by_the_same_command(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_after: Any
) -> None:
    config = search_config(tiny_checkpoint, tmp_path)
    first = run_profiling(config)
    (tmp_path / SEARCH_FILE).unlink()
    # The journals are gone here; a kill before the file is there leaves them. Without either it is all measured again.
    measured = cut_after(10_000)
    second = run_profiling(config)
    assert len(measured) == sum(result["num_samples"] for result in second.results)
    assert first.search is not None
    assert second.search is not None
    assert second.search["rounds"][0] == first.search["rounds"][0]


def test_a_setting_that_fails_is_recorded_and_tried_again_by_the_next_run(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_after: Any
) -> None:
    config = replace(search_config(tiny_checkpoint, tmp_path), max_config_retries=0)
    broken = "tier-low_topk2_blocks3"
    with monkeypatch.context() as patched:
        check = measurement.check_proof

        def refuse(proof: Any, setting: Any, default_top_k: int) -> None:
            if setting.key == broken:
                raise OutOfMemory("no room")
            check(proof, setting, default_top_k)

        patched.setattr(measurement, "check_proof", refuse)
        report = run_profiling(config)
    assert report.exit_code == 1
    assert report.failed == {broken: SettingFailure("OutOfMemory", "no room", 1)}
    assert report.search is not None
    assert report.search["failed"] == {broken: {"error": "OutOfMemory", "reason": "no room", "attempts": 1}}
    assert broken not in settings_in(report.search)
    assert len(report.results) == 3
    after = cut_after(10_000)
    again = run_profiling(config)
    assert again.exit_code == 0
    assert again.search is not None
    assert broken in settings_in(again.search)
    # What the others had in the first round was not measured again.
    assert len(after) <= sum(result["num_samples"] for result in again.results) - 9


def test_what_cannot_be_searched_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="cider_score has none that hold by themselves"):
        check_searchable(get_metric("cider_score"))
    check_searchable(get_metric("vqa_score"))
    for flags, message in (
        (["--pareto_search", "--pareto_margin", "1"], "--pareto_margin 1.0 is not possible"),
        (["--pareto_search", "--pareto_alpha", "0"], "--pareto_alpha 0.0 is not possible"),
        (["--pareto_margin", "0.02"], "say how --pareto_search decides"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            parse_config(flags)


KEY, FINGERPRINT = "tier-low_topk4_blocks3", "f"


def journal_of(folder: Path, rank: int) -> Journal:
    header = JournalHeader(JOURNAL_VERSION, KEY, FINGERPRINT, rank, 2, "0001", (rank,))
    return Journal(folder, header)


def failed(sample_id: int) -> FinishedSample:
    return FinishedSample(None, FailedSample(sample_id, "SampleError", "blank"), MEMORY)


def collected(folder: Path, timeout_s: float = 5.0, stop: StopRequest | None = None) -> list[int]:
    shares = {0: [1], 1: [2]}
    parts = collect_finished(folder, KEY, FINGERPRINT, "0001", shares, timeout_s, stop or StopRequest())
    return [failure.sample_id for part in parts for failure in part.failures]


def test_a_round_waits_for_its_samples_and_not_for_the_end_of_the_round_before(tmp_path: Path) -> None:
    with journal_of(tmp_path, 0) as own, journal_of(tmp_path, 1) as other:
        own.append(failed(1))
        other.append(failed(7))
        other.append(ShareDone("0001", None, None, None))
        later = threading.Timer(0.7, other.append, [failed(2)])
        later.start()
        assert collected(tmp_path) == [1, 7, 2]
        later.join()


def test_a_round_ends_where_a_process_gave_the_setting_up(tmp_path: Path) -> None:
    with journal_of(tmp_path, 0) as own, journal_of(tmp_path, 1) as other:
        own.append(failed(1))
        other.append(ShareDone("0001", None, None, SettingFailure("OutOfMemory", "no room", 1)))
        assert collected(tmp_path) == [1]


def test_a_process_that_is_gone_is_named_with_what_it_owes(tmp_path: Path) -> None:
    with journal_of(tmp_path, 0) as own:
        own.append(failed(1))
        with pytest.raises(WorkerLost, match=r"process 1 \(owes 1 samples: 2\)"):
            collected(tmp_path, timeout_s=0.6)
        stop = StopRequest()
        stop.note(2, None)
        with pytest.raises(Stopped):
            collected(tmp_path, stop=stop)
