"""How often verdicts are wrong, and how often they find a difference: of mean latency, of accuracy, of P95 and P99.

python -m experiments.benchmarks.verdict_level [--quick]
python -m experiments.benchmarks.verdict_level --all [--repetitions 200] [--processes 16] [--json FILE] [--page PAGE]
python -m experiments.benchmarks.verdict_level --from_json FILE --page PAGE

With `--all` every word that is printed, of every quantity in every world (`verdict_words.py`); else three tables of
the methods behind them.

Latency: runs are made of a grid of settings whose tiers differ much, whose numbers of blocks differ by 5 % and whose
top-k changes nothing, each sample twice, on a machine whose speed changes. `wrong` is the percentage of runs in which
any pair is called the wrong way round or different though it is equal (nominal 5), `found` the percentage of the pairs
5 % apart that are called. The same requests are measured in `blocked` order, setting after setting, and in `rounds`;
`ideal` is Student's t of each pair with Bonferroni's correction on a machine that never changes.

Accuracy: twelve settings, eleven of which are as good as the first, or lose as much as is said; `not worse` is the
percentage of these that are surely not worse by 0.02. Percentiles: pairs of the same P95 or P99.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import numpy as np
from scipy import stats

from experiment_core_utils.config.command import run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.primitives.contrasts import PairedContrasts, ScoreContrasts
from experiment_core_utils.primitives.statistics import CONFIDENCE
from experiments.benchmarks.simulated_runs import STEP, WORLDS, Knobs, World, measured
from experiments.benchmarks.verdict_words import cells_of, read_cells, save_cells, table_lines, write_page
from experiments.fitting.verdicts import TAIL, fewest_for, tail_p_values

PERCENT = {"p95": 95.0, "p99": 99.0}
METHODS = ("blocked", "rounds", "ideal")


def verdicts(world: World, knobs: Knobs, num_samples: int, generator: np.random.Generator) -> dict[str, np.ndarray]:
    """For each method [S, S], whether a setting is called faster than another."""
    times, pictures = measured(world, knobs, num_samples, generator), np.arange(num_samples) // world.per_picture
    contrasts = {
        "blocked": PairedContrasts.of(times["blocked"], pictures),
        "rounds": PairedContrasts.of(times["rounds"], pictures),
    }
    called = {name: np.stack([each.better(at) for at in range(len(each.means))]) for name, each in contrasts.items()}
    ideal = PairedContrasts.of(times["steady"], pictures)
    errors = np.stack([ideal.errors(at) for at in range(len(ideal.means))])
    size, limit = len(errors), 1 - CONFIDENCE
    least = stats.t.isf(limit / (size * (size - 1)), ideal.num_pictures - 1)
    return called | {"ideal": -ideal.log_ratio > least * np.maximum(errors, 1e-12)}


def wrong_and_found(
    world: World, num_settings: int, num_samples: int, num_runs: int, seed: int
) -> dict[str, tuple[float, float]]:
    """For each method the percentages of runs with a wrong call, and of the pairs STEP apart that are called."""
    knobs, generator = Knobs.of(num_settings), np.random.default_rng(seed)
    gaps = knobs.log_times[None] - knobs.log_times[:, None]  # above 0 where the first is faster
    same_tier = np.array(knobs.levels["vision"])[:, None] == np.array(knobs.levels["vision"])
    same_top_k = np.array(knobs.levels["top_k"])[:, None] == np.array(knobs.levels["top_k"])
    apart = same_tier & same_top_k & np.isclose(gaps, STEP)
    runs = [verdicts(world, knobs, num_samples, generator) for _ in range(num_runs)]
    return {
        method: (
            100 * float(np.mean([(run[method] & (gaps < 1e-9)).any() for run in runs])),
            100 * float(np.mean([run[method][apart].mean() for run in runs])),
        )
        for method in METHODS
    }


def accuracy_verdicts(
    num_samples: int, per_picture: int, changed: float, loss: float, num_runs: int, seed: int
) -> tuple[float, float, float]:
    """Percentages: runs with a wrong call, settings that are surely worse, settings surely not worse by 0.02.

    Eleven settings beside one that is right on 80 % change `changed` of its answers, so that they lose `loss`; half of
    them change all answers of a picture alike.
    """
    generator, worse, kept, wrong = np.random.default_rng(seed), [], [], []
    pictures = np.arange(num_samples) // per_picture
    for _ in range(num_runs):
        own = generator.random(num_samples) < 0.8
        rows = [own]
        for at in range(11):
            chances = generator.random(num_samples if at % 2 else pictures.max() + 1)
            chances = chances if at % 2 else chances[pictures]
            gain, fall = (changed - loss) / 2 / 0.2, (changed + loss) / 2 / 0.8
            rows.append(np.where(own, chances >= fall, chances < gain))
        found = ScoreContrasts.of(np.array(rows, dtype=float), pictures, reference=0)
        is_better, is_kept = found.better(0)[1:], found.not_worse(0)[1:]
        reverse = [found.better(at)[0] for at in range(1, 12)]
        wrong.append(any(reverse) or bool(is_better.any() and loss == 0) or bool(is_kept.any() and loss >= 0.02))
        worse.append(is_better.mean())
        kept.append(is_kept.mean())
    return 100 * float(np.mean(wrong)), 100 * float(np.mean(worse)), 100 * float(np.mean(kept))


def equal_pairs(statistic: str, n: int, num_pairs: int, seed: int, is_alike: bool) -> tuple[np.ndarray, np.ndarray]:
    """Log-normal times [num_pairs, n] of two settings with the same percentile, paired by sample, correlated by 0.5."""
    normal = np.random.default_rng(seed).multivariate_normal([0, 0], [[1, 0.5], [0.5, 1]], size=(num_pairs, n))
    times = []
    for side, spread in enumerate((0.5, 0.5) if is_alike else (0.75, 0.25)):
        times.append(np.exp(spread * (normal[..., side] - float(stats.norm.ppf(PERCENT[statistic] / 100)))))
    return times[0], times[1]


def wrong_verdicts(statistic: str, n: int, num_pairs: int, seed: int, *, is_alike: bool = True) -> float:
    """Fraction of pairs of the same percentile in which the first is called cheaper; 0 below the fewest pictures."""
    percent = PERCENT[statistic]
    if n < fewest_for(percent):
        return 0.0
    ones, others = equal_pairs(statistic, n, num_pairs, seed, is_alike)
    return float(
        np.mean([tail_p_values(*pair, percent)[0] <= TAIL for pair in zip(ones, others[:, None], strict=True)])
    )


def latency_lines(sizes: dict[int, int], numbers: tuple[int, ...], seed: int) -> Iterator[str]:
    """Lines of the table of mean latency, of so many runs for each number of settings."""
    yield "| settings | samples | machine | " + " | ".join(f"{each}: wrong, found" for each in METHODS) + " |"
    yield "| --- " * (3 + len(METHODS)) + "|"
    for (num_settings, num_runs), n, world in product(sizes.items(), numbers, WORLDS):
        found = wrong_and_found(world, num_settings, n, num_runs, seed)
        cells = [f"{wrong:.0f}, {power:.0f}" for wrong, power in found.values()]
        yield f"| {num_settings} | {n} | {world.name} | " + " | ".join(cells) + " |"


def accuracy_lines(num_runs: int, numbers: tuple[int, ...], seed: int) -> Iterator[str]:
    """Lines of the table of accuracy."""
    yield "| samples | questions a picture | changed | lost | wrong | surely worse | not worse by 0.02 |"
    yield "| --- " * 7 + "|"
    for n, per_picture, (changed, loss) in product(numbers, (1, 3), ((0.06, 0.0), (0.06, 0.02), (0.1, 0.05))):
        cells = accuracy_verdicts(n, per_picture, changed, loss, num_runs, seed)
        yield f"| {n} | {per_picture} | {changed} | {loss} | " + " | ".join(f"{each:.0f}" for each in cells) + " |"


def percentile_lines(num_pairs: int, seed: int) -> Iterator[str]:
    """Lines of the table of percentiles, in percent of equal pairs."""
    yield "| percentile | pictures | alike: wrong | unlike: wrong |"
    yield "| --- " * 4 + "|"
    for statistic, n in product(PERCENT, (100, 500)):
        cells = [100 * wrong_verdicts(statistic, n, num_pairs, seed, is_alike=alike) for alike in (True, False)]
        words = [f"{each:.1f}" if n >= fewest_for(PERCENT[statistic]) else "refused" for each in cells]
        yield f"| {statistic.upper()} | {n} | {words[0]} | {words[1]} |"


def _every_word(given: argparse.Namespace) -> int:
    """Print the table of all words; 1 where a cell is beyond what is promised by more than chance."""
    if given.from_json is not None:
        cells = read_cells(given.from_json)
    else:
        cells = cells_of(given.repetitions, given.seed, given.processes, is_small=given.small)
    if given.json is not None:
        save_cells(cells, given.json)
    for line in table_lines(cells):
        print(line)
    if given.page is not None:
        write_page(cells, given.page)
    beyond = [each for each in cells if each.is_beyond]
    for each in beyond:
        where = f"{each.table}, {each.world}, {each.num_samples} samples"
        print(f"beyond chance: {where}, {each.column}: {each.percent:.1f} %")
    return int(bool(beyond))


def main() -> int:
    """Print the table of all words, or the three tables, of latency, of accuracy and of percentiles."""
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--num_runs", type=int, default=100, help="simulated runs for each row (default: 100)")
    parser.add_argument("--quick", action="store_true", help="few runs, of 12 settings and of few samples")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--all", action="store_true", help="every word, of every quantity in every world")
    parser.add_argument("--small", action="store_true", help="with --all: the cases that showed faults, few samples")
    parser.add_argument("--repetitions", type=int, default=200, help="with --all: runs of each case (default: 200)")
    parser.add_argument("--processes", type=int, default=1, help="with --all: processes that share the runs")
    parser.add_argument("--json", type=Path, help="with --all: the file that the cells are written to")
    parser.add_argument("--from_json", type=Path, help="a file of --json: its table, nothing is simulated")
    parser.add_argument("--page", type=Path, help="the page in which the table is replaced")
    given = parser.parse_args()
    if given.all or given.from_json is not None:
        return _every_word(given)
    runs = 8 if given.quick else given.num_runs
    tables: list[Callable[[], Iterator[str]]] = [
        lambda: latency_lines(
            {12: runs} if given.quick else {12: runs, 60: max(runs // 4, 1)},
            (16,) if given.quick else (16, 50, 200),
            given.seed,
        ),
        lambda: accuracy_lines(runs, (198,) if given.quick else (198, 501), given.seed),
        lambda: percentile_lines(40 if given.quick else 400, given.seed),
    ]
    for table in tables:
        for line in table():
            print(line, flush=True)
        print()
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
