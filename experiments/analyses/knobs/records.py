"""The contents of E2's three JSON files and of its CSV files."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from experiment_core_utils.primitives.csv_tables import Cell, split_intervals
from experiment_core_utils.primitives.statistics import percentiles_over_runs
from experiment_core_utils.records.caveats import caveat_fields
from experiments.analyses.caveats import AnalysisCaveat
from experiments.analyses.knobs.coupling import Coupling, FixedValue, SingleKnob
from experiments.analyses.knobs.effects import Effects, Term, is_beyond_noise
from experiments.analyses.knobs.fronts import Front, TaskDifference, areas, reference_cost_of
from experiments.analyses.knobs.grid import TaskGrid, knob_names, knobs_of, levels_of
from experiments.analyses.knobs.objectives import PERCENT, Cost, NoObjectives, Objectives
from experiments.analyses.limits import MOST_SETTINGS, MOST_VALUES
from experiments.analyses.sweeps import knob_columns
from experiments.fitting.held_out import mean_of
from experiments.fitting.verdicts import TAIL, fewest_for

Row = dict[str, Cell]
# Below, percentiles depend on the one or two longest times.
FEWEST_FOR = {"p95": 20, "p99": 100}


@dataclass(frozen=True)
class FrontAnalysis:
    """The front of one task against one cost, of all settings; what knobs do is of the requested grid alone."""

    found: Objectives
    front: Front
    fixed: Sequence[FixedValue]
    single: Sequence[SingleKnob]
    couplings: Sequence[Coupling]


@dataclass(frozen=True)
class TaskAnalysis:
    """The analysis of one task."""

    grid: TaskGrid
    fronts: Sequence[FrontAnalysis | NoObjectives]  #: one for each cost, in the order in which they are requested
    effects: Mapping[str, Effects]  #: `accuracy` or a cost's name -> how its spread splits


def present(analysis: TaskAnalysis) -> list[FrontAnalysis]:
    """The costs that the task has."""
    return [front for front in analysis.fronts if isinstance(front, FrontAnalysis)]


def caveats_of(analyses: Sequence[TaskAnalysis], random_weights: bool) -> list[AnalysisCaveat]:
    """Caveats that a reader has to know before the figures, from the data themselves."""
    caveat = AnalysisCaveat.of
    found = [caveat("random_weights")] * random_weights
    for analysis in analyses:
        task, times = analysis.grid.task, analysis.grid.times
        if times.source == "unknown":
            found.append(caveat("blocked_order_unknown", task=task))
        for component in times.components:
            found.append(caveat("runs_differ", task=task, fraction=math.expm1(component.deviation)))
        off = [caveat("control_off", task=task, control=str(each)) for each in analysis.grid.controls if each.is_off]
        found += off + _left_out_of_many(analysis)
        for each in present(analysis):
            of, n, pictures = each.found.of, each.found.num_cost_samples, each.found.num_cost_pictures
            if n < FEWEST_FOR.get(of.statistic, 0):
                found.append(caveat("few_for_percentile", task=task, cost=of.label, num_samples=n))
            if each.found.no_verdict is not None:
                found.append(caveat("no_verdict", task=task, reason=each.found.no_verdict))
            settings = len(each.found.points)
            # As the p-value of a front's setting: twice that of either direction, among all with this setting.
            least = fewest_for(PERCENT.get(of.statistic), TAIL / (2 * max(settings - 1, 1)))
            if pictures < least and of.statistic != "mean":
                figures = {"num_settings": settings, "least": least, "num_pictures": pictures}
                independent = analysis.grid.independent
                found.append(caveat("few_pictures", task=task, cost=of.label, independent=independent, **figures))
            if dropped := each.found.num_dropped_samples:
                found.append(caveat("samples_left_out", task=task, cost=of.name, num_samples=dropped))
            if each.found.left_out:
                left_out = len(each.found.left_out)
                found.append(caveat("settings_left_out", task=task, cost=of.name, num_settings=left_out))
    return found


def _left_out_of_many(analysis: TaskAnalysis) -> list[AnalysisCaveat]:
    """Caveats of what is not computed for so many settings, or for knobs of so many values."""
    task, points, found = analysis.grid.task, analysis.grid.points, []
    if len(points) > MOST_SETTINGS:
        draws = min((len(each.found.cost_draws) for each in present(analysis)), default=0)
        figures = {"num_settings": len(points), "most": MOST_SETTINGS, "num_draws": draws}
        found.append(AnalysisCaveat.of("few_draws", task=task, **figures))
    for knob in knob_names():
        values = len(levels_of([point for point in points if point.in_grid], knob))
        if values > MOST_VALUES:
            found.append(AnalysisCaveat.of("many_values", task=task, knob=knob, num_values=values, most=MOST_VALUES))
    return found


def contents_of(
    source: Mapping[str, Any],
    drawn: Mapping[str, int],
    analyses: Sequence[TaskAnalysis],
    differences: Mapping[str, Sequence[TaskDifference]],
    caveats: Sequence[AnalysisCaveat],
) -> dict[str, dict[str, Any]]:
    """The contents of E2's JSON files by name.

    Args:
        source: what was read.
        drawn: `num_draws` and `seed`.
        differences: by the cost's name.
    """
    head = {"schema_version": 1, "source": source, **drawn}
    shown = [each for analysis in analyses for each in present(analysis)]
    return {
        "e2_knob_grid_results": head
        | {
            **caveat_fields(caveats),
            "tasks": [_task_fields(each) for each in analyses],
        },
        "e2_pareto_frontiers": head
        | {
            "fronts": [_front_fields(front) for analysis in analyses for front in analysis.fronts],
            "tasks_compared": [
                {"cost": name, "settings": [asdict(each) for each in found]} for name, found in differences.items()
            ],
        },
        "e2_coupling_analysis": head | {"couplings": [_coupling_fields(each) for each in shown]},
    }


def tables_of(analyses: Sequence[TaskAnalysis]) -> dict[str, list[Row]]:
    """The rows of E2's CSV files by name."""
    knobs = knobs_of(point for analysis in analyses for point in analysis.grid.points)
    shown = [each for analysis in analyses for each in present(analysis)]
    return {
        "e2_fronts": [row for each in shown for row in _front_rows(each, knobs)],
        "e2_fixed_knobs": [_fixed_row(each, row) for each in shown for row in each.fixed],
        "e2_effects": [
            _effect_row(analysis.grid.task, name, term)
            for analysis in analyses
            for name, effects in analysis.effects.items()
            for term in effects.terms
        ],
    }


