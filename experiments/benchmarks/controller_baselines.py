"""How good tables, single knobs, a regression and learned controllers are on splits of a full grid by picture.

python -m experiments.benchmarks.controller_baselines docs/core_exp/pareto_table.json

Each split makes every policy from one half of the pictures and replays it on the other half, at budgets that are
fractions of the reference's mean time in the first half (of the largest setting's without a reference). The figures are
means over splits, the budgets that some setting meets and requests; the intervals (95 %) are over pictures, a request's
difference being its mean over all splits that judge it. Of controllers of several training seeds there are intervals
over pictures and seeds as well.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from experiment_core_utils.config.command import reporting_errors, run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.statistics import bounded_mean_interval
from experiments.controller.evaluation.outcomes import Outcomes
from experiments.controller.evaluation.replay import (
    BUDGET_SHARES,
    PerSampleOracle,
    best_static,
    meetable,
    outcomes_of,
    replay,
    shares_of_reference,
)
from experiments.controller.lookup import build
from experiments.controller.measured_grid import MeasuredGrid, load_grid, split_by_picture
from experiments.controller.policies.baselines import baselines
from experiments.controller.policies.feedback import FeedbackPolicy
from experiments.controller.policies.interface import Policy, RandomPolicy, StaticPolicy
from experiments.fitting.intervals import draw_counts, interval, resampled

REFERENCES = ("lookup_mean", "chosen_table")
DRAWS = 4000
STREAM_LATE = 0.05
STREAM_NEIGHBOURS = 0.2
# A stream of requests on a machine whose speed changes.
STREAM_REQUESTS = 280
CORRELATED_REQUESTS = 40
STEP = 1.5
#: how the speed changes -> standard deviation of its logarithm; None for the step
CHANGES: Mapping[str, float | None] = {"none": 0.0, "sd 0.2": 0.2, "sd 0.35": 0.35, f"{STEP:g} x slower": None}


@dataclass
class RequestSums:
    """Figures of each of the grid's N requests, summed over splits and budgets."""

    grid: MeasuredGrid
    of: dict[str | int, np.ndarray] = field(default_factory=dict)  #: policy, or number of a training seed -> [N, C]

    def add(self, name: str | int, validation: MeasuredGrid, columns: Sequence[np.ndarray]) -> None:
        """Add C columns, each [budgets, requests of a validation half]."""
        own = self.of.setdefault(name, np.zeros((len(self.grid), len(columns))))
        row_of = {key: row for row, key in enumerate(self.grid.keys)}
        rows = [row_of[key] for key in validation.keys]
        np.add.at(own, rows, np.stack([column.sum(axis=0) for column in columns], axis=1))


def untrained_outcomes(
    calibration: MeasuredGrid, validation: MeasuredGrid, budgets_s: Sequence[float], seed: int
) -> list[Outcomes]:
    """The outcomes on the validation half of all policies that need no training."""
    policies: list[Policy] = [
        *map(StaticPolicy, validation.landmarks), RandomPolicy(validation.choices, seed),
        *baselines(calibration, budgets_s), PerSampleOracle(validation),
    ]  # fmt: skip
    return [*(replay(policy, validation, budgets_s) for policy in policies), best_static(validation, budgets_s)]


def trained_by_split(pairs: Sequence[str]) -> dict[int, list[Path]]:
    """The checkpoints of `--learned` by the seed of their split; raises ConfigurationError for another form."""
    trained: dict[int, list[Path]] = {}
    for text in pairs:
        seed, given_with, path = text.partition("=")
        if not seed.isdigit() or not given_with:
            raise ConfigurationError(f"--learned {text} is not SEED=CHECKPOINT; give such as 0=results/c/checkpoint.pt")
        trained.setdefault(int(seed), []).append(Path(path))
    return trained


