"""In: one setting's samples and what was noted around them; out: the keys of its result that say how steady it was."""

from collections.abc import Mapping
from typing import Any

from experiment_core_utils.primitives.distributions import relative_half_width
from experiment_core_utils.primitives.records import MeasuredSetting, MeasuringOrder, WarmUp
from experiment_core_utils.primitives.units import milliseconds


def steadiness_entries(
    key: str, order: MeasuringOrder, until_precision: float | None, merged: MeasuredSetting
) -> dict[str, Any]:
    """The top-level keys `setting_order`, `warmup` and `precision`; see `docs/results_schema.md`."""
    return {
        "setting_order": order_entry(key, order),
        "warmup": [warmup_entry(each) for each in merged.warmups],
        "precision": precision_entry(until_precision, merged),
    }


def order_entry(key: str, order: MeasuringOrder) -> Mapping[str, Any] | None:
    """The setting's place, counted from 0; None where it is not part of the plan."""
    if key not in order.keys:
        return None
    return {"how": order.how, "seed": order.seed, "position": order.keys.index(key), "num_settings": len(order.keys)}


def warmup_entry(warmup: WarmUp) -> dict[str, Any]:
    """One process's warm-up in one run."""
    return {
        "rank": warmup.rank,
        "experiment_id": warmup.experiment_id,
        "num_runs": len(warmup.total_s),
        "is_stable": warmup.is_stable,
        "spread_of_last_3": warmup.spread,
        "T_total": [milliseconds(total) for total in warmup.total_s],
    }


def precision_entry(until_precision: float | None, merged: MeasuredSetting) -> dict[str, Any]:
    """How well the mean total time is known, and why no more samples were asked for."""
    totals_s = [sample.run.total_s for sample in merged.samples]
    return {
        "asked": until_precision,
        "reached": relative_half_width(totals_s, [sample.image_id for sample in merged.samples]),
        "stopped_by": "precision" if merged.num_stopped_early else "num_samples",
        "num_processes_stopped": merged.num_stopped_early,
    }
