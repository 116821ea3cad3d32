"""The contents of E2's three JSON files and of its CSV files."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from experiment_core_utils.primitives.csv_tables import Cell
from experiment_core_utils.records.caveats import caveat_fields
from experiments.analyses.caveats import AnalysisCaveat
from experiments.analyses.files import MOST_SETTINGS, MOST_VALUES
from experiments.analyses.knobs.coupling import Coupling, FixedValue, SingleKnob
from experiments.analyses.knobs.effects import Effects, is_beyond_noise
from experiments.analyses.knobs.fronts import Front, TaskDifference
from experiments.analyses.knobs.grid import KNOBS, TaskGrid, knobs_of, levels_of
from experiments.analyses.knobs.objectives import PERCENT, Cost, NoObjectives, Objectives
from experiments.fitting.held_out import mean_of
from experiments.fitting.verdicts import TAIL, fewest_for

Row = dict[str, Cell]
# Below, percentiles depend on the one or two longest times.
FEWEST_FOR = {"p95": 20, "p99": 100}


@dataclass(frozen=True)
class FrontAnalysis:
    """The front of one task against one cost."""

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


@dataclass(frozen=True)
class Shared:
    """The fields that all three files begin with: what was read and how draws were made."""

    source: Mapping[str, Any]
    num_draws: int
    seed: int

    def entry(self) -> dict[str, Any]:
        """The fields as keys of a file."""
        return {"schema_version": 1, "source": self.source, "num_draws": self.num_draws, "seed": self.seed}


def present(analysis: TaskAnalysis) -> list[FrontAnalysis]:
    """The costs that the task has."""
    return [each for each in analysis.fronts if isinstance(each, FrontAnalysis)]


def caveats_of(analyses: Sequence[TaskAnalysis], random_weights: bool) -> list[AnalysisCaveat]:
    """Caveats that a reader has to know before the figures, from the data themselves."""
    caveat = AnalysisCaveat.of
    found = [caveat("no_drift_in_intervals"), *[caveat("random_weights")] * random_weights]
    if any(point.sweep for analysis in analyses for point in analysis.grid.points):
        found.append(caveat("sweeps_one_after_the_other"))
    for analysis in analyses:
        task, drift = analysis.grid.task, analysis.grid.drift
        found.append(
            caveat("drift_not_measured", task=task)
            if drift is None
            else caveat("drift_allowance", task=task, fraction=float(drift))
        )
        found += _left_out_of_many(analysis)
        for each in present(analysis):
            of, n, pictures = each.found.of, each.found.num_cost_samples, each.found.num_cost_pictures
            if n < FEWEST_FOR.get(of.statistic, 0):
                found.append(caveat("few_for_percentile", task=task, cost=of.label, num_samples=n))
            if each.found.no_verdict is not None:
                found.append(caveat("no_verdict", task=task, reason=each.found.no_verdict))
            settings = len(each.found.points)
            least = fewest_for(PERCENT.get(of.statistic), TAIL / (2 * settings))
            if pictures < least and of.statistic != "mean":
                figures = {"num_settings": settings, "least": least, "num_pictures": pictures}
                found.append(caveat("few_pictures", task=task, cost=of.label, **figures))
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
    for knob in KNOBS:
        values = len(levels_of(points, knob))
        if values > MOST_VALUES:
            found.append(AnalysisCaveat.of("many_values", task=task, knob=knob, num_values=values, most=MOST_VALUES))
    return found


def grid_content(shared: Shared, analyses: Sequence[TaskAnalysis], caveats: Sequence[AnalysisCaveat]) -> dict[str, Any]:
    """The content of `e2_knob_grid_results.json`."""
    return shared.entry() | {
        **caveat_fields(caveats),
        "tasks": [
            {
                "task": each.grid.task,
                "metric": each.grid.metric,
                "metric_best": each.grid.best,
                "num_settings": len(each.grid.points),
                "knobs": {knob: list(levels_of(each.grid.points, knob)) for knob in knobs_of(each.grid.points)},
                "settings": _setting_entries(each.grid),
                "effects": {name: _effects_fields(effects) for name, effects in each.effects.items()},
            }
            for each in analyses
        ],
    }


def fronts_content(
    shared: Shared, analyses: Sequence[TaskAnalysis], differences: Mapping[str, Sequence[TaskDifference]]
) -> dict[str, Any]:
    """The content of `e2_pareto_frontiers.json`; `differences` by the cost's name."""
    return shared.entry() | {
        "fronts": [_front_fields(each) for analysis in analyses for each in analysis.fronts],
        "tasks_compared": [
            {"cost": name, "settings": [asdict(each) for each in found]} for name, found in differences.items()
        ],
    }


def coupling_content(shared: Shared, analyses: Sequence[TaskAnalysis]) -> dict[str, Any]:
    """The content of `e2_coupling_analysis.json`."""
    return shared.entry() | {
        "couplings": [
            _cost_fields(each.found.task, each.found.of)
            | {
                "hypervolume": each.front.hypervolume.value,
                "reference_cost": each.front.reference_cost,
                "fixed": [asdict(row) for row in each.fixed],
                "single": [asdict(row) for row in each.single],
                "best_values": [asdict(row) for row in each.couplings],
            }
            for analysis in analyses
            for each in present(analysis)
        ]
    }


