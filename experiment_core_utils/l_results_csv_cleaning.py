"""In: the JSON files of a run's settings or of text experiments; out: tidy CSV files, and the tables for a terminal."""

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from experiment_core_utils.primitives.csv_cells import Cell, csv_text, spreadsheet_safe
from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.primitives.files import read_regular_file, write_text_atomically
from experiment_core_utils.primitives.flat_table import (
    checked_rows,
    read_table,
    reordered_columns,
    table_text,
)
from experiment_core_utils.primitives.knobs import decoder_label, own_target, tier_target, token_target
from experiment_core_utils.primitives.result_files import read_rows
from experiment_core_utils.sample_table import sample_rows, samples_csv_text
from experiment_core_utils.setting_result import RescoredResult, SettingResult, read_setting
from experiment_core_utils.tasks.comparison import PairedComparison
from experiment_core_utils.tasks.sampling import few_samples_sentence

RESULT_FILES = "*_imgsize*_topk*_blocks*.json"

SETTING_COLUMNS = (
    "tier",
    "vision_tokens_target",
    "top_k",
    "num_active_blocks",
    "num_samples",
    "num_failed_samples",
    "accuracy",
    "accuracy_ci95_low",
    "accuracy_ci95_high",
    "selected_crops_mean",
    "actual_vision_tokens_mean",
)
STAT_COLUMNS = (
    "T_vision_total_mean",
    "T_LLM_prefill_mean",
    "T_LLM_decode_mean",
    "T_total_mean",
    "T_total_std",
    "T_total_p50",
    "T_total_p95",
    "T_total_p99",
    "T_decode_per_token_mean",
    "T_first_token_mean",
    "T_preprocess_mean",
    "output_tokens_mean",
    "prompt_tokens_mean",
    "vision_flops_mean",
    "prefill_flops_mean",
    "decode_flops_per_token_mean",
)
# At the end of a row, so that the columns before them keep their places.
SCORING_COLUMNS = ("metric", "metric_best", "num_unparsed", "share_unparsed", "share_truncated", "share_failed")
STEADINESS_COLUMNS = ("share_outlier_runs",)
LATENCY_COLUMNS = ("num_latency_samples",)
UTILISATION_COLUMNS = ("mfu_vision", "mfu_prefill", "mfu_decode", "mbu_decode")
# Columns by the keys of `energy.summary`.
ENERGY_COLUMNS = {
    "energy_vision_j": "vision_j",
    "energy_prefill_j": "prefill_j",
    "energy_decode_j": "decode_j",
    "energy_decode_j_per_token": "decode_j_per_token",
    "energy_end_to_end_j": "end_to_end_j",
    "energy_end_to_end_uncertainty_j": "end_to_end_uncertainty_j",
    "energy_end_to_end_idle_j": "end_to_end_idle_j",
    "energy_end_to_end_net_j": "end_to_end_net_j",
    "energy_j_per_output_token": "j_per_output_token",
    "energy_closure_residual_share": "closure_residual_share",
    "energy_source_ratio": "source_ratio",
    "energy_source": "source",
    "energy_kind": "kind",
}
# The same, behind all others.
CORRECT_ANSWER_COLUMNS = {
    f"energy_j_per_correct_answer{ending}": f"j_per_correct_answer{ending}"
    for ending in ("", "_ci95_low", "_ci95_high")
}


def read_results(folder: Path) -> dict[str, SettingResult]:
    """The settings' files in `folder` itself, by file name in alphabetical order; files of other names are not read.

    Raises:
        ResultsError: no such folder, no such file in it, or one that is not what its name says.
    """
    if not folder.is_dir():
        raise ResultsError(f"{folder} is not a folder; give the --output_dir of a profiling run")
    results = {path.name: read_setting(path) for path in sorted(folder.glob(RESULT_FILES))}
    if not results:
        raise ResultsError(f"{folder} holds no results ({RESULT_FILES}); give the --output_dir of a profiling run")
    return results


def setting_key(result: SettingResult) -> str:
    """`KnobSetting.key` of a stored result, such as `tier-low_topk4_blocks12`."""
    tier, tokens = result.tier, result.vision_tokens_target
    target = tier_target(tier) if tier is not None else token_target(tokens) if tokens is not None else own_target()
    return f"{target.label}_{decoder_label(result.top_k, result.num_active_blocks)}"


def few_samples_warning(results: Sequence[SettingResult]) -> str | None:
    """What must stand under a comparison of settings that too few samples stand behind; None where it is fair."""
    fewest = min((result.num_samples for result in results), default=0)
    return few_samples_sentence(len(results), fewest)


def settings_frame(results: Sequence[SettingResult]) -> pd.DataFrame:
    """One row a setting, columns in fixed order; units in the names (times in ms), absent values empty."""
    return pd.DataFrame([_setting_row(result) for result in results])


