"""What a result says of its conditions, from hand-made readings."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import tier_target
from experiment_core_utils.measuring.arrivals import arrivals_s
from experiment_core_utils.meters.stability import warm_up_of
from experiment_core_utils.meters.steadiness import (
    conditions_of,
    open_loop_of,
    order_of,
    precision_of,
    warmup_of,
)
from experiment_core_utils.records.caveats import Caveat, caveat
from experiment_core_utils.records.setting_result import OpenLoop, Order, SettingResult
from experiment_core_utils.records.settings import (
    ArrivalsTrace,
    ConditionsReading,
    CpuReading,
    GpuReading,
    MeasuringOrder,
    When,
)
from experiment_core_utils.saved_results.result_caveats import conditions_caveats, open_loop_caveats
from experiment_core_utils.saved_results.terminal import caveat_lines
from tests.hand_made_records import measured_sample, part, result_of, staged_run

GPU = GpuReading(1980, 2600, 60, 400.0, ("gpu_idle",), 5.0, 1.0, 3, 0, 0, None)


def reading(
    when: When, at_s: float, busy_s: float, own_s: float, gpu: GpuReading | None = GPU, rank: int = 0, run: str = "0007"
) -> ConditionsReading:
    """On a host of 4 CPUs."""
    cpu = CpuReading(busy_s, 4 * at_s, own_s, 2000.0 + at_s)
    return ConditionsReading(run, rank, when, "2026-01-02T03:04:05.678+00:00", at_s, gpu, None, cpu)


def test_one_window_comes_to_ends_sums_and_unions() -> None:
    warmer = replace(
        GPU, sm_clock_mhz=1700, temperature_c=80, power_w=650.0, throttle_reasons=("sw_power_cap",),
        power_throttled_s=5.5, foreign_processes=2, foreign_memory_bytes=7, utilisation_percent=90,
    )  # fmt: skip
    readings = [reading("open", 10, 5, 1), reading("between", 20, 20, 11, warmer), reading("close", 30, 30, 20)]
    (entry,) = conditions_of(readings)
    assert entry.content() == {
        "rank": 0,
        "experiment_id": "0007",
        "opened": "2026-01-02T03:04:05.678+00:00",
        "num_readings": 3,
        "window_s": 20,
        "sm_clock_mhz": [1700, 1980],
        "memory_clock_mhz": [2600, 2600],
        "temperature_c_max": 80,
        "power_w_max": 650.0,
        "throttle_reasons": ["gpu_idle", "sw_power_cap"],
        # Up by 0.5, then (the scripted counter) down again by as much.
        "power_throttled_s": 0.0,
        "thermal_throttled_s": 0.0,
        "utilisation_percent_at_open": 3,
        "foreign_gpu_processes_max": 2,
        "foreign_gpu_memory_bytes_max": 7,
        "gpu_reason": None,
        # 25 busy seconds, 19 of them own, of 4 * 20.
        "foreign_cpu_share": pytest.approx(6 / 80),
        "cpu_frequency_mhz": [2010.0, 2030.0],
    }


def test_time_between_two_windows_does_not_count() -> None:
    readings = [
        reading("open", 0, 0, 0), reading("close", 10, 10, 10), reading("open", 110, 400, 10),
        reading("close", 120, 420, 20),
    ]  # fmt: skip
    (entry,) = conditions_of(readings)
    assert entry.window_s == 20
    # 10 + 20 busy seconds, 10 + 10 own, of 4 * 20.
    assert entry.foreign_cpu_share == pytest.approx(10 / 80)


def test_each_process_and_run_has_its_own_entry() -> None:
    readings = [reading("open", 0, 0, 0, run="0006"), reading("open", 50, 0, 0), reading("open", 0, 0, 0, rank=1)]
    assert [(each.rank, each.experiment_id) for each in conditions_of(readings)] == [
        (0, "0006"), (0, "0007"), (1, "0007"),
    ]  # fmt: skip
    assert conditions_of(readings)[0].foreign_cpu_share is None
    assert conditions_of([]) == []


def test_without_a_gpu_its_figures_are_null_with_a_reason() -> None:
    blind = replace(reading("open", 0, 0, 0, None), gpu_reason="no GPU is used")
    (entry,) = conditions_of([blind])
    assert entry.gpu_reason == "no GPU is used"
    assert entry.sm_clock_mhz is entry.throttle_reasons is entry.power_throttled_s is None


def caveats(close: GpuReading, background_s: float = 0.0, opened: GpuReading = GPU) -> list[Caveat]:
    readings = [reading("open", 0, 0, 0, opened), reading("close", 10, 10 + background_s, 10, close)]
    return conditions_caveats(conditions_of(readings))


def test_a_quiet_machine_has_no_caveat() -> None:
    assert caveats(GPU, background_s=4.0) == []  # 4 of 40 seconds are 10 %, not more
    assert caveats(replace(GPU, power_throttled_s=5.1)) == []  # 0.1 of 10 s


def test_of_several_processes_the_one_that_saw_most_load_of_others_counts() -> None:
    # The own time is that of both processes. The first sees 3 of 40 s of others, the second 6, of which 10 % are 4.
    of_both = [
        [reading("open", 0, 0, 0, rank=rank), reading("close", 10, 18 + others_s, 18, rank=rank)]
        for rank, others_s in ((1, 3.0), (0, 6.0))
    ]
    (load,) = conditions_caveats(conditions_of([each for own in of_both for each in own]))
    assert load.figures == {"cpu_fraction": pytest.approx(0.15)} and load.voids
    assert conditions_caveats(conditions_of(of_both[0])) == []


def test_heat_power_and_others_are_caveats() -> None:
    (hot,) = caveats(replace(GPU, throttle_reasons=("gpu_idle", "hw_thermal_slowdown")))
    assert hot.kind == "throttled" and "(hw_thermal_slowdown)" in hot.sentence
    (counted,) = caveats(replace(GPU, power_throttled_s=5.2))
    assert "(power limit)" in counted.sentence
    (load,) = caveats(GPU, background_s=8.0)
    assert load.sentence.startswith("background load: other processes used 20% of the CPUs during this setting; ")
    busy = replace(GPU, foreign_processes=1, utilisation_percent=50)
    (company,) = caveats(GPU, opened=busy)
    assert company.kind == "foreign_load_gpu"
    assert caveats(GPU, opened=replace(busy, utilisation_percent=10)) == []
    assert caveats(GPU, opened=replace(busy, foreign_processes=None)) == []


def test_the_place_in_the_order_is_counted_from_zero() -> None:
    order = MeasuringOrder(42, ("b", "a"))
    assert order_of("a", order) == Order(how="rounds", seed=42, position=1, num_settings=2)
    assert order_of("c", order) is None


def test_a_warm_up_is_reported_in_milliseconds() -> None:
    assert warmup_of(warm_up_of([0.5, 0.25, 0.25, 0.25], 2, "0007", 3)).content() == {
        "rank": 3, "experiment_id": "0007", "num_runs": 4, "is_stable": True, "spread_of_last_3": 0.0,
        "T_total": [500.0, 250.0, 250.0, 250.0],
    }  # fmt: skip


def test_the_precision_is_that_of_all_processes_together() -> None:
    samples = [measured_sample(i, staged_run(None, total, ())) for i, total in enumerate((8.0, 10.0, 10.0, 12.0))]
    merged = replace(part(*samples), num_stopped_early=1)
    assert precision_of(0.5, merged).content() == {
        "asked": 0.5,
        # 3.182446 * sqrt(8 / 3) / 2 / 10, as in test_stability.py.
        "reached": pytest.approx(0.259845, 1e-5),
        "stopped_by": "precision",
        "num_processes_stopped": 1,
    }
    assert precision_of(None, part(samples[0])).reached is None
    assert precision_of(None, part(samples[0])).stopped_by == "num_samples"


def arrivals(num_answered: int, due_span_s: float, answered_span_s: float, **changes: Any) -> ArrivalsTrace:
    """A batch of 100 requests, 2 a second."""
    usual = {"most_under_way": 2, "num_late": 0, "late_max_s": 0.001}
    return ArrivalsTrace("0007", 0, 2.0, 100, num_answered, due_span_s, answered_span_s, **{**usual, **changes})


def test_batches_of_arriving_requests_come_to_one_rate() -> None:
    """The middle ones of three batches came within 40, 20 and 0 s, and were answered within 80, 40 and 0."""
    batches = [
        arrivals(100, 40.0, 80.0, most_under_way=60),
        arrivals(60, 20.0, 40.0, num_late=1, late_max_s=0.25),
        arrivals(0, 0.0, 0.0, late_max_s=None),
    ]
    found = open_loop_of(batches)
    assert found == OpenLoop(
        request_rate=2.0,
        achieved_rate=1.0,
        num_batches=3,
        num_requests=300,
        num_answered=160,
        most_under_way=60,
        num_late=1,
        late_max_ms=250.0,
    )
    behind, short, late = open_loop_caveats(found)
    assert behind.sentence.startswith("server: it answered 1 of 2 requests a second, with up to 60 under way")
    assert late.sentence.startswith("client: 1 of 300 requests were sent more than 5 ms after they were due, the")
    assert short.sentence.startswith("open loop: up to 60 of the 100 requests of a batch were under way at once")
    # The load grew all the time: half of the rate may be no more than answers of several lengths.
    assert (behind.voids, short.voids, late.voids) == (False, False, False)
    (steady,) = open_loop_caveats(open_loop_of([arrivals(100, 40.0, 60.0)]))
    assert steady.voids and steady.figures["fraction"] == pytest.approx(1 / 3)
    (near,) = open_loop_caveats(open_loop_of([arrivals(100, 40.0, 48.0)]))
    assert not near.voids


def test_a_server_and_a_client_in_time_have_no_caveat() -> None:
    # 40 s for what came in 40 s, and 44, in which 91 % of them are answered.
    assert [open_loop_caveats(open_loop_of([arrivals(100, 40.0, each)])) for each in (40.0, 44.0)] == [[], []]
    assert open_loop_of([]) is None and open_loop_caveats(None) == []
    # Of one answer there is no rate, of fewer than 100 requests none that says much, and one alone is no growing load.
    assert open_loop_caveats(open_loop_of([arrivals(1, 0.0, 0.0)])) == []
    assert open_loop_caveats(open_loop_of([replace(arrivals(99, 40.0, 80.0), num_requests=99)])) == []
    assert open_loop_caveats(open_loop_of([replace(arrivals(1, 0.0, 0.0), num_requests=1, most_under_way=1)])) == []


def test_answers_of_several_lengths_do_not_make_a_server_late() -> None:
    """Of unlimited capacity, with times that are 0.6 apart in logarithm around 1 s: 20 runs of 256 requests at 10/s."""
    for seed in range(20):
        due_s = np.array(arrivals_s(256, 10.0, (seed, 0)))
        ended_s = due_s + np.random.RandomState(seed).lognormal(0.0, 0.6, 256)
        spans = (np.diff(np.quantile(each, (0.1, 0.9)))[0] for each in (due_s, ended_s))
        batch = replace(arrivals(256, *spans), num_requests=256, request_rate=10.0)
        assert open_loop_caveats(open_loop_of([batch])) == []


def test_each_kind_of_unsteadiness_is_one_line_under_the_table() -> None:
    def result(top_k: int, *found: Caveat) -> SettingResult:
        made = result_of(
            part(measured_sample(0)),
            Setting.of(vision=tier_target("low"), top_k=top_k, num_active_blocks=RunningBlocks.of((0, 1, 3))),
        )
        provenance = made.provenance.with_keys(caveats=[], caveat_records=[])
        return made.with_keys(provenance=provenance.with_caveats([caveat("random_weights"), *found]))

    loads = [caveat("foreign_load_cpu", cpu_fraction=each) for each in (0.2, 0.3)]
    results = [result(1), result(2, loads[0], caveat("foreign_load_gpu")), result(4, loads[1])]
    assert caveat_lines(results) == [
        f"{loads[1].sentence} (tier-low_topk4_blocks3; 2 of 3 settings)",
        f"{caveat('foreign_load_gpu').sentence} (tier-low_topk2_blocks3; 1 of 3 settings)",
    ]
    assert caveat_lines([result(1)]) == []
