"""Estimates from operations and earlier results, worked out by hand."""

from dataclasses import replace

import pytest

from experiment_core_utils.planning.estimate import (
    EarlierResults,
    PlanSize,
    SettingEstimate,
    SettingWork,
    StageRates,
    answered_lines,
    due_seconds,
    estimate_setting,
    plan_table,
    plan_total,
    rates_of,
    request_seconds,
    size_sentence,
    source_sentences,
)
from experiment_core_utils.records.compute import Memory
from experiment_core_utils.records.requests import StageFlops
from experiment_core_utils.records.setting_result import SettingResult

# 600 of vision, 1200 of prefill, 40 for each token after the first.
FLOPS = StageFlops(vision_flops=600, prefill_flops=1200, decode_flops_per_token=40.0)
WORK = SettingWork("tier-low_topk4_blocks3", 455.4, FLOPS, 3 * 2**20, is_done=False)
# 10 samples over 4 processes: the largest share is 3, so 3 * 2 + 1 = 7 runs.
SIZE = PlanSize(num_samples=10, num_runs_per_sample=2, num_warmup_runs=1, num_processes=4)
NOTHING = EarlierResults({}, None, None, 0)


def result(
    vision_ms: float | None, prefill_ms: float, decode_ms: float | None, peak: int | None = None, batch_size: int = 1
) -> SettingResult:
    stats = {
        "vision_flops_mean": 600.0 if vision_ms else None,
        "T_vision_total_mean": vision_ms,
        "prefill_flops_mean": 1200.0,
        "T_LLM_prefill_mean": prefill_ms,
        "decode_flops_per_token_mean": 40.0 if decode_ms else None,
        "T_decode_per_token_mean": decode_ms,
        "T_total_mean": 500.0,
        "T_preprocess_mean": 100.0,
    }
    knobs = {} if batch_size == 1 else {"batch_size": batch_size}
    return SettingResult.model_construct(aggregate_stats=stats, memory=Memory(peak_memory_bytes=peak), knobs=knobs)


def test_the_largest_shard_decides() -> None:
    assert SIZE.samples_per_process == 3
    assert SIZE.runs_per_process() == 7
    # Of 3 samples of the largest share 2 (5 / 4, rounded up) are timed twice, one is answered once.
    assert replace(SIZE, num_timed=5).runs_per_process() == 2 * 2 + 1 + 1


def test_samples_that_are_only_answered_have_their_part_of_the_time() -> None:
    """900 of 1,000 samples, at two settings of 0.2 and 0.3 s a request, and one that is done."""
    size = PlanSize(num_samples=1000, num_runs_per_sample=3, num_warmup_runs=2, num_processes=1, num_timed=100)
    known = [SettingEstimate(WORK, seconds, None, "measured", None, False) for seconds in (0.2, 0.3)]
    done = SettingEstimate(replace(WORK, is_done=True), 7.0, None, "measured", None, False)
    (line,) = answered_lines([*known, done], size, 8)
    assert "900 of 1000 samples are not timed" in line and line.endswith("together), about 8 min of the time")
    (line,) = answered_lines([*known, SettingEstimate(WORK, None, None, None, None, False)], size, None)
    assert line.endswith("by what runs the timed ones")
    assert answered_lines(known, replace(size, num_timed=1000), 8) == []


def test_where_requests_run_together_a_run_is_a_batch() -> None:
    """100 timed samples are three runs of 8 requests each, 900 others are 113 batches."""
    size = PlanSize(num_samples=1000, num_runs_per_sample=3, num_warmup_runs=2, num_processes=1, num_timed=100)
    estimate = estimate_setting(replace(WORK, batch_size=8), size, NOTHING, 5.0, matmul_rate=980.0)
    assert (estimate.run_s, estimate.setting_s) == (pytest.approx(16.0), pytest.approx(16.0 * (300 + 113 + 2)))
    heading, line = plan_table([estimate])
    assert "s/run" in heading and "s/request" not in heading and line.split()[3] == "16"
    (line,) = answered_lines([estimate], size, 8)
    # 113 x 16 s.
    assert line.endswith("about 30 min of the time")


