"""How good tables, single knobs, a regression and learned controllers are on splits of a full grid by picture.

python -m experiments.benchmarks.controller_baselines docs/core_exp/pareto_table.json

Each split makes every policy from one half of the pictures and replays it on the other half, at budgets that are
fractions of the largest setting's mean time in the first half. The figures are means over splits, the budgets that some
setting meets and requests; the intervals (95 %) are over pictures, a request's difference being its mean over all
splits that judge it. Of controllers of several training seeds there are intervals over pictures and seeds as well.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiment_core_utils.config.command import reporting_errors, run_command
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.statistics import bounded_mean_interval
from experiments.controller.evaluation.outcomes import Outcomes
from experiments.controller.evaluation.replay import (
    BUDGET_SHARES,
    PerSampleOracle,
    best_static,
    meetable,
    replay,
    shares_of_full,
)
from experiments.controller.lookup import build
from experiments.controller.measured_grid import MeasuredGrid, load_grid, split_by_picture
from experiments.controller.policies.baselines import baselines
from experiments.controller.policies.interface import Policy, RandomPolicy, StaticPolicy
from experiments.fitting.intervals import draw_counts, interval, resampled

REFERENCES = ("lookup_mean", "chosen_table")
DRAWS = 4000
STREAM_LATE = 0.05
STREAM_NEIGHBOURS = 0.2


def outcomes_of_split(calibration: MeasuredGrid, validation: MeasuredGrid, budgets_s: Sequence[float],
                      learned: Sequence[Path], seed: int) -> list[Outcomes]:  # fmt: skip
    """The outcomes of all policies on the validation half."""
    choices = validation.choices
    policies: list[Policy] = [
        StaticPolicy(choices[0]), StaticPolicy(choices[-1]), RandomPolicy(choices, seed),
        *baselines(calibration, budgets_s), PerSampleOracle(validation),
    ]  # fmt: skip
    found = [replay(policy, validation, budgets_s) for policy in policies] + [best_static(validation, budgets_s)]
    if learned:
        # torch takes seconds to import.
        from experiments.controller.policies.learned import learned_replay

        found += [
            replay(learned_replay(path, None, calibration, validation).policy, validation, budgets_s)
            for path in learned
        ]
    return found


@reporting_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Print a row for each policy. Exit code: 0 done, 1 the files do not allow it, 2 a flag is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULTS", help="full grid, or a table of one")
    parser.add_argument("--splits", type=int, nargs="+", metavar="SEED",
                        help="seeds of the splits (default: 0 to 39, or those of --learned)")  # fmt: skip
    parser.add_argument("--learned", nargs="+", default=[], metavar="SEED=CHECKPOINT",
                        help="controllers trained with --split_seed SEED; several of a split, one for each "
                             "training seed in the same order, are averaged")  # fmt: skip
    parser.add_argument("--stream", action="store_true",
                        help="budgets that a stream of requests shares instead (default: of each request)")  # fmt: skip
    given = parser.parse_args(argv)
    grid = load_grid(given.results).complete()
    trained: dict[int, list[Path]] = {}
    for text in given.learned:
        seed, given_with, path = text.partition("=")
        if not seed.isdigit() or not given_with:
            raise ConfigurationError(f"--learned {text} is not SEED=CHECKPOINT; give such as 0=results/c/checkpoint.pt")
        trained.setdefault(int(seed), []).append(Path(path))
    splits: list[int] = given.splits or sorted(trained) or list(range(40))
    if trained and set(splits) != set(trained):
        raise ConfigurationError(
            f"--learned has controllers of the splits {sorted(trained)}; give each of --splits one"
        )
    if given.stream:
        _streams(grid, splits)
        return
    # Policy -> [in time, late, requests] of each request over all splits and budgets.
    sums: dict[str, np.ndarray] = {}
    # The same of each training seed.
    by_seed = np.zeros((min(map(len, trained.values()), default=0), len(grid), 3))
    place_of = {key: place for place, key in enumerate(zip(grid.tasks, grid.sample_ids, strict=True))}
    num_budgets = 0
    for split in splits:
        calibration, validation = split_by_picture(grid, 0.5, split)
        every = shares_of_full(calibration, BUDGET_SHARES)
        budgets_s = [budget for budget, can in zip(every, meetable(validation, every), strict=True) if can]
        num_budgets += len(budgets_s)
        places = [place_of[key] for key in zip(validation.tasks, validation.sample_ids, strict=True)]
        found = outcomes_of_split(calibration, validation, budgets_s, trained.get(split, []), split)
        first = len(found) - len(trained.get(split, []))
        for number, outcome in enumerate(found):
            late = outcome.latency_s > np.asarray(budgets_s)[:, None]
            in_time = np.where(late, 0.0, outcome.scores / validation.best)
            requests = np.full(len(places), len(budgets_s))
            added = np.stack([in_time.sum(axis=0), late.sum(axis=0), requests], axis=1)
            np.add.at(sums.setdefault(outcome.name, np.zeros((len(grid), 3))), places, added)
            if first <= number < first + len(by_seed):
                np.add.at(by_seed[number - first], places, added)
    print(f"{len(splits)} splits, {num_budgets} budgets that some setting meets, {len(set(grid.pictures))} pictures")
    print(f"{'policy':<32}{'in time':>8}{'late':>8}  " + "".join(f"less {name:<28}" for name in REFERENCES))
    for name in sorted(sums, key=lambda each: -sums[each][:, 0].sum() / sums[each][:, 2].sum()):
        in_time, late, count = sums[name].sum(axis=0)
        differences = [_difference(sums[name], sums[other], grid.pictures) for other in REFERENCES]
        print(f"{name:<32}{in_time / count:>8.3f}{100 * late / count:>6.1f} %  "
              + "".join(f"{each:<33}" for each in differences))  # fmt: skip
    if len(by_seed) > 1:
        for other in REFERENCES:
            print(f"{len(by_seed)} seeds less {other}: {_over_seeds(by_seed, sums[other], grid.pictures)}")


def _streams(grid: MeasuredGrid, splits: Sequence[int]) -> None:
    """Print a row for each way to share a budget: mean latency / budget and fraction late are over a stream."""
    # Way -> [accuracy, 0, requests, latency / budget, late] of each request over all splits and budgets.
    sums: dict[str, np.ndarray] = {}
    place_of = {key: place for place, key in enumerate(zip(grid.tasks, grid.sample_ids, strict=True))}
    for split in splits:
        calibration, validation = split_by_picture(grid, 0.5, split)
        budgets_s = shares_of_full(calibration, BUDGET_SHARES)
        policies = [("one setting by mean", build(calibration, "mean"))]
        for limit, max_late in (("mean", None), ("late", STREAM_LATE)):
            for kind, share in (("mix", None), ("mix by prompts", STREAM_NEIGHBOURS)):
                made = build(calibration, "stream", max_late=max_late, neighbourhood=share)
                policies.append((f"{limit}: {kind}", made))
        policies.append(("p95 of each request", build(calibration, "p95")))
        places = [place_of[key] for key in zip(validation.tasks, validation.sample_ids, strict=True)]
        for name, policy in policies:
            found = replay(policy, validation, budgets_s)
            over = found.latency_s / np.array(budgets_s)[:, None]
            values = found.scores / validation.best, 0 * over, 1 + 0 * over, over, over > 1
            own = sums.setdefault(name, np.zeros((len(grid), len(values))))
            np.add.at(own, places, np.stack([each.sum(axis=0) for each in values], axis=1))
    print(f"{len(splits)} splits, {len(BUDGET_SHARES)} budgets, {len(set(grid.pictures))} pictures")
    print(f"{'sharing':<24}{'accuracy':>9}{'mean / budget':>15}{'late':>8}  less the plain mix")
    for name, own in sums.items():
        accuracy, _, count, over, late = own.sum(axis=0)
        plain = sums.get(name.removesuffix(" by prompts"), own)
        more = _difference(own, plain, grid.pictures)
        print(f"{name:<24}{accuracy / count:>9.3f}{over / count:>15.3f}{100 * late / count:>6.1f} %  {more}")


def _over_seeds(by_seed: np.ndarray, other: np.ndarray, pictures: Sequence[str]) -> str:
    """The mean difference over K seeds [K, N, 3] and pictures, its interval over both, and each seed's."""
    compared: list[int] = np.flatnonzero((by_seed[:, :, 2] > 0).all(axis=0)).tolist()
    seeds = by_seed[:, compared, 0] / by_seed[:, compared, 2] - other[compared, 0] / other[compared, 2]
    counts = draw_counts([pictures[place] for place in compared], np.zeros(len(compared)), DRAWS, seed=0)
    of_draws = counts @ seeds.T / counts.sum(axis=1, keepdims=True)
    weights = resampled(np.random.default_rng(1), len(seeds), DRAWS) / len(seeds)
    low, high = interval((weights * of_draws).sum(axis=1))
    alone = ", ".join(f"{each:+.3f}" for each in seeds.mean(axis=1))
    return f"{seeds.mean():+.3f} [{low:+.3f}, {high:+.3f}] over pictures and seeds; of each seed {alone}"


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
