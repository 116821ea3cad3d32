"""The caveats of a report by what they weaken: each kind once, with the settings that it applies to."""

from collections.abc import Iterator, Sequence

import numpy as np

from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.records.caveats import ANSWER_KINDS, Caveat
from experiments.analyses.knobs.records import caveats_of as front_caveats
from experiments.analyses.report.analyses import Analyses
from experiments.analyses.report.parts import CaveatGroup, ReportCaveat
from experiments.analyses.sweeps import StoredSetting

# Kinds of the caveats of single settings, and what they say together.
OF_SINGLE_SETTINGS = {
    "throttled": "Throttling: the GPU's clocks were lowered",
    "foreign_load_cpu": "Background load: other processes used the CPUs while settings were measured",
    "foreign_load_gpu": "Background load: other processes used the GPU when the measuring of settings began",
}
# What a caveat may weaken, and the kinds that weaken it; others are about accuracy.
GROUPS = ("times", "accuracy", "energy")
_OF_TIMES = {
    *OF_SINGLE_SETTINGS, "shared_cores", "runs_discarded", "runs_differ",
    "blocked_order_unknown", "few_for_percentile", "no_verdict", "few_pictures", "mixed_executions",
}  # fmt: skip
# Caveats of answers that no column of the settings tells.
_WITHOUT_COLUMN = {"answers_unscored", "few_references"}


def report_caveats(found: Analyses) -> list[CaveatGroup]:
    """What weakens times, accuracy and energy, in each the voiding ones first; nothing about what is not weakened."""
    # What random weights and few samples mean is said above.
    fronts = front_caveats(found.knobs.tasks, random_weights=False)
    of_fronts = (ReportCaveat(_about(each.kind), _sentence(each.sentence)) for each in fronts)
    every = [*_of_settings(found.stored), *_of_samples(found), *of_fronts]
    # Of sweeps and tasks that have the same one it is there once.
    texts: dict[tuple[str, str], ReportCaveat] = {}
    for each in every:
        texts.setdefault((each.about, each.text), each)
    once = sorted(texts.values(), key=lambda each: not each.voids)
    groups = [CaveatGroup(about, [each for each in once if each.about == about]) for about in GROUPS]
    return [group for group in groups if group.caveats]


def _about(kind: str) -> str:
    return "energy" if kind.startswith("energy") else "times" if kind in _OF_TIMES else "accuracy"


def _of_settings(settings: Sequence[StoredSetting]) -> Iterator[ReportCaveat]:
    kinds: dict[str, list[tuple[str, Caveat]]] = {}
    for each in settings:
        name = f"{each.task} {each.name}"
        provenance = each.result.provenance
        for caveat in provenance.caveat_records:
            if caveat.kind not in ANSWER_KINDS or caveat.kind in _WITHOUT_COLUMN:
                kinds.setdefault(caveat.kind, []).append((name, caveat))
    for kind, own in kinds.items():
        yield _of_kind(kind, own, settings)


def _of_kind(kind: str, own: Sequence[tuple[str, Caveat]], settings: Sequence[StoredSetting]) -> ReportCaveat:
    """The caveat of a kind: what it says of all its settings, or the sentence of the worst one."""
    names = dict.fromkeys(name for name, _ in own)
    text = OF_SINGLE_SETTINGS.get(kind) or max((each for _, each in own), key=lambda each: each.extent).sentence
    is_one = len({each.sentence for _, each in own}) == 1
    details = [f"{name}: {each.sentence}" for name, each in own]
    is_of_all = is_one and len(names) == len(settings) and kind not in OF_SINGLE_SETTINGS
    scope = None if is_of_all else _scope(len(names), len(settings))
    voids = any(each.voids for _, each in own)
    return ReportCaveat(_about(kind), _sentence(text), scope, () if scope is None else details, voids)


def _scope(count: int, total: int) -> str:
    return f"{count} of {counted(total, 'setting')}"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}" + ("" if text.endswith(".") else ".")


def _of_samples(found: Analyses) -> Iterator[ReportCaveat]:
    frame, total = found.settings, len(found.settings)
    failed = [
        f"{row.task} {row.setting}: {row.num_failed_samples} failed, {row.num_samples} ran"
        for row in frame[frame["num_failed_samples"] > 0].itertuples()
    ]
    if failed:
        num_failed = int(frame["num_failed_samples"].sum())
        yield ReportCaveat(
            "accuracy",
            f"Failed samples: {counted(num_failed, 'sample')} failed; figures are of those that ran.",
            _scope(len(failed), total),
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
        scope = None if having == total else _scope(having, total)
        yield ReportCaveat("accuracy", f"{_percent(share)} {text}.", scope)
    fewest = int(frame["num_latency_samples"].min())
    if fewest < 20:
        yield ReportCaveat(
            "times",
            "With fewer than 20 samples the P95 is interpolated between the two slowest ones and depends on them "
            f"alone; the fewest here are {fewest}.",
        )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.2g} %"


def conditions_facts(settings: Sequence[StoredSetting]) -> list[tuple[str, str]]:
    """The conditions of the machine over all settings; values that were not read are left out."""
    entries = [entry for setting in settings for entry in setting.result.conditions]
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
            # Three digits, and no exponent.
            facts.append((name, f"{float(f'{factor * max(values):.3g}'):g} {unit}"))
    return facts
