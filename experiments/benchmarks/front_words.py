"""How often the words of a front are wrong, and how often a setting that is truly off the front is called `no`.

python -m experiments.benchmarks.front_words [--num_runs 100]

Of 8 settings the first four are on the front: each takes a tenth more time than the one before and is right on 4 points
more. Each of the others takes 5 % more time than one of these and changes `changed` of its answers, so that it loses
`lost` in accuracy. `found`: % of these that are `no`. `wrong`: % of runs in which any of the first four is `no`, or any
of the others `yes`.
"""

import sys
from itertools import product

import numpy as np

from experiment_core_utils.config.command import run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import tier_target
from experiment_core_utils.primitives.replication import IN_ROUNDS
from experiments.analyses.knobs.fronts import front_words
from experiments.analyses.knobs.grid import KnobPoint, TaskGrid
from experiments.analyses.knobs.objectives import LATENCY_MEAN, Objectives, objectives

NUM_ON_FRONT = 4
STEP, BEHIND, GAIN, NOISE = 0.1, 0.05, 0.04, 0.04  # logarithms of times, accuracy, and a run's spread


def measured(scores: np.ndarray, log_times: np.ndarray) -> Objectives:
    """S settings in rounds, with a picture for each sample, from scores and the logarithms of milliseconds [S, N]."""
    settings = [
        Setting.of(vision=tier_target("low"), top_k=1 + at, num_active_blocks=RunningBlocks(12))
        for at in range(len(scores))
    ]
    ids = tuple(range(scores.shape[1]))
    absent = np.full(scores.shape, np.nan)
    grid = TaskGrid(
        "simulated", "exact", 1.0, tuple(KnobPoint(each.key, each) for each in settings), ids, tuple(map(str, ids)),
        scores, np.exp(log_times), absent, absent, log_times, IN_ROUNDS,
    )  # fmt: skip
    # Words need no draws.
    found = objectives(grid, LATENCY_MEAN, 2, 0)
    assert isinstance(found, Objectives)
    return found


def simulated(num_samples: int, changed: float, lost: float, generator: np.random.Generator) -> Objectives:
    """One run."""
    ease = generator.random(num_samples)
    own = [ease < 0.8 - GAIN * (NUM_ON_FRONT - 1 - at) for at in range(NUM_ON_FRONT)]
    behind = []
    for row in own:
        chances, right = generator.random(num_samples), row.mean()
        gain, fall = (changed - lost) / 2 / max(1 - right, 1e-9), (changed + lost) / 2 / max(right, 1e-9)
        behind.append(np.where(row, chances >= fall, chances < gain))
    means = np.concatenate([STEP * np.arange(NUM_ON_FRONT), STEP * np.arange(NUM_ON_FRONT) + BEHIND])
    noise = NOISE * generator.normal(size=(2 * NUM_ON_FRONT, num_samples))
    return measured(np.array(own + behind, dtype=float), np.log(50.0) + means[:, None] + noise)


def found_and_wrong(num_samples: int, changed: float, lost: float, num_runs: int, seed: int) -> tuple[float, float]:
    """Percentages: of settings off the front that are called `no`, and of runs with a wrong word."""
    generator, found, wrong = np.random.default_rng(seed), [], []
    for _ in range(num_runs):
        words = front_words(simulated(num_samples, changed, lost, generator))
        found.append(np.mean([word == "no" for word in words[NUM_ON_FRONT:]]))
        wrong.append("no" in words[:NUM_ON_FRONT] or "yes" in words[NUM_ON_FRONT:])
    return 100 * float(np.mean(found)), 100 * float(np.mean(wrong))


def main() -> int:
    """Print the table."""
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--num_runs", type=int, default=100, help="simulated runs for each row (default: 100)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print("| samples | changed | lost | found | wrong |\n| --- | --- | --- | --- | --- |")
    for n, (changed, lost) in product((52, 200, 1000), ((0.0, 0.0), (0.06, 0.0), (0.1, 0.05), (0.3, 0.25))):
        cells = found_and_wrong(n, changed, lost, given.num_runs, given.seed)
        print(f"| {n} | {changed:g} | {lost:g} | " + " | ".join(f"{each:.0f}" for each in cells) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
