"""The findings of a report in sentences, whose numbers and choices are all computed.

What E2 calls noise, or has too few pictures to say, is no finding.
"""

from collections.abc import Iterable, Iterator, Sequence

import pandas as pd

from experiments.analyses.charts.chart import milliseconds
from experiments.analyses.knobs.findings import change_sentences, front_sentences
from experiments.analyses.knobs.objectives import LATENCY_MEAN, Objectives
from experiments.analyses.knobs.records import TaskAnalysis, present
from experiments.analyses.latency.analysis import budget_sentences, prediction_sentences
from experiments.analyses.report.analyses import Analyses, Missing
from experiments.analyses.stages.analysis import decode_sentences, longest_stage
from experiments.analyses.sweeps import StoredSetting, Sweep

# Kinds of caveats that explain a long time by something else than the setting.
DISTURBANCES = ("throttled", "foreign_load_cpu", "foreign_load_gpu")


def report_statements(found: Analyses) -> list[str]:
    """The statements of a report that the results allow: times, each task's knobs and accuracy, energy, prediction.

    Of several sweeps, those about one begin with its label.
    """
    timed = [(own.sweep, own.stages) for own in found.sweeps if not isinstance(own.stages, Missing)]
    lines = [each for sweep, stages in timed for each in _about(sweep, [longest_stage(stages)])]
    for analysis in found.knobs.tasks:
        task = analysis.grid.task
        own = [*_extremes(analysis, _disturbed(found.stored, task))]
        own += [
            each
            for sweep, stages in timed
            if task in sweep.provenance.tasks
            for each in _about(sweep, decode_sentences(stages, task))
        ]
        own += change_sentences(analysis)
        own += [] if found.random_weights else front_sentences(analysis)
        lines += [f"{task}: {each}" for each in own] if len(found.knobs.tasks) > 1 else own
    lines += _energy(found.settings)
    for each in found.sweeps:
        if not isinstance(each.model, Missing):
            lines += _about(each.sweep, [*prediction_sentences(each.model), *budget_sentences(each.model)])
    return lines


def _about(sweep: Sweep, sentences: Iterable[str]) -> list[str]:
    """Sentences about one sweep, behind its label where there are several."""
    return [f"{sweep.label}: {each}" if sweep.label else each for each in sentences]


def _disturbed(settings: Sequence[StoredSetting], task: str) -> set[str]:
    """Names of the task's settings that were measured beside other load, or throttled."""
    return {
        each.name
        for each in settings
        for caveat in each.result.provenance.caveat_records
        if each.task == task and caveat.kind in DISTURBANCES
    }


def _extremes(analysis: TaskAnalysis, disturbed: set[str]) -> Iterator[str]:
    """The fastest and the slowest setting by mean time, where E2 distinguishes them among all pairs."""
    for each in present(analysis):
        found = each.found
        total = len(found.points)
        if found.of != LATENCY_MEAN or total < 2:
            continue
        low, high = milliseconds(found.cost.min()), milliseconds(found.cost.max())
        calm = [at for at, point in enumerate(found.points) if point.key not in disturbed]
        if found.no_verdict is not None:
            yield f"Mean times of a request are {low} to {high}; no setting is named: the {found.no_verdict}."
        elif len(calm) < 2:
            yield (
                f"Mean times of a request are {low} to {high}; no setting is named, since other load or throttling "
                f"disturbed {total - len(calm)} of {total}."
            )
        else:
            fast, slow = (choose(calm, key=found.cost.__getitem__) for choose in (min, max))
            if not found.cheaper(fast, total * (total - 1))[slow]:
                yield f"Mean times of a request are {low} to {high}; no setting is surely faster than another."
                continue
            times = [float(found.cost[at]) for at in (fast, slow)]
            names = [found.points[at].key for at in (fast, slow)]
            beside = "" if len(calm) == total else " measured without other load or throttling"
            yield (
                f"The fastest of {len(calm)} settings{beside} is {names[0]} with {milliseconds(times[0])} a request on "
                f"average, the slowest {names[1]} with {milliseconds(times[1])}, {times[1] / times[0]:.2f} times as "
                f"long.{_of_reference(found, fast)}"
            )


def _of_reference(found: Objectives, at: int) -> str:
    """What a setting takes of the reference's mean latency, or that the reference was not measured, as a sentence."""
    if found.reference is None:
        return " The reference, the model as it is, was not measured."
    own, share = found.points[found.reference].key, 100 * found.cost[at] / found.cost[found.reference]
    time = milliseconds(float(found.cost[found.reference]))
    return f" The reference, the model as it is ({own}), takes {time}, of which the fastest is {share:.0f} %."


def _energy(frame: pd.DataFrame) -> Iterator[str]:
    """A sentence for measured energies and one for estimated ones, which are not compared with each other."""
    known = frame[frame["energy_j_per_output_token"].notna()]
    for kind, own in known.groupby("energy_kind", sort=False):
        joules = own["energy_j_per_output_token"]
        by_energy = own.sort_values("energy_j_per_output_token", kind="stable")
        low, high = by_energy.iloc[0], by_energy.iloc[-1]
        yield (
            f"Energy ({kind}): from {joules.min():.3g} J an output token ({_named(low)}) to "
            f"{joules.max():.3g} J ({_named(high)})."
        )


def _named(row: pd.Series) -> str:
    return " ".join(str(row[name]) for name in ("task", "sweep", "setting") if name in row)
