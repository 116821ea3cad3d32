"""The caveats of a report: each once, with the settings that it applies to."""

from collections.abc import Iterator, Sequence

import numpy as np

from experiment_core_utils.records.caveats import ANSWER_KINDS
from experiments.analyses.knobs.records import caveats_of as front_caveats
from experiments.analyses.report.analyses import Analyses, Missing
from experiments.analyses.report.parts import ReportCaveat
from experiments.analyses.sweeps import StoredSetting, drift_ratios

# Kinds of the caveats of single settings, and what they say together.
OF_SINGLE_SETTINGS = {
    "drift": "Drift: the speed of the machine changed while the sweep ran",
    "throttled": "Throttling: the GPU's clocks were lowered",
    "foreign_load_cpu": "Background load: other processes used the CPUs while settings were measured",
    "foreign_load_gpu": "Background load: other processes used the GPU when the measuring of settings began",
}


# Caveats of answers that no column of the settings tells.
_WITHOUT_COLUMN = {"answers_unscored", "few_references"}


def report_caveats(found: Analyses) -> list[ReportCaveat]:
    """Caveats of the whole run first, then of single settings, then of the samples, then of the analyses."""
    return [
        *_of_the_run(found.stored),
        *_of_single_settings(found.stored),
        *_of_samples(found),
        *_of_analyses(found),
    ]


def _of_the_run(settings: Sequence[StoredSetting]) -> Iterator[ReportCaveat]:
    carried: dict[str, list[str]] = {}
    for each in settings:
        provenance = each.result.provenance
        elsewhere = {*OF_SINGLE_SETTINGS, *ANSWER_KINDS} - _WITHOUT_COLUMN
        texts = [found.sentence for found in provenance.caveat_records if found.kind not in elsewhere]
        # Files from before the records were there have sentences alone.
        for text in texts if provenance.caveat_records else provenance.caveats:
            carried.setdefault(text, []).append(f"{each.task} {each.name}")
    for text, names in carried.items():
        sentence = f"{text[:1].upper()}{text[1:]}" + ("" if text.endswith(".") else ".")
        is_of_all = len(names) == len(settings)
        yield (
            ReportCaveat(sentence)
            if is_of_all
            else ReportCaveat(sentence, f"{len(names)} of {len(settings)} settings", names)
        )


def _of_single_settings(settings: Sequence[StoredSetting]) -> Iterator[ReportCaveat]:
    for kind, text in OF_SINGLE_SETTINGS.items():
        found = [
            (f"{each.task} {each.name}", caveat.sentence)
            for each in settings
            for caveat in each.result.provenance.caveat_records
            if caveat.kind == kind
        ]
        if not found:
            continue
        if kind == "drift":
            ratios = drift_ratios(each.result for each in settings)
            text += (
                f"; a control setting took {min(ratios):.2f} to {max(ratios):.2f} times its first time"
                if ratios
                else ""
            )
        names = dict.fromkeys(name for name, _ in found)
        yield ReportCaveat(
            f"{text}.", f"{len(names)} of {len(settings)} settings", [f"{name}: {line}" for name, line in found]
        )


def _of_samples(found: Analyses) -> Iterator[ReportCaveat]:
    frame, total = found.settings, len(found.settings)
    failed = [
        f"{row.task} {row.setting}: {row.num_failed_samples} failed, {row.num_samples} ran"
        for row in frame[frame["num_failed_samples"] > 0].itertuples()
    ]
    if failed:
        yield ReportCaveat(
            f"Failed samples: {int(frame['num_failed_samples'].sum())} samples failed; figures are of those that ran.",
            f"{len(failed)} of {total} settings",
            failed,
        )
    for column, text in (
        ("share_truncated", "of the answers were cut at the limit of output tokens, so their own length is not known"),
        (
            "share_unparsed",
            "of the answers could not be read, and count as wrong, or not be scored, and are left out",
        ),
        ("share_empty", "of the answers have no text"),
        ("share_one_token", "of the answers are a single token where most reference answers have several words"),
    ):
        known = frame[[column, "num_samples"]].dropna()
        if known.empty or not known[column].any():
            continue
        share = float(np.average(known[column], weights=known["num_samples"]))
        having = int((known[column] > 0).sum())
        yield ReportCaveat(f"{_percent(share)} {text}.", None if having == total else f"{having} of {total} settings")
    fewest = int(frame["num_latency_samples"].min())
    if fewest < 20:
        yield ReportCaveat(
            "With fewer than 20 samples the P95 is interpolated between the two slowest ones and depends on them "
            f"alone; the fewest here are {fewest}."
        )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.2g} %"


def _of_analyses(found: Analyses) -> Iterator[ReportCaveat]:
    # What random weights and few samples mean is said above.
    for each in front_caveats(found.knobs.tasks, random_weights=False):
        yield ReportCaveat(f"Fronts and effects: {each.sentence}.")
    for own in found.sweeps:
        if isinstance(own.model, Missing):
            continue
        of = f" of {own.sweep.label}" if own.sweep.label else ""
        for each in own.model.caveats:
            yield ReportCaveat(f"Estimator{of}: {each.sentence}.")


def conditions_facts(settings: Sequence[StoredSetting]) -> list[tuple[str, str]]:
    """The conditions of the machine over all settings; values that were not read are left out."""
    entries = [entry for each in settings for entry in each.result.conditions]
    facts = []
    for name, key, unit in (
        ("GPU clock", "sm_clock_mhz", "MHz"),
        ("GPU memory clock", "memory_clock_mhz", "MHz"),
        ("CPU frequency", "cpu_frequency_mhz", "MHz"),
    ):
        ends = [end for entry in entries for end in getattr(entry, key) or () if end is not None]
        if ends:
            facts.append((name, f"{min(ends):.0f} to {max(ends):.0f} {unit}"))
    for name, key, unit, factor in (
        ("hottest GPU", "temperature_c_max", "°C", 1.0),
        ("highest GPU power", "power_w_max", "W", 1.0),
        ("clocks lowered by the power limit", "power_throttled_s", "s at most", 1.0),
        ("clocks lowered by heat", "thermal_throttled_s", "s at most", 1.0),
        ("CPU used by others", "foreign_cpu_share", "% at most", 100.0),
    ):
        values = [value for entry in entries if (value := getattr(entry, key)) is not None]
        if values:
            facts.append((name, f"{factor * max(values):.3g} {unit}"))
    return facts
