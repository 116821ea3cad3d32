"""The content of a report as records, from what was found in a sweep."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiment_core_utils.knobs.interface import Knob
from experiment_core_utils.knobs.registry import all_knobs
from experiment_core_utils.knobs.vision_tokens import VISION_TOKENS
from experiment_core_utils.primitives.statistics import mean_of
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.records.columns import SHARE_OF_REFERENCE
from experiment_core_utils.records.conclusion import FRONT_MEANING, FRONT_OPPOSITE, VERDICT_LEGEND, WORDS
from experiment_core_utils.records.provenance import ASKED_AT
from experiment_core_utils.saved_results.terminal import FRONT_HEADING, REFERENCE_HEADING
from experiment_core_utils.tasks.registry import score_name
from experiments.analyses.charts.chart import Rule
from experiments.analyses.charts.style import QUIET, joint_setup
from experiments.analyses.knobs.conclusion import front_words
from experiments.analyses.report.analyses import Analyses
from experiments.analyses.report.caveats import conditions_facts, report_caveats
from experiments.analyses.report.findings import headlines, price_table
from experiments.analyses.report.parts import Column, FrontPicture, Report, ReportTable, Section, Value
from experiments.analyses.report.samples import sample_section
from experiments.analyses.report.sections import estimator_section, front_pictures, knob_section, stage_section
from experiments.analyses.sweeps import Sweep

ABSENT = Value(None, None)
# Heading, meaning, column of the settings' frame, factor, decimals.
NUMBERS = (
    ("samples", "that ran", "num_samples", 1.0, 0),
    ("failed", "samples that did not run", "num_failed_samples", 1.0, 0),
    ("timed", "samples with times", "num_latency_samples", 1.0, 0),
    ("accuracy", "mean score with its 95 % interval", "accuracy", 1.0, 3),
    ("mean ms", "mean end-to-end time of a request", "T_total_mean_ms", 1.0, 1),
    (
        f"{REFERENCE_HEADING} %",
        "mean end-to-end time in percent of that of the reference on the same samples",
        SHARE_OF_REFERENCE,
        100.0,
        0,
    ),
    ("GFLOP", "mean operations of a request, in 10^9 FLOPs", "request_flops", 1e-9, 2),
    ("P95 ms", "95th percentile of the end-to-end time", "T_total_p95_ms", 1.0, 1),
    ("vision ms", "mean time of the vision stage", "T_vision_total_mean_ms", 1.0, 1),
    ("prefill ms", "mean time of the prefill", "T_LLM_prefill_mean_ms", 1.0, 1),
    ("ms a token", "mean time of a decode step", "T_decode_per_token_mean_ms", 1.0, 2),
    ("tokens in", "mean tokens of the whole prompt", "prompt_tokens_mean", 1.0, 0),
    ("tokens out", "mean output tokens", "output_tokens_mean", 1.0, 1),
    ("J a request", "mean energy of a request", "energy_sample_j_mean", 1.0, 2),
    ("J a token", "energy for each output token", "energy_passes_j_per_output_token", 1.0, 3),
    (
        "J a correct answer",
        "energy of all requests over the correct answers, with its 95 % interval",
        "energy_passes_j_per_correct_answer",
        1.0,
        2,
    ),
    ("prefill MFU %", "fraction of the GPU's peak that the prefill's operations reach", "mfu_prefill", 100.0, 2),
    ("decode MBU %", "fraction of the GPU's memory bandwidth that decode uses", "mbu_decode", 100.0, 2),
    ("counted MB", "weights, KV cache and activations by formula, in 10^6 bytes", "counted_memory_bytes", 1e-6, 0),
    ("memory GB", "peak GPU memory in 10^9 bytes", "peak_memory_bytes", 1e-9, 2),
)
# Columns of the table beside the picture, where any setting has them; the others are in that of all columns.
FIRST = ("accuracy", "T_total_mean_ms", SHARE_OF_REFERENCE, "request_flops", "counted_memory_bytes",
         "energy_sample_j_mean")  # fmt: skip
# Energies of repeated stages, whose kind is `energy_kind`; that of samples is always measured.
_OF_STAGES = ("energy_passes_j_per_output_token", "energy_passes_j_per_correct_answer")
OPTIONAL = ("num_failed_samples", SHARE_OF_REFERENCE, "T_vision_total_mean_ms",
            "request_flops",
            "energy_sample_j_mean", "energy_passes_j_per_output_token", "energy_passes_j_per_correct_answer",
            "mfu_prefill", "mbu_decode", "counted_memory_bytes",
            "peak_memory_bytes")  # fmt: skip


def report_of(found: Analyses, budget_ms: float | None = None) -> Report:
    """The content of the page.

    Args:
        budget_ms: latency budget that a reader has; None for none, about which the page says nothing then.
    """
    sweeps = [own.sweep for own in found.sweeps]
    device, model, _ = joint_setup([sweep.provenance for sweep in sweeps])
    tasks = ", ".join(task.grid.task for task in found.knobs.tasks)
    num_generations = sum(sweep.num_samples for sweep in sweeps)
    generations = f"{counted(len(found.stored), 'setting')}, {counted(num_generations, 'generation')} of {tasks}"
    labels = [f"{len(sweeps)} sweeps: {'; '.join(sweep.label for sweep in sweeps)}"] if len(sweeps) > 1 else []
    fronts = front_pictures(found.knobs, found.random_weights, found.conclusions)
    sections = [
        *(_of_sweep(stage_section(own, _frame_of(found, own.sweep)), own.sweep, at)
          for at, own in enumerate(found.sweeps)),
        knob_section(found.knobs, found.random_weights, any(conclusion.voided_by for conclusion in found.conclusions)),
        *(_of_sweep(estimator_section(own, budget_ms is not None), own.sweep, at)
          for at, own in enumerate(found.sweeps)),
    ]  # fmt: skip
    has_fronts = any(front.panel is not None for front in fronts)
    said, settings, score = headlines(found), settings_table(found), _score_name(found)
    has_words = FRONT_HEADING in [each.label for each in settings.columns] or any(each.word in WORDS for each in said)
    times = next((chart for each in sections for chart in each.charts if chart.name.startswith("e1_settings")), None)
    if has_fronts or times is None or len(times.panels) > 1:
        times = None
    # What is on the first screen is not shown again.
    sections = [replace(each, charts=[chart for chart in each.charts if chart is not times]) for each in sections]
    return Report(
        title=f"{model} {device}" if device.startswith(ASKED_AT) else f"{model} on {device}",
        subtitle=" · ".join([*labels, generations, *(["random weights"] if found.random_weights else [])]),
        headlines=said,
        fronts=[_with_budget(each, budget_ms) for each in fronts] if has_fronts else [],
        caveats=report_caveats(found),
        settings=settings,
        legend=VERDICT_LEGEND if has_words else "",
        prices=price_table([each for each in found.conclusions if each.prices is not None], score),
        sections=sections,
        samples=sample_section(found.stored),
        facts=[fact for sweep in sweeps for fact in _facts(sweep)],
        commands=[shared_command(command) for sweep in sweeps for command in sweep.provenance.commands],
        instead=None if times is None else (f"{times.name}-0", times.panels[0]),
        score=score,
    )


def _score_name(found: Analyses) -> str:
    """What the scores of all settings are called."""
    return score_name(*((each.result.metric, each.result.metric_best) for each in found.stored))


def _frame_of(found: Analyses, sweep: Sweep) -> pd.DataFrame:
    """The settings of one sweep."""
    return found.settings[found.settings["sweep"] == sweep.label] if sweep.label else found.settings


def _with_budget(picture: FrontPicture, budget_ms: float | None) -> FrontPicture:
    """A front by a latency, with a line at the budget where one is given."""
    if budget_ms is None or picture.panel is None or not picture.cost.endswith(" ms"):
        return picture
    line = Rule(budget_ms, True, QUIET, f"budget: {budget_ms:g} ms", "dash")
    return replace(picture, panel=replace(picture.panel, marks=[*picture.panel.marks, line]))


# Of an absolute path all but its last part: a page is sent to others.
_FOLDERS = re.compile(r"(?<![\w.:/<~-])/(?:[\w.+@%-]+/)+(?=[\w.])")


def without_folders(text: str) -> str:
    """A text whose absolute paths are their last parts."""
    return _FOLDERS.sub("", text)


def shared_command(command: str) -> str:
    """The command that measured, without the folders of the machine; `knobprof` without its interpreter."""
    try:
        words = list(map(_shared_word, shlex.split(command)))
    except ValueError:
        return without_folders(command)
    if "knobprof" in words[:2]:
        words = words[words.index("knobprof") :]
    return shlex.join(words)


def _shared_word(word: str) -> str:
    """A word, or what a flag's `=` gives, as the last part of its path where that is absolute."""
    flag, sign, value = word.partition("=") if word.startswith("-") else ("", "", word)
    return f"{flag}{sign}{Path(value).name or value}" if Path(value).is_absolute() else word


