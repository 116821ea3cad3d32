"""How often verdicts are wrong, and how often they find a difference: of mean latency, of accuracy, of P95 and P99.

python -m experiments.benchmarks.verdict_level [--quick]

Latency: runs are made of a grid of settings whose tiers differ much, whose numbers of blocks differ by 5 % and whose
top-k changes nothing, each sample twice, on a machine whose speed changes. `wrong` is the percentage of runs in which
any pair is called the wrong way round or different though it is equal (nominal 5), `found` the percentage of the pairs
5 % apart that are called. The same requests are measured in `blocked` order, setting after setting, judged without
and with the variance between settings, and in `rounds`; `ideal` is Student's t of each pair with Bonferroni's
correction on a machine that never changes.

Accuracy: twelve settings, eleven of which are as good as the first, or lose as much as is said; `not worse` is the
percentage of these that are surely not worse by 0.02. Percentiles: pairs of the same P95 or P99.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
from scipy import stats

from experiment_core_utils.config.command import run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.primitives.contrasts import PairedContrasts, ScoreContrasts
from experiment_core_utils.primitives.statistics import CONFIDENCE
from experiments.analyses.knobs.setting_variance import setting_variance
from experiments.fitting.verdicts import TAIL, fewest_for, tail_p_values

PERCENT = {"p95": 95.0, "p99": 99.0}
STEP = 0.05  # what one number of blocks takes more than the one before
TIERS = {"low": 0.0, "medium": 0.75, "high": 1.15}  # logarithms of times
NUM_RUNS = 2
METHODS = ("blocked", "blocked, variance", "rounds", "ideal")


@dataclass(frozen=True)
class World:
    """A machine, and requests on it; spreads are standard deviations of logarithms."""

    name: str
    noise: float = 0.04  #: of a run
    drift: tuple[float, float] | None = None  #: spread of the machine's speed, and seconds over which it changes
    bursts: tuple[float, float] | None = None  #: how many times as long, and seconds it lasts; a quarter of the time
    heavy: bool = False  #: noise by Student's t of 3 degrees, and one run of 50 twice as long
    per_picture: int = 1  #: questions, of which settings' peculiarities are shared
    resolution: float = 0.0  #: seconds to which times are rounded


WORLDS = (
    World("steady"),
    World("drift 5 %, 20 s", drift=(0.05, 20.0)),
    World("drift 5 %, 120 s", drift=(0.05, 120.0)),
    World("bursts x 1.35, 15 s", bursts=(1.35, 15.0)),
    World("heavy tails, drift", heavy=True, drift=(0.05, 60.0)),
    World("3 questions a picture", per_picture=3),
    World("ties (20 ms clock)", resolution=0.02),
)


@dataclass(frozen=True)
class Knobs:
    """The grid of settings, and the truth of its times."""

    levels: dict[str, list[str | int]]

    @classmethod
    def of(cls, num_settings: int) -> "Knobs":
        """3 x 2 x 2, or 3 x 4 x 5 settings."""
        top_ks, blocks = {12: (2, 2), 60: (4, 5)}[num_settings]
        rows = list(product(TIERS, range(top_ks), range(blocks)))
        return cls({name: [row[at] for row in rows] for at, name in enumerate(("vision", "top_k", "blocks"))})

    @property
    def log_times(self) -> np.ndarray:
        """[S]."""
        tiers, blocks = self.levels["vision"], self.levels["blocks"]
        return np.array([TIERS[str(tier)] + STEP * int(block) for tier, block in zip(tiers, blocks, strict=True)])


def speed(world: World, seconds: float, generator: np.random.Generator) -> np.ndarray:
    """The logarithm of how slow the machine is at each half second."""
    size = int(2 * seconds) + 2
    slow = np.zeros(size)
    if world.drift is not None:
        spread, scale = world.drift
        keep = np.exp(-0.5 / scale)
        steps = generator.normal(0, spread * np.sqrt(1 - keep**2), size)
        slow[0] = generator.normal(0, spread)
        for at in range(1, size):
            slow[at] = keep * slow[at - 1] + steps[at]
    if world.bursts is not None:
        factor, lasts = world.bursts
        begin = 0.0
        while begin < seconds:
            begin += generator.exponential(3 * lasts)
            end = begin + generator.exponential(lasts)
            slow[int(2 * begin) : int(2 * end)] = np.log(factor)
            begin = end
    return slow


def measured(world: World, knobs: Knobs, num_samples: int, generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Logarithms of times [S, N], mean over the runs, `blocked`, in `rounds`, and on a `steady` machine."""
    truth = knobs.log_times
    size, number = len(truth), np.arange(num_samples) // world.per_picture
    pictures = number.max() + 1
    tiers = np.unique(np.array(knobs.levels["vision"]), return_inverse=True)[1]
    own = truth[:, None] + np.log(0.055) + generator.normal(0, 0.2, pictures)[number]
    own = own + generator.normal(0, 0.15, (3, pictures))[tiers][:, number]
    own = own + generator.normal(0, 0.02, (size, pictures))[:, number]
    noise = generator.normal(0, world.noise, (NUM_RUNS, size, num_samples))
    if world.heavy:
        noise = world.noise * generator.standard_t(3, noise.shape)
        noise += np.log(2) * (generator.random(noise.shape) < 0.02)
    times = own + noise
    slow = speed(world, float(np.exp(times).sum()) * 1.5, generator)
    found = {"steady": times}
    # [P, R, S, N]: each run's place in the order of time.
    shuffled = generator.permutation(size)
    blocked = np.empty((NUM_RUNS, size, num_samples), dtype=np.int64)
    blocked[:, shuffled] = np.arange(blocked.size).reshape(size, num_samples, NUM_RUNS).transpose(2, 0, 1)
    orders = np.argsort(generator.random((NUM_RUNS, num_samples, size)), axis=-1)
    rounds = np.argsort(orders, axis=-1).transpose(0, 2, 1)
    rounds = rounds + size * (np.arange(num_samples) + num_samples * np.arange(NUM_RUNS)[:, None])[:, None]
    for name, places in (("blocked", blocked), ("rounds", rounds)):
        in_time = np.empty(places.size)
        in_time[places.ravel()] = np.exp(times).ravel()
        begins = np.concatenate([[0.0], in_time.cumsum()[:-1]])[places]
        found[name] = times + slow[np.minimum((2 * begins).astype(int), len(slow) - 1)]
    if world.resolution:
        found = {
            name: np.log(np.maximum(np.round(np.exp(each) / world.resolution), 1) * world.resolution)
            for name, each in found.items()
        }
    return {name: each.mean(axis=0) for name, each in found.items()}


def verdicts(world: World, knobs: Knobs, num_samples: int, generator: np.random.Generator) -> dict[str, np.ndarray]:
    """For each method [S, S], whether a setting is called faster than another."""
    times, pictures = measured(world, knobs, num_samples, generator), np.arange(num_samples) // world.per_picture
    between = setting_variance(times["blocked"], knobs.levels)
    contrasts = {
        "blocked": PairedContrasts.of(times["blocked"], pictures),
        "blocked, variance": PairedContrasts.of(times["blocked"], pictures, replication=between),
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


def main() -> int:
    """Print the three tables, of latency, of accuracy and of percentiles."""
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--num_runs", type=int, default=100, help="simulated runs for each row (default: 100)")
    parser.add_argument("--quick", action="store_true", help="few runs, of 12 settings and of few samples")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
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
