"""Measure text generation of a language model: read the YAML, run its grid, say where the results are.

accelerate launch experiments/text_exp/run_text_generation.py --config experiments/text_exp/example.yaml
"""

import argparse
import itertools
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiment_core_utils.config.command import libraries_loading, reporting_errors, run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.config.text_grid import combinations, read_yaml, with_overrides
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.texts import counted


def build_parser() -> argparse.ArgumentParser:
    """The driver's flags; everything else is in the YAML."""
    parser = OneLineParser(
        prog="run_text_generation.py",
        description="Throughput, latency, FLOPs, memory and energy of a language model's text generation, for every "
        "combination of the values in a YAML file. See docs/reference/command_line.md for its keys.",
        examples=(
            "knobprof text --model_name MODEL --num_input_prompts 32 --max_output_tokens 64",
            "knobprof text --config experiments/text_exp/example.yaml --dry_run",
            "knobprof text --set 'batching_options.batch_size___fixed_batching=[1,8,32]'",
        ),
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE.yaml", help="file of the experiments (default: the default of every key)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of the file, in YAML, such as decoder_config.decoding_mode=greedy; repeatable",
    )
    parser.add_argument("--model_name", metavar="MODEL", help="short for --set model_name=VALUE")
    parser.add_argument("--num_input_prompts", metavar="N", help="short for --set num_input_prompts=VALUE")
    parser.add_argument("--max_output_tokens", metavar="N", help="short for --set max_output_tokens=VALUE")
    parser.add_argument("--output_dir", type=Path, default=Path("results"), metavar="DIR", help="folder of the results")
    parser.add_argument("--dry_run", action="store_true", help="print what would be measured, and measure nothing")
    return parser


@reporting_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 all measured, 1 a combination failed or the run broke off, 2 it cannot be done, 130 stopped."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    given = build_parser().parse_args(argv)
    short = {name: getattr(given, name) for name in ("num_input_prompts", "max_output_tokens")}
    overrides = [*given.set, *(f"{name}={value}" for name, value in short.items() if value is not None)]
    content = with_overrides(read_yaml(given.config) if given.config else {}, overrides)
    if given.model_name is not None and any(each.startswith("model_name=") for each in given.set):
        raise ConfigurationError("model_name is given twice; give it once")
    # As given: a name may mean something else in YAML.
    grid = combinations(content if given.model_name is None else {**content, "model_name": given.model_name})
    # torch and transformers take seconds to import; `--help` and a wrong key need neither.
    with libraries_loading():
        from experiment_core_utils.meters.requested_energy import energy_plan_lines
        from experiment_core_utils.saved_results.terminal import text_table
        from experiment_core_utils.text_pipeline import run_text_experiments
        from experiment_core_utils.text_run.plan import launched, plan_of

    if given.dry_run:
        accelerator = launched(grid, given.output_dir)
        plan = plan_of(grid, given.output_dir, accelerator)
        if accelerator.is_main_process:
            modes = dict.fromkeys((each.config.energy_mode, each.config.device) for each in plan.due)
            energy = [energy_plan_lines(mode, device, 0, named="energy: ") for mode, device in modes]
            print("\n".join([*plan.lines(), *plan.prompt_lines(), *itertools.chain(*energy)]))
        return 0
    report = run_text_experiments(grid, given.output_dir, lambda line: print(line, file=sys.stderr, flush=True))
    if report.is_main_process:
        if report.results:
            print(text_table(list(report.results.values())))
        for name, result in report.results.items():
            for failure in result.get("custom_failures", ()):
                print(f"{name}: metric {failure['name']} failed: {failure['error']}: {failure['message']}")
        print(
            f"{counted(len(report.results), 'experiment')} of this grid saved ({report.num_measured} measured now), "
            f"{counted(len(report.plan.left_out), 'combination')} left out, {len(report.failed)} failed"
        )
        if report.csv_path is not None:
            print(f"table of all experiments: {report.csv_path}")
    return report.exit_code


if __name__ == "__main__":
    sys.exit(run_command(main))