def _of_sweep(section: Section, sweep: Sweep, place: int) -> Section:
    """A section about one of several sweeps: its title has the label, and names on the page are its own."""
    if not sweep.label:
        return section
    return replace(
        section,
        name=f"{section.name}-{place + 1}",
        title=f"{section.title}: {sweep.label}",
        charts=[replace(chart, name=f"{chart.name}-{place + 1}") for chart in section.charts],
    )


def settings_table(found: Analyses) -> ReportTable:
    """The table of settings: one row each in the sweep's order; columns without any value are left out."""
    frame, has_sweeps = found.settings.copy(), "sweep" in found.settings
    flops = [mean_of([sample.request_flops for sample in each.result.per_sample_results]) for each in found.stored]
    frame["request_flops"] = np.array(flops, dtype=float)
    is_known = {name: bool(frame[name].notna().any()) for name in OPTIONAL}
    is_known["num_failed_samples"] = bool(frame["num_failed_samples"].any())
    kept = [each for each in NUMBERS if is_known.get(each[2], True)]
    knobs = [knob for knob in all_knobs() if knob.name in frame and frame[knob.name].notna().any()]
    if not is_known["T_vision_total_mean_ms"] and frame[VISION_TOKENS.name].eq("own").all():
        # No picture was seen, and its own way to see them is no knob.
        knobs.remove(VISION_TOKENS)
    places = _places(found)
    columns = [
        *([Column("sweep", "what sets its sweep apart", False, True)] if has_sweeps else []),
        *([Column("task", "dataset", False, True)] if frame["task"].nunique() > 1 else []),
        Column("setting", "name of the setting, as in its file's", False, True),
        *([Column(FRONT_HEADING, f"{FRONT_MEANING}; {FRONT_OPPOSITE}", False, True)] if places else []),
        *(Column(knob.title, knob.meaning, is_number=True) for knob in knobs),
        *(
            Column(_score_name(found) if name == "accuracy" else label, meaning, True, name in FIRST)
            for label, meaning, name, *_ in kept
        ),
    ]
    rows = []
    has_tasks = frame["task"].nunique() > 1
    for row in frame.to_dict("records"):
        cells = [Value(row["sweep"], row["sweep"])] if has_sweeps else []
        cells += [Value(row["task"], row["task"])] if has_tasks else []
        mark = "reference" if row["is_reference"] else ""
        cells.append(Value(row["setting"], row["setting"], mark))
        if places:
            name = f"{row.get('sweep', '')} {row['setting']}".strip()
            cells.append(places.get((row["task"], name), ABSENT))
        cells += [_level(row, knob) for knob in knobs]
        cells += [_number(row, column, factor, decimals) for _, _, column, factor, decimals in kept]
        rows.append(cells)
    return ReportTable(columns, rows)