def write_settings_csv(results: Sequence[SettingResult], path: Path) -> None:
    """`settings_frame` as CSV, written whole or not at all; no text in it is run by a spreadsheet."""
    buffer = io.StringIO()
    frame = settings_frame(results).map(lambda value: spreadsheet_safe(value) if isinstance(value, str) else value)
    frame.to_csv(buffer, index=False)
    write_text_atomically(buffer.getvalue(), path)


def samples_csv_beside(settings_csv: Path) -> Path:
    """`<task>_samples.csv` beside `<task>_settings.csv`."""
    return settings_csv.with_name(settings_csv.name.replace("_settings.csv", "_samples.csv"))


def write_samples_csv(results: Sequence[SettingResult], path: Path) -> None:
    """One row for each sample that ran, setting by setting, written whole or not at all; safe as the other table.

    Raises:
        ResultsError: a number that is not finite.
        ResultsNotSaved: the disk does not take it.
    """
    text = samples_csv_text(row for result in results for row in sample_rows(result, setting_key(result)))
    write_text_atomically(text, path)


def json_to_csv(json_file_path: Path | str, csv_file_path: Path | str) -> None:
    """Write the experiments of a JSON file as CSV, one row each, as `flatten_results_to_csv` does.

    Args:
        json_file_path: a file of many experiments (a dict of dicts by name, or a list of dicts), or of one: a dict
            with other values than dicts, or one whose keys are all result types (`inference_metrics`, ...).

    Raises:
        ResultsError: no such file, torn, something else in it, or two keys that would share a column.
        ResultsNotSaved: the disk does not take it.
    """
    write_text_atomically(table_text(read_rows(Path(json_file_path))), Path(csv_file_path))


def reorder_csv_columns(csv_file_path: Path | str, priority_columns: Sequence[str]) -> None:
    """Put these columns first, in this order; cells as they are.

    A column is named whole or by its last part (`model_name` for `experiment_variables.model_name`); names that the
    file does not have are passed over. The other columns of the project's own tables (of experiments, of settings)
    keep their order, those of any other table are sorted alphabetically (places in lists by number).

    Raises:
        ResultsError: no such file, torn, ragged, or two columns of one name: it is left as it is.
        ResultsNotSaved: the disk does not take it.
    """
    path = Path(csv_file_path)
    rows = checked_rows(_csv_content(path), str(path))
    names = [cell.text for cell in rows[0]]
    wanted = [spreadsheet_safe(name) for name in priority_columns]
    if set(SETTING_COLUMNS) <= set(names):
        wanted += [name for name in names if name not in wanted]
    places = [names.index(name) for name in reordered_columns(names, wanted)]
    write_text_atomically(csv_text([row[place] for place in places] for row in rows), path)


def read_results_csv(csv_file_path: Path | str) -> list[dict[str, Cell]]:
    """The rows of a results CSV by column name: text, numbers, booleans and None (an empty cell) as they were.

    Raises:
        ResultsError: no such file, torn, ragged, or two columns of one name.
    """
    return read_table(_csv_content(Path(csv_file_path)), str(csv_file_path))


