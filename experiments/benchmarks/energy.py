"""Energy of the stages of one request (vision, prefill, decode), their sum against the whole, and what tracking costs.

python -m experiments.benchmarks.energy --top_k_list 8 4
python -m experiments.benchmarks.energy --model_path /tmp/molmoe_1b --random_weights --output energy.json

Eager stages and graphs are measured one after the other in one process, on the same request.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from experiment_core_utils.config.command import reporting_errors, run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.engines.greedy import generate_greedily
from experiment_core_utils.knobs.vision_tokens import tier_target
from experiment_core_utils.meters.instruments import Instruments, find_instruments, missing_lines, uuids_of
from experiment_core_utils.meters.stages import IDLE_S, LEAST_REPEATS, REPEATS, StageMeasurement, stage_energies
from experiment_core_utils.meters.windows import RELATIVE_ERROR, WindowGoal
from experiment_core_utils.models.interface import StagedModel, own_setting
from experiment_core_utils.primitives.clock import HostClock
from experiment_core_utils.primitives.device import NoMarks, choose_device, release_cached_memory, set_cpu_threads
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import write_json_atomically
from experiment_core_utils.records.energy import EnergyFigure, StageEnergies
from experiments.benchmarks.shared import endless_model, first_inputs, paired_ratios, quartiles, timed

WARM_UP_RUNS = 3
EXECUTIONS = ("eager", "graph")
# What says which kernels ran.
KERNELS = (
    "execution", "execution_reason", "execution_stages", "experts_implementation", "experts_implementation_decode",
)  # fmt: skip


def load_request(
    model_path: Path | None, random_weights: bool, tier: str, device: torch.device, execution: str = "eager"
) -> tuple[StagedModel, Mapping[str, Any]]:
    """The model, and its task's first sample on the model's device; answers always have their full length."""
    path = ["--model_path", str(model_path)] if model_path else []
    weights = ["--random_weights"] if random_weights else []
    config = parse_config([*path, *weights, "--execution", execution, "--device", device.type])
    model = endless_model(config)
    return model, first_inputs(model, config.task, tier_target(tier))


def tracking_ratios(
    model: StagedModel, inputs: Mapping[str, Any], max_new_tokens: int, using: Instruments, pairs: int
) -> list[float]:
    """Time of the request inside an open window over its time without one, for each pair; the order alternates."""
    meter = using.meter()

    def seconds(is_tracked: bool) -> float:
        if is_tracked:
            meter.open()
        taken, _ = timed(model.device, lambda: generate_greedily(model, inputs, max_new_tokens, NoMarks()))
        if is_tracked:
            meter.close()
        return taken

    ratios = paired_ratios(partial(seconds, True), partial(seconds, False), pairs)
    meter.release()
    return ratios


def figure_text(stage: str, figure: EnergyFigure, steps: int) -> str:
    """The line of one stage by one source."""
    name = f"{stage:10} {figure.origin.device} {figure.origin.source} ({figure.origin.kind}, {figure.origin.basis})"
    if figure.gross_j is None or figure.act_s is None or figure.count is None or figure.window_s is None:
        return f"{name}: none, {figure.reason}"
    parts = [f"gross {figure.gross_j.mean:.4f} J"]
    if figure.gross_j.ci_low is not None and figure.gross_j.ci_high is not None:
        parts.append(f"95 % [{figure.gross_j.ci_low:.4f}, {figure.gross_j.ci_high:.4f}]")
    if figure.uncertainty_j is not None:
        parts.append(f"u {figure.uncertainty_j / figure.gross_j.mean:.2%}")
    if figure.idle_j is not None and figure.net_j is not None:
        parts.append(f"idle {figure.idle_j:.4f} J, net {figure.net_j:.4f} J")
    if stage == "decode":
        parts.append(f"{figure.gross_j.mean / steps:.4f} J a step")
    parts.append(f"{figure.act_s * 1e3:.2f} ms, {figure.count:.0f} acts in {figure.window_s:.1f} s")
    return f"{name}: " + ", ".join(parts) + (f" ({figure.reason})" if figure.reason else "")


def report_lines(found: StageEnergies) -> list[str]:
    """The lines of a report: stages by source, the two sources against each other, and closure."""
    lines = [figure_text(stage, each, found.decode_steps) for stage, all_of in found.figures.items() for each in all_of]
    for stage, ratio in found.source_ratios.items():
        lines.append(f"{stage:10} integrated power / counter = " + ("none" if ratio is None else f"{ratio:.4f}"))
    for closed in found.closures:
        name = f"closure    {closed.origin.device} ({closed.origin.basis})"
        if closed.residual_j is None or closed.residual_share is None:
            lines.append(f"{name}: none, {closed.reason}")
            continue
        allowed = "" if closed.uncertainty_j is None else f", u {closed.uncertainty_j:.4f} J"
        lines.append(
            f"{name}: whole {closed.end_to_end_j:.4f} J, stages {closed.stages_j:.4f} J, "
            f"residual {closed.residual_j:+.4f} J ({closed.residual_share:+.2%}){allowed}"
        )
    return lines


def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--model_path", type=Path)
    parser.add_argument("--random_weights", action="store_true")
    parser.add_argument("--tier", default="medium")
    parser.add_argument("--top_k_list", type=int, nargs="+", default=[8, 4])
    parser.add_argument("--max_new_tokens", type=int, default=16)
    parser.add_argument(
        "--execution_list",
        nargs="+",
        choices=EXECUTIONS,
        default=list(EXECUTIONS),
        help="ways to run the model (default: both)",
    )
    parser.add_argument("--repeats", type=int, default=REPEATS, help="largest number of windows of each stage")
    parser.add_argument("--least_repeats", type=int, default=LEAST_REPEATS, help="smallest number of them")
    parser.add_argument("--error", type=float, default=RELATIVE_ERROR, help="error bound of a window")
    parser.add_argument("--idle_seconds", type=float, default=IDLE_S)
    parser.add_argument("--pairs", type=int, default=15, help="pairs of runs with and without tracking")
    parser.add_argument("--output", type=Path, help="JSON of everything that was measured")
    return parser


def measure(given: argparse.Namespace, using: Instruments) -> dict[str, Any]:
    """Measure every execution and every top-k in turn; prints as it goes."""
    device = choose_device("auto")
    how = StageMeasurement(using, WindowGoal(given.error), given.repeats, given.least_repeats, given.idle_seconds)
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "ticks": {name: asdict(tick) for name, tick in using.ticks.items()},
    }
    print(results, flush=True)
    for execution in given.execution_list:
        model, inputs = load_request(given.model_path, given.random_weights, given.tier, device, execution)
        described = model.describe()
        kernels = {name: described[name] for name in KERNELS if name in described}
        print(f"{execution}: {kernels}", flush=True)
        measured = {top_k: measure_setting(model, inputs, top_k, how, given) for top_k in given.top_k_list}
        results[execution] = {"kernels": kernels, **{f"topk{top_k}": each for top_k, each in measured.items()}}
        del model, inputs
        release_cached_memory(device)
    return results


def measure_setting(
    model: StagedModel, inputs: Mapping[str, Any], top_k: int, how: StageMeasurement, given: argparse.Namespace
) -> dict[str, Any]:
    """The energy of one setting, with the time that its measurement took."""
    setting = own_setting(model).replaced(vision=tier_target(given.tier), top_k=top_k)
    model.apply(setting)
    model.warm_up(inputs, given.max_new_tokens)
    for _ in range(WARM_UP_RUNS):
        generate_greedily(model, inputs, given.max_new_tokens, NoMarks())
    started = time.perf_counter()
    found = stage_energies(model, inputs, given.max_new_tokens, model.rewind, how)
    taken_s = time.perf_counter() - started
    print(f"{setting.key}, {inputs['input_ids'].shape[1]} prompt tokens, {found.output_tokens} output tokens")
    print("\n".join(report_lines(found)))
    print(f"measured in {taken_s:.1f} s", flush=True)
    ratios = tracking_ratios(model, inputs, given.max_new_tokens, how.using, given.pairs)
    print(f"tracked / not tracked = {quartiles(ratios)}, quartiles of {given.pairs} pairs", flush=True)
    return {**asdict(found), "measured_in_s": taken_s, "tracking_ratios": ratios}


@reporting_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print. Exit code: 0 done, 1 nothing here measures energy, 2 the request cannot be met."""
    given = build_parser().parse_args(argv)
    set_cpu_threads(None, 1)
    using = find_instruments(uuids_of([choose_device("auto")]), HostClock())
    for line in missing_lines(using.missing):
        print(line)
    using.require_any()
    if given.pairs < 2:
        raise ConfigurationError(f"--pairs {given.pairs} have no spread; give 2 or more")
    results = measure(given, using.calibrated())
    if given.output is not None:
        write_json_atomically(results, given.output)


if __name__ == "__main__":
    sys.exit(run_command(main))