@reporting_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Print a row for each policy. Exit code: 0 done, 1 the files do not allow it, 2 a flag is wrong."""
    parser = OneLineParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULTS", help="full grid, or tables of it")
    parser.add_argument("--splits", type=int, nargs="+", metavar="SEED",
                        help="seeds of the splits (default: 0 to 39, or those of --learned)")  # fmt: skip
    parser.add_argument("--learned", nargs="+", default=[], metavar="SEED=CHECKPOINT",
                        help="controllers trained with --split_seed SEED; several of a split, one for each "
                             "training seed in the same order, are averaged")  # fmt: skip
    parser.add_argument("--stream", action="store_true",
                        help="budgets that a stream of requests shares instead (default: of each request)")  # fmt: skip
    parser.add_argument("--changing_speed", action="store_true",
                        help=f"streams of {STREAM_REQUESTS} requests on a machine whose speed changes: the table with "
                             "feedback against the table alone")  # fmt: skip
    flags = parser.parse_args(argv)
    grid = load_grid(flags.results).complete()
    trained = trained_by_split(flags.learned)
    splits: list[int] = flags.splits or sorted(trained) or list(range(40))
    if trained and set(splits) != set(trained):
        raise ConfigurationError(
            f"--learned has controllers of the splits {sorted(trained)}; give each of --splits one"
        )
    if flags.changing_speed:
        _print_speeds(grid, splits)
    elif flags.stream:
        _print_streams(grid, splits)
    else:
        _print_policies(grid, splits, trained)


def policy_sums(
    grid: MeasuredGrid, splits: Sequence[int], trained: Mapping[int, Sequence[Path]], seeds: range
) -> tuple[RequestSums, int]:
    """In time, late and number of requests by policy and training seed, budgets of each request; number of budgets."""
    sums, num_budgets = RequestSums(grid), 0
    for split in splits:
        calibration, validation = split_by_picture(grid, 0.5, split)
        every = shares_of_reference(calibration, BUDGET_SHARES)
        budgets_s = [budget for budget, can in zip(every, meetable(validation, every), strict=True) if can]
        num_budgets += len(budgets_s)
        found = [(-1, each) for each in untrained_outcomes(calibration, validation, budgets_s, split)]
        if trained:
            # torch takes seconds to import.
            from experiments.controller.policies.learned import learned_replay

            learned = (learned_replay(path, None, calibration, validation).policy for path in trained[split])
            found += [(seed, replay(policy, validation, budgets_s)) for seed, policy in enumerate(learned)]
        for seed, outcome in found:
            late = outcome.latency_s > np.asarray(budgets_s)[:, None]
            columns = np.where(late, 0.0, outcome.scores / validation.best), late, np.ones(late.shape)
            sums.add(outcome.name, validation, columns)
            if seed in seeds:
                sums.add(seed, validation, columns)
    return sums, num_budgets


def _print_policies(grid: MeasuredGrid, splits: Sequence[int], trained: Mapping[int, Sequence[Path]]) -> None:
    """Print a row for each policy."""
    seeds = range(min(map(len, trained.values()), default=0))
    sums, num_budgets = policy_sums(grid, splits, trained, seeds)
    print(f"{len(splits)} splits, {num_budgets} budgets that some setting meets, {len(set(grid.pictures))} pictures")
    print(f"{'policy':<32}{'in time':>8}{'late':>8}  " + "".join(f"less {name:<28}" for name in REFERENCES))
    names = [name for name in sums.of if isinstance(name, str)]
    for name in sorted(names, key=lambda each: -sums.of[each][:, 0].sum() / sums.of[each][:, 2].sum()):
        in_time, late_requests, count = sums.of[name].sum(axis=0)
        differences = [_difference(sums.of[name], sums.of[other], grid.pictures) for other in REFERENCES]
        print(f"{name:<32}{in_time / count:>8.3f}{100 * late_requests / count:>6.1f} %  "
              + "".join(f"{each:<33}" for each in differences))  # fmt: skip
    if len(seeds) > 1:
        by_seed = np.stack([sums.of[seed] for seed in seeds])
        for other in REFERENCES:
            difference, alone = _over_seeds(by_seed, sums.of[other], grid.pictures)
            print(f"{len(seeds)} seeds less {other}: {difference} over pictures and seeds; of each seed {alone}")


def _print_streams(grid: MeasuredGrid, splits: Sequence[int]) -> None:
    """Print a row for each way to share a budget: mean latency / budget and fraction late are over a stream."""
    sums = RequestSums(grid)
    for split in splits:
        calibration, validation = split_by_picture(grid, 0.5, split)
        budgets_s = shares_of_reference(calibration, BUDGET_SHARES)
        policies = [("one setting by mean", build(calibration, "mean"))]
        for limit, max_late in (("mean", None), ("late", STREAM_LATE)):
            for kind, share in (("mix", None), ("mix by prompts", STREAM_NEIGHBOURS)):
                made = build(calibration, "stream", max_late=max_late, neighbourhood=share)
                policies.append((f"{limit}: {kind}", made))
        policies.append(("p95 of each request", build(calibration, "p95")))
        for name, policy in policies:
            found = replay(policy, validation, budgets_s)
            over = found.latency_s / np.array(budgets_s)[:, None]
            # The third is the number of requests, as `_difference` reads it.
            sums.add(name, validation, (found.scores / validation.best, over > 1, np.ones(over.shape), over))
    print(f"{len(splits)} splits, {len(BUDGET_SHARES)} budgets, {len(set(grid.pictures))} pictures")
    print(f"{'sharing':<24}{'accuracy':>9}{'mean / budget':>15}{'late':>8}  less the plain mix")
    for way, own in sums.of.items():
        accuracy, late, count, over_all = own.sum(axis=0)
        plain = sums.of.get(str(way).removesuffix(" by prompts"), own)
        more = _difference(own, plain, grid.pictures)
        print(f"{way:<24}{accuracy / count:>9.3f}{over_all / count:>15.3f}{100 * late / count:>6.1f} %  {more}")


def _print_speeds(grid: MeasuredGrid, splits: Sequence[int]) -> None:
    """Print a row for each way to choose, for each way in which the speed of the machine changes."""
    print(f"{len(splits)} splits, each a stream of {STREAM_REQUESTS} requests, {len(set(grid.pictures))} pictures")
    print(f"{'speed':<16}{'policy':<26}{'in time':>8}{'late':>8}  less the table")
    for kind, log_sd in CHANGES.items():
        sums = [_speed_sums(grid, split, log_sd) for split in splits]
        for name in sums[0].of:
            own, table = (np.stack([each.of[key] for each in sums]) for key in (name, next(iter(sums[0].of))))
            in_time, late, count = own.sum(axis=(0, 1))
            more = "" if own is table or not (own - table).any() else _over_seeds(own, table, grid.pictures)[0]
            print(f"{kind:<16}{name:<26}{in_time / count:>8.3f}{100 * late / count:>6.1f} %  {more}")


def _speed_sums(grid: MeasuredGrid, split: int, log_sd: float | None) -> RequestSums:
    """In time, late and number of requests by policy, the table first, of one stream of the validation half."""
    calibration, validation = split_by_picture(grid, 0.5, split)
    every = shares_of_reference(calibration, BUDGET_SHARES)
    budgets_s = [budget for budget, can in zip(every, meetable(validation, every), strict=True) if can]
    generator = np.random.default_rng(split)
    rounds = -(-STREAM_REQUESTS // len(validation))
    order = np.concatenate([generator.permutation(len(validation)) for _ in range(rounds)])[:STREAM_REQUESTS]
    slowness = slowness_of(generator, STREAM_REQUESTS, log_sd)
    stream = validation.take(order)
    stream = replace(stream, total_s=stream.total_s * slowness)
    table = build(calibration)
    known = np.exp(np.round(np.log(slowness), 2))
    rows = [[stream.choices.index(table.choose(request, budget / slow))
             for request, slow in zip(stream.features, known, strict=True)] for budget in budgets_s]  # fmt: skip
    knowing = outcomes_of("knows the speed", stream, np.array(rows), np.zeros((len(budgets_s), len(stream))))
    feedback = FeedbackPolicy(table, table.typical_s)
    sums = RequestSums(grid)
    for outcome in (*(replay(each, stream, budgets_s) for each in (table, feedback)), knowing,
                    best_static(stream, budgets_s)):  # fmt: skip
        late = outcome.latency_s > np.asarray(budgets_s)[:, None]
        sums.add(outcome.name, stream, (np.where(late, 0.0, outcome.scores / stream.best), late, np.ones(late.shape)))
    return sums


def slowness_of(generator: np.random.Generator, number: int, log_sd: float | None) -> np.ndarray:
    """How many times as long [number] requests take, one after another.

    Args:
        log_sd: standard deviation of the logarithm, whose correlation falls to 1/e over `CORRELATED_REQUESTS`; None for
            `STEP` times as long from the middle on.
    """
    if log_sd is None:
        return np.where(np.arange(number) < number // 2, 1.0, STEP)
    kept = np.exp(-1 / CORRELATED_REQUESTS)
    values = generator.standard_normal(number)
    for place in range(1, number):
        values[place] = kept * values[place - 1] + np.sqrt(1 - kept**2) * values[place]
    return np.exp(log_sd * values)


def _over_seeds(by_seed: np.ndarray, other: np.ndarray, pictures: Sequence[str]) -> tuple[str, str]:
    """The mean difference over K seeds [K, N, 3] and pictures with its interval over both, and that of each seed.

    A request counts for the seeds that judge it (count above 0).
    """
    compared = by_seed[:, :, 2] > 0
    own, others = (each[..., 0] / np.maximum(each[..., 2], 1) for each in (by_seed, other))
    seeds = np.where(compared, own - others, 0.0)
    counts = draw_counts(pictures, np.zeros(len(pictures)), DRAWS, seed=0)
    weights = resampled(np.random.default_rng(1), len(seeds), DRAWS)
    sums, numbers = ((weights * (counts @ each.T)).sum(axis=1) for each in (seeds, compared))
    # A draw may contain no request that its seeds judge.
    low, high = interval(np.divide(sums, numbers, out=np.full(DRAWS, np.nan), where=numbers > 0))
    alone = ", ".join(f"{each:+.3f}" for each in seeds.sum(axis=1) / compared.sum(axis=1))
    return f"{seeds.sum() / compared.sum():+.3f} [{low:+.3f}, {high:+.3f}]", alone


def _difference(own: np.ndarray, other: np.ndarray, pictures: Sequence[str]) -> str:
    """The mean difference of the first column over the measured requests [N, 3 or more], with its interval."""
    measured: list[int] = np.flatnonzero(own[:, 2]).tolist()
    values = own[measured, 0] / own[measured, 2] - other[measured, 0] / other[measured, 2]
    if not values.any():
        return ""
    found = bounded_mean_interval(values.tolist(), [pictures[place] for place in measured], 1.0, -1.0)
    low, high = found or (-1.0, 1.0)
    return f"{values.mean():+.3f} [{low:+.3f}, {high:+.3f}]"


if __name__ == "__main__":
    sys.exit(run_command(main))
