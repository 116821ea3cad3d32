"""How often E2 calls a setting surely cheaper whose mean, P95 or P99 is the same as the other's.

python -m experiments.benchmarks.verdict_level

Times are log-normal, those of a pair correlated by 0.5, and scaled to the same mean or percentile. `alike`: both have a
spread of 0.5 in the logarithm; `unlike`: the one that is called cheaper has 0.75, the other 0.25. A verdict should be
wrong in 2.5 % of the pairs at most. Beside it the percentile bootstrap (1000 draws), which is no longer used.
"""

import sys

import numpy as np
from scipy import stats

from experiment_core_utils.config.command import run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiments.fitting.verdicts import TAIL, fewest_for, mean_p_values, tail_p_values

PERCENT = {"mean": None, "p95": 95.0, "p99": 99.0}
NUMBERS = (10, 20, 50, 100, 200, 500)


def equal_pairs(statistic: str, n: int, num_pairs: int, seed: int, is_alike: bool) -> tuple[np.ndarray, np.ndarray]:
    """Times [num_pairs, n] of two settings with the same mean or percentile, paired by sample."""
    normal = np.random.default_rng(seed).multivariate_normal([0, 0], [[1, 0.5], [0.5, 1]], size=(num_pairs, n))
    percent, times = PERCENT[statistic], []
    for side, spread in enumerate((0.5, 0.5) if is_alike else (0.75, 0.25)):
        logarithm = spread * spread / 2 if percent is None else spread * float(stats.norm.ppf(percent / 100))
        times.append(np.exp(spread * normal[..., side] - logarithm))
    return times[0], times[1]


def wrong_verdicts(statistic: str, n: int, num_pairs: int, seed: int, *, is_alike: bool = True) -> float:
    """Fraction of pairs in which the first is called cheaper; 0 below the fewest pictures for a verdict."""
    percent = PERCENT[statistic]
    if n < fewest_for(percent):
        return 0.0
    ones, others = equal_pairs(statistic, n, num_pairs, seed, is_alike)
    if percent is None:
        return float((mean_p_values(others - ones, np.arange(n)) <= TAIL).mean())
    return float(
        np.mean([tail_p_values(*pair, percent)[0] <= TAIL for pair in zip(ones, others[:, None], strict=True)])
    )


def wrong_by_bootstrap(statistic: str, n: int, num_pairs: int, seed: int, *, is_alike: bool = True) -> float:
    """The same, had the first been cheaper in 97.5 % of bootstrap draws, from six pictures on."""
    generator, percent, wrong = np.random.default_rng(seed + 1), PERCENT[statistic], []
    for pair in zip(*equal_pairs(statistic, n, num_pairs, seed, is_alike), strict=True):
        drawn = np.stack(pair)[:, generator.integers(0, n, (1000, n))]
        one, other = drawn.mean(axis=2) if percent is None else np.percentile(drawn, percent, axis=2)
        wrong.append((one < other).mean() >= 1 - TAIL)
    return float(np.mean(wrong))


def main() -> int:
    """Print a row for each figure and number of pictures."""
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--num_pairs", type=int, default=1000, help="pairs for each cell (default: 1000)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print("figure    n  verdict: alike unlike   bootstrap: alike unlike  (% wrong)")
    for statistic, percent in PERCENT.items():
        for n in NUMBERS:
            cells = [
                100 * wrong(statistic, n, given.num_pairs, given.seed, is_alike=is_alike)
                for wrong in (wrong_verdicts, wrong_by_bootstrap)
                for is_alike in (True, False)
            ]
            own = f"{cells[0]:14.1f} {cells[1]:6.1f}" if n >= fewest_for(percent) else f"{'refused':>21}"
            print(f"{statistic:<6} {n:>4} {own} {cells[2]:18.1f} {cells[3]:6.1f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
