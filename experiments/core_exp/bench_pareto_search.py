"""How well the search finds a full grid's front, and in what share of its time: replayed over a table of a full run.

python -m experiments.core_exp.bench_pareto_search --seeds 10                   # made-up tables, 60 settings
python -m experiments.core_exp.bench_pareto_search --results_dir results/full   # a recorded run, seeds order its samples
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats
from tqdm import tqdm

from experiment_core_utils.l_results_csv_cleaning import read_results, setting_key
from experiment_core_utils.pareto_search import (
    Observation,
    ParetoSearch,
    SearchResult,
    SearchRules,
    mean_bound,
    random_order,
    run_search,
)
from experiment_core_utils.primitives.errors import ProfilerError, ResultsError
from experiment_core_utils.tasks.comparison import difference_interval

# Each side of a 95 % interval.
TAIL = 0.025

# The made-up grid is shaped like checkpoints/molmoe_tiny/README.md: shares of correct answers of the tiers, and what is
# left of them with fewer blocks or experts; `reading` is 239 of 500 questions.
READING_SHARE = 0.478
TIERS = {"high": (11.4, 0.916, 1.000), "medium": (5.5, 0.766, 1.000), "low": (2.0, 0.523, 0.969)}
BLOCKS = {16: (1.0, 1.0), 15: (0.991, 0.992), 14: (0.961, 0.992), 13: (0.924, 0.990), 12: (0.829, 0.990)}
TOP_K = {8: (1.0, 1.0), 4: (0.9985, 1.0), 2: (0.9985, 0.989), 1: (0.977, 0.966)}
QUESTIONS_OF_A_PICTURE = 4
# How a question's hardness is made up: of the picture, of the question, and of what each knob does to it by chance.
PICTURE, TIER_CHANCE, BLOCK_CHANCE, TOP_K_CHANCE = 0.15, 0.03, 0.01, 0.005
# Times in ms, by the shares that operators have in profiles on the CPU: a crop, a token in a block, a token of the answer.
MS_A_CROP, MS_A_TOKEN, MS_A_TOKEN_AND_EXPERT, MS_A_STEP, MS_A_STEP_AND_EXPERT = 180.0, 0.094, 0.0042, 7.0, 0.1
TIME_NOISE, OUTLIERS, OUTLIER_FACTOR = 0.05, 0.01, 2.0


@dataclass(frozen=True)
class Table:
    """A full run: scores and seconds [settings, samples], nan where a sample failed, and the picture of each sample."""

    settings: tuple[str, ...]
    sample_ids: tuple[int, ...]
    pictures: tuple[str, ...]
    scores: np.ndarray
    seconds: np.ndarray
    costs: np.ndarray
    best: float


@dataclass(frozen=True)
class Agreement:
    """A search against the full run.

    Attributes:
        front: settings of the full run's front, by its means.
        missed: those neither kept nor tied with a kept one within the full run's 95 % intervals.
        missed_beyond_margin: those of them that every kept setting as fast is worse than by more than the margin.
        kept: settings that the search kept.
        needless: kept ones that the full run's 95 % intervals show to be dominated.
        contenders: settings of the full run that its 95 % intervals do not show to be dominated.
    """

    front: int
    missed: tuple[str, ...]
    missed_beyond_margin: int
    kept: int
    needless: int
    contenders: int
    share: float


def made_up_table(num_samples: int, seed: int) -> Table:
    """A full run of 60 settings, drawn with a seed."""
    generator = np.random.default_rng(seed)
    pictures = np.arange(num_samples) // QUESTIONS_OF_A_PICTURE
    reading = generator.random(num_samples) < READING_SHARE
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
    table = np.array(seconds)
    ids = tuple(range(num_samples))
    return Table(tuple(names), ids, tuple(map(str, pictures)), np.array(scores), table, table, 1.0)


def recorded_table(folder: Path) -> Table:
    """The full run in a folder; raises ResultsError where its settings do not belong to one run."""
    results = list(read_results(folder).values())
    if len({result["fingerprint"] for result in results}) != 1:
        raise ResultsError(f"{folder} holds settings of several runs; give the folder of one")
    ids = tuple(results[0]["sample_ids"])
    place = {sample_id: at for at, sample_id in enumerate(ids)}
    pictures = [""] * len(ids)
    scores, seconds, costs = (np.full((len(results), len(ids)), np.nan) for _ in range(3))
    for row, result in enumerate(results):
        for sample in result["per_sample_results"]:
            at = place[sample["sample_id"]]
            pictures[at] = sample["metadata"]["image_id"]
            scores[row, at] = np.nan if sample["accuracy"] is None else sample["accuracy"]
            seconds[row, at] = sample["T_total"] / 1000
            costs[row, at] = sum(run["T_total"] for run in sample["runs"]) / 1000
    keys = tuple(setting_key(result) for result in results)
    return Table(keys, ids, tuple(pictures), scores, seconds, costs, results[0]["metric_best"])


def replay(table: Table, rules: SearchRules, seed: int) -> SearchResult:
    """The search, given the table's entries as if they were measured when asked for."""
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
                )
                for each, at in places
                if np.isfinite(table.seconds[at])
            }
        return found

    order = random_order(table.sample_ids, seed)
    pictures = [table.pictures[column[each]] for each in order]
    return run_search(ParetoSearch(table.settings, order, pictures, rules), look_up)


