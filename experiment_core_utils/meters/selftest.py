"""A self-test of the energy meters of this machine, on loads of known work."""

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from experiment_core_utils.meters.energy_statistics import sum_of_known
from experiment_core_utils.meters.instruments import Instruments
from experiment_core_utils.meters.windows import WindowGoal, energy_of_act, idle_power
from experiment_core_utils.primitives.clock import Clock
from experiment_core_utils.primitives.device import synchronize
from experiment_core_utils.primitives.errors import MeterUnavailable
from experiment_core_utils.records.energy import ActEnergy, EnergyOrigin, TickCalibration


@dataclass(frozen=True)
class KnownLoad:
    """Two acts that do known work and return when it is done."""

    name: str  #: sizes and dtype, for a reader
    first: Callable[[], None]
    second: Callable[[], None]
    first_flops: int  #: operations of the first act, one multiply-add as 2

    def both(self) -> None:
        """Run one load after the other."""
        self.first()
        self.second()


def matrix_products(device: torch.device) -> KnownLoad:
    """Some large products, and many small ones that leave the device waiting; warmed up.

    Numbers are random: products of equal ones draw less power.
    """
    is_cuda = device.type == "cuda"
    dtype = torch.bfloat16 if is_cuda else torch.float32
    large_side, small_side, small_times = (8192, 1024, 64) if is_cuda else (1024, 128, 256)
    large, small = (torch.randn(side, side, dtype=dtype, device=device) for side in (large_side, small_side))

    @torch.inference_mode()
    def products(factor: torch.Tensor, times: int) -> None:
        for _ in range(times):
            factor @ factor
        synchronize(device)

    load = KnownLoad(
        f"{large_side} x {large_side} {str(dtype).removeprefix('torch.')}",
        lambda: products(large, 4),
        lambda: products(small, small_times),
        4 * 2 * large_side**3,
    )
    load.both()
    return load


IDLE_S = 5.0
READINGS_TIMED = 20


def selftest_lines(
    using: Instruments, loads: Mapping[str, KnownLoad], goal: WindowGoal, idle_s: float = IDLE_S
) -> Iterator[str]:
    """One line for each thing found, as it is found; a device that fails on the way gets a line that says so.

    Args:
        loads: by the name of the device that they run on, warmed up, so that idle power is that with a context.
    """
    using = using.calibrated()
    for device in using.devices:
        own = using.of_device(device)
        try:
            yield from _source_lines(own)
            yield from _idle_lines(own, idle_s, "idle before")
            if device in loads:
                yield from _closure_lines(own, loads[device], goal)
                yield from _idle_lines(own, idle_s, "idle after")
            else:
                yield f"{device}  no closure: no work is run on this device alone"
        except MeterUnavailable as error:
            yield f"{device}  failed: {error}"


def missing_lines(missing: Mapping[str, str]) -> list[str]:
    """What cannot be measured here, and why."""
    return [f"not measured here: {name}: {reason}" for name, reason in missing.items()]


def _source_lines(own: Instruments) -> Iterator[str]:
    for counter in own.counters:
        yield f"{_name(counter.origin)}: {_tick_text(own.ticks[counter.origin.device])}"
    for probe in own.probes:
        cost_s = median_cost_s(probe.read_w, own.clock, READINGS_TIMED)
        yield f"{_name(probe.origin)}: {probe.read_w():.1f} W now, a reading takes {cost_s * 1e3:.3f} ms"


def median_cost_s(call: Callable[[], object], clock: Clock, times: int) -> float:
    """Median time of a call."""
    costs = []
    for _ in range(times):
        started_s = clock.now_s()
        call()
        costs.append(clock.now_s() - started_s)
    return statistics.median(costs)


def _tick_text(tick: TickCalibration) -> str:
    cost = "" if tick.read_cost_s is None else f", a reading takes {tick.read_cost_s * 1e3:.3f} ms"
    if tick.tick_s is None or tick.longest_tick_s is None:
        return f"tick not found, {tick.reason}{cost}"
    return f"tick {tick.tick_s * 1e3:.2f} ms (longest of {tick.num_ticks}: {tick.longest_tick_s * 1e3:.2f}){cost}"


def _idle_lines(own: Instruments, seconds: float, label: str) -> Iterator[str]:
    for each in idle_power(own, seconds):
        if each.watts is None:
            yield f"{_name(each.origin)}: {label}: none, {each.reason}"
        else:
            bound = "" if each.bound_w is None else f" (resolution +- {each.bound_w:.2f} W)"
            yield f"{_name(each.origin)}: {label}: {each.watts:.2f} W over {each.seconds:.1f} s{bound}"


def _closure_lines(own: Instruments, load: KnownLoad, goal: WindowGoal) -> Iterator[str]:
    """Each act alone, then both in one window: the sum of the parts against the whole, and source against source."""
    first, second, both = (energy_of_act(act, own, goal) for act in (load.first, load.second, load.both))
    for alone, other, whole in zip(first, second, both, strict=True):
        name = _name(alone.origin)
        yield f"{name}: products {load.name}: {_act_text(alone, load.first_flops)}"
        parts_j = sum_of_known([alone.joules, other.joules])
        if parts_j is None or whole.joules is None:
            yield f"{name}: closure: none, {alone.reason or other.reason or whole.reason}"
            continue
        bound_j = sum_of_known([alone.bound_j, other.bound_j, whole.bound_j])
        allowed = "" if bound_j is None else f" (resolution allows {bound_j / whole.joules:.2%})"
        residual = (whole.joules - parts_j) / whole.joules
        yield (
            f"{name}: closure: both acts {whole.joules:.4f} J, the two alone {parts_j:.4f} J, "
            f"residual {residual:+.2%}{allowed}"
        )
    yield from _ratio_lines(own.devices, first)


def _act_text(act: ActEnergy, flops: int) -> str:
    if act.joules is None or act.count is None or act.window_s is None or act.act_s is None:
        return f"none, {act.reason}"
    bound = "" if act.bound_j is None else f" +- {act.bound_j / act.joules:.2%}"
    text = (
        f"{act.joules:.4f} J{bound} an act, {act.joules / act.act_s:.1f} W, {flops / act.joules / 1e9:.1f} GFLOP/J, "
        f"{act.count:.1f} acts in {act.window_s:.2f} s between {act.alignment}"
    )
    return text if act.remark is None else f"{text} ({act.remark})"


def _ratio_lines(devices: tuple[str, ...], acts: list[ActEnergy]) -> Iterator[str]:
    for device in devices:
        own = [each for each in acts if each.origin.device == device]
        counted = [each.joules for each in own if each.origin.basis == "counter"]
        integrated = [each.joules for each in own if each.origin.basis != "counter"]
        if counted and integrated and counted[0] and integrated[0] is not None:
            yield f"{device}  integrated power / counter = {integrated[0] / counted[0]:.4f}"
        else:
            yield f"{device}  one source alone: nothing to compare it with"


def _name(origin: EnergyOrigin) -> str:
    return f"{origin.device}  {origin.source} ({origin.kind}, {origin.basis})"
