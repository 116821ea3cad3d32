"""What each of the five knobs buys, alone and together: accuracy of the embedded model, cost of MolmoE-1B's shape.

python -m experiments.benchmarks.five_knobs ACCURACY COST [--output_dir DIR]

Both are folders of runs (docs/core_exp/five_knobs.md has their commands). ACCURACY has `grid/TASK`, `mass/TASK`,
`keep_RULE/TASK` and `blocks_N/TASK`, the last with random sets of blocks; COST has `grid`, `energy_own`,
`energy_tiers` and `mass`. Accuracy is the mean over tasks of the fraction of the best score, with simultaneous 95 %
intervals of its difference to the reference; times are ratios to the reference on the same requests, with simultaneous
95 % intervals. Not counted: that the two models differ. A knob may cost MolmoE-1B other accuracy than the embedded one.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np

from experiment_core_utils.config.command import run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.primitives.contrasts import PairedContrasts, ScoreContrasts
from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.primitives.statistics import mean_of, on_front
from experiment_core_utils.records.setting_result import SettingResult
from experiments.analyses.charts.style import (
    BLACK,
    BLUE,
    GREEN,
    LIGHT_GREY,
    ORANGE,
    PURPLE,
    SKY,
    STAGE_COLOURS,
    STYLE,
    VERMILION,
    caption_of,
    new_figure,
    save_figure,
)
from experiments.analyses.knobs.grid import TaskGrid, grids_of
from experiments.analyses.sweeps import Sweep, load_sweep

REFERENCE, HALF, FEWER = "own_topk8_blocks16", "own_keep0.5_topk8_blocks16", "own_topk8_blocks12"
MASS = "expert mass"
# The settings that turn one knob alone: knob -> keys.
ALONE: Mapping[str, tuple[str, ...]] = {
    "vision tokens": ("tier-low_topk8_blocks16", "tier-medium_topk8_blocks16", "tier-high_topk8_blocks16"),
    "kept image tokens": (HALF,),
    "top-k": ("own_topk4_blocks16",),
    "blocks": (FEWER,),
}
COLOURS = dict(zip((*ALONE, MASS), (BLUE, SKY, ORANGE, VERMILION, PURPLE), strict=True))
STAGES = {"vision": "T_vision_total", "prefill": "T_LLM_prefill", "decode": "T_LLM_decode"}


@dataclass(frozen=True)
class Scores:
    """Fractions of the best score of S settings, on N samples of all tasks, as many of each."""

    keys: tuple[str, ...]
    values: np.ndarray  #: [S, N]
    pictures: tuple[str, ...]  #: [N], which several tasks may ask about

    @classmethod
    def of(cls, grids: Sequence[TaskGrid]) -> "Scores":
        """The scores of each task's settings; all tasks have the same ones."""
        keys = tuple(point.key for point in grids[0].points)
        rows = [[[point.key for point in grid.points].index(key) for key in keys] for grid in grids]
        values = np.hstack([grid.scores[at] / grid.best for grid, at in zip(grids, rows, strict=True)])
        return cls(keys, values, tuple(name for grid in grids for name in grid.pictures))

    def row(self, key: str) -> np.ndarray:
        """[N], of one setting."""
        return np.asarray(self.values[self.keys.index(key)])


@dataclass(frozen=True)
class Costs:
    """What the settings of the cost runs cost, on the same requests."""

    keys: tuple[str, ...]
    total_ms: np.ndarray  #: [S]
    stages_ms: Mapping[str, np.ndarray]  #: stage -> [S]
    flops: np.ndarray  #: [S], of a request
    kv_bytes: np.ndarray  #: [S], of the longest request
    against: PairedContrasts
    joules: Mapping[str, tuple[float, float, float]]  #: key -> J per request and its 95 % interval over passes

    @classmethod
    def of(cls, sweep: Sweep, energy: Sequence[Sweep]) -> "Costs":
        """The costs of a sweep's settings, and the energy of those that the other sweeps have."""
        (grid,) = grids_of(sweep)
        keys = tuple(point.key for point in grid.points)
        results = {setting.key: setting.result for setting in sweep.settings}
        stages = {name: np.array([_mean(results[key], field) for key in keys]) for name, field in STAGES.items()}
        caches = [results[key].memory for key in keys]
        return cls(
            keys,
            np.nanmean(grid.total_ms, axis=1),
            stages,
            np.nanmean(grid.flops, axis=1),
            np.array([np.nan if each is None else each.counted_kv_cache_bytes or np.nan for each in caches]),
            PairedContrasts.of(grid.log_times, grid.pictures, reference=keys.index(REFERENCE)),
            {each.key: found for one in energy for each in one.settings if (found := _joules(each.result)) is not None},
        )

    def ratio(self, key: str) -> str:
        """The time of a setting over the reference's, with its interval."""
        at, reference = self.keys.index(key), self.keys.index(REFERENCE)
        return _interval(self.against.ratio(at, reference), self.against.interval(at, reference), "{:.3f}")