def judge(table: Table, found: SearchResult, margin: float) -> Agreement:
    """The search's front against the full run's."""
    accuracy, seconds = np.nanmean(table.scores, axis=1), np.nanmean(table.seconds, axis=1)
    front = [
        at
        for at in range(len(table.settings))
        if not any(
            accuracy[other] >= accuracy[at]
            and seconds[other] <= seconds[at]
            and (accuracy[other], seconds[other]) != (accuracy[at], seconds[at])
            for other in range(len(table.settings))
        )
    ]
    kept = [table.settings.index(each.key) for each in found.front]
    missed = [at for at in front if at not in kept and not any(_stands_in(table, each, at) for each in kept)]
    allowed = margin * table.best
    gone = [
        at for at in missed
        if not any(seconds[each] <= seconds[at] and accuracy[each] >= accuracy[at] - allowed for each in kept)
    ]  # fmt: skip
    contenders = [at for at in range(len(table.settings)) if not _shown_dominated(table, at)]
    return Agreement(
        front=len(front),
        missed=tuple(table.settings[at] for at in missed),
        missed_beyond_margin=len(gone),
        kept=len(kept),
        needless=len(set(kept) - set(contenders)),
        contenders=len(contenders),
        share=found.cost_s / float(np.nansum(table.costs)),
    )


def _stands_in(table: Table, kept: int, at: int) -> bool:
    """Whether the full run's paired 95 % intervals leave it open that `kept` is as accurate and as fast as `at`."""
    scored = np.isfinite(table.scores[kept]) & np.isfinite(table.scores[at])
    gains = (table.scores[kept] - table.scores[at])[scored]
    pictures = [picture for picture, has in zip(table.pictures, scored, strict=True) if has]
    if _seconds_saved(table, kept, at).high < 0:
        return False
    return difference_interval(gains.tolist(), pictures, table.best)[1] >= 0


def _shown_dominated(table: Table, at: int) -> bool:
    for other in range(len(table.settings)):
        if other == at:
            continue
        gain = mean_bound(table.scores[other] - table.scores[at], _numbers(table), TAIL)
        if gain.low >= 0 and _seconds_saved(table, other, at).low > 0:
            return True
    return False


def _seconds_saved(table: Table, by: int, at: int):  # type: ignore[no-untyped-def]
    return mean_bound(table.seconds[at] - table.seconds[by], _numbers(table), TAIL)


def _numbers(table: Table) -> np.ndarray:
    return np.unique(table.pictures, return_inverse=True)[1]


def main() -> int:
    """Exit code: 0 done, 1 the files do not allow it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results_dir", type=Path, help="folder of a full run (default: made-up tables)")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--num_samples", type=int, default=1000, help="of the made-up tables")
    rules = SearchRules()
    parser.add_argument("--margin", type=float, default=rules.margin)
    parser.add_argument("--alpha", type=float, default=rules.alpha)
    parser.add_argument("--first_samples", type=int, default=rules.first_samples)
    parser.add_argument("--growth", type=float, default=rules.growth)
    parser.add_argument("--share", type=float, default=rules.share)
    given = parser.parse_args()
    try:
        recorded = recorded_table(given.results_dir) if given.results_dir is not None else None
    except ProfilerError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    all_done: list[Agreement] = []
    for seed in tqdm(range(given.seeds), desc="seeds", leave=False):
        table = recorded if recorded is not None else made_up_table(given.num_samples, seed)
        rules = SearchRules(given.margin, given.alpha, given.first_samples, given.growth, given.share, table.best)
        found = replay(table, rules, seed)
        done = judge(table, found, given.margin)
        all_done.append(done)
        print(
            f"seed {seed}: {len(table.settings)} settings x {len(table.sample_ids)} samples, "
            f"front {done.front}, missed {len(done.missed)} ({done.missed_beyond_margin} beyond the margin), "
            f"kept {done.kept} ({done.needless} needlessly; full run: {done.contenders}), "
            f"time {done.share:.3f} of the full run's, {len(found.rounds)} rounds, stopped: {found.stopped}",
            flush=True,
        )
    whole = sum(not each.missed for each in all_done)
    shares = [each.share for each in all_done]
    print(
        f"front found in {whole} of {len(all_done)} seeds ({sum(each.missed_beyond_margin for each in all_done)} points "
        f"missed beyond the margin); share of the full run's time: median {statistics.median(shares):.3f}, "
        f"largest {max(shares):.3f}; kept {statistics.median(each.kept for each in all_done)} settings (median)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
