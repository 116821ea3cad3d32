"""The findings of a report in sentences, whose numbers and choices are all computed, the conclusion first."""

from collections.abc import Iterable, Iterator

import pandas as pd

from experiments.analyses.knobs.conclusion import lines_of
from experiments.analyses.latency.analysis import budget_sentences, prediction_sentences
from experiments.analyses.report.analyses import Analyses, Missing
from experiments.analyses.stages.analysis import decode_sentences, longest_stage
from experiments.analyses.sweeps import Sweep


def report_statements(found: Analyses) -> list[str]:
    """The statements of a report that the results allow: each task's conclusion, times, energy, prediction.

    Of several sweeps, those about one begin with its label.
    """
    timed = [(own.sweep, own.stages) for own in found.sweeps if not isinstance(own.stages, Missing)]
    lines = [f"{line[:1].upper()}{line[1:]}." for line in lines_of(found.conclusions)]
    lines += [each for sweep, stages in timed for each in _about(sweep, [longest_stage(stages)])]
    for task in [each.task for each in found.conclusions]:
        measured = [(sweep, stages) for sweep, stages in timed if task in sweep.provenance.tasks]
        about = [each for sweep, stages in measured for each in _about(sweep, decode_sentences(stages, task))]
        lines += [f"{task}: {each}" for each in about] if len(found.conclusions) > 1 else about
    lines += _energy(found.settings)
    for own in found.sweeps:
        if not isinstance(own.model, Missing):
            lines += _about(own.sweep, [*prediction_sentences(own.model), *budget_sentences(own.model)])
    return lines


def _about(sweep: Sweep, sentences: Iterable[str]) -> list[str]:
    """Sentences about one sweep, behind its label where there are several."""
    return [f"{sweep.label}: {each}" if sweep.label else each for each in sentences]


def _energy(frame: pd.DataFrame) -> Iterator[str]:
    """A sentence for measured energies and one for estimated ones, which are not compared with each other."""
    known = frame[frame["energy_passes_j_per_output_token"].notna()]
    for kind, own in known.groupby("energy_kind", sort=False):
        joules = own["energy_passes_j_per_output_token"]
        by_energy = own.sort_values("energy_passes_j_per_output_token", kind="stable")
        low, high = by_energy.iloc[0], by_energy.iloc[-1]
        yield (
            f"Energy ({kind}): from {joules.min():.3g} J an output token ({_named(low)}) to "
            f"{joules.max():.3g} J ({_named(high)})."
        )


def _named(row: pd.Series) -> str:
    return " ".join(str(row[name]) for name in ("task", "sweep", "setting") if name in row)