def test_rates_are_medians_of_operations_over_seconds() -> None:
    # Vision 600 / 0.3 s and 600 / 0.2 s; prefill 1200 / 0.1, / 0.2, / 0.4; decode 40 / 0.01.
    found = rates_of([result(300.0, 100.0, 10.0), result(200.0, 200.0, None), result(None, 400.0, None)])
    assert found == StageRates(pytest.approx(2500.0), pytest.approx(6000.0), pytest.approx(4000.0))
    assert rates_of([]) is None
    assert rates_of([result(None, 100.0, None)]) == StageRates(None, pytest.approx(12000.0), None)
    # A batch of 4 computes as much in the time of all of them.
    assert rates_of([result(None, 100.0, None, batch_size=4)]) == StageRates(None, pytest.approx(48000.0), None)


def test_a_request_is_its_stages_one_after_the_other() -> None:
    # 600 / 2000 + 1200 / 6000 + (5 - 1) * 40 / 800 = 0.3 + 0.2 + 0.2.
    assert request_seconds(FLOPS, 5.0, StageRates(2000.0, 6000.0, 800.0)) == pytest.approx(0.7)
    # Where vision and decode were never measured they take the prefill's rate: (600 + 1200 + 160) / 6000.
    assert request_seconds(FLOPS, 5.0, StageRates(None, 6000.0, None)) == pytest.approx(1960 / 6000)
    assert request_seconds(StageFlops(None, 1200, None), 1.0, StageRates(1.0, 6000.0, 1.0)) == pytest.approx(0.2)


def test_with_nothing_measured_before_the_matrix_product_stands_in() -> None:
    estimate = estimate_setting(WORK, SIZE, NOTHING, 5.0, matmul_rate=980.0)
    # (600 + 1200 + 160) / 980 = 2 s a request, 7 requests.
    assert (estimate.run_s, estimate.setting_s) == (pytest.approx(2.0), pytest.approx(14.0))
    assert (estimate.time_source, estimate.memory_bytes, estimate.memory_is_measured) == ("matmul", 3 * 2**20, False)


def test_rates_of_other_settings_come_before_the_matrix_product() -> None:
    earlier = EarlierResults({}, StageRates(2000.0, 6000.0, 800.0), 5.0, 2)
    estimate = estimate_setting(WORK, SIZE, earlier, 5.0, matmul_rate=None)
    assert (estimate.time_source, estimate.setting_s) == ("scaled", pytest.approx(0.7 * 7))


def test_the_settings_own_measurement_comes_first() -> None:
    earlier = EarlierResults({WORK.key: result(300.0, 100.0, 10.0, peak=2**21)}, StageRates(1.0, 1.0, 1.0), 5.0, 1)
    estimate = estimate_setting(WORK, SIZE, earlier, 5.0, matmul_rate=None)
    # 7 requests of 0.5 s, 3 times 0.1 s of preprocessing.
    assert (estimate.time_source, estimate.setting_s) == ("measured", pytest.approx(3.8))
    assert (estimate.memory_bytes, estimate.memory_is_measured) == (2**21, True)


def test_requests_that_arrive_at_a_rate_take_the_time_in_which_they_come() -> None:
    """300 requests are two batches of 150, of which the last is due after 149 / 2 s; in three runs, six batches."""
    size = PlanSize(320, 3, 2, 1, request_rate=2.0, num_timed=300)
    assert (size.num_batches, size.arrivals_s) == (6, pytest.approx(6 * 149 / 2))
    bare = SettingWork(WORK.key, None, None, None, is_done=False)
    unknown = estimate_setting(bare, size, NOTHING, 5.0, None)
    assert (unknown.time_source, unknown.run_s, unknown.setting_s) == ("rate", None, pytest.approx(447.0))
    earlier = EarlierResults({WORK.key: result(None, 100.0, 10.0)}, None, 5.0, 1)
    # Of 0.5 s: the last of each batch, two of warm-up and the 20 that are only answered.
    known = estimate_setting(bare, size, earlier, 5.0, None)
    assert (known.time_source, known.setting_s) == ("rate", pytest.approx(447.0 + 0.5 * 28))
    assert size_sentence(size).endswith(", 1 process; 300 of them are timed, at 2 requests a second")
    assert [line.split(":")[0] for line in source_sentences([unknown], NOTHING, 16, None, "odd")] == [
        "time, rate", "not in the time",
    ]  # fmt: skip


