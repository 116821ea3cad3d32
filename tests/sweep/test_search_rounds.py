"""The search through the pipeline: its files, its journals, stopping and going on, failures, several processes."""

import json
import re
import shutil
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from experiment_core_utils.config.profiling import ProfilingConfig, parse_config
from experiment_core_utils.k_results_aggregation import SharedSetting, collect_finished
from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import tier_target
from experiment_core_utils.pipeline import RunReport, run_profiling
from experiment_core_utils.primitives.errors import ConfigurationError, OutOfMemory, ResultsRefused, Stopped, WorkerLost
from experiment_core_utils.primitives.interruption import StopRequest
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.records.journal import JOURNAL_VERSION, Journal
from experiment_core_utils.records.ledger import Ledger
from experiment_core_utils.records.requests import MemoryReading
from experiment_core_utils.records.setting_result import read_setting, setting_key
from experiment_core_utils.records.settings import (
    ArrivalsTrace,
    FinishedSample,
    JournalHeader,
    SettingFailure,
    ShardDone,
)
from experiment_core_utils.saved_results.terminal import closing_table
from experiment_core_utils.sweep.batches import Bench
from experiment_core_utils.sweep.measurer import ShardMeasurer
from experiment_core_utils.sweep.requests import RequestSource
from experiment_core_utils.sweep.rounds import RoundOrder
from experiment_core_utils.sweep.sample_runs import RunContext
from experiment_core_utils.sweep.search_rounds import (
    SEARCH_FILE,
    FrontSearch,
    announce_end,
    check_searchable,
    finished_search,
    only,
    wait_until_all_are_over,
)
from experiment_core_utils.tasks.registry import get_metric, load_task
from tests.documents.test_docs import first_cells
from tests.hand_made_records import failed_sample, measured_sample, part
from tests.processes.forked_runs import KILLED, TWO_PROCESSES, Run, RunServer
from tests.scripted.scripted_model import ScriptedModel
from tests.whole_runs.test_resume import remember

NUM_SAMPLES = 18
MEMORY = MemoryReading(None, None, 1, "no GPU")


def arguments(checkpoint: Path, output_dir: Path) -> tuple[str, ...]:
    """A tiny random model: no answer is right, so that the fastest setting is as good as any."""
    return (
        "--model_path", str(checkpoint), "--output_dir", str(output_dir), "--num_samples", str(NUM_SAMPLES),
        "--num_runs_per_sample", "1", "--num_warmup_runs", "0", "--max_warmup_runs", "1", "--max_repeats", "0",
        "--num_threads", "1", "--max_new_tokens", "2", "--tier_list", "low", "--top_k_list", "2", "4",
        "--num_active_blocks_list", "3", "4", "--config_retry_delay", "0", "--pareto_search",
    )  # fmt: skip


def search_config(checkpoint: Path, output_dir: Path) -> ProfilingConfig:
    return parse_config([*arguments(checkpoint, output_dir), "--no_reference"])


def settings_in(content: dict[str, Any]) -> list[str]:
    places = ("front", "undecided", "eliminated")
    return sorted(each["setting"] for place in places for each in content[place])