def _task_fields(analysis: TaskAnalysis) -> dict[str, Any]:
    grid = analysis.grid
    inside = [point for point in grid.points if point.in_grid]
    return {
        "task": grid.task,
        "metric": grid.metric,
        "metric_best": grid.best,
        "num_settings": len(grid.points),
        "knobs": {knob: list(levels_of(inside, knob)) for knob in knobs_of(inside)},
        "settings": _setting_entries(grid),
        "effects": {name: _effects_fields(effects) for name, effects in analysis.effects.items()},
    }


def _coupling_fields(each: FrontAnalysis) -> dict[str, Any]:
    inside = each.found.of_grid
    return _cost_fields(each.found.task, each.found.of) | {
        "hypervolume": areas(inside, np.arange(len(inside.points)))[0] if inside.points else None,
        "reference_cost": reference_cost_of(inside) if inside.points else None,
        "fixed": [asdict(row) for row in each.fixed],
        "single": [asdict(row) for row in each.single],
        "best_values": [asdict(row) for row in each.couplings],
    }


def _front_rows(each: FrontAnalysis, knobs: Sequence[str]) -> Iterator[Row]:
    """A row for each setting."""
    values = {point.key: {knob: point.value(knob) for knob in knobs} for point in each.found.points}
    at = each.found.reference
    reference_cost = None if at is None else float(each.found.cost[at])
    for point in each.front.points:
        yield {**_names(each), "setting": point.key, **values[point.key]} | split_intervals(
            {
                "accuracy": point.accuracy,
                "accuracy_ci95": point.accuracy_ci95,
                "cost_value": point.cost,
                "cost_ci95": point.cost_ci95,
                "on_front": point.on_front,
                "word": point.word,
                "front_p_value": point.p_value,
                "off_front_p_value": point.off_p_value,
                "status": point.status,
                "dominated_by": point.dominated_by,
                "surely_dominated_by": point.surely_dominated_by,
                "is_reference": at is not None and point.key == each.found.points[at].key,
                "cost_share_of_reference": None if not reference_cost else point.cost / reference_cost,
            }
        )


