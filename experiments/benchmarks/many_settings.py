"""How long the analyses take on a folder of many settings, and how that grows with their number.

python -m experiments.benchmarks.many_settings results/quickstart --sizes 1250 2500 5000

The folders are made from one result of a real run, so that they have its schema: a grid of numbers of image tokens,
top-k and blocks, with times that grow with the knobs and accuracy that does, both with noise of a fixed seed.
Each command runs as its own process on these cores; printed are its wall time, the CPU seconds in
it (which other work on the machine changes less), its largest memory, and over the size before, how many times as many
CPU seconds it took (2 is linear where the sizes double).
"""

import copy
import itertools
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiment_core_utils.config.command import run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.finishing.setting_content import decoder_knobs
from experiment_core_utils.knobs.active_blocks import ACTIVE_BLOCKS, num_blocks_of
from experiment_core_utils.knobs.interface import Level
from experiment_core_utils.knobs.registry import knob_named
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.top_k import TOP_K
from experiment_core_utils.knobs.vision_tokens import VISION_TOKENS, named_tokens, vision_of
from experiment_core_utils.l_results_csv_cleaning import read_results
from experiment_core_utils.records.result_files import RESULT_FILES

COMMANDS = ("e1_stage_latency.py", "e2_knob_pareto.py", "e3_latency_estimator.py", "report.py", "write_tables.py")
FEATURES_PER_CROP = 144
USED_FRACTION = 0.85
SPREAD = 0.05
STAGES = ("T_vision_total", "T_LLM_prefill", "T_LLM_decode")
# How many times as long the decoder takes at a level of its knobs.
LOADS: Mapping[str, Callable[[Any], float]] = {
    TOP_K.name: lambda experts: 0.5 + experts / 8,
    ACTIVE_BLOCKS.name: lambda blocks: 0.3 + blocks / 16,
}


def settings_of_grid(num_settings: int, levels: Mapping[str, Sequence[Level]]) -> Iterator[Setting]:
    """The first `num_settings` settings of the grid of the knobs' levels."""
    for chosen in itertools.islice(itertools.product(*levels.values()), num_settings):
        yield Setting({name: knob_named(name).of_level(level) for name, level in zip(levels, chosen, strict=True)})


def synthetic_result(real: Mapping[str, Any], setting: Setting, noise: random.Random) -> dict[str, Any]:
    """A setting's result with the keys and samples of a real one."""
    made = copy.deepcopy(dict(real))
    tokens, blocks = vision_of(setting).tokens, num_blocks_of(setting)
    assert tokens is not None
    load = math.prod(LOADS[name](level) for name, level in setting.levels.items() if name in LOADS)
    factors = [base * noise.gauss(1, SPREAD) for base in (0.4 + tokens / 1000, load, load)]
    made |= {
        **setting.published_fields,
        "is_reference": False,
        "max_crops": tokens // FEATURES_PER_CROP - 1,
        "active_block_indices": list(range(blocks)),
        "knobs": setting.levels,
    }
    for sample in made["per_sample_results"]:
        right = noise.random() < 0.2 + 0.6 * blocks / 16 + 0.0001 * tokens
        # Of the features that are computed, those of padding and overlaps reach no place in the prompt.
        placed = round(USED_FRACTION * tokens)
        sample |= {
            **decoder_knobs(setting).content(),
            "accuracy": float(right),
            "target_vision_tokens": tokens,
            "pooled_image_features": tokens,
            "prompt_tokens": sample["prompt_tokens"] - sample["actual_vision_tokens"] + placed,
            "actual_vision_tokens": placed,
        }
        for timed in (sample, *sample["runs"]):
            scale_times(timed, factors)
    scores = [sample["accuracy"] for sample in made["per_sample_results"]]
    totals = [sample["T_total"] for sample in made["per_sample_results"]]
    made["accuracy"] = sum(scores) / len(scores)
    made["aggregate_stats"]["T_total_mean"] = sum(totals) / len(totals)
    return made


def scale_times(timed: dict[str, Any], factors: Sequence[float]) -> None:
    """Multiply each stage's time by its factor; what follows from the stages is computed anew."""
    for stage, factor in zip(STAGES, factors, strict=True):
        if timed[stage] is not None:
            timed[stage] *= factor
    timed["T_total"] = sum(timed[stage] or 0.0 for stage in STAGES)
    if timed["T_decode_per_token"] is not None:
        timed["T_decode_per_token"] *= factors[-1]
    if "T_inter_token" in timed:
        timed["T_inter_token"] = [each * factors[-1] for each in timed["T_inter_token"]]
    if "T_first_token" in timed:
        timed["T_first_token"] = (timed["T_vision_total"] or 0.0) + timed["T_LLM_prefill"]


def write_folder(folder: Path, real: Mapping[str, Any], settings: Iterator[Setting]) -> Path:
    """Write a result for each of the settings."""
    folder.mkdir(parents=True)
    noise = random.Random(0)
    task = real["provenance"]["task"]["name"].replace("_", "-")
    for setting in settings:
        made = synthetic_result(real, setting, noise)
        (folder / f"{task}_imgsize{setting.key}.json").write_text(json.dumps(made))
    return folder


def timed_command(command: str, folder: Path) -> tuple[float, float, float]:
    """Seconds, CPU seconds and peak GB of one command on the folder; ends this script where it fails."""
    script = Path(__file__).resolve().parents[1] / "core_exp" / command
    started = time.perf_counter()
    running = subprocess.Popen([sys.executable, str(script), str(folder)], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(running.pid, 0)
    if status:
        raise SystemExit(f"{command} failed on {folder}")
    return time.perf_counter() - started, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e9


def main() -> None:
    """Make a folder of each size and time every command on it."""
    parser = OneLineParser(description=__doc__)
    parser.add_argument("results_dir", type=Path, help="--output_dir of a real run, whose first result is the pattern")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1250, 2500, 5000], help="numbers of settings")
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=COMMANDS)
    parser.add_argument("--num_tokens", type=int, default=40, help="how many numbers of image tokens the grid has")
    parser.add_argument(
        "--top_k_list",
        type=int,
        nargs="+",
        default=list(range(1, 9)),
        help="top-k values (default: 1 to 8)",
    )
    parser.add_argument("--num_blocks", type=int, default=16, help="block counts in the grid are 1 to this")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="make the folders here and keep them")
    given = parser.parse_args()
    targets = [named_tokens(2 * FEATURES_PER_CROP + number) for number in range(given.num_tokens)]
    levels: dict[str, Sequence[Level]] = {
        VISION_TOKENS.name: [VISION_TOKENS.level(target) for target in targets],
        TOP_K.name: given.top_k_list,
        ACTIVE_BLOCKS.name: range(1, given.num_blocks + 1),
    }
    most = math.prod(map(len, levels.values()))
    if max(given.sizes) > most:
        parser.error(f"the grid has {most} settings: give more --num_tokens for {max(given.sizes)}")
    real = next(iter(read_results(given.results_dir).values())).content()
    before: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for size in given.sizes:
            folder = (given.keep or Path(temporary)) / str(size)
            if not any(folder.glob(RESULT_FILES)):
                write_folder(folder, real, settings_of_grid(size, levels))
            for command in given.commands:
                seconds, cpu, memory = timed_command(command, folder)
                growth = f", {cpu / before[command]:.2f} times the size before" if command in before else ""
                print(
                    f"{size} settings, {command}: {seconds:.1f} s, {cpu:.1f} s of CPU, {memory:.2f} GB{growth}",
                    flush=True,
                )
                before[command] = cpu


if __name__ == "__main__":
    sys.exit(run_command(main))