@pytest.fixture(scope="module")
def searched(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[ProfilingConfig, RunReport]:
    config = search_config(tiny_checkpoint, tmp_path_factory.mktemp("searched"))
    return config, run_profiling(config)


def test_a_part_of_some_samples_has_the_batches_that_are_of_these() -> None:
    batches = [ArrivalsTrace("0001", 0, 2.0, 2, 2, 0.0, 0.0, 2, 0, None, ids) for ids in ((1, 2), (3, 4))]
    whole = part(*(measured_sample(sample_id) for sample_id in (1, 2, 3, 4)))
    kept = only(replace(whole, arrivals=tuple(batches)), {1, 2})
    assert [each.sample_id for each in kept.samples] == [1, 2] and kept.arrivals == (batches[0],)


def test_every_setting_has_its_result_with_the_samples_of_its_rounds(
    searched: tuple[ProfilingConfig, RunReport],
) -> None:
    config, report = searched
    content = json.loads((config.machine.output_dir / SEARCH_FILE).read_text())
    assert report.search is not None and report.search.content() == content
    assert settings_in(content) == sorted(setting_key(result) for result in report.results)
    assert len(report.results) == 4
    # The first round: half of a third of 18 samples; the same 3 for all, in the order of the seed.
    assert content["rounds"][0] == dict.fromkeys(settings_in(content), 3)
    for result in report.results:
        key = setting_key(result)
        assert result.num_samples == sum(each.get(key, 0) for each in content["rounds"])
        assert result.sample_ids == [sample.sample_id for sample in result.per_sample_results]
        assert result.provenance.experimental_variables.pareto_search is True
    standing = [each for place in ("front", "undecided") for each in content[place]]
    assert len({each["num_samples"] for each in standing}) == 1
    model_ms = sum(run.T_total for result in report.results for sample in result.per_sample_results
                   for run in sample.runs)  # fmt: skip
    assert content["T_model"] == pytest.approx(model_ms)
    assert content["share"] == pytest.approx(content["T_model"] / content["T_model_full_grid"])
    for each in standing:
        (own,) = (result for result in report.results if setting_key(result) == each["setting"])
        assert json.loads((config.machine.output_dir / each["result_file"]).read_text()) == own.content()
        assert each["accuracy"] == own.accuracy
        assert each["T_total_mean"] == pytest.approx(own.aggregate_stats["T_total_mean"])
    # Once it is saved, its journals are gone.
    assert not list((config.machine.output_dir / ".parts").glob("*.jsonl"))


def test_every_key_of_the_file_is_documented_and_no_other(searched: tuple[ProfilingConfig, RunReport]) -> None:
    search = searched[1].search
    assert search is not None
    content = search.content()
    assert set(content) == first_cells("Pareto search")
    for section, places in (("Remaining", ("front", "undecided")), ("Beaten", ("eliminated",))):
        for each in (each for place in places for each in content[place]):
            assert set(each) == first_cells(f"{section} settings of a search")


def test_a_finished_search_is_not_done_again(searched: tuple[ProfilingConfig, RunReport]) -> None:
    config, report = searched
    again = run_profiling(config)
    assert again.experiment_id is None
    assert (again.search, again.results) == (report.search, report.results)


def test_the_table_says_where_each_setting_ended(searched: tuple[ProfilingConfig, RunReport]) -> None:
    _, report = searched
    assert report.search is not None
    lines = closing_table(report.results, report.search.places).splitlines()
    assert lines[0].split()[-1] == "search"
    assert "samples" in lines[0]
    assert [line.split()[-1] for line in lines[1:]].count("front") == len(report.search.front)
    assert lines[1].endswith("front")
    assert report.search.sentence.startswith(f"front of {counted(len(report.search.front), 'setting')} (")


@dataclass(frozen=True)
class Killed:
    """Runs of one command of the driver, one after the other."""

    server: RunServer
    arguments: tuple[str, ...]
    folder: Path

    def run(self, **kind: Any) -> int:
        """Its exit code."""
        return self.server.run(Run(self.arguments, f"{self.folder}.log", **kind))[0].code


@pytest.fixture(scope="module")
def driver(tiny_checkpoint: Path, run_server: RunServer, tmp_path_factory: pytest.TempPathFactory) -> Killed:
    folder = tmp_path_factory.mktemp("killed") / "results"
    return Killed(run_server, arguments(tiny_checkpoint, folder), folder)


def test_a_search_killed_anywhere_resumes_and_measures_nothing_twice(driver: Killed) -> None:
    calls = driver.folder.parent / "calls"
    assert driver.run(calls_file=str(calls)) == 0, Path(f"{driver.folder}.log").read_text()
    log = Path(f"{driver.folder}.log").read_text()
    # The tiny model's answers are cut and wrong, of which a search concludes nothing.
    kinds = r"\nconclusion: (no setting is named|INVALID): (.*; )?"  # INVALID beside other load
    assert re.search(rf"{kinds}\d+( to \d+)? % of the answers could not be read as an answer, or were", log)
    num_calls = int(calls.read_text())
    # The last calls of all are those that save results, the search, and remove the journals.
    for at in (num_calls // 5, num_calls // 2, num_calls - 40, num_calls - 4):
        shutil.rmtree(driver.folder)
        seen: Any = {}
        for _ in range(2):
            assert driver.run(kill_at_call=at) in (KILLED, 0)
            if (driver.folder / ".parts").is_dir():
                remember(driver.folder, seen)
        assert driver.run() == 0, Path(f"{driver.folder}.log").read_text()
        remember(driver.folder, seen)
        content = json.loads((driver.folder / SEARCH_FILE).read_text())
        (reference,) = (read_setting(path) for path in driver.folder.glob("*imgsizeown*.json"))
        assert (reference.is_reference, reference.in_grid, reference.num_samples) == (True, False, NUM_SAMPLES)
        results = [read_setting(path) for path in driver.folder.glob("*tier-low*.json")]
        assert sorted(setting_key(result) for result in results) == settings_in(content)
        assert sum(result.num_samples for result in results) == sum(sum(each.values()) for each in content["rounds"])
        assert not list((driver.folder / ".parts").glob("*.jsonl"))


def test_the_reference_in_the_grid_is_raced_and_then_measured_on_all_samples(
    searched: tuple[ProfilingConfig, RunReport], tmp_path: Path
) -> None:
    config = searched[0].replaced(tier_list=("own",), no_reference=False, output_dir=tmp_path)
    report = run_profiling(config)
    assert report.search is not None and len(report.results) == 4
    assert settings_in(report.search.content()) == sorted(setting_key(result) for result in report.results)
    by_key = {setting_key(result): result for result in report.results}
    reference = by_key["own_topk4_blocks4"]
    assert [key for key, result in by_key.items() if result.is_reference] == ["own_topk4_blocks4"]
    assert (reference.in_grid, reference.num_samples) == (True, NUM_SAMPLES)
    in_rounds = sum(each.get("own_topk4_blocks4", 0) for each in report.search.rounds)
    assert in_rounds < NUM_SAMPLES
    assert not list((tmp_path / ".parts").glob("*.jsonl"))
    assert run_profiling(config).experiment_id is None


def test_where_every_setting_fails_there_is_no_front_and_the_exit_code_says_so(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    report = run_profiling(search_config(tiny_checkpoint, tmp_path).replaced(sample_timeout=0.001))
    assert report.exit_code == 1
    assert report.search is not None
    assert (report.search.front, report.search.share) == ([], None)
    assert report.search.failed.keys() == report.failed.keys()
    assert len(report.failed) == 4
    assert not report.results
    # Its journals are kept: the same command tries again.
    assert list((tmp_path / ".parts").glob("*.jsonl"))


@dataclass
class Breaking(ScriptedModel):
    """One setting does not fit into memory, from its n-th application on."""

    broken: str = ""
    works: int = 0
    applied: int = 0

    def apply(self, setting: Setting) -> None:
        if setting.key == self.broken:
            self.applied += 1
            if self.applied > self.works:
                raise OutOfMemory("no room")
        super().apply(setting)


# Of a round of 12 samples: once to warm up, twice a sample, and once more at the end.
@pytest.mark.parametrize("works", [0, 1 + 2 * 12 + 1])
def test_a_setting_that_fails_leaves_the_race_and_the_others_go_on(tmp_path: Path, works: int) -> None:
    slow, quick = (
        Setting.of(vision=tier_target("low"), top_k=2, num_active_blocks=RunningBlocks.of((0, 1))),
        Setting.of(vision=tier_target("low"), top_k=1, num_active_blocks=RunningBlocks.of((0, 1))),
    )
    model = Breaking(broken=quick.key, works=works, prefill_s=0.02)
    flags = ["--max_config_retries", "0", "--num_warmup_runs", "0", "--num_runs_per_sample", "1"]
    config, task = parse_config(flags), load_task("reference_vqa", "validation")
    ids = tuple(range(0, 720, 10))
    requests = RequestSource(task, model, ids, 0, 0, None, keep_pictures=False)
    ledger = Ledger(tmp_path, FINGERPRINT, trackers=tmp_path / "trackers")
    context = RunContext("0001", 0, {0: ids}, ledger, tmp_path, StopRequest())
    bench = Bench(model, requests, 4, get_metric(task.metric), frozenset(ids))
    measurer = ShardMeasurer(config.measuring, context, bench, RoundOrder((slow.key, quick.key), 0))
    # Both are always wrong, so that nothing ends the race before its second round.
    search = FrontSearch(config.measuring, config.machine, context, bench, measurer, [slow, quick], ids)
    result = search.run()
    assert result.failed == (quick.key,)
    assert search.failures == {quick.key: SettingFailure("OutOfMemory", "no room", 1)}
    assert [each.key for each in (*result.front, *result.undecided)] == [slow.key]
    assert search.measured.keys() == {slow.key}
    assert len(result.rounds) == (2 if works else 1)


def test_what_cannot_be_searched_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="cider_score has no score of a single sample"):
        check_searchable(get_metric("cider_score"), 18)
    check_searchable(get_metric("vqa_score"), 18)
    with pytest.raises(ConfigurationError, match="needs at least 18 samples, and there are 17"):
        check_searchable(get_metric("vqa_score"), 17)


KEY, FINGERPRINT = "tier-low_topk4_blocks3", "f"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"schema_version": 2, "finger', "json cannot be read .*; remove it or measure again"),
        ('{"schema_version": 9, "fingerprint": "f"}', "json is not the file of a search of schema 2 .its schema is 9"),
        ('{"schema_version": 2, "fingerprint": "f"}', "json lacks 'stopped': .*; remove it and run the same command"),
    ],
)
def test_a_file_that_is_no_search_is_refused(tmp_path: Path, content: str, message: str) -> None:
    ledger = Ledger(tmp_path, FINGERPRINT, trackers=tmp_path)
    assert finished_search(tmp_path, (KEY,), ledger) is None
    (tmp_path / SEARCH_FILE).write_text('{"schema_version": 2, "fingerprint": "of another run"}')
    assert finished_search(tmp_path, (KEY,), ledger) is None
    (tmp_path / SEARCH_FILE).write_text(content)
    with pytest.raises(ResultsRefused, match=message):
        finished_search(tmp_path, (KEY,), ledger)