def _csv_content(path: Path) -> str:
    try:
        # A spreadsheet may have put a byte order mark in front; line ends within cells are kept.
        return read_regular_file(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ResultsError(f"{path} cannot be read ({error}); give a CSV file in UTF-8") from error


def failed_sample_lines(results: Sequence[SettingResult]) -> list[str]:
    """For each setting with samples that failed, how many of each class."""
    lines = []
    for result in results:
        counts = Counter(failure.error for failure in result.failed_samples)
        if counts:
            found = ", ".join(f"{count} {error}" for error, count in sorted(counts.items()))
            lines.append(f"failed samples: {setting_key(result)}: {found} of {len(result.sample_ids)}")
    return lines


# Beginnings of the caveats that belong to single settings, not to the whole run.
UNSTEADY = ("drift: ", "throttled: ", "foreign load: ", "energy: ")
# How the caveats begin that a run also prints.
PRINTED = (*UNSTEADY, "pictures: ")


def caveat_lines(results: Sequence[SettingResult]) -> list[str]:
    """For each kind of printed caveat the first setting that has it, and how many have."""
    lines = []
    for kind in PRINTED:
        found = [
            (setting_key(result), caveat)
            for result in results
            for caveat in result.provenance.caveats
            if caveat.startswith(kind)
        ]
        if found:
            key, caveat = found[0]
            lines.append(f"{caveat} ({key}; {len(found)} of {len(results)} settings)")
    return lines


def places_of(search: Mapping[str, Any] | None) -> dict[str, str] | None:
    """For each setting of a search's `pareto_search.json`, where it ended; None where there was no search."""
    if search is None:
        return None
    standing = {each["setting"]: place for place in ("front", "undecided") for each in search[place]}
    gone = {
        each["setting"]: f"{place} by {each['by']}"
        for name, place in (("set_aside", "likely beaten"), ("eliminated", "beaten"))
        for each in search[name]
    }
    return {**standing, **gone}


def search_sentence(search: Mapping[str, Any]) -> str:
    """What a search found and took."""
    share = "" if search["share"] is None else f", {search['share']:.3f} of the full grid's model time (estimated)"
    counts = ", ".join(
        f"{len(search[name])} {name.replace('_', ' ')}" for name in ("undecided", "set_aside", "eliminated")
    )
    return (
        f"front of {len(search['front'])} settings ({counts}) after {len(search['rounds'])} rounds{share}; "
        f"stopped: {search['stopped']}"
    )


def closing_table(results: Sequence[SettingResult], places: Mapping[str, str] | None = None) -> str:
    """The table that a run prints at its end; with `places`, how each setting ended in a search, the front first."""
    if places is not None:
        rank = {"front": 0, "undecided": 1}
        results = sorted(results, key=lambda each: rank.get(places[setting_key(each)], 2))
    rows = []
    for result in results:
        stats = result.aggregate_stats
        rows.append(
            {
                "vision": result.tier or result.vision_tokens_target or own_target().label,
                "top-k": "-" if result.top_k is None else result.top_k,
                "blocks": result.num_active_blocks,
                "crops": _text(result.selected_crops_mean, 1),
                "tokens": _text(stats.get("prompt_tokens_mean"), 0),
                "accuracy [95 %]": _accuracy(result),
                "vision ms": _text(stats.get("T_vision_total_mean"), 1),
                "prefill ms": _text(stats.get("T_LLM_prefill_mean"), 1),
                "decode ms": _text(stats.get("T_LLM_decode_mean"), 1),
                "total ms": _text(stats.get("T_total_mean"), 1),
                "p95": _text(stats.get("T_total_p95"), 1),
                "ms/token": _text(stats.get("T_decode_per_token_mean"), 2),
                "failed": result.num_failed_samples,
                "unparsed": result.num_unparsed,
            }
        )
    table = pd.DataFrame(rows)
    if places is not None:
        table.insert(6, "samples", [result.num_samples for result in results])
        table["search"] = [places[setting_key(result)] for result in results]
    if not table["unparsed"].any():
        table = table.drop(columns="unparsed")
    return aligned_text(table)


def aligned_text(table: pd.DataFrame) -> str:
    """A table as a run prints it at its end; `-` stands for what was not measured."""
    return str(table.astype(object).where(table.notna(), "-").to_string(index=False))


def comparison_table(comparisons: Mapping[str, PairedComparison]) -> str:
    """Settings against one baseline, a row each."""
    rows = [
        {
            "setting": key,
            "accuracy": _text(each.mean, 3),
            "difference [95 %]": _difference(each),
            "better": each.better,
            "worse": each.worse,
            "equal": each.equal,
            "p": "-" if each.p_value is None else f"{each.p_value:.2g}",
            "excluded": each.num_excluded,
        }
        for key, each in comparisons.items()
    ]
    return pd.DataFrame(rows).to_string(index=False)


def rescoring_table(before: Sequence[SettingResult], after: Sequence[RescoredResult]) -> str:
    """The same settings by the metric that they were measured with and by another, a row each."""
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
    return pd.DataFrame(rows).fillna("").to_string(index=False)


def _setting_row(result: SettingResult) -> dict[str, Any]:
    low, high = result.accuracy_ci95 or (None, None)
    interval = {"accuracy_ci95_low": low, "accuracy_ci95_high": high}
    row = {name: interval[name] if name in interval else getattr(result, name) for name in SETTING_COLUMNS}
    stats, summary = result.aggregate_stats, None if result.energy is None else result.energy.summary
    row |= {_with_unit(name): stats.get(name) for name in STAT_COLUMNS}
    row |= {name: getattr(result, name) for name in SCORING_COLUMNS}
    # In files from before the key was there every sample was measured.
    measured = result.num_latency_samples
    row |= dict.fromkeys(LATENCY_COLUMNS, result.num_samples if measured is None else measured)
    row |= {name: getattr(result, name) for name in STEADINESS_COLUMNS}
    row |= {column: getattr(summary, key, None) for column, key in ENERGY_COLUMNS.items()}
    row |= {"energy_sample_j_mean": stats.get("energy_j_mean")}
    row |= {name: getattr(result.hardware_utilisation, name, None) for name in UTILISATION_COLUMNS}
    return row | {column: getattr(summary, key, None) for column, key in CORRECT_ANSWER_COLUMNS.items()}


def _with_unit(name: str) -> str:
    return f"{name}_ms" if name.startswith("T_") else name


def _accuracy(result: SettingResult) -> str:
    interval = result.accuracy_ci95
    if result.accuracy is None or interval is None:
        return "-"
    return f"{result.accuracy:.3f} [{interval[0]:.2f}, {interval[1]:.2f}]"


def _difference(comparison: PairedComparison) -> str:
    if comparison.difference is None or comparison.interval is None:
        return "-"
    low, high = comparison.interval
    return f"{comparison.difference:+.3f} [{low:+.3f}, {high:+.3f}]"


def _text(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
