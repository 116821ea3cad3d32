"""What selftest and watch print of simulated devices, and of a machine without any."""

import pytest
import torch

from experiment_core_utils.meters.__main__ import KnownLoad, main, matrix_products, selftest_lines, watch_lines
from experiment_core_utils.meters.instruments import Instruments, missing_lines
from experiment_core_utils.meters.windows import WindowGoal
from tests.scripted.simulated_meters import ScriptedClock, SimulatedCounter, SimulatedDevice, SimulatedPower, constant


def simulated(**changes) -> SimulatedDevice:  # type: ignore[no-untyped-def]
    scripted = {"name": "GPU-12", "read_cost_s": 0.0038, "power_read_cost_s": 0.00001}
    return SimulatedDevice(ScriptedClock(3.0), constant(76.0), **{**scripted, **changes})


def found(device: SimulatedDevice) -> Instruments:
    return Instruments(device.clock, (SimulatedCounter(device),), (SimulatedPower(device),))


def load_of(device: SimulatedDevice) -> KnownLoad:
    """5 ms at 600 W, and 3 ms at 200 W: 3 J and 0.6 J."""
    return KnownLoad("8 x 8", lambda: device.run(0.005, 600.0), lambda: device.run(0.003, 200.0), 6_000_000_000)


def test_selftest_prints_tick_costs_idle_closure_and_ratio() -> None:
    device = simulated()
    lines = list(selftest_lines(found(device), {"GPU-12": load_of(device)}, WindowGoal(0.01)))
    text = "\n".join(lines)
    assert lines[0].startswith("GPU-12  simulated (measured, counter): tick ")
    assert float(lines[0].split("tick ")[1].split(" ms")[0]) == pytest.approx(100.0, abs=0.3)
    assert "a reading takes 3.800 ms" in lines[0]
    assert "76.0 W now, a reading takes 0.010 ms" in lines[1]
    assert text.count("idle before: 76.") + text.count("idle before: 75.") == 2
    # 6 GFLOP and 3 J.
    (counted,) = [line for line in lines if "counter): products 8 x 8" in line]
    energy, gflop_per_j = float(counted.split(": ")[2].split(" J")[0]), float(counted.split(" W, ")[1].split(" ")[0])
    assert energy == pytest.approx(3.0, rel=0.01) and gflop_per_j == pytest.approx(2.0, rel=0.02)
    (closed,) = [line for line in lines if "counter): closure" in line]
    assert abs(float(closed.split("residual ")[1].split("%")[0])) < 2.0
    (ratio,) = [line for line in lines if "integrated power / counter" in line]
    assert float(ratio.split("= ")[1]) == pytest.approx(1.0, abs=0.02)


def test_a_device_that_vanishes_during_the_selftest_is_a_line() -> None:
    device = simulated(vanishes_at_s=12.0)
    lines = list(selftest_lines(found(device), {"GPU-12": load_of(device)}, WindowGoal(0.01)))
    assert any("GPU is lost" in line for line in lines)


def test_a_device_without_work_has_no_closure() -> None:
    lines = list(selftest_lines(found(simulated()), {}, WindowGoal()))
    assert lines[-1] == "GPU-12  no closure: no work is run on this device alone"


def test_what_is_missing_is_a_line_each() -> None:
    assert missing_lines({"RAPL": "no interface"}) == ["not measured here: RAPL: no interface"]


def test_watch_prints_power_and_energy_so_far() -> None:
    device = simulated(read_cost_s=0.0, power_read_cost_s=0.0)
    lines = list(watch_lines(found(device), 1.0, 2.5))
    assert lines == [
        "    1.0 s | GPU-12 76.0 W (instant_power), 76.0 J (simulated)",
        "    2.0 s | GPU-12 76.0 W (instant_power), 152.0 J (simulated)",
        "    2.5 s | GPU-12 76.0 W (instant_power), 190.0 J (simulated)",
    ]


def test_watch_takes_mean_power_from_the_counter_where_there_is_no_power_reading() -> None:
    device = simulated(read_cost_s=0.0)
    (line,) = watch_lines(Instruments(device.clock, (SimulatedCounter(device),), ()), 2.0, 2.0)
    assert line == "    2.0 s | GPU-12 76.0 W (mean since the last line), 152.0 J (simulated)"
    (line,) = watch_lines(Instruments(device.clock, (), (SimulatedPower(device),)), 2.0, 2.0)
    assert line.endswith("GPU-12 76.0 W (instant_power), no energy counter")


def test_watch_says_when_a_counter_was_reset_or_a_gpu_is_gone() -> None:
    device = simulated(read_cost_s=0.0, power_read_cost_s=0.0, starts_at_j=1e6, resets_at_s=(4.5,), vanishes_at_s=6.5)
    first, second, third, fourth = watch_lines(found(device), 1.0, 4.0)
    assert first.endswith("76.0 J (simulated)")
    assert "counted anew from here: the counter went backwards" in second
    assert third.endswith("76.0 J (simulated)")
    assert "GPU-12 no longer answers: GPU-12: GPU is lost" in fourth


def test_matrix_products_run_on_the_requested_device() -> None:
    load = matrix_products(torch.device("cpu"))
    load.both()
    # 4 products of 1024 x 1024: 2 * 1024^3 operations each.
    assert (load.name, load.first_flops) == ("1024 x 1024 float32", 8 * 1024**3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing on a machine without a GPU")
@pytest.mark.parametrize("command", [["selftest"], ["watch", "--seconds", "0.01", "--interval", "0.01"]])
def test_without_a_gpu_both_commands_say_so_and_succeed(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 0
    assert "not measured here: GPU energy: torch sees no GPU" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="requires a GPU that is not there")
def test_what_is_required_and_missing_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--require", "gpu"]) == 1
    assert "error: --require gpu: its energy is not measured here" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ["selftest", "--error", "0"],
        ["watch", "--interval", "0"],
        ["watch", "--interval", "nan"],
        ["watch", "--interval", "inf"],
        ["watch", "--seconds", "nan"],
        ["selftest", "--require", "tpu"],
    ],
)
def test_what_cannot_be_is_refused_in_one_line(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 2
    assert capsys.readouterr().err.count("\n") == 1
