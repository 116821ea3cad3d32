"""How well the search finds a full grid's front, and in what fraction of its model time.

The search is replayed over a table of a full grid (settings x samples: score and milliseconds), which
`collect_table.py` writes: it asks, the table answers; each seed puts the samples in another order.

    python -m experiments.benchmarks.pareto_search --table docs/core_exp/pareto_table.json --seeds 10
    python -m experiments.benchmarks.pareto_search --seeds 10        # over made-up tables, one for each seed
"""

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats
from tqdm import tqdm

from experiment_core_utils.config.command import reporting_errors, run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.primitives.statistics import bounded_mean_interval
from experiment_core_utils.sweep.front_search import (
    MeanBound,
    Observation,
    ParetoSearch,
    SearchResult,
    SearchRules,
    Survivor,
    front_of,
    mean_bound,
    random_order,
    run_search,
)
from experiments.analyses.recorded_table import RecordedTable, read_table
from experiments.fitting.verdicts import TAIL

# The made-up grid is shaped like checkpoints/molmoe_tiny/README.md: fractions of correct answers of the tiers, and what
# is left of them with fewer blocks or experts; `reading` is 239 of 500 questions.
READING_FRACTION = 0.478
TIERS = {"high": (11.4, 0.916, 1.000), "medium": (5.5, 0.766, 1.000), "low": (2.0, 0.523, 0.969)}
BLOCKS = {16: (1.0, 1.0), 15: (0.991, 0.992), 14: (0.961, 0.992), 13: (0.924, 0.990), 12: (0.829, 0.990)}
TOP_K = {8: (1.0, 1.0), 4: (0.9985, 1.0), 2: (0.9985, 0.989), 1: (0.977, 0.966)}
QUESTIONS_OF_A_PICTURE = 4
# How a question's hardness is made up: of the picture, of the question, and of what each knob does to it by chance.
PICTURE, TIER_CHANCE, BLOCK_CHANCE, TOP_K_CHANCE = 0.15, 0.03, 0.01, 0.005
# Times in ms, by the operators' fractions in profiles on the CPU: a crop, a token in a block, a token of the answer.
MS_A_CROP, MS_A_TOKEN, MS_A_TOKEN_AND_EXPERT, MS_A_STEP, MS_A_STEP_AND_EXPERT = 180.0, 0.094, 0.0042, 7.0, 0.1
TIME_NOISE, OUTLIERS, OUTLIER_FACTOR = 0.05, 0.01, 2.0


@dataclass(frozen=True)
class SearchAgreement:
    """The agreement of a search with the full run.

    A point of the full run's front is *found* by a setting of the search's front that is not slower (the full run's
    paired 95 % interval of the difference in time reaches 0) and whose accuracy in the full run is not below the
    point's own 95 % interval there.
    """

    points: int  #: settings of the full run's front, by its means
    lost: tuple[str, ...]  #: points that no setting found
    #: points lost to a harder test: the paired 95 % interval of the difference in accuracy reaches 0
    lost_paired: tuple[str, ...]
    gap: float  #: the most that the accuracy of a point is above the best of those settings, by the full run's means
    front: int  #: settings of the search's front
    wrong: int  #: those of them that the full run's paired 95 % intervals show to be dominated
    share: float  #: model time of what the search requested, as a fraction of the full run's


