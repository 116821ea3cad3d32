"""What this machine can measure of energy, and what it draws now.

python -m experiment_core_utils.meters selftest
python -m experiment_core_utils.meters selftest --require gpu
python -m experiment_core_utils.meters watch --seconds 60 --interval 1

A GPU that this process may not use (CUDA_VISIBLE_DEVICES) is not looked at. Without anything to measure with both say
what is missing and end with exit code 0, but for what `--require` names.
"""

import argparse
import platform
import statistics
import sys
from collections.abc import Sequence
from importlib.util import find_spec

import torch

from experiment_core_utils.meters.instruments import Instruments, find_instruments, uuids_of
from experiment_core_utils.meters.known_load import KnownLoad, matrix_products
from experiment_core_utils.meters.selftest import missing_lines, selftest_lines
from experiment_core_utils.meters.watch import watch_lines
from experiment_core_utils.meters.windows import RELATIVE_ERROR, WindowGoal
from experiment_core_utils.primitives.bounds import MOST_SECONDS
from experiment_core_utils.primitives.clock import HostClock
from experiment_core_utils.primitives.command import run_command
from experiment_core_utils.primitives.device import gpu_uuid, synchronize, visible_gpus
from experiment_core_utils.primitives.errors import ConfigurationError, MeterUnavailable, ProfilerError
from experiment_core_utils.primitives.flags import OneLineParser


def build_parser() -> argparse.ArgumentParser:
    """The two commands and their flags."""
    parser = OneLineParser(
        prog="python -m experiment_core_utils.meters", description="What measures energy on this machine."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=OneLineParser)
    test = commands.add_parser(
        "selftest", help="sources, ticks, idle power, closure on matrix products, what is missing"
    )
    test.add_argument(
        "--require", nargs="+", default=[], choices=("gpu", "cpu"), help="fail where its energy is not measured"
    )
    test.add_argument("--error", type=float, default=RELATIVE_ERROR, help="error bound of a window (%(default)s)")
    watch = commands.add_parser("watch", help="a live line of power and energy of each device")
    watch.add_argument("--seconds", type=float, help="how long (default: until Ctrl-C)")
    watch.add_argument("--interval", type=float, default=1.0, metavar="S", help="between two lines (%(default)s)")
    return parser


def selftest(given: argparse.Namespace, gpus: Sequence[torch.device], using: Instruments) -> None:
    """Raises ConfigurationError, or MeterUnavailable for what `--require` names and is not there."""
    if not 0 < given.error < 1:
        raise ConfigurationError(f"--error {given.error:g} is not possible; give a share between 0 and 1, such as 0.02")
    print(f"{platform.node()}: {platform.platform()}, torch {torch.__version__}, {len(gpus)} GPUs in use", flush=True)
    for device in gpus:
        print(f"{gpu_uuid(device)}  {torch.cuda.get_device_name(device)}")
    loads = _loads(gpus, using)
    for device in gpus:
        print(
            f"{gpu_uuid(device)}  synchronize takes {_synchronize_s(device) * 1e6:.1f} us where nothing is left to do"
        )
    for line in selftest_lines(using, loads, WindowGoal(given.error)):
        print(line, flush=True)
    for line in missing_lines({**using.missing, **_always_missing(using)}):
        print(line)
    components = {each.component for each in using.origins}
    for required in given.require:
        if required not in components:
            raise MeterUnavailable(f"--require {required}: its energy is not measured here, see above")


def _loads(gpus: Sequence[torch.device], using: Instruments) -> dict[str, KnownLoad]:
    """Work for every device that has something to read, by its name; the CPU's where one package is all there is."""
    loads = {uuid: matrix_products(device) for device in gpus if (uuid := gpu_uuid(device)) in using.devices and uuid}
    packages = [each.origin.device for each in using.counters if each.origin.component == "cpu"]
    if len(packages) == 1:
        loads[packages[0]] = matrix_products(torch.device("cpu"))
    return loads


def _synchronize_s(device: torch.device) -> float:
    """Median of 100."""
    clock, costs = HostClock(), []
    for _ in range(100):
        begun_s = clock.now_s()
        synchronize(device)
        costs.append(clock.now_s() - begun_s)
    return statistics.median(costs)


def _always_missing(using: Instruments) -> dict[str, str]:
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


def watch(given: argparse.Namespace, using: Instruments) -> None:
    """Until the time is over or the user stops it."""
    for name, value in (("--interval", given.interval), ("--seconds", given.seconds)):
        if value is not None and not 0 < value <= MOST_SECONDS:
            raise ConfigurationError(
                f"{name} {value:g} is not possible; give seconds greater than 0 and at most {MOST_SECONDS}, such as 1"
            )
    for line in missing_lines(using.missing):
        print(line, flush=True)
    if not using.devices:
        print("nothing to watch")
        return
    is_live = sys.stdout.isatty()
    try:
        for line in watch_lines(using, given.interval, given.seconds):
            print(f"\r{line}" if is_live else line, end="" if is_live else "\n", flush=True)
    except KeyboardInterrupt:
        pass
    if is_live:
        print()


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 what was required is not there, 2 the request cannot be met."""
    try:
        given = build_parser().parse_args(argv)
        gpus = visible_gpus()
        using = find_instruments(uuids_of(gpus), HostClock())
        if given.command == "selftest":
            selftest(given, gpus, using)
        else:
            watch(given, using)
    except ProfilerError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