def front_rows(analyses: Sequence[TaskAnalysis]) -> list[Row]:
    """Rows of the CSV of fronts: one for each task, cost and setting."""
    knobs = knobs_of(point for analysis in analyses for point in analysis.grid.points)
    return [
        {
            **_names(each),
            "setting": point.key,
            **cells[point.key],
            "accuracy": point.accuracy,
            "accuracy_ci95_low": point.accuracy_ci95[0],
            "accuracy_ci95_high": point.accuracy_ci95[1],
            "cost_value": point.cost,
            "cost_ci95_low": None if point.cost_ci95 is None else point.cost_ci95[0],
            "cost_ci95_high": None if point.cost_ci95 is None else point.cost_ci95[1],
            "on_front": point.on_front,
            "front_probability": point.probability,
            "front_drift_probability": point.drift_probability,
            "front_p_value": point.p_value,
            "status": point.status,
            "dominated_by": point.dominated_by,
        }
        for analysis in analyses
        for each in present(analysis)
        for cells in [{point.key: {knob: point.value(knob) for knob in knobs} for point in each.found.points}]
        for point in each.front.points
    ]


def coupling_rows(analyses: Sequence[TaskAnalysis]) -> list[Row]:
    """Rows of the CSV of couplings: one for each task, cost, knob and value at which it is held."""
    return [
        {
            **_names(each),
            "knob": row.knob,
            "value": str(row.value),
            "num_settings": row.num_settings,
            "num_on_joint_front": row.num_on_joint_front,
            "probability_on_joint_front": row.probability_on_joint_front,
            "hypervolume": row.loss.hypervolume,
            "loss_share": row.loss.share,
            "loss_share_ci95_low": None if row.loss.share_ci95 is None else row.loss.share_ci95[0],
            "loss_share_ci95_high": None if row.loss.share_ci95 is None else row.loss.share_ci95[1],
            "unseen_loss_share": row.loss.unseen_share,
            "beyond_noise": row.loss.beyond_noise,
        }
        for analysis in analyses
        for each in present(analysis)
        for row in each.fixed
    ]


def effect_rows(analyses: Sequence[TaskAnalysis]) -> list[Row]:
    """Rows of the CSV of effects: one for each task, figure and term."""
    return [
        {
            "task": analysis.grid.task,
            "figure": name,
            "term": " x ".join(term.knobs),
            "degrees": term.degrees,
            "share": term.share,
            "share_ci95_low": None if term.share_ci95 is None else term.share_ci95[0],
            "share_ci95_high": None if term.share_ci95 is None else term.share_ci95[1],
            "noise_share": term.noise_share,
            "p_value": term.p_value,
            "settings_p_value": term.settings_p_value,
            "family_p_value": term.family_p_value,
            "beyond_noise": is_beyond_noise(term),
        }
        for analysis in analyses
        for name, effects in analysis.effects.items()
        for term in effects.terms
    ]


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
        "left_out": found.left_out,
        "num_score_samples": found.num_score_samples,
        "num_cost_samples": found.num_cost_samples,
        "num_pictures": found.num_pictures,
        "num_dropped_samples": found.num_dropped_samples,
        "num_cost_pictures": found.num_cost_pictures,
        "no_verdict": found.no_verdict,
        "drift_allowance": found.drift_allowance,
        "reference_point": {"accuracy": 0.0, "cost": front.reference_cost},
        "hypervolume": asdict(front.hypervolume),
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
    for at, (p95, p99) in enumerate(_tails(grid.total_ms)):
        scores, times, energies, flops = (
            row[np.isfinite(row)] for row in (grid.scores[at], grid.total_ms[at], grid.energy_j[at], grid.flops[at])
        )
        entries.append(
            asdict(grid.points[at])
            | {
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


def _tails(times: np.ndarray) -> list[list[float | None]]:
    """P95 and P99 of each row of [S, N]; nan does not count, and a row of nan alone has none."""
    if not np.isfinite(times).all():
        rows = [row[np.isfinite(row)] for row in times]
        return [np.percentile(row, (95, 99)).tolist() if len(row) else [None, None] for row in rows]
    tails: list[list[float | None]] = np.percentile(times, (95, 99), axis=1).T.tolist()
    return tails


def contents_of(
    shared: Shared,
    analyses: Sequence[TaskAnalysis],
    differences: Mapping[str, Sequence[TaskDifference]],
    random_weights: bool,
) -> dict[str, dict[str, Any]]:
    """The contents of E2's JSON files by name."""
    return {
        "e2_knob_grid_results": grid_content(shared, analyses, caveats_of(analyses, random_weights)),
        "e2_pareto_frontiers": fronts_content(shared, analyses, differences),
        "e2_coupling_analysis": coupling_content(shared, analyses),
    }


def tables_of(analyses: Sequence[TaskAnalysis]) -> dict[str, list[Row]]:
    """The rows of E2's CSV files by name."""
    return {
        "e2_fronts": front_rows(analyses),
        "e2_fixed_knobs": coupling_rows(analyses),
        "e2_effects": effect_rows(analyses),
    }
