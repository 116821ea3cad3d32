"""Models behind servers, over real sockets on loopback: transformers' own server, and a scripted one for faults."""

import csv
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import knob_profiler as kp
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.knobs.registry import unregister_knob
from experiment_core_utils.knobs.setting import setting_of
from experiment_core_utils.l_results_csv_cleaning import read_results
from experiment_core_utils.pipeline import run_profiling
from experiment_core_utils.planning.dry_run import describe_plan
from experiment_core_utils.primitives import texts
from experiment_core_utils.primitives.errors import ConfigurationError, EnergyRefused
from experiment_core_utils.records.journal import read_journal
from experiment_core_utils.records.run_report import RunReport
from experiment_core_utils.records.setting_result import SettingResult
from experiment_core_utils.saved_results.terminal import closing_table, column_lines, reference_lines
from experiments.core_exp.acc_lat_profiling import main as profile
from experiments.core_exp.report import main as report_command
from tests.given_flags import over
from tests.models.endpoint.test_server_process import free_port, is_running
from tests.models.tiny_checkpoints import write_checkpoint
from tests.processes.forked_runs import Run, RunServer
from tests.processes.openai_server import Reply, is_salted, serving

QUICK = (
    "--num_runs_per_sample", "2", "--num_warmup_runs", "1", "--max_warmup_runs", "1", "--max_repeats", "0",
    "--max_config_retries", "0", "--max_new_tokens", "6", "--device", "cpu", "--num_threads", "1",
)  # fmt: skip


def measured(folder: Path, *flags: str) -> RunReport:
    return run_profiling(parse_config(over(QUICK, ["--output_dir", str(folder), *flags])))


def by_key(report: RunReport) -> dict[str, SettingResult]:
    results = {"_".join(str(each) for each in result.knobs.values()): result for result in report.results}
    assert len(results) == len(report.results)
    return results


def kinds(result: SettingResult) -> set[str]:
    return {each.kind for each in result.provenance.caveat_records}


def question_of(request: dict[str, Any]) -> str:
    content = request["messages"][-1]["content"]
    return content if isinstance(content, str) else content[-1]["text"]


@contextmanager
def transformers_serve(folder: Path) -> Iterator[str]:
    """Base URL of `transformers serve` with the checkpoint in a folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder), "--device", "cpu"]
    log = (folder / "serve.log").open("w")
    with (
        log,
        subprocess.Popen(
            [*program, "--host", "127.0.0.1", "--port", str(port)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        ) as server,
    ):
        try:
            for _ in range(600):
                assert server.poll() is None, (folder / "serve.log").read_text()[-2000:]
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                    break
                except (urllib.error.URLError, OSError):
                    time.sleep(0.1)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()


def test_transformers_serve_is_measured_with_pictures(tmp_path: Path) -> None:
    """A tiny LLaVA-NeXT: its pictures are smaller prompts when they are sent smaller, and each answer's end is seen."""
    model = write_checkpoint("llava_next", tmp_path / "model")
    with transformers_serve(model) as url:
        flags = ("--endpoint", url, "--model", str(model), "--dataset_name", "reference_vqa", "--num_samples", "2")
        report = measured(tmp_path / "out", *flags, "--picture_side_list", "20", "--answer_limit_list", "3")
    assert report.exit_code == 0
    results = by_key(report)
    assert set(results) == {"own_20_3", "own"}
    small, whole = results["own_20_3"], results["own"]
    assert whole.is_reference and not small.is_reference
    for result, limit in ((small, 3), (whole, 6)):
        assert result.num_samples == 2 and not result.failed_samples
        assert (result.num_total_blocks, result.num_active_blocks, result.top_k) == (None, None, None)
        assert result.energy is None and "server_unseen" in kinds(result)
        for sample in result.per_sample_results:
            assert 1 <= sample.output_tokens <= limit
            assert (sample.actual_vision_tokens, sample.input_text_tokens, sample.prefill_flops) == (None, None, None)
            assert sample.T_first_token is not None and sample.T_total is not None
            assert sample.T_LLM_prefill is None and sample.T_first_token <= sample.T_total
            assert sample.outputs_identical and len(sample.runs) == 2
        model_record = result.provenance.model.content()
        assert model_record["execution_stages"] == {"vision": "server", "prefill": "server", "decode": "server"}
        assert [each["model"] for each in model_record["endpoints"]] == [str(model)]
    # Of 20 pixels it fills one crop of 24, and as it is several: its prompt is shorter.
    pairs = zip(small.per_sample_results, whole.per_sample_results, strict=True)
    assert all(one.prompt_tokens is not None and other.prompt_tokens is not None for one, other in pairs)
    sums = [sum(each.prompt_tokens or 0 for each in result.per_sample_results) for result in (small, whole)]
    assert 0 < sums[0] < sums[1]


