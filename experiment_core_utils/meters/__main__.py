"""The energy meters of this machine: a self-test, and a live view of its power.

knobprof meters selftest
knobprof meters selftest --require gpu
knobprof meters watch --seconds 60 --interval 1

A GPU that this process may not use (CUDA_VISIBLE_DEVICES) is not looked at. Without anything to measure with both say
what is missing and end with exit code 0, but for what `--require` names.
"""

import argparse
import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch

from experiment_core_utils.config.command import reporting_errors, run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.meters.counters import counter_delta
from experiment_core_utils.meters.energy_statistics import sum_of_known
from experiment_core_utils.meters.instruments import Instruments, find_instruments, missing_lines, uuids_of
from experiment_core_utils.meters.interface import EnergyCounter, PowerProbe
from experiment_core_utils.meters.windows import RELATIVE_ERROR, WindowGoal, energy_of_act, idle_power
from experiment_core_utils.primitives.clock import Clock, HostClock
from experiment_core_utils.primitives.device import gpu_uuid, synchronize, visible_gpus
from experiment_core_utils.primitives.errors import ConfigurationError, MeterUnavailable
from experiment_core_utils.primitives.units import MOST_SECONDS, check_fraction
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


def selftest_lines(using: Instruments, loads: Mapping[str, KnownLoad], goal: WindowGoal) -> Iterator[str]:
    """One line for each thing found, as it is found; a device that fails on the way gets a line that says so.

    Args:
        loads: by the name of the device that they run on, warmed up, so that idle power is that with a context.
    """
    using = using.calibrated()
    for device in using.devices:
        own = using.of_device(device)
        try:
            yield from _source_lines(own)
            yield from _idle_lines(own, "idle before")
            if device in loads:
                yield from _closure_lines(own, loads[device], goal)
                yield from _idle_lines(own, "idle after")
            else:
                yield f"{device}  no closure: no work is run on this device alone"
        except MeterUnavailable as error:
            yield f"{device}  failed: {error}"


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


def _idle_lines(own: Instruments, label: str) -> Iterator[str]:
    for each in idle_power(own, IDLE_S):
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


def watch_lines(using: Instruments, interval_s: float, seconds: float | None) -> Iterator[str]:
    """A line every `interval_s`, until `seconds` have passed; None continues until it is stopped."""
    clock = using.clock
    watched = [_Watched(using.of_device(device), clock) for device in using.devices]
    started_s = clock.now_s()
    while seconds is None or clock.now_s() - started_s < seconds:
        clock.sleep(interval_s if seconds is None else min(interval_s, seconds - (clock.now_s() - started_s)))
        parts = [each.text() for each in watched]
        yield " | ".join([f"{clock.now_s() - started_s:7.1f} s", *parts])


class _Watched:
    """One device: its power reading, and its counter since the beginning."""

    def __init__(self, own: Instruments, clock: Clock) -> None:
        self._device = own.devices[0]
        self._clock = clock
        self._counter: EnergyCounter | None = own.counters[0] if own.counters else None
        self._probe: PowerProbe | None = own.probes[0] if own.probes else None
        self._joules = 0.0
        self._last_j = self._counter.read_j() if self._counter is not None else 0.0
        self._last_s = clock.now_s()

    def text(self) -> str:
        """The device now; what it no longer reports is named with the reason."""
        try:
            energy, mean_w = self._energy()
            return f"{self._device} {self._power(mean_w)}, {energy}"
        except MeterUnavailable as error:
            return f"{self._device} no longer answers: {error}"

    def _energy(self) -> tuple[str, float | None]:
        """Energy so far, and mean power since the last line."""
        if self._counter is None:
            return "no energy counter", None
        now_j, now_s = self._counter.read_j(), self._clock.now_s()
        passed_s = now_s - self._last_s
        delta = counter_delta(self._last_j, now_j, passed_s, self._counter.wraps_at_j, self._counter.limit_w)
        self._last_j, self._last_s = now_j, now_s
        if delta.joules is None:
            self._joules = 0.0
            return f"counted anew from here: {delta.reason}", None
        self._joules += delta.joules
        mean_w = delta.joules / passed_s if passed_s > 0 else None
        return f"{self._joules:.1f} J ({self._counter.origin.source})", mean_w

    def _power(self, mean_w: float | None) -> str:
        if self._probe is not None:
            return f"{self._probe.read_w():.1f} W ({self._probe.origin.basis})"
        return "no power" if mean_w is None else f"{mean_w:.1f} W (mean since the last line)"


