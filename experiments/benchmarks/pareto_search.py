"""How much of a grid's true front the search finds, beside the trivial rule, in what fraction of the full model time.

    python -m experiments.benchmarks.pareto_search --table docs/core_exp/pareto_table.json --seeds 20
    python -m experiments.benchmarks.pareto_search --seeds 20 --num_samples 100 200 500   # synthetic grids

The search is replayed over a table of a full grid (settings x samples: score and seconds): it asks, the table answers;
each seed puts the samples in another order. The trivial rule measures every setting on the same random third of the
samples and takes the front of the means; `all samples` is the front of the means of the whole table.

Found is the fraction of the settings of the true front that are on the front of a rule; excluded, of those, the
fraction that the search removed; false, of the settings of a rule's front, the fraction that are not on the true one;
gap, the mean over the true front of the accuracy that is lost by using the best setting of the rule's front that is not
slower. Of a recorded table the means count as the truth; synthetic grids have a known one:

- `dominated`: 60 settings, 6 on the front (accuracies 0.55 to 0.89, each 1.5 times as slow as the one before); each
  other one takes 1.05 to 2.5 times as long as one of them and is worse by 0.02 to 0.3;
- `trade-offs`: 12 settings, 11 on the front (accuracies 0.55 to 0.9, each 1.12 times as slow as the one before).

An answer is right where a question's hardness is below the setting's accuracy; 0.85 of the hardness (variance of a
normal) is common to all settings. Times have a factor common to all settings (0.25, standard deviation of the
logarithm) and noise (0.05).
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from experiment_core_utils.config.command import reporting_errors, run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.primitives.statistics import on_front
from experiment_core_utils.sweep.front_search import (
    LARGEST_SHARE,
    Observation,
    ParetoSearch,
    SearchResult,
    random_order,
    run_search,
)
from experiments.analyses.recorded_table import RecordedTable, read_table


@dataclass(frozen=True)
class Grid:
    """A full run, and what is true of its settings."""

    table: RecordedTable
    accuracy: np.ndarray  #: [S]
    seconds: np.ndarray  #: [S]

    @classmethod
    def recorded(cls, table: RecordedTable) -> "Grid":
        """A table whose means count as the truth."""
        return cls(table, np.nanmean(table.scores, axis=1), np.nanmean(table.seconds, axis=1))

    @classmethod
    def drawn(cls, kind: str, num_samples: int, seed: int) -> "Grid":
        """A synthetic grid, `dominated` or `trade-offs`."""
        generator = np.random.default_rng(seed)
        if kind == "dominated":
            accuracy, seconds = np.array([0.55, 0.66, 0.74, 0.80, 0.85, 0.89]), 0.1 * 1.5 ** np.arange(6)
            better = generator.integers(0, 6, 54)
            accuracy = np.append(accuracy, accuracy[better] - generator.uniform(0.02, 0.3, 54))
            seconds = np.append(seconds, seconds[better] * generator.uniform(1.05, 2.5, 54))
        else:
            accuracy, seconds = np.linspace(0.55, 0.9, 12), 0.1 * 1.12 ** np.arange(12)
            accuracy[4] = accuracy[3] - 0.01
        shape = len(accuracy), num_samples
        hardness = np.sqrt(0.85) * generator.normal(size=num_samples) + np.sqrt(0.15) * generator.normal(size=shape)
        scores = (stats.norm.cdf(hardness) < accuracy[:, None]).astype(float)
        noise = 0.25 * generator.normal(size=num_samples) + 0.05 * generator.normal(size=shape)
        times, ids = seconds[:, None] * np.exp(noise), tuple(range(num_samples))
        names, origin = tuple(f"s{at}" for at in range(len(accuracy))), {"caveats": ["synthetic"]}
        return cls(
            RecordedTable(names, ids, tuple(map(str, ids)), scores, times, times, 1.0, origin), accuracy, seconds
        )


@dataclass(frozen=True)
class RuleOutcome:
    """How a rule did on one grid; see the module."""

    found: float
    excluded: float
    false: float
    gap: float
    share: float  #: model time, as a fraction of the full run's


def replay(table: RecordedTable, seed: int) -> SearchResult:
    """The search, given the table's scores and times as if they were measured when requested."""
    row = {key: at for at, key in enumerate(table.settings)}
    column = {sample_id: at for at, sample_id in enumerate(table.sample_ids)}

    def look_up(wanted: Mapping[str, Sequence[int]]) -> dict[str, dict[int, Observation]]:
        found: dict[str, dict[int, Observation]] = {}
        for key, sample_ids in wanted.items():
            places = [(each, (row[key], column[each])) for each in sample_ids]
            found[key] = {
                each: Observation(
                    None if np.isnan(table.scores[at]) else float(table.scores[at]),
                    float(table.seconds[at]),
                    float(table.costs[at]),
                    table.pictures[at[1]],
                )
                for each, at in places
                if np.isfinite(table.seconds[at])
            }
        return found

    return run_search(ParetoSearch(table.settings, random_order(table.sample_ids, seed), table.best), look_up)


