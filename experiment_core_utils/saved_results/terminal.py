"""Saved results for the terminal: tables, caveats, warnings and failed samples."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pandas as pd

from experiment_core_utils.knobs.batch_size import BATCH_SIZE
from experiment_core_utils.knobs.interface import Knob, Level
from experiment_core_utils.knobs.registry import all_knobs
from experiment_core_utils.knobs.setting import setting_of
from experiment_core_utils.knobs.variant import reference_meaning
from experiment_core_utils.knobs.vision_tokens import VISION_TOKENS
from experiment_core_utils.primitives.statistics import half_of_interval, mean_of
from experiment_core_utils.primitives.texts import ABSENT, counted
from experiment_core_utils.records.caveats import Caveat
from experiment_core_utils.records.conclusion import FRONT_MEANING, FRONT_OPPOSITE, VERDICT_LEGEND
from experiment_core_utils.records.setting_result import (
    FixedLengthTime,
    RescoredResult,
    SettingResult,
    reference_of,
    setting_key,
    share_of_reference,
    throughput_of,
)
from experiment_core_utils.saved_results.result_caveats import MOST_UNREADABLE
from experiment_core_utils.tables.frames import further_knobs
from experiment_core_utils.tasks.comparison import PairedComparison
from experiment_core_utils.tasks.registry import score_name
from experiment_core_utils.tasks.sampling import few_samples_caveats
from experiment_core_utils.tasks.scoring.metrics import AGREED_REPLIES, LABELLED_REPLIES

# Of a column with the place of each setting on the front of accuracy and mean latency.
FRONT_HEADING = "front by mean"
# Of a column with the total time of each setting as a fraction of that of the model as it is.
REFERENCE_HEADING = "of reference"
# Before joules that no meter read.
ESTIMATED = "~"


def few_samples_warning(results: Sequence[SettingResult]) -> str | None:
    """The sentence under a comparison of settings with too few samples; None where it is fair."""
    fewest = min((result.num_samples for result in results), default=0)
    return next((each.sentence for each in few_samples_caveats(len(results), fewest)), None)


def failed_sample_lines(results: Sequence[SettingResult]) -> list[str]:
    """How many samples of each class failed, and why the first did; settings of which this is the same share a line."""
    settings: dict[str, list[str]] = {}
    for result in results:
        counts = Counter(failure.error for failure in result.failed_samples)
        if counts:
            found = ", ".join(f"{count} {error}" for error, count in sorted(counts.items()))
            line = f"{found} of {len(result.sample_ids)}; the first: {result.failed_samples[0].reason}"
            settings.setdefault(line, []).append(setting_key(result))
    return [
        f"failed samples: {keys[0] if len(keys) == 1 else f'each of {len(keys)} settings'}: {line}"
        for line, keys in settings.items()
    ]


def caveat_lines(results: Sequence[SettingResult], reported: Collection[str] = ()) -> list[str]:
    """For each kind of warning the worst one, and how many settings have it.

    Args:
        reported: kinds that another line is about; that of few samples is right under the table.
    """
    found = [
        (setting_key(result), record)
        for result in results
        for record in result.provenance.caveat_records
        if record.severity == "warning" and record.kind not in {"few_samples", *reported}
    ]
    return list(worst_of_each_kind(found, len(results)).values())


def worst_of_each_kind(found: Sequence[tuple[str, Caveat]], num_settings: int) -> dict[str, str]:
    """Kind -> the sentence of the worst caveat, with its setting and how many of the settings have one.

    Args:
        found: the key of the setting and the caveat.
    """
    kinds: dict[str, list[tuple[str, Caveat]]] = {}
    for key, each in found:
        kinds.setdefault(each.kind, []).append((key, each))
    lines = {}
    for kind, own in kinds.items():
        key, worst = max(own, key=lambda each: each[1].extent)
        lines[kind] = f"{worst.sentence} ({key}; {len(own)} of {counted(num_settings, 'setting')})"
    return lines


def fixed_length_line(times: Mapping[str, FixedLengthTime]) -> str | None:
    """How long answers of one length take, beside which times of answers of their own lengths are to be read.

    Args:
        times: of each setting that has one, by its key.
    """
    if not times:
        return None
    (fastest, least), (slowest, most) = (chosen(times.items(), key=lambda each: each[1].mean) for chosen in (min, max))
    how = {"computed": f"TTFT + {least.num_tokens - 1} x ms/token", "measured": "--ignore_eos"}[least.how]
    settings = f" ({fastest}) to {most.mean:.1f} ms ({slowest})" if len(times) > 1 else ""
    return f"answers of {counted(least.num_tokens, 'token')}, {least.how} ({how}): {least.mean:.1f} ms{settings}"


# Columns of the table that are there where any setting has more than a few of them.
_ANSWER_SHARES = {"cut": "share_truncated", "empty": "share_empty", "one token": "share_one_token"}


_NOT_EVERYWHERE = ("crops", "vision ms", "prefill ms", "first token ms", "answered/s", "under way")


def _percent(share: float | None) -> str:
    return ABSENT if share is None else f"{100 * share:.0f} %"


def closing_table(
    results: Sequence[SettingResult],
    fronts: Mapping[str, str] | None = None,
) -> str:
    """The table that a run prints at its end.

    Args:
        fronts: how sure it is that each setting is on the front of accuracy and mean latency.
    """
    rows = []
    reference, further = reference_of(results), further_knobs(results)
    titles = {knob.title: knob for knob in all_knobs() if knob.published or knob in further}
    score = f"{score_name(*((each.metric, each.metric_best) for each in results))} [95 %]"
    for result in results:
        stats = result.aggregate_stats
        has_prefill = stats.get("T_LLM_prefill_mean") is not None
        # Both by formula; the memory follows the setting on every device.
        flops = mean_of([sample.request_flops for sample in result.per_sample_results])
        memory_bytes = None if result.memory is None else result.memory.counted_memory_bytes
        rows.append(
            {
                **{title: _knob_cell(result, knob) for title, knob in titles.items()},
                # A picture that the model does not cut has 0 crops, but is seen.
                "crops": _text(result.selected_crops_mean or None, 1),
                "tokens": _text(stats.get("prompt_tokens_mean"), 0),
                score: _accuracy(result),
                "vision ms": _text(stats.get("T_vision_total_mean"), 1),
                "prefill ms": _text(stats.get("T_LLM_prefill_mean"), 1),
                # Where its stages are not seen, as at a server.
                "first token ms": _text(None if has_prefill else stats.get("T_first_token_mean"), 1),
                "decode ms": _text(stats.get("T_LLM_decode_mean"), 1),
                "total ms": _text(stats.get("T_total_mean"), 1),
                REFERENCE_HEADING: _of_reference(result, reference),
                "p95 ms": _text(stats.get("T_total_p95"), 1),
                "ms/token": _text(stats.get("T_decode_per_token_mean"), 2),
                # Where requests run together.
                "requests/s": _text(throughput_of(result).requests_per_s, 2),
                "tokens/s": _text(throughput_of(result).output_tokens_per_s, 1),
                # At `--request_rate`.
                "answered/s": _text(getattr(result.open_loop, "achieved_rate", None), 2),
                "under way": _text(getattr(result.open_loop, "most_under_way", None), 0),
                "GFLOP": _text(None if flops is None else flops / 1e9, 1),
                "MB": _text(None if memory_bytes is None else memory_bytes / 1e6, 0),
                "J": _joules(result),
                "failed": result.num_failed_samples,
                "unparsed": result.num_unparsed,
                **{heading: _percent(getattr(result, name)) for heading, name in _ANSWER_SHARES.items()},
            }
        )
    table = pd.DataFrame(rows)
    if fronts:
        table[FRONT_HEADING] = [fronts.get(setting_key(result)) for result in results]
    if reference is None:
        table = table.drop(columns=REFERENCE_HEADING)
    if BATCH_SIZE not in further:
        table = table.drop(columns=["requests/s", "tokens/s"])
    table = table.drop(columns=[heading for heading in ("failed", "unparsed") if not table[heading].any()])
    # What the model, or the task, does not have.
    lacking = [heading for heading in (*titles, *_NOT_EVERYWHERE) if table[heading].eq(ABSENT).all()]
    if "crops" in lacking and "vision ms" in lacking and table[VISION_TOKENS.title].eq("own").all():
        # No picture was seen, and its own way to see them is no knob.
        lacking.append(VISION_TOKENS.title)
    table = table.drop(columns=lacking)
    few = [
        heading
        for heading, name in _ANSWER_SHARES.items()
        if all((getattr(result, name) or 0.0) <= MOST_UNREADABLE for result in results)
    ]
    table = table.drop(columns=few)
    return aligned_text(table)


def column_lines(results: Sequence[SettingResult], front: Mapping[str, str]) -> list[str]:
    """What columns of the table mean that do not say it themselves."""
    costs = "GFLOP, MB, J: of a request; MB by formula: weights, KV cache, activations"
    joules = " ".join(filter(None, map(_joules, results)))
    marks = {"+-": "half of the 95 % interval over passes", ESTIMATED: "estimated"}
    shown = "".join(f"; {mark}: {meaning}" for mark, meaning in marks.items() if mark in joules)
    lines = [f"{costs}{shown}; {ABSENT}: not measured, or not applicable"]
    if BATCH_SIZE in further_knobs(results):
        lines.append("requests/s, tokens/s: of whole batches, over the time of a batch; times: what each request waits")
    rates = {each.open_loop.request_rate for each in results if each.open_loop is not None}
    if rates:
        came = " or ".join(f"{rate:g}" for rate in sorted(rates))
        lines.append(f"answered/s: of {came} a second that came; times count from then; under way: most at once")
    for metric in sorted({each.metric for each in results} & AGREED_REPLIES.keys()):
        agreed = f"{AGREED_REPLIES[metric]} of {LABELLED_REPLIES}"
        lines.append(f"accuracy: {metric} reads sentences, and scores {agreed} labelled replies as they are labelled")
    if front:
        lines += [f"{FRONT_HEADING}: {FRONT_MEANING}; {FRONT_OPPOSITE}", VERDICT_LEGEND]
    return lines


def reference_lines(results: Sequence[SettingResult]) -> list[str]:
    """What the column of fractions of the reference means; nothing where the reference was not measured."""
    reference = reference_of(results)
    if reference is None:
        return []
    runs = {tuple(each.provenance.run_uids or each.provenance.experiment_ids or ()) for each in results}
    key = setting_key(reference)
    return [
        f"{REFERENCE_HEADING}: total time in percent of that of {key}, {reference_meaning(key)}, on the "
        f"same samples{'' if len(runs) < 2 else '; measured in several runs, between which speeds may differ'}"
    ]


def _of_reference(result: SettingResult, reference: SettingResult | None) -> str | None:
    if reference is None or result is reference:
        return None if reference is None else "reference"
    share = share_of_reference(result, reference)
    return None if share is None else _percent(share)


def aligned_text(table: pd.DataFrame) -> str:
    """A table as a run prints it at its end; `–` means not measured, or that it does not apply."""
    return str(table.astype(object).where(table.notna(), ABSENT).to_string(index=False))


def comparison_table(comparisons: Mapping[str, PairedComparison], score: str) -> str:
    """Settings against one baseline, a row each.

    Args:
        score: what the metric's scores are called.
    """
    rows = [
        {
            "setting": key,
            score: _text(each.mean, 3),
            "difference [95 %]": _difference(each),
            "better": each.better,
            "worse": each.worse,
            "equal": each.equal,
            "p": ABSENT if each.p_value is None else f"{each.p_value:.2g}",
            "excluded": each.num_excluded,
        }
        for key, each in comparisons.items()
    ]
    return pd.DataFrame(rows).to_string(index=False)


def rescoring_table(before: Sequence[SettingResult], after: Sequence[RescoredResult]) -> str:
    """Table of settings by the metric that they were measured with and by another, a row each."""
    rows = [
        {
            "setting": setting_key(new),
            f"{new.rescored.metric_before} (before)": _text(old.accuracy, 3),
            f"{new.metric} [95 %]": _accuracy(new),
            "samples": new.num_samples,
            "unparsed": _text(new.share_unparsed, 3),
        }
        for old, new in zip(before, after, strict=True)
    ]
    return pd.DataFrame(rows).fillna(ABSENT).to_string(index=False)


def _knob_cell(result: SettingResult, knob: Knob[Any]) -> Level:
    value = setting_of(result).value(knob.name)
    return ABSENT if value is None else knob.cell(value)


def _accuracy(result: SettingResult) -> str:
    interval = result.accuracy_ci95
    if result.accuracy is None or interval is None:
        return ABSENT
    return f"{result.accuracy:.3f} [{interval[0]:.2f}, {interval[1]:.2f}]"


def _joules(result: SettingResult) -> str | None:
    """Gross energy of a request, of passes where there are some, with half of their interval; None where there is none.

    Estimates are marked.
    """
    passes, summary = (None, None) if result.energy is None else (result.energy.passes, result.energy.summary)
    if passes is not None and passes.j_per_request is not None:
        joules, kind = passes.j_per_request, passes.kind
    elif summary is not None and summary.end_to_end_j is not None:
        joules, kind = summary.end_to_end_j, summary.kind
    else:
        return None
    text = f"{ESTIMATED if kind == 'estimated' else ''}{joules:.3g}"
    low, high = (passes.j_per_request_ci95_low, passes.j_per_request_ci95_high) if passes is not None else (None, None)
    return text if low is None or high is None else f"{text} +-{half_of_interval(joules, low, high) / joules:.0%}"


def _difference(comparison: PairedComparison) -> str:
    if comparison.difference is None or comparison.interval is None:
        return ABSENT
    low, high = comparison.interval
    return f"{comparison.difference:+.3f} [{low:+.3f}, {high:+.3f}]"


def _text(value: float | None, digits: int) -> str:
    return ABSENT if value is None else f"{value:.{digits}f}"


def text_table(results: Sequence[Mapping[str, Any]]) -> str:
    """One row an experiment: what was varied, rates of output tokens and prompts, first token, padding, energy.

    `–` stands for what was not measured; joules of GPUs, by their counters or else by integrated power, are left out
    where no experiment has them.
    """
    rows = []
    for result in results:
        metrics, energy = result["inference_metrics"], result["global_energy_results"]
        ttft, kwh, joules = metrics["ttft_s"], energy["total_energy_kwh"], energy["gpu_counter_j"]
        joules = energy["gpu_power_integral_j"] if joules is None else joules
        row = {
            "id": result["experiment_id"],
            **{key.rpartition(".")[2]: value for key, value in result["varied"].items()},
            "prompts": metrics["num_prompts"],
            "out tokens": metrics["total_output_tokens"],
            "tokens/s": _text(metrics["tokens_per_second"], 1),
            "prompts/s": _text(metrics["queries_per_second"], 2),
            "first token ms": _text(None if ttft is None else 1e3 * ttft["mean"], 1),
            "padding": _text(metrics["padding_share"], 3),
            "energy Wh (estimated)": _text(None if kwh is None else 1e3 * kwh, 4),
        }
        if joules is not None:
            row["GPU J"] = _text(joules, 2)
        rows.append(row)
    return aligned_text(pd.DataFrame(rows))