def journal_of(folder: Path, rank: int) -> Journal:
    header = JournalHeader(JOURNAL_VERSION, KEY, FINGERPRINT, rank, 2, "0001", (rank,))
    return Journal(folder, header)


def failed(sample_id: int) -> FinishedSample:
    return FinishedSample(None, failed_sample(sample_id, "blank"), MEMORY)


def collected(folder: Path, timeout_s: float = 5.0, stop: StopRequest | None = None) -> list[int]:
    shared = SharedSetting(folder, KEY, FINGERPRINT, "0001", {0: [1], 1: [2]})
    parts = collect_finished(shared, timeout_s, stop or StopRequest())
    return [failure.sample_id for part in parts for failure in part.failures]


def test_a_round_waits_for_its_samples_and_not_for_the_end_of_the_round_before(tmp_path: Path) -> None:
    with journal_of(tmp_path, 0) as own, journal_of(tmp_path, 1) as other:
        own.append(failed(1))
        other.append(failed(7))
        other.append(ShardDone("0001", None, None, None))
        later = threading.Timer(0.7, other.append, [failed(2)])
        later.start()
        assert collected(tmp_path) == [1, 7, 2]
        later.join()


def test_a_round_ends_where_a_process_gave_the_setting_up(tmp_path: Path) -> None:
    with journal_of(tmp_path, 0) as own, journal_of(tmp_path, 1) as other:
        own.append(failed(1))
        other.append(ShardDone("0001", None, None, SettingFailure("OutOfMemory", "no room", 1)))
        assert collected(tmp_path) == [1]