def _mean(result: SettingResult, field: str) -> float:
    found = mean_of([value for each in result.per_sample_results if (value := getattr(each, field)) is not None])
    return float("nan") if found is None else found


def _joules(result: SettingResult) -> tuple[float, float, float] | None:
    found = None if result.energy is None else result.energy.passes
    if found is None or found.j_per_request is None:
        return None
    low, high = found.j_per_request_ci95_low, found.j_per_request_ci95_high
    return found.j_per_request, float("nan") if low is None else low, float("nan") if high is None else high


def _interval(middle: float, bounds: tuple[float, float] | None, form: str) -> str:
    ends = "" if bounds is None else f" [{form.format(bounds[0])}, {form.format(bounds[1])}]"
    return form.format(middle) + ends


def _sweep(folder: Path) -> Sweep:
    """The runs of a folder, or of its folders, one a task."""
    if not folder.is_dir():
        raise ResultsError(f"{folder} is no folder; docs/core_exp/five_knobs.md has the commands that make it")
    tasks = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    return load_sweep(*(tasks or [folder]))


def table_alone(
    grid: Scores, further: Mapping[tuple[str, str], np.ndarray], costs: Costs, mass_costs: Costs
) -> list[str]:
    """A row for each setting that turns one knob alone, beside the reference.

    Args:
        further: knob and setting -> [N] scores, of settings that the cost runs do not have.
    """
    pruned = [(knob, key) for knob, keys in ALONE.items() for key in keys]
    rows = [grid.row(REFERENCE), *(grid.row(key) for _, key in pruned), *further.values()]
    scores = ScoreContrasts.of(np.stack(rows), grid.pictures, reference=0)
    lines = [
        "| knob | setting | accuracy | to the reference | not worse by 0.02 | vision, prefill, decode ms | "
        "time, times the reference's | TFLOP | KV cache, MB | J |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for at, (knob, key) in enumerate([("–", REFERENCE), *pruned]):
        place = costs.keys.index(key)
        stages = ", ".join(f"{costs.stages_ms[name][place]:.1f}" for name in STAGES)
        energy = _interval(*_split(costs.joules.get(key)), "{:.1f}") if key in costs.joules else "–"
        lines.append(
            f"| {knob} | `{key}` | {rows[at].mean():.3f} | {_judged(scores, at, 0)} | "
            f"{stages} | {'1' if at == 0 else costs.ratio(key)} | {costs.flops[place] / 1e12:.2f} | "
            f"{costs.kv_bytes[place] / 1e6:.0f} | {energy} |"
        )
    for at, (knob, key) in enumerate(further, len(pruned) + 1):
        judged = _judged(scores, at, 0)
        lines.append(f"| {knob} | `{key}` | {rows[at].mean():.3f} | {judged} | – | – | – | – | – |")
    for place, key in enumerate(mass_costs.keys):
        stages = ", ".join(f"{mass_costs.stages_ms[name][place]:.1f}" for name in STAGES)
        ratio = "1" if key == REFERENCE else mass_costs.ratio(key)
        lines.append(f"| {MASS}, by modules | `{key}` | – | – | – | {stages} | {ratio} | – | – | – |")
    return lines


def _split(found: tuple[float, float, float] | None) -> tuple[float, tuple[float, float] | None]:
    return (float("nan"), None) if found is None else (found[0], found[1:])


def _judged(scores: ScoreContrasts, at: int, than: int) -> str:
    """The cells of a difference in accuracy and of its verdict; empty ones of the reference itself."""
    if at == than:
        return "– | –"
    difference = _interval(scores.difference(at, than), scores.interval(at, than), "{:+.3f}")
    return f"{difference} | {scores.word_not_worse(at, than)}"


def joint_front(grid: Scores, costs: Costs) -> tuple[list[str], list[str]]:
    """The lines about settings that turn several knobs, and the keys of the front, cheapest first."""
    accuracy = np.array([grid.row(key).mean() for key in costs.keys])
    is_on_front = on_front(costs.total_ms, accuracy)
    front = [costs.keys[at] for at in np.argsort(costs.total_ms, kind="stable") if is_on_front[at]]
    scores = ScoreContrasts.of(
        np.stack([grid.row(key) for key in costs.keys]), grid.pictures, reference=costs.keys.index(REFERENCE)
    )
    reference = costs.keys.index(REFERENCE)
    lines = [
        "| setting on the front | accuracy | to the reference | not worse by 0.02 | ms | time, times the reference's |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for key in front:
        at = costs.keys.index(key)
        lines.append(
            f"| `{key}` | {accuracy[at]:.3f} | {_judged(scores, at, reference)} | {costs.total_ms[at]:.1f} | "
            f"{'1' if at == reference else costs.ratio(key)} |"
        )
    kept = [key for key, is_sure in zip(costs.keys, scores.not_worse(reference), strict=True) if is_sure]
    cheapest = min(kept, key=lambda key: costs.total_ms[costs.keys.index(key)])
    lines.append(f"the cheapest that is surely not worse by 0.02: {cheapest}, time {costs.ratio(cheapest)}")
    return lines, front


@dataclass(frozen=True)
class Baselines:
    """Choices of tokens and of blocks, with as many left: the profiler's rules, and at random."""

    kept: Mapping[str, np.ndarray]  #: rule -> [N] scores with half of the image tokens; `random` among them
    blocks: Sequence[np.ndarray]  #: [N] scores of each random set of 12 blocks

    @classmethod
    def of(cls, root: Path, grid: Scores) -> "Baselines":
        """What the folder has."""
        kept = {rule: _scores(root / f"keep_{rule}").row(HALF) for rule in ("random", "norm", "divprune")}
        sets = [_scores(folder).row(FEWER) for folder in sorted(root.glob("blocks_*"))]
        return cls({"uniform": grid.row(HALF), **kept}, sets)

    def lines(self, grid: Scores) -> list[str]:
        """What each rule is worth over chance."""
        drawn = self.kept["random"]
        rules = {name: row for name, row in self.kept.items() if name != "random"}
        figures = ", ".join(f"{block.mean():.3f}" for block in self.blocks)
        chosen = {"the scores of the model's folder": grid.row(FEWER)}
        best = max(self.blocks, key=lambda each: float(each.mean()))
        return [
            f"half of the image tokens, drawn at random: {drawn.mean():.3f}",
            *_over(rules, drawn, grid.pictures),
            f"12 of 16 blocks, {len(self.blocks)} random sets: {figures}",
            *(f"over the mean set: {each}" for each in _over(chosen, np.mean(self.blocks, axis=0), grid.pictures)),
            *(f"over the best set: {each}" for each in _over(chosen, best, grid.pictures)),
        ]

    def points(self) -> list[tuple[str, str, float, str]]:
        """Label, key whose time it has, accuracy and colour of what the picture shows."""
        sets = [("", FEWER, float(block.mean()), COLOURS["blocks"]) for block in self.blocks]
        random = ("at random", HALF, float(self.kept["random"].mean()), COLOURS["kept image tokens"])
        return [random, *sets, ("by DivPrune (time of even tokens)", HALF, float(self.kept["divprune"].mean()), BLACK)]


def _scores(folder: Path) -> Scores:
    return Scores.of(grids_of(_sweep(folder)))


def _over(rules: Mapping[str, np.ndarray], baseline: np.ndarray, pictures: Sequence[str]) -> list[str]:
    scores = ScoreContrasts.of(np.stack([baseline, *rules.values()]), pictures, reference=0)
    return [
        f"{name}: {rule.mean():.3f}, {_interval(scores.difference(at, 0), scores.interval(at, 0), '{:+.3f}')}: "
        f"better: {scores.word(at, 0)}"
        for at, (name, rule) in enumerate(rules.items(), 1)
    ]


def draw(grid: Scores, costs: Costs, front: Sequence[str], baselines: Baselines, caption: str, folder: Path) -> None:
    """The picture: accuracy against time of all settings, and the stages of those that turn one knob alone."""
    accuracy = np.array([grid.row(key).mean() for key in costs.keys])
    place = {key: at for at, key in enumerate(costs.keys)}
    with mpl.rc_context(STYLE):
        figure = new_figure(10.5, 4.6, caption)
        left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
        left.scatter(costs.total_ms, accuracy, s=14, color=LIGHT_GREY, label="several knobs")
        at = [place[key] for key in front]
        left.plot(costs.total_ms[at], accuracy[at], color=GREEN, drawstyle="steps-post", label="front")
        for knob, keys in ALONE.items():
            own = [place[key] for key in keys]
            left.scatter(costs.total_ms[own], accuracy[own], s=42, color=COLOURS[knob], label=f"{knob} alone")
        for label, key, score, colour in baselines.points():
            shape = {"marker": "D"} if colour == BLACK else {"facecolors": "none", "edgecolors": colour}
            left.scatter(costs.total_ms[[place[key]]], [score], s=42, label=label, **shape)
        star = place[REFERENCE]
        left.scatter(costs.total_ms[[star]], accuracy[[star]], s=110, marker="*", color="black", label="reference")
        left.set(xlabel="ms a request, MolmoE-1B's shape", ylabel="mean accuracy of six tasks, embedded model")
        left.set_title("What settings cost and score")
        left.legend(loc="lower right", fontsize=8)
        shown = [REFERENCE, *(key for keys in ALONE.values() for key in keys), front[0]]
        start = np.zeros(len(shown))
        for stage, values in costs.stages_ms.items():
            width = np.array([values[place[key]] for key in shown])
            right.barh(range(len(shown)), width, left=start, color=STAGE_COLOURS[stage], label=stage)
            start += width
        names = ["reference", *(key.replace("_topk8_blocks16", "") for key in shown[1:])]
        right.set_yticks(range(len(shown)), names, fontsize=8)
        right.invert_yaxis()
        right.set(xlabel="ms a request")
        right.set_title("Where the time goes")
        right.legend(loc="lower right", fontsize=8)
    save_figure(figure, folder, "five_knobs")


def main() -> None:
    """Print the tables and draw the picture."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("accuracy", type=Path, metavar="ACCURACY", help="folder of the runs of six tasks")
    parser.add_argument("cost", type=Path, metavar="COST", help="folder of the runs of MolmoE-1B's shape")
    parser.add_argument("--output_dir", type=Path, default=Path("results/five_knobs"), metavar="DIR",
                        help="folder of the picture (default: results/five_knobs)")  # fmt: skip
    given = parser.parse_args()
    sweep, cost_sweep = _sweep(given.accuracy / "grid"), _sweep(given.cost / "grid")
    grids = grids_of(sweep)
    grid, mass = Scores.of(grids), _scores(given.accuracy / "mass")
    baselines = Baselines.of(given.accuracy, grid)
    costs = Costs.of(cost_sweep, [_sweep(given.cost / name) for name in ("energy_tiers", "energy_own")])
    further = {(f"kept image tokens, {rule}", HALF): row for rule, row in baselines.kept.items() if rule != "uniform"}
    further |= {(MASS, key): mass.row(key) for key in mass.keys if key != REFERENCE}
    front_lines, front = joint_front(grid, costs)
    alone = table_alone(grid, further, costs, Costs.of(_sweep(given.cost / "mass"), []))
    print(*alone, "", *front_lines, "", *baselines.lines(grid), sep="\n")
    num_samples = sum(setting.result.num_samples for setting in cost_sweep.settings)
    caption = caption_of([cost_sweep.provenance], len(costs.keys), num_samples)
    draw(grid, costs, front, baselines, caption, given.output_dir)


if __name__ == "__main__":
    sys.exit(run_command(main))
