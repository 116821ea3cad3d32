"""Results that commit dfe8f148 wrote, in the form of today: all that differs is filled in here; nothing older is read.

They have no `run_uid`, by which they are known. Their intervals are symmetric about the mean, also of quantities
that are not below 0, and the times of a sample are those of its run with the median total.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from experiment_core_utils.primitives.statistics import positive_interval
from experiment_core_utils.records.json_record import Record
from experiment_core_utils.records.sample_result import times_over_runs

if TYPE_CHECKING:
    from experiment_core_utils.records.setting_result import SettingResult

R = TypeVar("R", bound="SettingResult")
_LOW, _HIGH = "_ci95_low", "_ci95_high"


def completed_result(result: R) -> R:
    """A result as today's code would have written it; one that today's code wrote is returned as it is."""
    if "run_uid" in result.provenance.model_fields_set:
        return result
    energy = result.energy
    if energy is not None and energy.passes is not None:
        figures = [_with_positive_interval(each, "gross_j") for each in energy.passes.figures]
        passes = _with_positive_interval(energy.passes, "j_per_request").with_keys(figures=figures)
        energy = energy.with_keys(passes=passes)
    if energy is not None:
        stages = {
            name: [_with_positive_interval(each, "gross_j") for each in figures]
            for name, figures in energy.stages.items()
        }
        energy = energy.with_keys(stages=stages)
    return result.with_keys(
        aggregate_stats=_with_positive_intervals(result.aggregate_stats),
        per_sample_results=[
            each.with_keys(**times_over_runs(each.runs, each.thinking_tokens)) if each.runs else each
            for each in result.per_sample_results
        ],
        energy=energy,
        provenance=result.provenance.with_keys(run_uid=None, run_uids=None),
    )


def completed_line(kind: str, content: Any) -> Any:
    """A journal's line as today's code would have written it: the host times of a sample are one mapping."""
    lines = [content] if kind == "sample" else content.get("samples", ()) if kind == "group" else ()
    for each in lines:
        measured = each.get("measured")
        if measured is not None and "transfer_s" in measured:
            transfer_s = measured.pop("transfer_s")
            measured["host_s"] = {} if transfer_s is None else {"transfer_s": transfer_s}
    return content


F = TypeVar("F", bound=Record)


def _with_positive_interval(figure: F, name: str) -> F:
    """A figure of energy, whose interval is of the quantity of this name."""
    mean, high = getattr(figure, name), getattr(figure, f"{name}{_HIGH}")
    if mean is None or high is None:
        return figure
    low, high = positive_interval(mean, high - mean)
    return figure.with_keys(**{f"{name}{_LOW}": low, f"{name}{_HIGH}": high})


def _with_positive_intervals(stats: Mapping[str, Any]) -> dict[str, Any]:
    """The spreads, with the intervals of those quantities of which no value is below 0."""
    found = dict(stats)
    for key, high in stats.items():
        name, mark, end = key.partition(_HIGH)
        mean, least = stats.get(f"{name}_mean{end}"), stats.get(f"{name}_min{end}")
        if mark and high is not None and mean is not None and least is not None and least >= 0:
            found[f"{name}{_LOW}{end}"], found[key] = positive_interval(mean, high - mean)
    return found