def test_an_earlier_result_without_times_is_no_estimate() -> None:
    stats = {"T_total_mean": None, "T_preprocess_mean": None}
    untimed = SettingResult.model_construct(aggregate_stats=stats, memory=None, knobs={})
    assert estimate_setting(WORK, SIZE, EarlierResults({WORK.key: untimed}, None, None, 1), 5.0, None).setting_s is None


def test_what_is_done_counts_as_done() -> None:
    done = SettingWork("tier-low_topk4_blocks4", 455.4, FLOPS, 2**23, is_done=True)
    estimates = [estimate_setting(work, SIZE, NOTHING, 5.0, matmul_rate=980.0) for work in (WORK, done)]
    assert due_seconds(estimates) == pytest.approx(14.0)
    assert plan_total(estimates) == "whole: 1 of 2 settings to measure, about 14 s, most memory 8 MiB"
    assert [line.split() for line in plan_table(estimates)[1:]] == [
        ["1", WORK.key, "455", "2", "14", "s", "3", "MiB", "matmul"],
        ["2", done.key, "455", "2", "-", "8", "MiB", "done", "already"],
    ]


def test_a_plan_without_times_is_a_plan() -> None:
    """No formula is known, or nothing was measured before: the settings are there, figures are not, and a line why."""
    bare = SettingWork("own_blocks3", 47.0, None, None, is_done=False)
    rates = EarlierResults({}, StageRates(1.0, 1.0, 1.0), 5.0, 2)
    for earlier, work, matmul in ((rates, bare, 980.0), (NOTHING, WORK, None)):
        estimate = estimate_setting(work, SIZE, earlier, 5.0, matmul)
        assert (estimate.run_s, estimate.setting_s, estimate.time_source) == (None, None, None)
    without = estimate_setting(bare, SIZE, NOTHING, 5.0, None)
    known = estimate_setting(WORK, SIZE, NOTHING, 5.0, 980.0)
    assert due_seconds([known, without]) is None
    assert plan_table([without])[1].split() == ["1", bare.key, "47", "-", "-", "-", "none"]
    assert plan_total([without]) == "whole: 1 of 1 setting to measure"
    assert plan_total([known, without]) == "whole: 2 of 2 settings to measure, most memory 3 MiB"
    advice = "measure the settings with a few samples into --output_dir, and plan again"
    assert source_sentences([without], NOTHING, 16, None, "no formula is known for 'opt'") == [
        f"no estimate: no formula is known for 'opt'; {advice}"
    ]
    unmeasured = estimate_setting(WORK, SIZE, NOTHING, 5.0, None)
    lines = source_sentences([unmeasured], NOTHING, 16, None)
    assert lines[0] == f"no estimate: no earlier result in --output_dir to go by; {advice}"
    assert [line.split(":")[0] for line in lines] == ["no estimate", "memory"]


def test_less_than_a_second_or_a_mebibyte_is_not_nothing() -> None:
    small = SettingWork("own_blocks3", 47.0, FLOPS, 2**17, is_done=False)
    # 1960 operations a request and 7 requests.
    estimate = estimate_setting(small, SIZE, NOTHING, 5.0, matmul_rate=98e3)
    assert plan_total([estimate]) == "whole: 1 of 1 setting to measure, about 0.14 s, most memory 0.12 MiB"
    assert plan_table([estimate])[1].split()[3:] == ["0.02", "0.14", "s", "0.12", "MiB", "matmul"]


def test_every_source_that_was_used_is_explained_and_no_other() -> None:
    rough = source_sentences([estimate_setting(WORK, SIZE, NOTHING, 16, 98e9)], NOTHING, 16, 98e9)
    assert rough[0].startswith("time, matmul: a rough") and "(98 GFLOP/s)" in rough[0] and "(16 tokens)" in rough[0]
    assert "a tiny model takes orders of magnitude longer" in rough[0]
    assert rough[1].startswith("memory: by formula")
    assert len(rough) == 3
    earlier = EarlierResults({}, StageRates(2000.0, 6000.0, 800.0), 5.0, 2)
    scaled = source_sentences([estimate_setting(WORK, SIZE, earlier, 5.0, None)], earlier, 5.0, None)
    assert scaled[0].startswith("time, scaled") and "2 earlier results" in scaled[0] and "5.0 tokens" in scaled[0]
