"""The findings of a report in sentences, whose numbers and choices are all computed: those of the first screen, from
the conclusions and of sweeps against the first one, and those of its sections.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pandas as pd

from experiment_core_utils.primitives.contrasts import ACCURACY_MARGIN
from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.records.conclusion import Conclusion
from experiments.analyses.report.analyses import Analyses, Missing, SweepAnalyses
from experiments.analyses.report.parts import Headline
from experiments.analyses.shared_samples import SharedSamples
from experiments.analyses.stages.analysis import decode_sentences, longest_stage
from experiments.analyses.sweeps import Sweep
from experiments.analyses.two_runs import RATIO_MARGIN, RunDifference, compare_runs


def headlines(found: Analyses) -> list[Headline]:
    """Each sweep against the first one, then the conclusion of each task."""
    several = len(found.conclusions) > 1
    return [
        *_against_the_first([own.sweep for own in found.sweeps]),
        *(_concluded(conclusion, conclusion.task if several else "") for conclusion in found.conclusions),
    ]


def _concluded(found: Conclusion, about: str) -> Headline:
    word = found.word if found.why is None else "INVALID" if found.voided_by else "no setting"
    _, *more = found.lines
    return Headline(about, word, found.sentence, more, "a cheaper setting" if found.why is None else "")


def _against_the_first(sweeps: Sequence[Sweep]) -> list[Headline]:
    """What the settings that each shares with the first come to, all together; their intervals hold for all at once."""
    first, *others = sweeps
    reasons = {other.label: _why_not_compared(first, other) for other in others}
    compared = [other for other in others if reasons[other.label] is None]
    found = _pairs([first, *compared]) if compared else {}
    return [
        found.get(other.label)
        or Headline(f"{other.label} against {first.label}", "can't tell", f"not compared: {reasons[other.label]}")
        for other in others
    ]


def _why_not_compared(first: Sweep, other: Sweep) -> str | None:
    try:
        SharedSamples((first,), (other,))
    except ResultsError as error:
        return str(error)
    return None


def _pairs(sweeps: Sequence[Sweep]) -> Mapping[str, Headline]:
    """The label of each sweep but the first -> latency, energy, memory and accuracy against it."""
    first, *others = sweeps
    found = compare_runs([(sweep,) for sweep in sweeps], [each.label for each in sweeps], RATIO_MARGIN, ACCURACY_MARGIN)
    pairs: dict[str, Headline] = {}
    for other in others:
        lines = [replace(line, run="") for line in found.lines if line.run in ("", other.label)]
        pair = replace(found, sides=[(first,), (other,)], labels=[first.label, other.label], lines=lines)
        pooled = [each for each in lines if each.is_pooled]
        # Latency is first, where both have it.
        word = "INVALID" if pair.voided_by else _word(pooled[0]) if pooled else "can't tell"
        # Notes are of all of them.
        notes = () if pairs else found.notes
        more = [f"A: {first.label}; B: {other.label}", *pair.voided_by, *notes]
        pairs[other.label] = Headline(f"{other.label} against {first.label}", word, "; ".join(pair.headlines), more)
    return pairs


def _word(line: RunDifference) -> str:
    return "can't tell" if line.verdict == "CANNOT TELL" else line.verdict.lower()


def stage_findings(own: SweepAnalyses) -> list[str]:
    """Which stage takes longest, and from which length on decode does; of several tasks, task by task."""
    if isinstance(own.stages, Missing):
        return []
    tasks = own.sweep.provenance.tasks
    lines = [longest_stage(own.stages)]
    for task in tasks:
        about = decode_sentences(own.stages, task)
        lines += [f"{task}: {each}" for each in about] if len(tasks) > 1 else about
    return lines


def energy_findings(frame: pd.DataFrame) -> Iterator[str]:
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
