"""Floors, ratios and the table of requests that were run in several ways.

A floor is the time of products and bytes at the given rates; nothing else is counted.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiment_core_utils.models.costs.architecture import shapes_of
from experiment_core_utils.models.costs.decoder import DecoderShape, ExpertsShape
from experiment_core_utils.models.costs.vision_table import molmoe_vision
from experiment_core_utils.records.stages import STAGES
from experiments.analyses.charts.chart import Axis, Chart, Dots, Line, Mark, Panel, Symbol
from experiments.analyses.charts.style import BLUE, GREEN, INK, ORANGE, PURPLE, QUIET, VERMILION

# What the others are compared with.
PLAIN, EAGER = "generate", "eager"
FLOOR = "floor"


@dataclass(frozen=True)
class Rates:
    """The rates that a device attains; infinite bytes where only products count."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class Work:
    """The products and bytes of a stage; for decode, of one step."""

    flops: float
    bytes: float

    def floor_s(self, rates: Rates) -> float:
        """The floor in seconds: the slower of products and bytes."""
        return max(self.flops / rates.flops_per_s, self.bytes / rates.bytes_per_s)


@dataclass(frozen=True)
class Shape:
    """The sizes of a request at a setting; `experts` per token of each active block, any number for a dense one."""

    crops: int
    prompt_tokens: int
    experts: tuple[int, ...]


def work_of(config: Any, shape: Shape, element_bytes: int) -> dict[str, Work]:
    """The work of each stage that the request has, to a model of this config; pictures are a MolmoE's.

    Attention counts half of the rectangle in the prefill, as a causal kernel computes it. Weights are read once, of the
    experts those that tokens choosing evenly hit. A decode step is the first one after the prompt.
    """
    tokens, whole = shape.prompt_tokens, shapes_of(config)[0]
    running = [block.with_top_k(top_k) for block, top_k in zip(whole.blocks, shape.experts, strict=False)]
    decoder = DecoderShape.of_blocks(whole.hidden, running, whole.head_rows)
    half_of_attention = tokens * tokens * sum(block.pair_products for block in running)
    cache = sum(block.cache_width for block in running) * element_bytes
    read = {positions: _weights(decoder, positions) * element_bytes for positions in (1, tokens)}
    found = {
        "prefill": Work(decoder.prefill_flops(tokens) - half_of_attention, read[tokens] + tokens * cache),
        "decode": Work(decoder.decode_flops(tokens + 1), read[1] + (tokens + 1) * cache),
    }
    if not shape.crops:
        return found
    vision_flops = shape.crops * molmoe_vision(config).flops_per_crop
    return {"vision": Work(vision_flops, _vision_weights(config) * element_bytes), **found}


def _weights(decoder: DecoderShape, tokens: int) -> float:
    """Number of weights of the blocks and the head, without the experts that so many tokens do not hit."""
    found = float(decoder.hidden * decoder.head_rows)
    for block in decoder.blocks:
        found += block.weights(decoder.hidden)
        if isinstance(block.mlp, ExpertsShape):
            missed = block.mlp.num_experts * (1 - block.mlp.top_k / block.mlp.num_experts) ** tokens
            found -= missed * 3 * decoder.hidden * block.mlp.width
    return found


def _vision_weights(config: Any) -> int:
    vision = config.vision_config
    blocks = max(vision.num_hidden_layers + index for index in config.vision_feature_layers) + 1
    return int(blocks * (4 * vision.hidden_size**2 + 2 * vision.hidden_size * vision.intermediate_size))


@dataclass(frozen=True)
class Timed:
    """The times of one way to run one case."""

    case: str  #: the request and its setting
    way: str  #: how it was run
    stages: Mapping[str, Sequence[float]]  #: seconds of each stage in each round; of decode, of one step
    totals: Sequence[float]  #: seconds of the whole request in each round
    cpu: Sequence[float]  #: seconds of all cores in each round, which a busy machine changes less
    tokens: tuple[int, ...]  #: what came out, in the last round
    same: bool  #: whether they are those of the first way

    def median_s(self, stage: str) -> float | None:
        """The median seconds of a stage; None for a stage that the request does not have."""
        return statistics.median(self.stages[stage]) if self.stages.get(stage) else None


