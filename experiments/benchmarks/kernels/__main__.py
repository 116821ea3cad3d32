"""Variants of a stage against each other in fresh processes, at a published shape with random weights.

    python -m experiments.benchmarks.kernels --stage decode --model molmoe_1b --variant no_pdl graph
    python -m experiments.benchmarks.kernels --stage prefill --model qwen3_30b_a3b:12 --variant modules graph
    python -m experiments.benchmarks.kernels --stage decode --model llama_3_2_1b --variant modules launched --shape tiny

Each pair runs every variant once, in the order of the flags or in the reverse one. Before its time counts, a variant's
logits over a prompt and decode steps must be near those of the modules in float32 on the same weights: the mean KL
divergence is at most `--kl_bound`, or four times that of the modules in the same precision. Times are also multiples of
what bytes or products take at the copy and product rates of the same process. The exit code is 1 where the gate refused
a variant.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from experiment_core_utils.config.command import reporting_errors, run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.primitives.device import choose_device
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import read_json, write_json_atomically, write_text_atomically
from experiment_core_utils.primitives.units import MOST_TIMES, check_within
from experiment_core_utils.records.stages import STAGES
from experiments.benchmarks.kernels.process import YARDSTICK, answer
from experiments.benchmarks.kernels.protocol import FEWEST_PAIRS, Measured, markdown, orders, rows
from experiments.benchmarks.kernels.shapes import MOLMOE, REQUESTS, SOURCES, config_of
from experiments.benchmarks.kernels.variants import VARIANTS, refuse_other_devices


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags, with the request of the shape where they do not say.

    Raises:
        ConfigurationError: the model is unknown or takes no pictures, a variant is given twice, or a number is too
            small.
    """
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--stage", choices=STAGES, required=True)
    parser.add_argument("--model", required=True, help=f"NAME or NAME:BLOCKS, of {', '.join(SOURCES)}")
    what = "; ".join(f"{name}: {each.what}" for name, each in VARIANTS.items())
    parser.add_argument("--variant", nargs="+", choices=tuple(VARIANTS), required=True, help=f"the first is A ({what})")
    parser.add_argument("--shape", choices=tuple(REQUESTS), default="published")
    parser.add_argument("--pairs", type=int, default=4, help=f"no interval below {FEWEST_PAIRS}")
    parser.add_argument("--prompt_tokens", type=int, help="(default: 1053, tiny 12)")
    parser.add_argument("--crops", type=int, help="of the vision stage (default: 13, tiny 2)")
    parser.add_argument("--decode_steps", type=int, help="(default: 32, tiny 4)")
    parser.add_argument("--top_k", type=int, help="experts of a token (default: the model's own)")
    parser.add_argument("--repeats", type=int, default=10, help="runs inside a process, of which the median counts")
    parser.add_argument("--kl_bound", type=float, help="in nats (default: four times the modules' own)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--precision", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    parser.add_argument("--num_threads", type=int)
    parser.add_argument("--output", type=Path, help="JSON file of everything; the table is beside it as .md")
    # What the harness itself gives to its processes.
    parser.add_argument("--process", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    flags = parser.parse_args(argv)
    for name, value in REQUESTS[flags.shape].items():
        setattr(flags, name, value if getattr(flags, name) is None else getattr(flags, name))
    for name in (*REQUESTS[flags.shape], "pairs", "repeats"):
        check_within(f"--{name}", getattr(flags, name), 1, MOST_TIMES)
    config_of(flags.model, flags.shape)
    if flags.stage == "vision" and flags.model.partition(":")[0] != MOLMOE:
        raise ConfigurationError(f"--stage vision: {flags.model} takes no pictures; give --model {MOLMOE}")
    if len(set(flags.variant)) < len(flags.variant):
        raise ConfigurationError("--variant has a name twice; give each once")
    return flags


def measured_in_turn(flags: argparse.Namespace, argv: Sequence[str]) -> list[Measured]:
    """What each process found, pair by pair, after one that makes the yardstick.

    Raises:
        ConfigurationError: a process failed; the message is its last line.
    """
    found = []
    runs = [YARDSTICK, *(variant for order in orders(flags.variant, flags.pairs) for variant in order)]
    with tempfile.TemporaryDirectory() as folder:
        for name in tqdm(runs, desc="processes", leave=False):
            command = [sys.executable, "-m", "experiments.benchmarks.kernels", *argv, "--process", name, folder]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
                raise ConfigurationError(f"the process of {name} failed: {last.removeprefix('error: ')}")
            if name != YARDSTICK:
                found.append(Measured(**read_json(Path(folder, "found.json"))))
    return found


@reporting_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table and save it; returns the exit code."""
    flags = arguments(argv)
    if flags.process:
        name, folder = flags.process
        if (found := answer(flags, name, Path(folder))) is not None:
            write_json_atomically(asdict(found), Path(folder, "found.json"))
        return 0
    refuse_other_devices(flags.variant, choose_device(flags.device).type, flags.model.partition(":")[0])
    measured = measured_in_turn(flags, sys.argv[1:] if argv is None else argv)
    request = f"{flags.crops} crops" if flags.stage == "vision" else f"{flags.prompt_tokens} prompt tokens"
    title = f"{flags.stage} of {flags.model} ({flags.shape}), {request}"
    table = markdown(title, measured, flags.variant)
    print(table)
    if flags.output is not None:
        asked = {name: value for name, value in vars(flags).items() if name not in ("output", "process")}
        content = {
            "asked": {**asked, "source": SOURCES[flags.model.partition(":")[0]]},
            "processes": [{**asdict(each), "times_limit": each.times_limit} for each in measured],
            "rows": rows(measured, flags.variant),
        }
        write_json_atomically(content, flags.output)
        write_text_atomically(table + "\n", flags.output.with_suffix(".md"))
    return int(any(each.seconds is None for each in measured))


if __name__ == "__main__":
    sys.exit(run_command(main))