def made_up_table(num_samples: int, seed: int) -> RecordedTable:
    """A full run of 60 settings, drawn with a seed."""
    generator = np.random.default_rng(seed)
    pictures = np.arange(num_samples) // QUESTIONS_OF_A_PICTURE
    reading = generator.random(num_samples) < READING_FRACTION
    hardness = np.sqrt(PICTURE) * generator.normal(size=pictures[-1] + 1)[pictures]
    own = 1 - PICTURE - TIER_CHANCE - BLOCK_CHANCE - TOP_K_CHANCE
    hardness = hardness + np.sqrt(own) * generator.normal(size=num_samples)
    chances = {
        name: np.sqrt(share) * generator.normal(size=num_samples)
        for names, share in ((TIERS, TIER_CHANCE), (BLOCKS, BLOCK_CHANCE), (TOP_K, TOP_K_CHANCE))
        for name in names
    }
    crops_of_picture = generator.normal(0.0, 1.0, pictures[-1] + 1)[pictures]
    steps = np.where(reading, generator.integers(3, 6, num_samples), 1)
    names, scores, seconds = [], [], []
    for tier, (mean_crops, tier_reading, tier_other) in TIERS.items():
        for blocks, (block_reading, block_other) in BLOCKS.items():
            for top_k, (top_k_reading, top_k_other) in TOP_K.items():
                right = np.where(
                    reading, tier_reading * block_reading * top_k_reading, tier_other * block_other * top_k_other
                )
                total = hardness + chances[tier] + chances[blocks] + chances[top_k]
                crops = np.maximum(np.round(mean_crops + 0.25 * mean_crops * crops_of_picture), 1)
                tokens = 320 + 80 * crops
                ms = MS_A_CROP * (crops + 1) + tokens * blocks * (MS_A_TOKEN + MS_A_TOKEN_AND_EXPERT * top_k)
                ms = ms + steps * blocks * (MS_A_STEP + MS_A_STEP_AND_EXPERT * top_k)
                noise = np.exp(TIME_NOISE * generator.normal(size=num_samples))
                noise = noise * np.where(generator.random(num_samples) < OUTLIERS, OUTLIER_FACTOR, 1.0)
                names.append(f"tier-{tier}_topk{top_k}_blocks{blocks}")
                scores.append((stats.norm.cdf(total) < right).astype(float))
                seconds.append(ms * noise / 1000)
    times = np.array(seconds)
    origin = {"caveats": ["made up"]}
    ids = tuple(range(num_samples))
    return RecordedTable(tuple(names), ids, tuple(map(str, pictures)), np.array(scores), times, times, 1.0, origin)


def replay(table: RecordedTable, rules: SearchRules, seed: int) -> SearchResult:
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

    order = random_order(table.sample_ids, seed)
    return run_search(ParetoSearch(table.settings, order, rules), look_up)


def compare_fronts(table: RecordedTable, found: SearchResult) -> SearchAgreement:
    """The search's front compared with the full run's."""
    accuracy, seconds = np.nanmean(table.scores, axis=1), np.nanmean(table.seconds, axis=1)
    everything = [
        Survivor(key, len(table.sample_ids), float(accuracy[at]), float(seconds[at]), ())
        for at, key in enumerate(table.settings)
    ]
    row = {key: at for at, key in enumerate(table.settings)}
    points = [row[each.key] for each in front_of(everything)]
    front = [row[each.key] for each in found.front]
    lost, lost_paired, gaps = [], [], []
    for at in points:
        no_slower = [each for each in front if each == at or _saved(table, each, at).high >= 0]
        if not any(accuracy[each] >= _mean_interval(table, table.scores[at], 0.0)[0] for each in no_slower):
            lost.append(table.settings[at])
        if not any(each == at or _gained(table, each, at)[1] >= 0 for each in no_slower):
            lost_paired.append(table.settings[at])
        gaps.append(float(accuracy[at]) - max((float(accuracy[each]) for each in no_slower), default=0.0))
    wrong = [at for at in front if _shown_dominated(table, at)]
    return SearchAgreement(
        points=len(points),
        lost=tuple(lost),
        lost_paired=tuple(lost_paired),
        gap=max(gaps),
        front=len(front),
        wrong=len(wrong),
        share=found.cost_s / float(np.nansum(table.costs)),
    )