def test_fields_of_a_request_are_knobs_of_a_grid_and_one_that_is_refused_fails_its_settings(tmp_path: Path) -> None:
    def reply(request: dict[str, Any]) -> Reply:
        if request.get("top_k") == 50:
            return Reply(status=400, message="top_k is at most 40")
        return Reply(prompt_tokens=11 + 2 * request.get("kwargs", {}).get("on", False))

    with serving(reply) as server:
        flags = ("--endpoint", server.url, "--model", "m", "--num_samples", "2", "--num_runs_per_sample", "1")
        fields = ("--request_knob", "top_k=5,50", "--request_knob", "kwargs.on=true")
        report = measured(tmp_path / "out", *flags, *fields)
    try:
        assert report.exit_code == 1
        kept, own = "req-kwargs.on--true_req-top-k--5", "own"
        results = {setting_of(each).key: each for each in report.results}
        assert [each.removeprefix("own_") for each in results] == [kept, own]
        assert setting_of(report.results[0]).level("request.top_k") == 5
        realised = results[f"own_{kept}"].realised
        assert realised is not None and realised["counted"]["request.kwargs.on"]["prompt_tokens"] == [13, 11]
        assert list(realised["knobs_not_seen"]) == ["request.top_k"]
        (failed,) = report.failed.values()
        assert "HTTP 400: top_k is at most 40; without request.kwargs.on, request.top_k it answers" in failed.reason
        with (tmp_path / "out" / "reference-questions_settings.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [(each["request.kwargs.on"], each["request.top_k"]) for each in rows] == [("true", "5"), ("own", "own")]
    finally:
        for knob in ("request.kwargs.on", "request.top_k"):
            unregister_knob(knob)


def test_servers_that_a_run_starts_are_measured_forth_and_back_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port, pids, out = free_port(), tmp_path / "pids", tmp_path / "out"
    command = f"{sys.executable} -m tests.processes.openai_program {port} {{q}} {pids}"
    flags = ("--endpoint", f"http://127.0.0.1:{port}/v1", "--model", "m", "--num_samples", "2")
    code = profile(over(QUICK, [*flags, "--output_dir", str(out), "--serve", command, "--set", "q=four,six"]))
    shown = capsys.readouterr().out
    lines = pids.read_text().splitlines()
    assert code == 0, shown
    assert [line.split()[0] for line in lines] == ["four", "six", "six", "four"]
    assert not any(is_running(int(pid)) for line in lines for pid in line.split()[1:])
    for value in ("four", "six"):
        for number in ("1", "2"):
            folder = out / f"q-{value}" / number
            (result,) = kp.load(folder).sweep.settings
            assert [each.pred for each in result.result.per_sample_results] == [value, value]
            assert (folder / "serve.log").read_text().endswith(f"answering with {value}\n")
    assert "q-four" in shown and "q-six" in shown


def test_what_goes_wrong_at_a_server_is_a_failed_sample_and_the_run_goes_on(tmp_path: Path) -> None:
    """Of six questions, one gets HTTP 500, one no answer in time, one half an answer; the others are measured."""
    closing = threading.Event()
    faults: dict[str, Reply] = {}
    wrong = [Reply(status=500, message="no memory left"), Reply(wait=closing), Reply(is_cut_off=True)]

    def reply(request: dict[str, Any]) -> Reply:
        question = question_of(request)
        if question == "Hi":
            return Reply()
        if question not in faults:
            # The first question is the one of the warm-up.
            faults[question] = Reply() if not faults or not wrong else wrong.pop(0)
        return faults[question]

    with serving(reply) as server:
        flags = ("--endpoint", server.url, "--model", "m", "--num_samples", "6", "--sample_timeout", "2")
        report = measured(tmp_path / "out", *flags, "--num_runs_per_sample", "1")
        closing.set()
    (result,) = report.results
    assert report.exit_code == 3 and result.num_samples == 3
    failed = {each.error: each.reason for each in result.failed_samples}
    reasons = [each.reason for each in result.failed_samples]
    where = f"m at 127.0.0.1:{server.port}"
    assert len(reasons) == 3 and set(failed) == {"SampleError", "SampleTimedOut"}
    assert failed["SampleTimedOut"].startswith("not done after")
    assert any(each.startswith(f"{where} answered with HTTP 500") and "no memory left" in each for each in reasons)
    assert any(each.startswith(f"{where} broke off its answer") for each in reasons)
    for sample in result.per_sample_results:
        assert (sample.pred, sample.output_tokens, sample.output_ended) == ("fourteen", 3, True)
        assert sample.prompt_tokens == sample.input_text_tokens == 11
        assert len(sample.runs[0].T_inter_token) == 2
    assert {"server_pieces", "server_uncounted"}.isdisjoint(kinds(result))


def test_two_servers_side_by_side_are_values_of_a_knob(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second sends three tokens a piece, and the third does not count; each says what is not known for that."""
    three_tokens, uncounted = Reply(completion_tokens=6, finish_reason="length"), Reply(has_usage=False)
    with serving() as exact, serving(lambda _: three_tokens) as grouped, serving(lambda _: uncounted) as silent:
        endpoints = (f"exact={exact.url}", f"grouped={grouped.url}", f"silent={silent.url}")
        flags = ("--endpoint", *endpoints, "--model", "m", "--num_samples", "2", "--reasoning_effort_list", "low")
        report = measured(tmp_path / "out", *flags)
    results = by_key(report)
    # Nothing of the asking process stands for the servers.
    shown, place = capsys.readouterr().err, ", ".join(f"127.0.0.1:{each.port}" for each in (exact, grouped, silent))
    assert f"connecting to m at {place} ..." in shown and "loading" not in shown
    for result in results.values():
        assert result.provenance.hardware.device == f"asked at {place}"
        assert result.hardware_utilisation is not None and result.memory is not None
        assert result.hardware_utilisation.utilisation_reason == "another process has the model: its device is not seen"
        found = result.memory.content()
        reasons = found.pop("reason"), found.pop("parts_reason")
        assert set(reasons) == {"another process has the model: its memory is not seen"}
        assert found.keys() >= {"peak_memory_bytes", "process_rss_bytes"} and set(found.values()) == {None}
    (table,) = (tmp_path / "out").glob("*_settings.csv")
    with table.open() as rows:
        for row in csv.DictReader(rows):
            assert row["device"] == f"asked at {place}" and "process_rss_bytes" not in row
    assert kp.load(tmp_path / "out").sweep.provenance.device == f"asked at {place}"
    (line,) = reference_lines(report.results)
    assert "that of own_variant-exact, the first variant, on the same samples" in line
    # What reads results reads these.
    frame = kp.load(tmp_path / "out").frame()
    assert frame["num_active_blocks"].isna().all() and frame["T_first_token_mean_ms"].notna().all()
    assert "reference_questions" in kp.compare(tmp_path / "out", tmp_path / "out").frame()["task"].tolist()
    assert report_command([str(tmp_path / "out")]) in (None, 0)
    page = (tmp_path / "out" / "report.html").read_text()
    assert f"m asked at {place}" in page and "ids: None" not in page
    # The model as it is: the first server, asked for nothing.
    assert set(results) == {"own_low_exact", "own_low_grouped", "own_low_silent", "own_exact"}
    assert results["own_exact"].is_reference
    efforts = [each.get("reasoning_effort") for each in exact.requests]
    # The silent one is asked for nothing by its probe, and once to see whether it follows.
    assert set(efforts) == {"low", None}
    assert [each.get("reasoning_effort") for each in silent.requests].count(None) == 2
    assert all(each["temperature"] == 0 and each["max_tokens"] in (1, 6) for each in exact.requests)
    unseen = {"server_pieces", "server_uncounted", "knobs_not_seen"}
    found = {key: kinds(result) & unseen for key, result in results.items()}
    assert found == {
        "own_low_exact": {"knobs_not_seen"},
        "own_low_grouped": {"knobs_not_seen", "server_pieces"},
        "own_low_silent": {"knobs_not_seen", "server_uncounted"},
        "own_exact": set(),
    }
    grouped_sample = results["own_low_grouped"].per_sample_results[0]
    run = grouped_sample.runs[0]
    assert (grouped_sample.output_tokens, run.T_inter_token) == (6, [])
    assert run.T_LLM_decode is not None and run.T_decode_per_token == pytest.approx(run.T_LLM_decode / 5)
    silent_sample = results["own_low_silent"].per_sample_results[0]
    assert (silent_sample.output_tokens, silent_sample.prompt_tokens) == (2, None)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--top_k_list", "2"), "--top_k_list 2 cannot be set in m: a request cannot carry it"),
        (("--num_active_blocks_list", "3"), "--num_active_blocks_list 3 cannot be set in m: a request cannot carry it"),
        (("--tier_list", "low"), "--tier_list and --vision_tokens_list do nothing for m: the server's processor"),
    ],
)
def test_what_a_request_cannot_carry_is_refused_by_name(tmp_path: Path, flags: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        measured(tmp_path, "--endpoint", "http://127.0.0.1:9/v1", "--model", "m", "--num_samples", "2", *flags)


def test_a_server_that_is_not_there_is_reported_before_anything_is_measured(tmp_path: Path) -> None:
    flags = ("--endpoint", "http://127.0.0.1:9/v1", "--model", "m", "--num_samples", "2")
    with pytest.raises(ConfigurationError, match=r"m at 127.0.0.1:9 cannot be reached .*; start the server"):
        measured(tmp_path, *flags)


def test_energy_needs_a_gpu_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with serving() as server:
        flags = ("--endpoint", server.url, "--model", "m", "--num_samples", "2")
        with pytest.raises(EnergyRefused, match="--energy required: the server computes on this machine's CPU"):
            measured(tmp_path / "required", *flags, "--energy", "required")
        (result,) = measured(tmp_path / "optional", *flags, "--energy", "optional").results
    assert result.energy is None and "energy_not_measured" in kinds(result)


def test_a_plan_needs_no_server(tmp_path: Path) -> None:
    flags = ("--endpoint", "a=http://127.0.0.1:9/v1", "b=http://127.0.0.1:9/v1", "--model", "m", "--num_samples", "2")
    text = describe_plan(parse_config(["--output_dir", str(tmp_path), "--energy", "optional", *flags])).text
    assert torch.cuda.is_available() or "--energy optional: the server computes on this machine's CPU" in text
    assert "asked at 127.0.0.1:9, 127.0.0.1:9; nothing was sent" in text and "cpu float32" not in text
    assert "own_variant-a" in text and "own_variant-b" in text and "no estimate: a server shows no architecture" in text
    given = ["--output_dir", str(tmp_path), *flags, "--num_runs_per_sample", "5", "--request_rate", "0.5"]
    plan = describe_plan(parse_config(given))
    # One gap of 2 s in each of 5 runs, at 2 settings.
    assert plan.whole_s == pytest.approx(20) and "2 of them are timed, at 0.5 requests a second" in plan.text
    assert "mean latency none, since requests that arrive at a rate wait for each other" in plan.text


def test_samples_that_are_only_answered_go_several_at_a_time(tmp_path: Path) -> None:
    """A server that answers no second-turn question before another has come, too: one at a time would never end."""
    together = threading.Barrier(2)

    def reply(request: dict[str, Any]) -> Reply:
        return Reply() if len(server.requests) <= 4 else Reply(wait=together)

    with serving(reply) as server:
        flags = ("--endpoint", server.url, "--model", "m", "--num_samples", "5", "--num_latency_samples", "1")
        report = measured(tmp_path / "out", *flags, "--concurrency", "2")
    (result,) = report.results
    assert report.exit_code == 0 and (result.num_samples, result.num_latency_samples) == (5, 1)
    answered = [each for each in result.per_sample_results if not each.runs]
    assert [(each.pred, each.output_tokens, each.T_total) for each in answered] == 4 * [("fourteen", 3, None)]
    assert {each.accuracy_batch_size for each in answered} == {2}
    assert "server_concurrency" in kinds(result) and "batched_answers" not in kinds(result)


def test_requests_arrive_at_a_rate_whatever_the_server_has_answered(tmp_path: Path) -> None:
    """A server that answers none of five questions before all have come, at each of two settings."""
    together = threading.Barrier(5)

    def reply(request: dict[str, Any]) -> Reply:
        # The probe, and one run of warm-up at each setting.
        return Reply() if len(server.requests) <= 3 else Reply(wait=together)

    def run(name: str) -> RunReport:
        server.requests.clear()
        flags = ("--endpoint", server.url, "--model", "m", "--num_samples", "5", "--answer_limit_list", "4")
        return measured(tmp_path / name, *flags, "--request_rate", "200", "--sample_timeout", "60")

    with serving(reply) as server:
        report = run("out")
        run("again")
    assert report.exit_code == 0 and len(server.requests) == 3 + 2 * 2 * 5
    for result in report.results:
        found = result.open_loop
        assert found is not None and found.achieved_rate is not None
        assert (found.request_rate, found.num_batches, found.num_requests, found.num_answered) == (200.0, 2, 10, 10)
        assert found.most_under_way == 5
        assert result.provenance.experimental_variables.request_rate == 200.0 and "open_loop" in kinds(result)
        (rounds,) = result.rounds
        assert (rounds.num_rounds, rounds.samples_per_round, rounds.num_settings) == (2, 5, 2)
        assert rounds.common_factor is not None and rounds.common_factor.last_over_first is None
        assert all(len(each.runs) == 2 for each in result.per_sample_results)
    frame = kp.load(tmp_path / "out").frame()
    assert frame["request_rate"].tolist() == [200.0, 200.0] and frame["most_under_way"].tolist() == [5, 5]
    assert frame["requests_per_second"].isna().all() and frame["tokens_per_second"].isna().all()
    assert all(word in closing_table(report.results) for word in ("answered/s", "under way"))
    assert any(each.startswith("answered/s: of 200 a second that came") for each in column_lines(report.results, {}))
    # Samples that waited for each other decide nothing about times.
    compared = kp.compare(tmp_path / "out", tmp_path / "again").frame()
    assert set(compared[compared["quantity"] == "latency"]["verdict"]) == {"CANNOT TELL"}
    assert "P95 latency" not in set(compared["quantity"])


@pytest.mark.parametrize(
    ("rate", "source", "is_known"), [("200", "rate", True), ("100", "rate", False), (None, None, False)]
)
def test_an_estimate_is_of_requests_that_came_as_those_will(
    tmp_path: Path, rate: str | None, source: str | None, is_known: bool
) -> None:
    with serving() as server:
        flags = ("--endpoint", server.url, "--model", "m", "--num_samples", "2")
        measured(tmp_path, *flags, "--request_rate", "200")
    again = [*over(QUICK, flags), "--output_dir", str(tmp_path), "--seed", "1"]
    plan = describe_plan(parse_config([*again, "--request_rate", rate] if rate else again))
    (estimate,) = plan.estimates
    assert (estimate.time_source, estimate.run_s is not None) == (source, is_known)
    (line,) = (each for each in plan.text.splitlines() if each.startswith("warning: 1 of the 1 setting"))
    assert "--seed 1, there 42" in line and "--model " not in line


def test_an_arriving_request_that_fails_is_not_asked_again_when_fewer_come(tmp_path: Path) -> None:
    """Of four, one gets HTTP 500 and one no answer in time; in the second round all come again."""
    closing = threading.Event()
    asked: list[str] = []

    def reply(request: dict[str, Any]) -> Reply:
        asked.append(question_of(request))
        # The probe and the run of warm-up come before.
        return {3: Reply(status=500), 4: Reply(wait=closing)}.get(len(asked), Reply())

    with serving(reply) as server:
        flags = ("--endpoint", server.url, "--model", "m", "--num_samples", "4", "--request_rate", "100")
        given = ("--num_runs_per_sample", "2", "--sample_timeout", "3", "--max_config_retries", "2")
        report = measured(tmp_path, *flags, *given, "--config_retry_delay", "0")
        closing.set()
    (result,) = report.results
    assert report.exit_code == 3 and len(asked) == 2 + 2 * 4
    assert {each.error for each in result.failed_samples} == {"SampleError", "SampleTimedOut"}
    assert result.open_loop is not None
    assert (result.open_loop.num_requests, result.open_loop.num_answered) == (8, 6)
    assert result.num_samples == 2 and all(len(each.runs) == 2 for each in result.per_sample_results)


@pytest.mark.parametrize("retries", [0, 1])
def test_no_request_arrives_before_one_of_the_warm_up_was_answered(tmp_path: Path, retries: int) -> None:
    """The server is out of order for as long as the warm-up tries all three questions, and then works."""
    asked: list[str] = []

    def reply(request: dict[str, Any]) -> Reply:
        asked.append(question_of(request))
        return Reply(status=500) if len(asked) in (2, 3, 4) else Reply()

    with serving(reply) as server:
        flags = ("--endpoint", server.url, "--model", "m", "--num_samples", "3", "--request_rate", "200")
        given = ("--max_config_retries", str(retries), "--config_retry_delay", "0")
        report = measured(tmp_path, *flags, *given)
    if retries:
        (result,) = report.results
        assert result.realised is not None
        assert (report.exit_code, result.num_samples, len(asked)) == (0, 3, 4 + 1 + 2 * 3)
    else:
        (failure,) = report.failed.values()
        assert (failure.error, failure.attempts, len(asked)) == ("SampleError", 1, 4)


def test_after_a_kill_all_requests_of_a_batch_arrive_again(run_server: RunServer, tmp_path: Path) -> None:
    """Three questions in two runs at each of two settings, killed at calls that change files, half a write included: of
    a setting all three are finished or none is. At one the question of the warm-up fails, and comes all the same.
    """
    first = list[str]()

    def reply(request: dict[str, Any]) -> Reply:
        question = question_of(request)
        if question != "Hi" and not first:
            first.append(question)
        return Reply(status=500) if question in first and request["max_tokens"] == 4 else Reply()

    def run(name: str, **kind: Any) -> int:
        given = (*flags, "--output_dir", str(tmp_path / name))
        return run_server.run(Run(over(QUICK, given), str(tmp_path / f"{name}.log"), **kind))[0].code

    with serving(reply) as server:
        flags = ("--endpoint", server.url, "--model", "m", "--num_samples", "3", "--answer_limit_list", "4")
        flags += ("--request_rate", "200", "--max_config_retries", "1", "--config_retry_delay", "0")
        calls, seen = tmp_path / "calls", list[int]()
        assert run("whole", calls_file=str(calls)) == 3, (tmp_path / "whole.log").read_text()
        for at in range(24, int(calls.read_text()), 7):
            run(f"killed{at}", kill_at_call=at)
            paths = (tmp_path / f"killed{at}" / ".parts").glob("*.jsonl")
            seen += [len(content.finished) for path in paths if (content := read_journal(path)) is not None]
            assert run(f"killed{at}") == 3, (tmp_path / f"killed{at}.log").read_text()
    assert set(seen) == {0, 3}
    for name in (path.name for path in tmp_path.iterdir() if path.is_dir()):
        found = {result.num_samples: result.open_loop for result in read_results(tmp_path / name).values()}
        answered = {number: each.num_answered for number, each in found.items() if each is not None}
        assert answered == {2: 4, 3: 6} and {each.num_requests for each in found.values() if each is not None} == {6}


def test_a_secret_is_in_no_file_also_where_the_server_repeats_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(texts, "_SECRETS", {})
    key = "sk-0123456789abcdef"
    monkeypatch.setenv("OPENAI_API_KEY", key)

    def reply(request: dict[str, Any]) -> Reply:
        # The probe, the warm-up, an answer that has it in pieces, and a refusal.
        is_refused = len(server.requests) > 3
        return Reply(status=401, message=f"bad key {key}") if is_refused else Reply(pieces=("sk-", key[3:]))

    with serving(reply) as server:
        url = server.url.replace("//", "//me:pa55word@") + f"/{key}"
        flags = ("--endpoint", url, "--model", "m", "--num_samples", "2")
        report = measured(tmp_path, *flags, "--num_runs_per_sample", "1")
    report_command([str(tmp_path)])
    assert report.exit_code == 3
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert any(b"bad key ***" in each for each in written) and any(b'"***' in each for each in written)
    assert any(f"{server.url}/***".encode() in each for each in written)
    for each in (*written, "".join(capfd.readouterr()).encode()):
        assert key.encode() not in each and b"pa55word" not in each


def test_a_cache_does_not_answer_for_the_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A prompt takes 40 ms where the server has not seen its beginning; a salt makes it answer in other words, once."""
    seen = set[str]()

    def reply(request: dict[str, Any]) -> Reply:
        question = question_of(request)
        time.sleep(0.0 if question in seen else 0.04)
        seen.add(question)
        return Reply(pieces=("salt", "ed") if is_salted(request) and request["max_tokens"] > 1 else ("four", "teen"))

    with serving(reply) as server:
        server.counts_salted_apart = False
        flags = ("--endpoint", server.url, "--model", "m", "--num_samples", "2", "--answer_limit_list", "4")
        results = measured(tmp_path, *flags).results
    said = capfd.readouterr().err
    assert "timed requests begin with a salt of 0 tokens, accuracy is of prompts without it; of the first 2" in said
    assert "samples, asked both ways, 2 have another answer (100%)" in said
    assert len(results) == 2
    for result in results:
        assert "server_salt_changes" in kinds(result) and "server_warm" not in kinds(result)
        for each in result.per_sample_results:
            assert each.pred == "fourteen" and each.T_first_token is not None and each.T_first_token > 40


def test_the_caveat_of_cut_answers_names_the_limit_of_their_setting(tmp_path: Path) -> None:
    with serving(lambda request: Reply(pieces=("a ",) * request["max_tokens"], finish_reason="length")) as server:
        flags = ("--endpoint", server.url, "--model", "m", "--num_samples", "1", "--answer_limit_list", "3")
        results = by_key(measured(tmp_path / "out", *flags))
    found = {
        key: [each.figures["limit"] for each in result.provenance.caveat_records if each.kind == "answers_cut"]
        for key, result in results.items()
    }
    assert found == {"own_3": [3], "own": [6]}