def _fixed_row(each: FrontAnalysis, row: FixedValue) -> Row:
    """The row of a knob and the value at which it is held."""
    return _names(each) | split_intervals(
        {
            "knob": row.knob,
            "value": str(row.value),
            "num_settings": row.num_settings,
            "num_on_joint_front": row.num_on_joint_front,
            "hypervolume": row.loss.hypervolume,
            "loss_share": row.loss.share,
            "loss_share_ci95": row.loss.share_ci95,
            "unseen_loss_share": row.loss.unseen_share,
            "beyond_noise": row.loss.beyond_noise,
        }
    )


def _effect_row(task: str, figure: str, term: Term) -> Row:
    figures = {name: value for name, value in vars(term).items() if name != "knobs"}
    named = {"task": task, "figure": figure, "term": " x ".join(term.knobs)}
    return {**named, **split_intervals(figures), "beyond_noise": is_beyond_noise(term)}


def _names(each: FrontAnalysis) -> Row:
    return {"task": each.found.task, "cost": each.found.of.name, "unit": each.found.of.unit}


def _cost_fields(task: str, of: Cost) -> dict[str, Any]:
    return {"task": task, "cost": of.name, "quantity": of.quantity, "statistic": of.statistic, "unit": of.unit}


def _front_fields(each: FrontAnalysis | NoObjectives) -> dict[str, Any]:
    if isinstance(each, NoObjectives):
        return _cost_fields(each.task, each.of) | {"front": None, "reason": each.reason}
    found, front = each.found, each.front
    return _cost_fields(found.task, found.of) | {
        "front": [point.key for point in front.points if point.on_front],
        "reason": None,
        "num_settings": len(front.points),
        "reference": None if found.reference is None else found.points[found.reference].key,
        "left_out": found.left_out,
        "num_score_samples": found.num_score_samples,
        "num_cost_samples": found.num_cost_samples,
        "num_pictures": found.num_pictures,
        "num_dropped_samples": found.num_dropped_samples,
        "num_cost_pictures": found.num_cost_pictures,
        "no_verdict": found.no_verdict,
        "setting_variance": found.replication.fields(),
        "replication": found.replication.level_fields(),
        "reference_point": {"accuracy": 0.0, "cost": front.reference_cost},
        "hypervolume": asdict(front.hypervolume),
        "ties": front.ties,
        # Not by asdict, which copies each of thousands of names.
        "settings": [dict(vars(point)) for point in front.points],
    }


def _effects_fields(effects: Effects) -> dict[str, Any]:
    entry = asdict(effects)
    entry["terms"] = [asdict(term) | {"beyond_noise": is_beyond_noise(term)} for term in effects.terms]
    return entry


def _setting_entries(grid: TaskGrid) -> list[dict[str, Any]]:
    """The settings' own figures, on all samples that each has; they are not paired."""
    entries = []
    knobs = knob_columns([point.setting for point in grid.points])
    for at, (p95, p99) in enumerate(_tails(grid.total_ms[None] if grid.runs_ms is None else grid.runs_ms)):
        scores, times, energies, flops = (
            row[np.isfinite(row)] for row in (grid.scores[at], grid.total_ms[at], grid.energy_j[at], grid.flops[at])
        )
        point = grid.points[at]
        entries.append(
            {
                "key": point.key,
                **{name: levels[at] for name, levels in knobs.items()},
                "sweep": point.sweep,
                "is_reference": point.is_reference,
                "in_grid": point.in_grid,
                "num_score_samples": len(scores),
                "accuracy": mean_of(scores),
                "num_latency_samples": len(times),
                "T_total_mean_ms": mean_of(times),
                "T_total_p95_ms": p95,
                "T_total_p99_ms": p99,
                "num_energy_samples": len(energies),
                "energy_mean_j": mean_of(energies),
                "flops_mean": mean_of(flops),
            }
        )
    return entries


def _tails(runs: np.ndarray) -> list[list[float | None]]:
    """P95 and P99 of each setting of [R, S, N] over all runs, those of a sample together as one; none of nan alone."""
    rows = [runs[:, at] for at in range(runs.shape[1])]
    return [[*percentiles_over_runs(row, (95, 99))] if np.isfinite(row).any() else [None, None] for row in rows]