def build_parser() -> argparse.ArgumentParser:
    """The two commands and their flags."""
    parser = OneLineParser(
        prog="python -m experiment_core_utils.meters",
        description="What measures energy on this machine.",
        examples=("knobprof meters selftest --require gpu", "knobprof meters watch --seconds 30"),
    )
    commands = parser.add_subparsers(dest="command", required=True)
    test = commands.add_parser(
        "selftest", help="check sources, ticks, idle power and closure, and print what is missing"
    )
    test.add_argument(
        "--require",
        nargs="+",
        default=[],
        choices=("gpu", "cpu"),
        help="exit if the energy of this device is not measured",
    )
    test.add_argument("--error", type=float, default=RELATIVE_ERROR, metavar="FRACTION", help="error bound of a window")
    watch = commands.add_parser("watch", help="print power and energy of each device as they change")
    watch.add_argument("--seconds", type=float, metavar="SECONDS", help="seconds to run (default: until Ctrl-C)")
    watch.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="seconds between two lines")
    return parser


def selftest(flags: argparse.Namespace, gpus: Sequence[torch.device], using: Instruments) -> None:
    """Raises ConfigurationError, or MeterUnavailable for what `--require` names and is not there."""
    check_fraction("--error", flags.error)
    print(f"{platform.node()}: {platform.platform()}, torch {torch.__version__}, {len(gpus)} GPUs in use", flush=True)
    for device in gpus:
        print(f"{gpu_uuid(device)}  {torch.cuda.get_device_name(device)}")
    loads = _loads(gpus, using)
    for device in gpus:
        cost_s = median_cost_s(partial(synchronize, device), HostClock(), 100)
        print(f"{gpu_uuid(device)}  synchronize takes {cost_s * 1e6:.1f} us where nothing is left to do")
    for line in selftest_lines(using, loads, WindowGoal(flags.error)):
        print(line, flush=True)
    for line in missing_lines({**using.missing, **_always_missing(using)}):
        print(line)
    components = {each.component for each in using.origins}
    for required in flags.require:
        if required not in components:
            raise MeterUnavailable(f"--require {required}: its energy is not measured here, see above")


def _loads(gpus: Sequence[torch.device], using: Instruments) -> Mapping[str, KnownLoad]:
    """Work for every device that has something to read, by its name; the CPU's where one package is all there is."""
    loads = {uuid: matrix_products(device) for device in gpus if (uuid := gpu_uuid(device)) in using.devices and uuid}
    packages = [each.origin.device for each in using.counters if each.origin.component == "cpu"]
    if len(packages) == 1:
        loads[packages[0]] = matrix_products(torch.device("cpu"))
    return loads


def _always_missing(using: Instruments) -> Mapping[str, str]:
    """What no source here covers."""
    estimate = (
        "codecarbon is installed and estimates" if find_spec("codecarbon") else "codecarbon, not installed, estimates"
    )
    missing = {"fans, power supply, network, disks": "only a meter at the wall sees the whole machine"}
    if not any(each.origin.component == "cpu" for each in using.counters):
        missing["CPU energy"] = f"no RAPL; {estimate} it from load and nominal power (codecarbon_estimate)"
    if not any(each.origin.component == "dram" for each in using.counters):
        missing["memory energy"] = f"no RAPL zone for it; {estimate} it from the number of modules"
    return missing


def watch(flags: argparse.Namespace, using: Instruments) -> None:
    """Print readings until the time is over or the user stops it."""
    for name, value in (("--interval", flags.interval), ("--seconds", flags.seconds)):
        if value is not None and not 0 < value <= MOST_SECONDS:
            raise ConfigurationError(
                f"{name} {value:g} is not possible; give seconds greater than 0 and at most {MOST_SECONDS}, such as 1"
            )
    for line in missing_lines(using.missing):
        print(line, flush=True)
    if not using.devices:
        print("nothing on this machine measures energy; see above for the reasons")
        return
    is_live = sys.stdout.isatty()
    try:
        for line in watch_lines(using, flags.interval, flags.seconds):
            print(f"\r{line}" if is_live else line, end="" if is_live else "\n", flush=True)
    except KeyboardInterrupt:
        pass
    if is_live:
        print()


@reporting_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Exit code: 0 done, 1 what was required is not there, 2 the request cannot be met."""
    flags = build_parser().parse_args(argv)
    gpus = visible_gpus()
    using = find_instruments(uuids_of(gpus), HostClock())
    if flags.command == "selftest":
        selftest(flags, gpus, using)
    else:
        watch(flags, using)


if __name__ == "__main__":
    sys.exit(run_command(main))