def _level(row: Mapping[Any, Any], knob: Knob[Any]) -> Value:
    """The level of a knob; one by name sorts by the vision tokens that were there, where the knob changes them."""
    level = row[knob.name]
    if not isinstance(level, str):
        return ABSENT if np.isnan(level) else Value(f"{level:g}", float(level))
    tokens = row["actual_vision_tokens_mean"]
    if not knob.changes_tokens:
        return Value(level, level)
    return Value(level, None if np.isnan(tokens) else float(tokens))


def _number(row: Mapping[Any, Any], column: str, factor: float, decimals: int) -> Value:
    value = float(row[column])
    if np.isnan(value):
        return ABSENT
    text = f"{factor * value:.{decimals}f}"
    if column in _OF_STAGES and row.get("energy_kind") == "estimated":
        text += " (estimated)"
    # Absent where a column has no interval, or none of its settings has.
    ends = [row.get(f"{column}_ci95_{end}") for end in ("low", "high")]
    low, high = (float("nan") if end is None else float(end) for end in ends)
    more = "" if np.isnan(low) else f"[{low:.2f}, {'∞' if np.isnan(high) else f'{high:.2f}'}]"
    return Value(text, factor * value, more)


def _places(found: Analyses) -> dict[tuple[str, str], Value]:
    """(task, name of the setting) -> its place relative to the front of accuracy and mean latency."""
    return {
        (analysis.grid.task, key): Value(word, f"{WORDS.index(word)}")
        for analysis, concluded in zip(found.knobs.tasks, found.conclusions, strict=True)
        if concluded.why is None
        for key, word in front_words(analysis).items()
    }


def _facts(sweep: Sweep) -> list[tuple[str, str]]:
    shared, settings = sweep.provenance, sweep.settings
    stamps = sorted(stamp for setting in settings if (stamp := setting.result.provenance.timestamp) is not None)
    versions = ", ".join(f"{name} {version}" for name, version in shared.versions.items() if version is not None)
    return [
        *([("sweep", sweep.label)] if sweep.label else []),
        ("model", Path(shared.model).name if Path(shared.model).is_absolute() else shared.model),
        ("weights", "random" if shared.random_weights else "trained"),
        ("number format", shared.dtype or "not known"),
        ("execution", shared.execution or "not known"),
        ("device", shared.device),
        ("tasks", ", ".join(shared.tasks)),
        ("settings", str(len(settings))),
        ("generations", f"{sweep.num_samples}, {sum(each.result.num_failed_samples for each in settings)} failed"),
        *([("measured", " to ".join(dict.fromkeys((stamps[0], stamps[-1]))))] if stamps else []),
        ("versions", versions),
        ("commit", shared.git_commit or "not a checkout"),
        ("fingerprints", ", ".join(f"{task} {digest}" for task, digest in shared.fingerprints.items())),
        *conditions_facts(settings),
    ]
