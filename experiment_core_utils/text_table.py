"""The table that closes a text run."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from experiment_core_utils.l_results_csv_cleaning import aligned_text


def text_table(results: Sequence[Mapping[str, Any]]) -> str:
    """One row an experiment: what was varied, rates of output tokens and prompts, first token, padding, energy.

    `-` stands for what was not measured.
    """
    rows = [_row(result) for result in results]
    frame = pd.DataFrame(rows, columns=list(dict.fromkeys(name for row in rows for name in row)))
    return aligned_text(frame)


def _row(result: Mapping[str, Any]) -> dict[str, Any]:
    metrics, energy = result["inference_metrics"], result["global_energy_results"]
    ttft = metrics["ttft_s"]
    return {
        "id": result["experiment_id"],
        **{key.rpartition(".")[2]: value for key, value in result["varied"].items()},
        "prompts": metrics["num_prompts"],
        "out tokens": metrics["total_output_tokens"],
        "tokens/s": _rounded(metrics["tokens_per_second"], 1),
        "prompts/s": _rounded(metrics["queries_per_second"], 2),
        "first token ms": None if ttft is None else _rounded(1e3 * ttft["mean"], 1),
        "padding": _rounded(metrics["padding_share"], 3),
        "energy Wh": _rounded(_times(energy["total_energy_kwh"], 1e3), 4),
    }


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _rounded(value: float | None, digits: int) -> str | None:
    return None if value is None else f"{value:.{digits}f}"