def _mean_interval(table: RecordedTable, values: np.ndarray, worst: float) -> tuple[float, float]:
    """The 95 % interval of the mean of the samples' values, nan left out, as the full run publishes it."""
    known = np.isfinite(values)
    pictures = [picture for picture, has in zip(table.pictures, known, strict=True) if has]
    return bounded_mean_interval(values[known].tolist(), pictures, table.best, worst) or (worst, table.best)


def _gained(table: RecordedTable, by: int, at: int) -> tuple[float, float]:
    """The 95 % interval of the difference in accuracy, `by` minus `at`."""
    return _mean_interval(table, table.scores[by] - table.scores[at], -table.best)


def _saved(table: RecordedTable, by: int, at: int) -> MeanBound:
    numbers = np.unique(table.pictures, return_inverse=True)[1]
    return mean_bound(table.seconds[at] - table.seconds[by], numbers, TAIL)


def _shown_dominated(table: RecordedTable, at: int) -> bool:
    means = np.nanmean(table.scores, axis=1)
    return any(
        _saved(table, other, at).low > 0 and _gained(table, other, at)[0] >= 0
        for other in range(len(table.settings))
        if other != at and means[other] > means[at]
    )


def line_of(seed: int, table: RecordedTable, found: SearchResult, one: SearchAgreement) -> str:
    """The line with the results of one seed's search."""
    return (
        f"seed {seed}: {len(table.settings)} settings x {len(table.sample_ids)} samples; time {one.share:.3f} of the "
        f"full grid's, {len(found.rounds)} rounds ({found.stopped}); front {one.front} ({one.wrong} dominated in the "
        f"full run), undecided {len(found.undecided)}, set aside {len(found.set_aside)}, eliminated "
        f"{len(found.eliminated)}; of the full front's {one.points} points {len(one.lost)} lost "
        f"({len(one.lost_paired)} paired), largest gap "
        f"{one.gap:.3f}{': ' if one.lost else ''}{', '.join(one.lost)}"
    )


def summary_of(done: Sequence[SearchAgreement]) -> str:
    """The lines with the results of all seeds."""
    fractions = [each.share for each in done]
    lost, lost_paired = sum(len(each.lost) for each in done), sum(len(each.lost_paired) for each in done)
    return (
        f"{len(done)} seeds: the whole full front found in {sum(not each.lost for each in done)}; {lost} of "
        f"{sum(each.points for each in done)} points lost ({lost_paired} by the harder, paired test); "
        f"{sum(each.wrong for each in done)} of {sum(each.front for each in done)} settings of the found fronts are "
        f"dominated in the full run\nshare of the full grid's model time: median {statistics.median(fractions):.3f}, "
        f"largest {max(fractions):.3f}"
    )


@reporting_errors
def main() -> None:
    """Exit code: 0 done, 1 the table cannot be read, 2 a wrong flag."""
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--table", type=Path, metavar="FILE", help="replay over this table (default: made-up tables)")
    parser.add_argument("--num_samples", type=int, default=500, help="samples of made-up tables")
    parser.add_argument("--seeds", type=int, default=10)
    rules = SearchRules()
    for name in ("margin", "alpha", "doubt", "growth", "share"):
        parser.add_argument(f"--{name}", type=float, default=getattr(rules, name))
    parser.add_argument("--first_samples", type=int, default=rules.first_samples)
    given = parser.parse_args()
    recorded = read_table(given.table) if given.table is not None else None
    done: list[SearchAgreement] = []
    for seed in tqdm(range(given.seeds), desc="seeds", leave=False, disable=not sys.stderr.isatty()):
        table = recorded if recorded is not None else made_up_table(given.num_samples, seed)
        rules = SearchRules(
            given.margin, given.alpha, given.doubt, given.first_samples, given.growth, given.share, table.best
        )
        found = replay(table, rules, seed)
        one = compare_fronts(table, found)
        done.append(one)
        print(line_of(seed, table, found, one), flush=True)
    print(summary_of(done))


if __name__ == "__main__":
    sys.exit(run_command(main))
