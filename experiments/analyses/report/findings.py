"""The findings of a report in sentences, whose numbers and choices are all computed: those of the first screen, from
the conclusions and of sweeps against the first one, and those of its sections.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pandas as pd

from experiment_core_utils.primitives.contrasts import ACCURACY_MARGIN
from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.records.conclusion import WORDS, Conclusion
from experiments.analyses.report.analyses import Analyses, Missing, SweepAnalyses
from experiments.analyses.report.parts import Column, Headline, ReportTable, Value
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
    return Headline(about, word, found.sentence, found.notes, "a cheaper setting" if found.why is None else "")


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


def price_table(conclusions: Sequence[Conclusion], score: str = "accuracy") -> ReportTable | None:
    """The price list of each task: a row for each type of question and accepted loss; None without prices.

    Args:
        score: what the scores of all of them are called.
    """
    several = len(conclusions) > 1
    columns = [
        *([Column("task", "name of the task", False)] if several else []),
        Column("type of question", "the task's column question_type; over all: each question once", False),
        Column("questions", "that all settings have a score of", True),
        Column("accepted loss", f"{score} that may be lost, in percent of the best one", True),
        Column("setting", "the cheapest that surely loses less; without a yes the one that is nearest", False),
        Column("sure", "whether it is surely faster and surely not worse by the accepted loss", False),
        Column("% of time", "of the model as it is, with a 95 % interval for all rows together", True),
        Column("% of J", "the same of the energy of a request", True),
        Column(score, "change in percent of the best one, with a 95 % interval for all rows together", True),
        Column("questions needed", "that would decide, were the means as they are", True),
    ]
    rows = []
    for each in conclusions:
        for found in [] if each.prices is None else each.prices.types:
            for price in found.prices:
                word = "same answers" if price.loss == 0 and price.is_identical else price.word
                rows.append([
                    *([Value(each.task, each.task)] if several else []),
                    Value(found.question_type, found.question_type),
                    Value(f"{found.num_samples}", found.num_samples),
                    Value(f"{100 * price.loss:g}", price.loss),
                    Value(price.setting, price.setting),
                    Value(word, f"{WORDS.index(price.word)}"),
                    _figure(price.time_ratio, price.time_ratio_ci95, ".0f"),
                    _figure(price.energy_ratio, price.energy_ratio_ci95, ".0f"),
                    _figure(price.accuracy_difference, price.accuracy_difference_ci95, "+.1f", each.metric_best),
                    Value(None if price.samples_needed is None else f"{price.samples_needed}", price.samples_needed),
                ])  # fmt: skip
    return ReportTable(columns, rows) if rows else None


def _figure(value: float | None, ends: tuple[float, float] | None, form: str, whole: float = 1.0) -> Value:
    """A figure in percent of a whole, with its interval."""
    if value is None:
        return Value(None, None)
    more = "" if ends is None else f"[{100 * ends[0] / whole:{form}}, {100 * ends[1] / whole:{form}}]"
    return Value(f"{100 * value / whole + 0.0:{form}}", value, more)
