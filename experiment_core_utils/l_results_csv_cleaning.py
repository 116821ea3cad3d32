"""In: the JSON files of a run's settings; out: one tidy CSV with a row a setting, and the table that closes a run."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from experiment_core_utils.j_results_saving import write_text_atomically

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


def settings_frame(results: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """One row a setting, columns in fixed order; units in the names (times in ms), absent values empty."""
    return pd.DataFrame([_setting_row(result) for result in results])


def write_settings_csv(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """`settings_frame` as CSV, written whole or not at all."""
    buffer = io.StringIO()
    settings_frame(results).to_csv(buffer, index=False)
    write_text_atomically(buffer.getvalue(), path)


def closing_table(results: Sequence[Mapping[str, Any]]) -> str:
    """The table that a run prints at its end."""
    rows = []
    for result in results:
        stats = result["aggregate_stats"]
        rows.append(
            {
                "vision": result["tier"] or result["vision_tokens_target"],
                "top-k": result["top_k"],
                "blocks": result["num_active_blocks"],
                "crops": _text(result["selected_crops_mean"], 1),
                "tokens": _text(stats.get("prompt_tokens_mean"), 0),
                "accuracy [95 %]": _accuracy(result),
                "vision ms": _text(stats.get("T_vision_total_mean"), 1),
                "prefill ms": _text(stats.get("T_LLM_prefill_mean"), 1),
                "decode ms": _text(stats.get("T_LLM_decode_mean"), 1),
                "total ms": _text(stats.get("T_total_mean"), 1),
                "p95": _text(stats.get("T_total_p95"), 1),
                "ms/token": _text(stats.get("T_decode_per_token_mean"), 2),
                "failed": result["num_failed_samples"],
            }
        )
    return pd.DataFrame(rows).to_string(index=False)


def _setting_row(result: Mapping[str, Any]) -> dict[str, Any]:
    interval = result["accuracy_ci95"] or (None, None)
    values = {**result, "accuracy_ci95_low": interval[0], "accuracy_ci95_high": interval[1]}
    row = {name: values[name] for name in SETTING_COLUMNS}
    stats = result["aggregate_stats"]
    return row | {_with_unit(name): stats.get(name) for name in STAT_COLUMNS}


def _with_unit(name: str) -> str:
    return f"{name}_ms" if name.startswith("T_") else name


def _accuracy(result: Mapping[str, Any]) -> str:
    interval = result["accuracy_ci95"]
    if result["accuracy"] is None or interval is None:
        return "-"
    return f"{result['accuracy']:.3f} [{interval[0]:.2f}, {interval[1]:.2f}]"


def _text(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
