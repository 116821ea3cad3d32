"""Whole runs with the knob of how many requests run together."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from experiment_core_utils.config.parts import QuestionConfig
from experiment_core_utils.config.profiling import ProfilingConfig, parse_config
from experiment_core_utils.pipeline import run_profiling
from experiment_core_utils.primitives.contrasts import PairedContrasts
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.replication import COUNTED, over_batches
from experiment_core_utils.records.journal import journals_in, read_journal
from experiment_core_utils.records.requests import BatchedRun, StagedRun
from experiment_core_utils.records.setting_result import SettingResult, setting_key, throughput_of
from experiments.analyses.knobs.grid import grids_of
from experiments.analyses.knobs.prices import price_list
from experiments.analyses.sweeps import load_sweep, mixed_executions
from tests.given_flags import over
from tests.models.other_lists import OTHER_LISTS
from tests.models.tiny_checkpoints import _Family, write_checkpoint
from tests.processes.forked_runs import KILLED, Run, RunServer

FLAGS = ["--dataset_name", "reference_questions", "--ids", "5", "0", "3", "9", "--num_warmup_runs", "0",
         "--max_warmup_runs", "1", "--max_repeats", "0", "--num_threads", "1", "--max_new_tokens", "3", "--stop", "e",
         "--num_runs_per_sample", "2", "--energy", "off", "--max_config_retries", "0"]  # fmt: skip
BATCHES = ("--batch_size_list", "1", "3", "--num_active_blocks_list", "3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("olmoe", tmp_path_factory.mktemp("olmoe"))


def config_for(folder: Path, output_dir: Path, *more: str) -> ProfilingConfig:
    return parse_config(["--model_path", str(folder), "--output_dir", str(output_dir), *FLAGS, *more])


def by_size(results: tuple[SettingResult, ...]) -> dict[int, SettingResult]:
    return {int(result.knobs.get("batch_size", 1)): result for result in results}


@pytest.mark.parametrize("execution", ["eager", "auto"])
def test_each_request_is_answered_as_alone_and_throughput_is_that_of_whole_batches(
    folder: Path, tmp_path: Path, execution: str
) -> None:
    report = run_profiling(config_for(folder, tmp_path, *BATCHES, "--top_k_list", "2", "--execution", execution))
    assert not report.failed
    found = by_size(report.results)
    alone, together = found[1], found[3]
    assert [each.pred for each in together.per_sample_results] == [each.pred for each in alone.per_sample_results]
    assert together.is_reference is False and alone.is_reference is True
    paths = {path.name for path in tmp_path.glob("*.json")}
    assert "reference-questions_imgsizeown_topk2_blocks3_batch3.json" in paths
    # Of each batch the sample and the two that follow it among those that are timed, in the order of the run.
    tokens = {each.sample_id: each.output_tokens for each in alone.per_sample_results}
    order = [5, 0, 3, 9]
    for each in together.per_sample_results:
        place = order.index(each.sample_id)
        own = [order[(place + offset) % 4] for offset in range(3)]
        assert [run.batch_output_tokens for run in each.runs] == [sum(tokens[one] for one in own)] * 2
        assert all(len(run.T_inter_token) == max(tokens[one] for one in own) - 1 for run in each.runs)
    table = pd.read_csv(tmp_path / "reference-questions_settings.csv").set_index("batch_size")
    for size, result in found.items():
        samples = result.per_sample_results
        seconds = sum(sum(run.T_total for run in each.runs) / len(each.runs) for each in samples) / 1000
        row, throughput = table.loc[size], throughput_of(result)
        # Tables are rounded to six digits.
        assert row["requests_per_second"] == pytest.approx(4 * size / seconds, rel=1e-5)
        assert throughput.requests_per_s == pytest.approx(4 * size / seconds)
        # Each request is in as many batches as a batch has requests.
        all_tokens = sum(tokens.values()) * size
        assert row["tokens_per_second"] == pytest.approx(all_tokens / seconds, rel=1e-5)
        assert throughput.output_tokens_per_s == pytest.approx(all_tokens / seconds)
    memory, of_batch = alone.memory, together.memory
    assert memory is not None and of_batch is not None and memory.counted_kv_cache_bytes is not None
    assert of_batch.counted_kv_cache_bytes == 3 * memory.counted_kv_cache_bytes
    assert [each.prefill_flops for each in together.per_sample_results] == [
        each.prefill_flops for each in alone.per_sample_results
    ]
    # Which kernels run a batch is a part of what it costs.
    assert mixed_executions(report.results) is None
    (grid,) = grids_of(load_sweep(tmp_path))
    assert grid.requests_per_s is not None and list(grid.batch_sizes) == [1, 3]
    prices = price_list(grid, QuestionConfig(budget_ms=1e6))
    (budget,) = prices.types[0].budgets
    rates = {setting_key(result): throughput_of(result).requests_per_s for result in report.results}
    assert budget.setting is not None and budget.requests_per_s == pytest.approx(rates[budget.setting])
    assert any(f", {budget.requests_per_s:.3g} requests/s" in line for line in prices.lines)


def runs_in(folder: Path) -> Mapping[tuple[str, int], tuple[StagedRun, ...]]:
    """The runs of each finished sample in the journals, by file and sample."""
    contents = {path.name: read_journal(path) for path in journals_in(folder / ".parts")}
    return {
        (name, each.sample_id): each.measured.runs
        for name, content in contents.items()
        if content is not None
        for each in content.finished
        if each.measured is not None
    }


def test_a_run_that_was_killed_goes_on_with_the_same_batches(
    folder: Path, tmp_path: Path, run_server: RunServer
) -> None:
    arguments = ["--model_path", str(folder), *FLAGS, *BATCHES, "--top_k_list", "2"]
    calls = tmp_path / "calls"
    whole = ["--output_dir", str(tmp_path / "whole"), *arguments]
    (ended,) = run_server.run(Run(whole, str(tmp_path / "whole.log"), calls_file=str(calls)))
    assert ended.code == 0, (tmp_path / "whole.log").read_text()
    resumed = ["--output_dir", str(tmp_path / "resumed"), *arguments]
    kept: Mapping[tuple[str, int], tuple[StagedRun, ...]] = {}
    # Somewhere in the middle of the rounds.
    for part in (0.55, 0.65, 0.75):
        kill_at = int(part * int(calls.read_text()))
        (ended,) = run_server.run(Run(resumed, str(tmp_path / "killed.log"), kill_at_call=kill_at))
        assert ended.code == KILLED
        kept = runs_in(tmp_path / "resumed")
        if any(isinstance(runs[0], BatchedRun) for runs in kept.values()):
            break
    assert kept and any(isinstance(runs[0], BatchedRun) for runs in kept.values())
    (ended,) = run_server.run(Run(resumed, str(tmp_path / "resumed.log")))
    assert ended.code == 0, (tmp_path / "resumed.log").read_text()
    for path in sorted((tmp_path / "whole").glob("*imgsize*.json")):
        one, other = (json.loads(each.read_text()) for each in (path, tmp_path / "resumed" / path.name))
        assert [without_times(each) for each in one["per_sample_results"]] == [
            without_times(each) for each in other["per_sample_results"]
        ]
        key = path.name.removesuffix(".json").partition("imgsize")[2]
        for (name, sample_id), runs in kept.items():
            if name.startswith(f"{key}.rank"):
                (sample,) = [each for each in other["per_sample_results"] if each["sample_id"] == sample_id]
                totals = [each["T_total"] for each in sample["runs"]]
                assert totals == pytest.approx([1e3 * run.total_s for run in runs])


def without_times(sample: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: sample[name] for name in ("sample_id", "pred", "output_tokens", "prefill_flops", "accuracy")}
    return kept | {"tokens": [run.get("batch_output_tokens") for run in sample["runs"]]}


def test_a_family_that_looks_at_its_batch_fails_at_that_setting_alone(tmp_path: Path) -> None:
    """Its blocks see the padding; alone it is measured."""
    doge = write_checkpoint("doge", tmp_path / "doge")
    report = run_profiling(config_for(doge, tmp_path / "out", *BATCHES, "--top_k_list", "2"))
    ((key, failure),) = report.failed.items()
    assert key.endswith("_batch3") and failure.error == "KnobDidNotAct" and failure.attempts == 1
    assert "requests cannot run together: in a batch of 3 " in failure.reason
    assert list(by_size(report.results)) == [1]


def test_a_prompt_that_fails_alone_fails_no_other(tmp_path: Path) -> None:
    """GPT-2 of 48 positions; the prompt of 60 tokens fails at each setting, and each other is measured there."""
    config = OTHER_LISTS["gpt2"](n_positions=48)
    made = write_checkpoint(_Family(lambda _: config), tmp_path / "gpt2")
    questions = "Is it red?", "Who is it?" * 6, "Why?", "Where are all of them?"
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"question": each, "answer": "no"}) + "\n" for each in questions))
    own = ["--data_file", str(file), "--prompt_template", "{question}", "--execution", "eager"]
    given = [each for each in FLAGS if each not in ("--dataset_name", "reference_questions")]
    given = over([*given, "--batch_size_list", "1", "2"], ("--ids", "0", "1", "2", "3"))
    report = run_profiling(
        parse_config(["--model_path", str(made), "--output_dir", str(tmp_path / "out"), *given, *own])
    )
    assert not report.failed and set(by_size(report.results)) == {1, 2}
    for result in report.results:
        assert [each.sample_id for each in result.failed_samples] == [1]
        assert "sample 1: its prompt of 60 tokens is longer" in result.failed_samples[0].reason
        assert sorted(each.sample_id for each in result.per_sample_results) == [0, 2, 3]
        assert all(len(each.runs) == 2 for each in result.per_sample_results)


def test_batches_that_cannot_be_filled_or_asked_for_are_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--batch_size_list 5 needs as many timed samples, and there are 4;"):
        run_profiling(config_for(folder, tmp_path, "--batch_size_list", "1", "5"))
    with pytest.raises(ConfigurationError, match="--until_precision looks at samples one by one"):
        run_profiling(config_for(folder, tmp_path, "--batch_size_list", "2", "--until_precision", "0.1"))
    with pytest.raises(ConfigurationError, match="batch_size_list"):
        config_for(folder, tmp_path, "--batch_size_list", "0")
    assert not list(tmp_path.glob("*.json"))


def test_verdicts_have_the_spread_of_batches_that_overlap() -> None:
    """Times of 4 requests that follow each other, of which the sum is a batch: the interval of the mean batch contains
    its truth as often as it says."""
    generator, inside, naive, number = np.random.default_rng(3), 0, 0, 300
    for _ in range(number):
        requests = np.exp(generator.normal(0.0, 0.5, (2, 60)))
        batches = np.log(sum(np.roll(requests, -offset, axis=1) for offset in range(4)))
        for replication in (over_batches(COUNTED, batches, np.array([4, 4])), COUNTED):
            contrasts = PairedContrasts.of(batches, np.arange(60), reference=0, replication=replication)
            ends = contrasts.interval(1, 0)
            assert ends is not None
            is_inside = ends[0] <= 1.0 <= ends[1]
            inside, naive = (inside + is_inside, naive) if replication is not COUNTED else (inside, naive + is_inside)
    # 95 % less what 300 draws may miss; without the correction two thirds.
    assert inside / number > 0.9 and naive / number < 0.75
    assert over_batches(COUNTED, batches, np.array([1, 1])) is COUNTED
