"""How often each word that is printed is wrong, of every quantity in every world, and how often intervals hold.

    python -m experiments.benchmarks.verdict_level [--repetitions 200] [--processes 16] [--page PAGE]

Each case is a quantity in a world: a run of known truth is made, the product's own code says its words of it, and what
is wrong is counted by run: a run is wrong in a word where any of its settings has it wrongly. `yes` and `no` are to be
wrong in at most 5 % of runs, `likely` (and surer) in 20 %, and the intervals of a family hold together in 95 %.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from scipy import stats

from experiment_core_utils.config.command import run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import target_of_value
from experiment_core_utils.primitives.contrasts import ACCURACY_MARGIN, ScoreContrasts, Word
from experiment_core_utils.primitives.replication import COUNTED, IN_ROUNDS, Replication, across_runs, in_passes
from experiments.analyses.knobs.analysis import analyse_knobs
from experiments.analyses.knobs.conclusion import conclude
from experiments.analyses.knobs.fronts import front
from experiments.analyses.knobs.grid import KnobPoint, TaskGrid
from experiments.analyses.knobs.objectives import ENERGY, FLOPS, LATENCY_MEAN, Cost, Objectives, objectives
from experiments.analyses.knobs.records import present
from experiments.analyses.two_runs import WORDS as SIDES
from experiments.analyses.two_runs import verdict_of
from experiments.benchmarks.simulated_runs import LEVELS, LOG_TIMES, WORLDS, World, measured
from experiments.fitting.run_ratios import BETWEEN_RUNS, log_ratio

Found = dict[str, bool]  # column -> whether the run is wrong in it, or an interval holds, or a setting is found
NUM_DRAWS = 200
RIGHT = 0.8  # of the reference's answers
SURE, LIKELY, HOLDS = "wrong", "wrong likely", "holds"
LIMITS = {SURE: 5.0, LIKELY: 20.0, HOLDS: 95.0}
STEADY = World("steady")
SLOW_RUNS = (
    World("1 % of runs 10 times", slow=(0.01, 10.0)),
    World("3 % of runs 3 times", slow=(0.03, 3.0)),
)
_EXACT = 1e-9


@dataclass(frozen=True)
class Truth:
    """What is true of S settings; contrasts are with `reference`."""

    log_costs: np.ndarray  #: [S]
    accuracies: np.ndarray  #: [S]
    reference: int

    def is_beaten(self, at: int) -> bool:
        """Whether a setting is at least as good in cost and accuracy, and better in one of them."""
        cost, accuracy = self.log_costs[at] - self.log_costs, self.accuracies - self.accuracies[at]
        no_worse = (cost > -_EXACT) & (accuracy > -_EXACT)
        return bool((no_worse & ((cost > _EXACT) | (accuracy > _EXACT))).any())

    def is_replaced(self, at: int) -> bool:
        """Whether a setting costs less and is worse by less than the margin, if at all."""
        cheaper = self.log_costs[at] - self.log_costs > _EXACT
        return bool((cheaper & (self.accuracies - self.accuracies[at] > _EXACT - ACCURACY_MARGIN)).any())


@dataclass(frozen=True)
class Case:
    """A quantity in a world."""

    table: str
    world: str
    num_samples: int
    run: Callable[[np.random.Generator], Found]


def answers(
    num_settings: int, pictures: np.ndarray, losses: Sequence[float], changed: float, generator: np.random.Generator
) -> np.ndarray:
    """Scores [S, N]: the last setting's answers are right in 80 %, of the others so many change that they lose so much.

    Half of the settings change all answers of a picture alike.
    """
    is_right = generator.random(len(pictures)) < RIGHT
    rows = []
    for at in range(num_settings - 1):
        chances = generator.random(len(pictures))
        if at % 2:
            chances = generator.random(pictures.max() + 1)[pictures]
        gain, fall = (changed - losses[at]) / 2 / (1 - RIGHT), (changed + losses[at]) / 2 / RIGHT
        rows.append(np.where(is_right, chances >= fall, chances < gain))
    return np.array([*rows, is_right], dtype=float)


def grid_of(
    levels: Mapping[str, Sequence[str | int]],
    scores: np.ndarray,
    log_costs: np.ndarray,
    pictures: np.ndarray,
    replication: Replication,
) -> TaskGrid:
    """A grid whose time, energy and operations are these costs; the last setting is the reference."""
    points = []
    for at, (vision, top_k, blocks) in enumerate(zip(*levels.values(), strict=True)):
        setting = Setting.of(
            vision=target_of_value(str(vision)),
            top_k=1 + int(top_k),
            num_active_blocks=RunningBlocks(12 + int(blocks)),
        )
        points.append(KnobPoint(setting.key, setting, is_reference=at == len(scores) - 1))
    costs = np.exp(log_costs)
    return TaskGrid(
        task="simulated", metric="right", best=1.0, points=tuple(points),
        sample_ids=tuple(range(scores.shape[1])), pictures=tuple(f"picture {picture}" for picture in pictures),
        scores=scores, total_ms=costs, energy_j=costs, flops=costs, log_times=log_costs,
        times=replication, energies=replication,
    )  # fmt: skip


def _worded(words: Sequence[Word], is_yes: Sequence[bool], is_no: Sequence[bool], claim: str) -> Found:
    """Columns of the words of one claim, given where it is true and where its opposite is."""
    truths = list(zip(words, is_yes, is_no, strict=True))
    return {
        f"{claim} yes: {SURE}": any(word == "yes" and not yes for word, yes, _ in truths),
        f"{claim} likely: {LIKELY}": any(word in ("yes", "likely") and not yes for word, yes, _ in truths),
        f"{claim} no: {SURE}": any(word == "no" and not no for word, _, no in truths),
    }


def cost_words(found: Objectives, truth: Truth) -> Found:
    """Of costs: the words against the reference, of all pairs, of the front, and the intervals."""
    reference, size = truth.reference, len(truth.log_costs)
    others = [at for at in range(size) if at != reference]
    ahead = truth.log_costs[reference] - truth.log_costs
    contrasts, has_verdict = found.cost_contrasts(reference), found.no_verdict is None
    words: list[Word] = [contrasts.word(at, reference) if has_verdict else "can't tell" for at in others]
    ends = [contrasts.interval(at, reference) if has_verdict else None for at in others]
    holds = [end is None or end[0] <= np.exp(-ahead[at]) <= end[1] for at, end in zip(others, ends, strict=True)]
    pairs = np.stack([found.cheaper(at) for at in range(size)])
    is_cheaper = truth.log_costs[:, None] < truth.log_costs - _EXACT
    index_of = {point.key: at for at, point in enumerate(found.points)}
    points = front(found).points
    at_front = [index_of[point.key] for point in points]
    return {
        **_worded(words, (ahead > _EXACT)[others], (ahead < -_EXACT)[others], "cheaper"),
        f"cheaper interval: {HOLDS}": all(holds),
        f"any pair: {SURE}": bool((pairs & ~is_cheaper).any()),
        **_worded(
            [point.word for point in points],
            [not truth.is_beaten(at) for at in at_front],
            [truth.is_replaced(at) for at in at_front],
            "front",
        ),
    }


def concluded(grid: TaskGrid, truth: Truth, still: Mapping[str, str]) -> Found:
    """Of times, with `cost_words`: the setting to take, and the knobs, of which `still` ones change nothing.

    Args:
        still: title of a knob -> "time" or "accuracy", which it does not change.
    """
    task = analyse_knobs([grid], [LATENCY_MEAN], NUM_DRAWS).tasks[0]
    (each,) = present(task)
    found = conclude(task)
    takes = next((at for at, point in enumerate(grid.points) if point.key == found.setting), truth.reference)
    is_right = (
        truth.log_costs[takes] < truth.log_costs[truth.reference]
        and truth.accuracies[takes] - truth.accuracies[truth.reference] > _EXACT - ACCURACY_MARGIN
    )
    knobs = [change for change in found.changes if change.knob in still]
    said = [change.time_word if still[change.knob] == "time" else change.accuracy_word for change in knobs]
    return {
        **cost_words(each.found, truth),
        f"take it: {SURE}": found.word == "yes" and not is_right,
        f"knob changes it: {SURE}": "yes" in said,
    }


def score_words(contrasts: ScoreContrasts, truth: Truth) -> Found:
    """Of accuracies: not worse than the reference, more accurate in any pair, and the intervals."""
    reference, size = truth.reference, len(truth.accuracies)
    others = [at for at in range(size) if at != reference]
    losses = (truth.accuracies[reference] - truth.accuracies)[others]
    ends = [contrasts.interval(at, reference) for at in others]
    holds = [
        end is None or (end[0] <= -loss + _EXACT and -loss <= end[1] + _EXACT)
        for end, loss in zip(ends, losses, strict=True)
    ]
    return {
        **_worded(
            [contrasts.word_not_worse(at, reference) for at in others],
            losses < ACCURACY_MARGIN - _EXACT,
            losses > ACCURACY_MARGIN + _EXACT,
            "not worse",
        ),
        f"worse than it: {SURE}": bool(contrasts.better(reference)[others][losses < _EXACT].any()),
        f"better than it: {SURE}": any(contrasts.better(at)[reference] for at, loss in zip(others, losses, strict=True)
                                       if loss > -_EXACT),
        f"interval: {HOLDS}": all(holds),
    }  # fmt: skip


def _time_case(world: World, num_samples: int, kind: str, generator: np.random.Generator) -> Found:
    """Twelve settings, six pairs of which take equally long; all lose the margin beside the reference."""
    pictures = np.arange(num_samples) // world.per_picture
    times, replication = measured(world, num_samples, generator), IN_ROUNDS
    if kind == "two days":
        days = np.arange(len(times)) % 2
        times = times + generator.normal(0, BETWEEN_RUNS, 2)[days][:, None]
        replication = across_runs(IN_ROUNDS, BETWEEN_RUNS**2, days.tolist())
    losses = [ACCURACY_MARGIN] * (len(times) - 1)
    truth = Truth(LOG_TIMES, RIGHT - np.array([*losses, 0.0]), len(times) - 1)
    scores = answers(len(times), pictures, losses, 0.06, generator)
    still = {"top-k": "time"}
    return concluded(grid_of(LEVELS, scores, times, pictures, replication), truth, still)


EIGHT = {
    name: [row[at] for row in product(("low", "high"), range(2), range(2))]
    for at, name in enumerate(("vision", "top_k", "blocks"))
}


def _cost_case(of: Cost, log_costs: np.ndarray, replication: Replication, generator: np.random.Generator) -> Found:
    """Eight settings of equal cost, all of which lose the margin beside the reference."""
    num_settings, num_samples = log_costs.shape
    pictures = np.arange(num_samples)
    losses = [ACCURACY_MARGIN] * (num_settings - 1)
    truth = Truth(np.zeros(num_settings), RIGHT - np.array([*losses, 0.0]), num_settings - 1)
    grid = grid_of(EIGHT, answers(num_settings, pictures, losses, 0.06, generator), log_costs, pictures, replication)
    found = objectives(grid, of, NUM_DRAWS, 0)
    assert isinstance(found, Objectives)
    return cost_words(found, truth)


def _energy_case(spread: float, of_parts: float, num_passes: int, generator: np.random.Generator) -> Found:
    """Energies of 32 samples: parts of windows, of which a setting has one in each pass."""
    of_samples = generator.normal(0, 0.2, 32)
    windows = generator.normal(0, spread, (8, num_passes, 1))
    joules = np.exp(of_samples + windows + generator.normal(0, of_parts, (8, num_passes, 32)))
    passes = in_passes(joules.mean(axis=2).tolist())
    return _cost_case(ENERGY, np.log(joules.mean(axis=1)), passes, generator)


def _flops_case(num_samples: int, generator: np.random.Generator) -> Found:
    """Operations of answers whose lengths settings change in some samples."""
    lengths = generator.normal(0, 0.3, num_samples) + generator.normal(0, 0.2, (8, num_samples)) * (
        generator.random((8, num_samples)) < 0.2
    )
    return _cost_case(FLOPS, lengths, COUNTED, generator)


def _score_case(
    num_samples: int, per_picture: int, loss: float, changed: float, generator: np.random.Generator
) -> Found:
    """Eight settings, seven of which lose as much."""
    pictures = np.arange(num_samples) // per_picture
    truth = Truth(np.zeros(8), RIGHT - np.array([loss] * 7 + [0.0]), 7)
    scores = answers(8, pictures, [loss] * 7, changed, generator)
    return score_words(ScoreContrasts.of(scores, pictures, reference=7), truth)


def _trade(num_settings: int, num_samples: int, loss: float, changed: float) -> Callable[..., Found]:
    """Settings of which each cheaper one loses as much beside the reference, which is on the front."""

    def run(generator: np.random.Generator) -> Found:
        pictures, losses = np.arange(num_samples), [loss] * (num_settings - 1)
        truth = Truth(-0.1 * np.arange(num_settings)[::-1], RIGHT - np.array([*losses, 0.0]), num_settings - 1)
        scores = answers(num_settings, pictures, losses, changed, generator)
        noise = generator.normal(0, 0.04, scores.shape) + generator.normal(0, 0.2, num_samples)
        levels: dict[str, list[str | int]] = {
            "vision": ["low"] * num_settings, "top_k": [0] * num_settings, "blocks": [*range(num_settings)],
        }  # fmt: skip
        grid = grid_of(levels, scores, truth.log_costs[:, None] + noise, pictures, IN_ROUNDS)
        found = objectives(grid, LATENCY_MEAN, NUM_DRAWS, 0)
        assert isinstance(found, Objectives)
        return {name: each for name, each in cost_words(found, truth).items() if name.startswith("front")}

    return run


def _dominated(num_samples: int, loss: float, changed: float) -> Callable[..., Found]:
    """Eight settings, one of which takes a quarter longer than the reference and is as good or loses; is it found?"""

    def run(generator: np.random.Generator) -> Found:
        pictures = np.arange(num_samples)
        losses = [loss, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07]
        scores = answers(8, pictures, losses, changed, generator)
        log_costs = np.array([np.log(1.25), -0.1, -0.2, -0.3, -0.4, -0.5, -0.6, 0.0])
        times = log_costs[:, None] + generator.normal(0, 0.04, scores.shape) + generator.normal(0, 0.2, num_samples)
        found = objectives(grid_of(EIGHT, scores, times, pictures, IN_ROUNDS), LATENCY_MEAN, NUM_DRAWS, 0)
        assert isinstance(found, Objectives)
        word = next(point.word for point in front(found).points if point.key == found.points[0].key)
        return {"found as no": word == "no"}

    return run


def _sides_case(num_runs: int, deviation: float, generator: np.random.Generator) -> Found:
    """Two sides of so many runs, paired where there are several: equal ones, and ones that differ by the margin."""
    is_paired, pictures = num_runs > 1, np.arange(50)
    first, second = (
        generator.normal(0, deviation, (num_runs, 1)) + generator.normal(0, 0.04, (num_runs, 50)) for _ in range(2)
    )
    margin, found = 0.02, dict[str, bool]()
    for name, ratio in (("equal", 1.0), ("margin", 1 + margin)):
        log_change = log_ratio(first, second + np.log(ratio), pictures, is_paired=is_paired, between=BETWEEN_RUNS)
        assert log_change is not None
        ends = log_change.interval(0.025)
        word = verdict_of(ends, (1 / (1 + margin), 1 + margin), 1.0, SIDES["latency"])
        if name == "equal":
            found[f"FASTER, SLOWER: {SURE}"] = word in SIDES["latency"]
            found[f"interval: {HOLDS}"] = ends[0] <= 1 <= ends[1]
        else:
            found[f"SAME: {SURE}"] = word == "SAME"
    return found


def cases(is_small: bool = False) -> list[Case]:
    """All of them, or those that showed faults, of few samples."""
    found = []

    def time(world: World, n: int, kind: str = "rounds") -> None:
        name = world.name if kind == "rounds" else f"{kind}, {world.name}"
        found.append(Case("time", name, n, partial(_time_case, world, n, kind)))

    def energy(spread: float, parts: float, passes: int) -> None:
        name = f"windows {spread:.1%}, parts {parts:.0%}, {passes} passes"
        found.append(Case("energy", name, 32, partial(_energy_case, spread, parts, passes)))

    def score(n: int, per: int, loss: float, changed: float) -> None:
        name = f"{changed:.0%} change, {loss:.2f} lost, {per} a picture"
        found.append(Case("accuracy", name, n, partial(_score_case, n, per, loss, changed)))

    def trade(size: int, n: int, loss: float, changed: float) -> None:
        name = f"{size} settings, {changed:.0%} change, {loss:.2f} lost"
        found.append(Case("front", name, n, _trade(size, n, loss, changed)))

    numbers = (16,) if is_small else (16, 52, 200)
    for world, n in product((WORLDS[2], SLOW_RUNS[0]) if is_small else (*WORLDS, *SLOW_RUNS), numbers):
        time(world, n)
    for n in numbers:
        time(STEADY, n, "two days")
    for spread, parts in ((0.005, 0.01), (0.01, 0.03)) if is_small else ((0.0, 0.01), *_WINDOWS):
        for passes in (2, 4) if is_small else (2, 3, 4, 6):
            energy(spread, parts, passes)
    for n in numbers:
        found.append(Case("FLOPs", "answers of other lengths", n, partial(_flops_case, n)))
    for n, per, (loss, changed) in product((200,) if is_small else (52, 200, 501), (1, 3), _CHANGES):
        if not is_small or (per == 1 and changed == loss):
            score(n, per, loss, changed)
    for n, (size, loss, changed) in product((52,) if is_small else (52, 200), _TRADES):
        if not is_small or size == 8:
            trade(size, n, loss, changed)
    for runs, deviation in ((1, 0.0), (1, 0.02), (5, 0.02), (5, 0.07)):
        found.append(Case("two sides", f"{runs} a side, {deviation:.0%} between runs", 50,
                          partial(_sides_case, runs, deviation)))  # fmt: skip
    for n, (loss, changed) in product((52, 200, 1000), ((0.0, 0.02), (0.0, 0.06), (0.03, 0.06), (0.06, 0.1))):
        if not is_small:
            name = f"{changed:.0%} change, {loss:.2f} lost, a quarter longer"
            found.append(Case("dominated", name, n, _dominated(n, loss, changed)))
    return found


_WINDOWS = ((0.003, 0.01), (0.005, 0.01), (0.01, 0.01), (0.01, 0.03))
_CHANGES = ((0.0, 0.06), (0.02, 0.02), (0.02, 0.03), (0.02, 0.06), (0.05, 0.1))
_TRADES = ((2, 0.02, 0.06), (8, 0.02, 0.06), (8, 0.03, 0.1), (12, 0.02, 0.02))


@dataclass(frozen=True)
class Cell:
    """A column of a case: so many of its runs are wrong in a word, have intervals that hold, or find a setting."""

    table: str
    world: str
    num_samples: int
    column: str
    num_runs: int
    number: int

    @property
    def percent(self) -> float:
        """Of the runs."""
        return 100 * self.number / self.num_runs

    @property
    def is_beyond(self) -> bool:
        """Whether so many, or so few, happen in less than one of 10,000 tables of what is promised."""
        limit = LIMITS.get(self.column.rpartition(": ")[2])
        if limit is None:
            return False
        if limit == LIMITS[HOLDS]:
            return bool(stats.binom.cdf(self.number, self.num_runs, limit / 100) < 1e-4)
        return bool(stats.binom.sf(self.number - 1, self.num_runs, limit / 100) < 1e-4)


def _chunk(of: tuple[bool, int, int, int, int]) -> tuple[int, int, dict[str, int]]:
    is_small, case, first, size, seed = of
    counts: dict[str, int] = {}
    own = cases(is_small)[case]
    for number in range(first, first + size):
        for column, is_so in own.run(np.random.default_rng([seed, case, number])).items():
            counts[column] = counts.get(column, 0) + bool(is_so)
    return case, size, counts


def cells_of(num_runs: int, seed: int = 0, processes: int = 1, *, is_small: bool = False) -> list[Cell]:
    """The cells of all cases; equal for any number of processes."""
    every = cases(is_small)
    step = max(1, min(10, num_runs))
    chunks = [
        (is_small, case, first, min(step, num_runs - first), seed)
        for first in range(0, num_runs, step)
        for case in range(len(every))
    ]
    totals: dict[int, dict[str, int]] = {case: {} for case in range(len(every))}

    def add(found: Iterator[tuple[int, int, dict[str, int]]]) -> None:
        for case, _, counts in found:
            for column, count in counts.items():
                totals[case][column] = totals[case].get(column, 0) + count

    if processes == 1:
        add(map(_chunk, chunks))
    else:
        # Read when numpy is imported: the processes share the cores.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            add(pool.imap_unordered(_chunk, chunks))
    return [
        Cell(every[case].table, every[case].world, every[case].num_samples, column, num_runs, number)
        for case, counts in totals.items()
        for column, number in counts.items()
    ]


def table_lines(cells: Sequence[Cell]) -> Iterator[str]:
    """Markdown: a table of each quantity, a line of each world, in percent; bold what is beyond chance."""
    for table in dict.fromkeys(cell.table for cell in cells):
        of_table = [cell for cell in cells if cell.table == table]
        columns = list(dict.fromkeys(cell.column for cell in of_table))
        yield f"**{table}**"
        yield ""
        yield f"| world | samples | {' | '.join(columns)} |"
        yield "| --- " * (2 + len(columns)) + "|"
        for world, n in dict.fromkeys((cell.world, cell.num_samples) for cell in of_table):
            row = {cell.column: cell for cell in of_table if (cell.world, cell.num_samples) == (world, n)}
            texts = [f"**{row[column].percent:.1f}**" if row[column].is_beyond else f"{row[column].percent:.1f}"
                     for column in columns]  # fmt: skip
            yield f"| {world} | {n} | {' | '.join(texts)} |"
        yield ""


BEGIN, END = "<!-- from experiments.benchmarks.verdict_level -->", "<!-- end -->"


def write_page(cells: Sequence[Cell], page: Path) -> None:
    """Put the tables between the marks of a page, which keeps what stands around them."""
    text = page.read_text(encoding="utf-8")
    before, _, behind = text.partition(BEGIN)
    _, _, after = behind.partition(END)
    runs = cells[0].num_runs
    tables = "\n".join([f"{runs} runs of each line.", "", *table_lines(cells)])
    page.write_text(f"{before}{BEGIN}\n\n{tables}\n{END}{after}", encoding="utf-8")


def main() -> int:
    """Print the table of all words; 1 where a cell is beyond what is promised by more than chance."""
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="the cases that showed faults, few samples")
    parser.add_argument("--repetitions", type=int, default=200, help="runs of each case (default: 200)")
    parser.add_argument("--processes", type=int, default=1, help="processes that share the runs")
    parser.add_argument("--page", type=Path, help="the page in which the table is replaced")
    flags = parser.parse_args()
    cells = cells_of(flags.repetitions, flags.seed, flags.processes, is_small=flags.small)
    for line in table_lines(cells):
        print(line)
    if flags.page is not None:
        write_page(cells, flags.page)
    beyond = [cell for cell in cells if cell.is_beyond]
    for cell in beyond:
        where = f"{cell.table}, {cell.world}, {cell.num_samples} samples"
        print(f"beyond chance: {where}, {cell.column}: {cell.percent:.1f} %")
    return int(bool(beyond))


if __name__ == "__main__":
    sys.exit(run_command(main))