def entries(timed: Sequence[Timed], floors: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    """Fields of each row for JSON: medians in ms, the floor's fraction of them, and ratios to plain `generate()`.

    Args:
        floors: case -> stage -> seconds; {} where no rates are known.
    """
    plain = {row.case: row for row in timed if row.way == PLAIN}
    found = []
    for row in timed:
        entry: dict[str, Any] = {"case": row.case, "way": row.way, "same_tokens": row.same}
        entry.update(tokens=len(row.tokens), rounds=len(row.totals))
        for stage in STAGES:
            own, peer, floor = row.median_s(stage), plain[row.case].median_s(stage), floors.get(row.case, {}).get(stage)
            entry[f"{stage}_ms"] = None if own is None else own * 1e3
            entry[f"{stage}_of_generate"] = None if own is None or peer is None else own / peer
            entry[f"{stage}_floor_ms"] = None if floor is None else floor * 1e3
            entry[f"{stage}_over_floor"] = None if own is None or floor is None else own / floor
        entry["total_ms"] = statistics.median(row.totals) * 1e3
        entry["total_of_generate"] = statistics.median(row.totals) / statistics.median(plain[row.case].totals)
        entry["cpu_ms"] = statistics.median(row.cpu) * 1e3
        found.append(entry)
    return found


def totals_of_generate(rows: Sequence[Mapping[str, Any]], key: str = "total_ms") -> dict[str, float]:
    """Way -> sum over all cases, as a fraction of that of plain `generate()`."""
    sums: dict[str, float] = {}
    for row in rows:
        sums[row["way"]] = sums.get(row["way"], 0.0) + row[key]
    return {way: seconds / sums[PLAIN] for way, seconds in sums.items()}


def stages_of_generate(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Way, and the floor where it is known -> stage and total -> sum over all cases, as a fraction of `generate()`'s.

    The decode sums steps over answers; the floor's total is that of its stages.
    """
    sums: dict[str, dict[str, float]] = {}
    for row in rows:
        own = sums.setdefault(row["way"], dict.fromkeys((*STAGES, "total"), 0.0))
        own["total"] += row["total_ms"]
        floor = sums.setdefault(FLOOR, dict.fromkeys(own, 0.0)) if row["way"] == PLAIN else None
        for stage in STAGES:
            times = row["tokens"] - 1 if stage == "decode" else 1
            own[stage] += times * (row[f"{stage}_ms"] or 0.0)
            if floor is not None:
                floor[stage] += times * (row[f"{stage}_floor_ms"] or 0.0)
                floor["total"] += times * (row[f"{stage}_floor_ms"] or 0.0)
    if not sums[FLOOR]["total"]:
        del sums[FLOOR]
    peer = sums[PLAIN]
    return {way: {stage: ms / peer[stage] for stage, ms in own.items() if peer[stage]} for way, own in sums.items()}


def eager_of_generate(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Case -> decode step of the eager stages over that of plain `generate()`."""
    found = {row["case"]: row["decode_of_generate"] for row in rows if row["way"] == EAGER}
    return {case: ratio for case, ratio in found.items() if ratio is not None}


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table, one line for each row; after a time in brackets how many times the floor it is."""
    lines = [
        "| case | way | vision ms | prefill ms | decode ms/token | total ms | of generate() | same tokens |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        times = " | ".join(_cell(row, stage) for stage in STAGES)
        lines.append(
            f"| {row['case']} | {row['way']} | {times} | {row['total_ms']:.1f} | {row['total_of_generate']:.3f} | "
            f"{'yes' if row['same_tokens'] else 'no'} |"
        )
    return "\n".join(lines)


def _cell(row: Mapping[str, Any], stage: str) -> str:
    time_ms, over = row[f"{stage}_ms"], row[f"{stage}_over_floor"]
    if time_ms is None:
        return ""
    return f"{time_ms:.2f}" if over is None else f"{time_ms:.2f} ({over:.1f} x)"


COLOURS = (BLUE, ORANGE, GREEN, VERMILION, PURPLE)
SYMBOLS: dict[str, Symbol] = {"vision": "open square", "prefill": "ring", "decode": "open triangle"}
# Of the first case and of the last one: hollow symbols of two sizes in one place are both seen.
LARGEST, SMALLEST = 13.8, 5.0
# Ways in the same place are drawn beside each other, each this many times the abscissa of the one before.
STEP = 1.12
NOTE = f"a stage of a case has one abscissa: its ways are drawn around it, each {STEP:g} times as far right as the last"


def roofline_chart(rows: Sequence[Mapping[str, Any]], work: Mapping[str, Mapping[str, Work]], rates: Rates) -> Chart:
    """Operations per second over operations per byte, for each stage, way and case, below what the device attains.

    Colours show ways, shapes stages, sizes cases.
    """
    ways = list(dict.fromkeys(row["way"] for row in rows))
    cases = list(dict.fromkeys(row["case"] for row in rows))
    colours = {way: COLOURS[place % len(COLOURS)] for place, way in enumerate(ways)}
    sizes = dict(zip(cases, np.linspace(LARGEST, SMALLEST, len(cases)).tolist(), strict=True))
    knee = rates.flops_per_s / rates.bytes_per_s
    ends = [0.1, knee, max(10 * knee, 2e4)]
    marks: list[Mark] = [Line(ends, [min(rates.flops_per_s, at * rates.bytes_per_s) / 1e12 for at in ends], INK)]
    for row in rows:
        shift = STEP ** (ways.index(row["way"]) - (len(ways) - 1) / 2)
        for stage, done in work[row["case"]].items():
            if row[f"{stage}_ms"]:
                at, reached = done.flops / done.bytes, done.flops / (row[f"{stage}_ms"] * 1e-3) / 1e12
                marks.append(Dots([at * shift], [reached], colours[row["way"]], symbol=SYMBOLS[stage],
                                  size=sizes[row["case"]]))  # fmt: skip
    stages = [stage for stage in STAGES if any(stage in each for each in work.values())]
    keys: list[tuple[str, str, Symbol, float]] = [
        *((way, colour, "ring", 9.0) for way, colour in colours.items()),
        *((stage, QUIET, SYMBOLS[stage], 9.0) for stage in stages),
        *((case, QUIET, "ring", size) for case, size in sizes.items()),
    ]
    marks += [Dots([], [], colour, name, symbol=symbol, size=size) for name, colour, symbol, size in keys]
    x = Axis("operations per byte (as the floor counts them)", is_log=True)
    return Chart(
        "roofline", [Panel("", x, Axis("operations per second (TFLOP/s)", is_log=True), marks)], 1, (8.0, 4.8), NOTE
    )
