"""Stage energies of a scripted model whose stages draw scripted powers on simulated devices: joules by hand."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.knobs.vision_tokens import tier_target
from experiment_core_utils.meters import power
from experiment_core_utils.meters.instruments import Instruments
from experiment_core_utils.meters.setting_energy import energy_of
from experiment_core_utils.meters.stages import Rewind, StagedRequest, StageMeasurement, StageRounds, are_narrow
from experiment_core_utils.meters.windows import WindowGoal, idle_power
from experiment_core_utils.models.interface import Stages
from experiment_core_utils.primitives.clock import HostClock
from experiment_core_utils.primitives.errors import ConfigurationError, MeterUnavailable, Stopped
from experiment_core_utils.primitives.interruption import StopRequest
from experiment_core_utils.records.energy import EnergyFigure, SettingEnergy, StageEnergies
from experiment_core_utils.saved_results.result_caveats import energy_caveats
from experiments.benchmarks.shared import endless_model, first_inputs
from tests.scripted.scripted_model import ScriptedModel
from tests.scripted.simulated_energy import ModelOnDevice
from tests.scripted.simulated_meters import ScriptedClock, SimulatedCounter, SimulatedDevice, SimulatedPower, constant

TEXT = {"input_ids": torch.zeros(1, 4, dtype=torch.long)}
PICTURE = {**TEXT, "pixel_values": torch.zeros(1, 2, 3, 4, 4)}


def rewind(state: list[int], steps: int) -> None:
    del state[len(state) - steps :]


def gpu(**changes: Any) -> SimulatedDevice:
    scripted = {"name": "GPU-12", "phase_s": 0.037, "read_cost_s": 0.0038, "power_read_cost_s": 0.00001}
    return SimulatedDevice(ScriptedClock(3.0), constant(70.0), **{**scripted, **changes})


def stage_energies(
    model: Stages, inputs: Any, max_new_tokens: int, rewind: Rewind, how: StageMeasurement
) -> StageEnergies:
    """Rounds of one request's stages, as a setting's energy passes make them."""
    before = idle_power(how.using, how.idle_s)
    request, rounds = StagedRequest(model, inputs, max_new_tokens, rewind), StageRounds(how)
    for repeat in range(how.repeats):
        rounds.measure(request, repeat)
        if repeat + 1 >= how.least_repeats and are_narrow(rounds.windows.values(), how.goal.relative_error):
            break
    return rounds.energies(tuple(zip(before, idle_power(how.using, how.idle_s), strict=True)))


def measured(device: SimulatedDevice, inputs: Any = PICTURE, max_new_tokens: int = 16, **how: Any) -> StageEnergies:
    using = Instruments(device.clock, (SimulatedCounter(device),), (SimulatedPower(device),)).calibrated()
    measurement = StageMeasurement(using, WindowGoal(0.01), **how)
    return stage_energies(ModelOnDevice(device), inputs, max_new_tokens, rewind, measurement)


def mean_of(figure: EnergyFigure) -> float:
    assert figure.gross_j is not None
    return figure.gross_j.mean


def test_each_stage_has_its_joules_and_they_add_up_to_the_whole() -> None:
    found = measured(gpu())
    assert (found.output_tokens, found.decode_steps) == (4, 3)
    # 0.01 * 400, 0.02 * 600, 3 * 0.005 * 200.
    for stage, joules in {"vision": 4.0, "prefill": 12.0, "decode": 3.0, "end_to_end": 19.0}.items():
        counted, integrated = found.figures[stage]
        assert mean_of(counted) == pytest.approx(joules, rel=0.01)
        assert mean_of(integrated) == pytest.approx(joules, rel=0.05)
        assert (counted.origin.basis, counted.num_windows, counted.reason) == ("counter", 3, None)
        assert counted.uncertainty_j is not None and abs(mean_of(counted) - joules) <= 2 * counted.uncertainty_j
        assert found.source_ratios[stage] == mean_of(integrated) / mean_of(counted)
    by_counter, by_power = found.closures
    assert by_counter.stages_j == pytest.approx(19.0, rel=0.01)
    assert by_counter.residual_share is not None and abs(by_counter.residual_share) < 0.01
    assert by_power.origin.basis == "instant_power"


def test_a_stage_whose_longest_window_was_too_short_tells_its_error_and_the_goal() -> None:
    device = gpu()
    using = Instruments(device.clock, (SimulatedCounter(device),), (SimulatedPower(device),)).calibrated()
    how = StageMeasurement(using, WindowGoal(0.005, least_s=0.5, longest_s=4.0), repeats=2)
    found = stage_energies(ModelOnDevice(device), PICTURE, 16, rewind, how)
    assert found.error_goal == 0.005
    errors = {name: figures[0].window_error for name, figures in found.figures.items()}
    # Ends known to 4.05 ms each and an act of 20, 15 or 45 ms, in 4 s and up to a tick; for 10 ms 3.62 s suffice.
    for name, act_s in {"prefill": 0.020, "decode": 0.015, "end_to_end": 0.045}.items():
        assert errors[name] == pytest.approx((0.0081 + act_s) / 4.05, rel=0.03)
    entry = energy_of(SettingEnergy("0001", 0, 7, found, {}, None))
    (caveat,) = [each for each in energy_caveats(entry) if each.kind == "energy_goal_missed"]
    assert caveat.sentence.startswith(
        "energy: the longest windows leave an error of up to prefill 0.7%, decode 0.6%, end_to_end"
    )
    assert caveat.sentence.endswith("more than the goal of 0.5%")


def test_idle_energy_is_taken_off_for_the_net() -> None:
    counted, _ = measured(gpu()).figures["prefill"]
    # 70 W over 20 ms.
    assert counted.idle_j == pytest.approx(1.4, rel=0.01)
    assert counted.net_j == pytest.approx(12.0 - 1.4, rel=0.015)


def test_without_a_picture_there_is_no_vision_and_with_one_token_no_decode() -> None:
    assert set(measured(gpu(), TEXT).figures) == {"prefill", "decode", "end_to_end"}
    one = measured(gpu(), TEXT, max_new_tokens=1)
    assert set(one.figures) == {"prefill", "end_to_end"}
    assert one.decode_steps == 0


def test_every_repetition_of_decode_begins_behind_the_prefill() -> None:
    model = ModelOnDevice(gpu())
    request = StagedRequest(model, TEXT, 16, rewind)
    model.calls.clear()
    request.decode()
    request.decode()
    steps = ["decode_step 1", "decode_step 2", "decode_step 3"]
    assert (request.output_tokens, model.calls) == (4, steps + steps)


def test_stages_are_measured_in_rounds_each_in_an_order_of_its_own() -> None:
    device = gpu()
    model, order = ModelOnDevice(device), list[str]()
    for name in ("encode_image", "prefill", "decode_step"):
        call = getattr(model, name)
        setattr(model, name, lambda *given, call=call, name=name: (order.append(name), call(*given))[1])
    using = Instruments(device.clock, (SimulatedCounter(device),), ()).calibrated()
    how = StageMeasurement(using, WindowGoal(0.05, least_s=0.5), repeats=3)
    stage_energies(model, PICTURE, 16, rewind, how)
    runs = [name for name, before in zip(order, ["", *order], strict=False) if name != before]
    # The stages are met again and again, not each in one block; the whole request shows all three in turn.
    assert [runs.count(name) > 3 for name in ("encode_image", "prefill", "decode_step")] == [True, True, True]


@pytest.mark.parametrize(("swing", "windows"), [(0.0, 3), (0.2, 5)])
def test_rounds_end_once_every_interval_is_within_the_goal(swing: float, windows: int) -> None:
    device = gpu()
    model = ModelOnDevice(device)

    def prefill(inputs: Any, features: str | None) -> Any:
        """Another power every 2 s, by turns more and less."""
        device.run(0.020, 600.0 * (1 + swing * (-1) ** int(device.clock.now_s() / 2)))
        return ScriptedModel.prefill(model, inputs, features)

    model.prefill = prefill  # type: ignore[method-assign]
    using = Instruments(device.clock, (SimulatedCounter(device),), (SimulatedPower(device),)).calibrated()
    found = stage_energies(model, TEXT, 16, rewind, StageMeasurement(using, WindowGoal(0.02)))
    assert {figure.num_windows for figures in found.figures.values() for figure in figures} == {windows}
    # Of the three acts; the two windows at rest and what is beside the windows come on top.
    taken_s = device.clock.now_s() - 5.0
    assert 3 * windows * 2.0 + 2 * 2.0 < taken_s < 3 * windows * 2.6 + 2 * 3.0 + 1.0


def test_a_gpu_that_vanishes_leaves_reasons_and_no_closure() -> None:
    found = measured(gpu(vanishes_at_s=20.0), repeats=2)
    for figures in found.figures.values():
        for figure in figures:
            assert figure.num_windows < 2 and figure.reason is not None and "GPU is lost" in figure.reason
    for closure in found.closures:
        assert closure.residual_j is None and closure.reason is not None
    assert found.idle[0][0].watts is not None and found.idle[0][1].watts is None


def test_devices_are_separate_and_summed() -> None:
    clock = ScriptedClock(3.0)
    first, second = (SimulatedDevice(clock, constant(70.0), f"GPU-{n}", read_cost_s=0.001) for n in (0, 1))
    using = Instruments(clock, (SimulatedCounter(first), SimulatedCounter(second)), ()).calibrated()
    how = StageMeasurement(using, WindowGoal(0.01), repeats=2)
    own, other, both = stage_energies(ModelOnDevice(first), TEXT, 16, rewind, how).figures["prefill"]
    # The second does nothing: 20 ms at 70 W.
    assert (mean_of(own), mean_of(other)) == (pytest.approx(12.0, rel=0.01), pytest.approx(1.4, rel=0.02))
    assert (both.origin.device, mean_of(both)) == ("all", pytest.approx(13.4, rel=0.01))
    assert both.idle_w == pytest.approx(140.0, rel=0.01)


def test_what_cannot_be_is_refused_before_anything_runs() -> None:
    using = Instruments(ScriptedClock(), (), ())
    with pytest.raises(ConfigurationError, match="1 windows of a stage"):
        StageMeasurement(using, WindowGoal(), repeats=1)
    model = ModelOnDevice(gpu())
    with pytest.raises(MeterUnavailable, match="nothing on this machine"):
        stage_energies(model, TEXT, 16, rewind, StageMeasurement(using, WindowGoal()))
    assert model.calls == []


def test_a_wish_to_stop_is_heard_between_two_repetitions() -> None:
    device, stop = gpu(), StopRequest()
    model = ModelOnDevice(device)
    using = Instruments(device.clock, (SimulatedCounter(device),), (SimulatedPower(device),)).calibrated()
    prefill, prefilled = model.prefill, list[float]()

    def prefill_and_stop(*given: Any) -> Any:
        prefilled.append(device.clock.now_s())
        if len(prefilled) == 20:
            stop.note(2, None)
        return prefill(*given)

    model.prefill = prefill_and_stop  # type: ignore[method-assign, assignment]
    with pytest.raises(Stopped, match="while a stage's energy was measured"):
        stage_energies(model, TEXT, 16, rewind, StageMeasurement(using, WindowGoal(), stop=stop))
    assert len(prefilled) == 20
    readings = device.num_readings
    device.clock.sleep(1.0)
    assert device.num_readings == readings


def real_request(checkpoint: Path) -> tuple[Any, Any]:
    """A model on the CPU and the first sample of its task, whose answers have their full length."""
    config = parse_config(["--model_path", str(checkpoint), "--execution", "eager", "--device", "cpu"])
    model = endless_model(config)
    return model, first_inputs(model, config.task, tier_target("low"))


def test_a_real_model_beside_a_device_played_in_real_time(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread, the ticks and the model run beside each other; at 100 W an act's joules are 100 times its seconds.

    A busy host holds the thread up for many of its 5 ms, and windows with such gaps are refused (see test_power.py); at
    a constant power nothing is lost in a gap.
    """
    monkeypatch.setattr(power, "MOST_GAP", math.inf)
    clock = HostClock()
    device = SimulatedDevice(clock, constant(100.0), "GPU-12", tick_s=0.02)
    using = Instruments(
        clock, (SimulatedCounter(device),), (SimulatedPower(device),), sample_every_s=0.005
    ).calibrated()
    model, inputs = real_request(tiny_checkpoint)
    how = StageMeasurement(using, WindowGoal(0.5, least_s=0.1), repeats=2, idle_s=0.1)
    found = stage_energies(model, inputs, 5, model.rewind, how)
    for counted, integrated in found.figures.values():
        assert counted.act_s is not None and integrated.act_s is not None
        assert mean_of(integrated) == pytest.approx(100.0 * integrated.act_s, rel=1e-6)
        # How exact the counter is depends on how busy the host is; that it was read between its ticks does not.
        assert counted.num_windows == 2 and mean_of(counted) > 0.0 and counted.uncertainty_j is not None


def test_the_steps_of_the_real_model_can_be_done_again(tiny_checkpoint: Path) -> None:
    """A cache cut back by the steps gives the same tokens again, and is as long as before."""
    model, inputs = real_request(tiny_checkpoint)
    request = StagedRequest(model, inputs, 5, model.rewind)
    assert list(request.acts) == ["vision", "prefill", "decode", "end_to_end"]
    for act in request.acts.values():
        act()
    with torch.inference_mode():
        logits, state = model.prefill(inputs, model.encode_image(inputs))
        length = state.past_key_values.get_seq_length()
        first = logits.argmax(dim=-1, keepdim=True)
        answers = []
        for _ in range(2):
            token, answer = first, []
            for _ in range(4):
                token = model.decode_step(token, state).argmax(dim=-1, keepdim=True)
                answer.append(int(token))
            model.rewind(state, 4)
            answers.append(answer)
            assert state.past_key_values.get_seq_length() == length
    assert answers[0] == answers[1]