def test_a_process_that_is_gone_is_named_with_what_it_owes(tmp_path: Path) -> None:
    with journal_of(tmp_path, 0) as own:
        own.append(failed(1))
        with pytest.raises(WorkerLost, match=r"process 1 \(1 sample missing: 2\)"):
            collected(tmp_path, timeout_s=0.6)
        stop = StopRequest()
        stop.note(2, None)
        with pytest.raises(Stopped):
            collected(tmp_path, stop=stop)


def test_journals_are_kept_until_no_process_looks_at_them(tmp_path: Path) -> None:
    announce_end(tmp_path, 0, "0002")
    announce_end(tmp_path, 1, "0001")  # of an earlier run
    assert not wait_until_all_are_over(tmp_path, 2, "0002", 0.0, StopRequest())
    announce_end(tmp_path, 1, "0002")
    assert wait_until_all_are_over(tmp_path, 2, "0002", 0.0, StopRequest())
    assert not list(tmp_path.iterdir())


def test_two_processes_search_to_the_end(tiny_checkpoint: Path, run_server: RunServer, tmp_path: Path) -> None:
    flags = [*arguments(tiny_checkpoint, tmp_path / "results"), "--worker_timeout", "60"]
    logs = [tmp_path / f"log{rank}" for rank in (0, 1)]
    ended = run_server.run(
        *(Run(flags, str(log), {**TWO_PROCESSES, "RANK": str(rank)}) for rank, log in enumerate(logs))
    )
    assert [each.code for each in ended] == [0, 0], logs[0].read_text()
    assert (tmp_path / "results" / SEARCH_FILE).is_file()
    left = {path.name for path in (tmp_path / "results" / ".parts").iterdir()}
    (ledger,) = (name for name in left if name.startswith("ledger_"))
    assert left <= {"lock", "plan.json", ledger, "seen_by_all"}
