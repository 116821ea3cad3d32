"""Energy of a pass on a simulated device, with a clock that stands still: joules by hand."""

import pytest
import torch

from experiment_core_utils.measuring.passes import energy_of_pass
from experiment_core_utils.meters.stages import StageMeasurement
from experiment_core_utils.meters.windows import WindowGoal
from experiment_core_utils.primitives.errors import SampleTimedOut
from tests.scripted.simulated_energy import instruments_of, scripted_device

TEXT = {"input_ids": torch.zeros(1, 4, dtype=torch.long)}


def test_requests_of_a_pass_share_its_window() -> None:
    """Two requests of 1 s at 200 W and 400 W again and again: a pass takes 600 J, a third of it the first."""
    device = scripted_device()
    using = instruments_of(device, sample_every_s=0.01)
    how = StageMeasurement(using, WindowGoal(0.05, least_s=5.0))
    windows, allocated = energy_of_pass([lambda: device.run(1.0, 200.0), lambda: device.run(1.0, 400.0)], how)
    counter, power = windows
    assert (counter.origin.basis, power.origin.basis) == ("counter", "instant_power")
    # Whole passes of 2 s: the third ends the window.
    assert (counter.count, counter.window_s, counter.alignment) == (3, pytest.approx(6.0), "acts")
    assert counter.joules == pytest.approx(600.0, rel=0.02) and power.joules == pytest.approx(600.0, rel=0.02)
    assert [each.joules for each in allocated] == [pytest.approx(200.0, rel=0.02), pytest.approx(400.0, rel=0.02)]
    assert sum(each.joules or 0.0 for each in allocated) == pytest.approx(counter.joules, rel=1e-12)
    for each, truth in zip(allocated, (200.0, 400.0), strict=True):
        assert each.joules is not None and each.bound_j is not None and abs(each.joules - truth) <= each.bound_j
        assert (each.method, each.origin, each.reason) == ("apportioned", counter.origin, None)


def test_of_a_batch_each_request_has_an_equal_part() -> None:
    """The same two runs as batches of 3 requests: 600 J for six of them, 200 J and 400 J for three each."""
    device = scripted_device()
    how = StageMeasurement(instruments_of(device, sample_every_s=0.01), WindowGoal(0.05, least_s=5.0))
    runs = [lambda: device.run(1.0, 200.0), lambda: device.run(1.0, 400.0)]
    (counter, _), allocated = energy_of_pass(runs, how, batch_size=3)
    # An act is one request of each batch; three passes of 2 s are nine of them.
    assert (counter.count, counter.window_s) == (9, pytest.approx(6.0))
    assert (counter.joules, counter.act_s) == (pytest.approx(200.0, rel=0.02), pytest.approx(2.0 / 3))
    assert [each.joules for each in allocated] == [pytest.approx(each / 3, rel=0.02) for each in (200.0, 400.0)]


def test_a_request_that_fails_ends_the_readings() -> None:
    device = scripted_device()
    how = StageMeasurement(instruments_of(device), WindowGoal())

    def fail() -> None:
        raise SampleTimedOut("too long")

    with pytest.raises(SampleTimedOut):
        energy_of_pass([fail], how)
    readings = device.num_readings
    device.clock.sleep(1.0)
    assert device.num_readings == readings