def outcome(grid: Grid, front: Sequence[int], removed: Sequence[int], share: float) -> RuleOutcome:
    """What a rule found, by the places of its front's settings and of those that it removed."""
    true, accuracy, seconds = np.flatnonzero(on_front(grid.seconds, grid.accuracy)), grid.accuracy, grid.seconds
    best = [max((accuracy[each] for each in front if seconds[each] <= seconds[at]), default=0.0) for at in true]
    return RuleOutcome(
        found=float(np.isin(true, front).mean()),
        excluded=float(np.isin(true, removed).mean()),
        false=float(np.mean([each not in true for each in front])),
        gap=float(np.maximum(accuracy[true] - best, 0.0).mean()),
        share=share,
    )


def outcomes(grid: Grid, seed: int) -> dict[str, RuleOutcome]:
    """What each rule found in a grid, its samples in the seed's order."""
    table, row = grid.table, {key: at for at, key in enumerate(grid.table.settings)}
    search = replay(table, seed)
    front, removed = [row[each.key] for each in search.front], [row[each.key] for each in search.eliminated]
    found = {"search": outcome(grid, front, removed, search.cost_s / float(np.nansum(table.costs)))}
    order = [table.sample_ids.index(each) for each in random_order(table.sample_ids, seed)]
    for name, share in (("random third", LARGEST_SHARE), ("all samples", 1.0)):
        some = order[: int(share * len(order))]
        means = np.nanmean(table.seconds[:, some], axis=1), np.nanmean(table.scores[:, some], axis=1)
        used = float(np.nansum(table.costs[:, some]) / np.nansum(table.costs))
        found[name] = outcome(grid, np.flatnonzero(on_front(*means)).tolist(), [], used)
    return found


def lines(name: str, num_settings: int, num_samples: int, grids: Sequence[Grid]) -> Iterator[str]:
    """Rows of the table: means over seeds of what each rule found; of `found` its standard error besides."""
    done = [outcomes(grid, seed) for seed, grid in enumerate(grids)]
    for rule in done[0]:
        columns = np.array([list(vars(each[rule]).values()) for each in done]).T
        means = [f"{column.mean():.3f}" for column in columns]
        means[0] += f" ± {columns[0].std() / np.sqrt(len(done)):.3f}"
        yield f"| {name}, {num_settings} x {num_samples} | {rule} | " + " | ".join(means) + " |"


@reporting_errors
def main() -> None:
    """Exit code: 0 done, 1 the table cannot be read, 2 a wrong flag."""
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--table", type=Path, metavar="FILE", help="replay over this table (default: synthetic grids)")
    parser.add_argument(
        "--num_samples", type=int, nargs="+", default=[100, 200, 500], help="samples of synthetic grids"
    )
    parser.add_argument("--seeds", type=int, default=20)
    given = parser.parse_args()
    print("| grid, settings x samples | rule | found | excluded | false | gap | share of model time |")
    print("| --- " * 7 + "|")
    if given.table is not None:
        grid = Grid.recorded(read_table(given.table))
        cases = [(given.table.name, [grid] * given.seeds)]
    else:
        cases = [
            (kind, [Grid.drawn(kind, number, seed) for seed in range(given.seeds)])
            for kind in ("dominated", "trade-offs")
            for number in given.num_samples
        ]
    for name, grids in cases:
        table = grids[0].table
        for line in lines(name, len(table.settings), len(table.sample_ids), grids):
            print(line, flush=True)


if __name__ == "__main__":
    sys.exit(run_command(main))
