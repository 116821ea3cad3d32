"""E2 of grids: what its command, the report and the notebook show of what the knobs buy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from experiments.analyses.knobs.coupling import couplings, fixed_values, single_knobs
from experiments.analyses.knobs.effects import Effects, effects, main_effect_p_values
from experiments.analyses.knobs.fronts import TaskDifference, compare_tasks, front
from experiments.analyses.knobs.grid import TaskGrid, knob_names
from experiments.analyses.knobs.objectives import Cost, NoObjectives, objectives
from experiments.analyses.knobs.records import FrontAnalysis, TaskAnalysis, present

NUM_DRAWS = 1000


@dataclass(frozen=True)
class KnobAnalysis:
    """What E2 finds: each task's, and by the cost's name what is on one task's front and off another's."""

    tasks: Sequence[TaskAnalysis]
    differences: Mapping[str, Sequence[TaskDifference]]


def analyse_knobs(
    grids: Sequence[TaskGrid], costs: Sequence[Cost], num_draws: int = NUM_DRAWS, seed: int = 0
) -> KnobAnalysis:
    """E2 of each task's grid, against each cost."""
    tasks = [_analyse_task(grid, costs, num_draws, seed) for grid in grids]
    return KnobAnalysis(tasks, {of.name: _compare(tasks, of) for of in costs} if len(tasks) > 1 else {})


def _analyse_task(grid: TaskGrid, costs: Sequence[Cost], num_draws: int, seed: int) -> TaskAnalysis:
    """Fronts, couplings and effects of one task."""
    fronts: list[FrontAnalysis | NoObjectives] = []
    for of in costs:
        found = objectives(grid, of, num_draws, seed)
        if isinstance(found, NoObjectives):
            fronts.append(found)
        else:
            inside = found.of_grid
            knobs = (fixed_values(inside), single_knobs(inside), couplings(inside)) if inside.points else ((), (), ())
            fronts.append(FrontAnalysis(found, front(found), *knobs))
    split: dict[str, Effects] = {}
    for each in fronts:
        if isinstance(each, FrontAnalysis):
            inside = each.found.of_grid
            levels = {knob: [point.value(knob) for point in inside.points] for knob in knob_names()}
            if "accuracy" not in split:
                by_scores = main_effect_p_values(levels, inside.scores, inside.clusters)
                split["accuracy"] = effects(levels, inside.accuracy, inside.accuracy_draws, paired=by_scores)
            allows_verdict, paired = inside.no_verdict is None, None
            if each.found.of.statistic == "mean" and allows_verdict:
                paired = main_effect_p_values(levels, inside.log_costs, inside.cost_clusters, inside.replication)
            split[each.found.of.name] = effects(
                levels,
                inside.cost,
                inside.cost_draws,
                allows_verdict=allows_verdict,
                have_waited=inside.have_waited,
                paired=paired,
            )
    return TaskAnalysis(grid, fronts, split)


def _compare(analyses: Sequence[TaskAnalysis], of: Cost) -> list[TaskDifference]:
    """What is on the front for one task and off it for another, against one cost."""
    return compare_tasks(
        {
            each.found.task: each.front
            for analysis in analyses
            for each in present(analysis)
            if each.found.of.name == of.name
        }
    )
