"""In: the energy of a setting or a sample; out: its entries in the setting's JSON file, and what is to be warned of.

Joules, watts and seconds, as the names say.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from experiment_core_utils.meters.energy_statistics import LEAST_WINDOW_S, expanded_interval
from experiment_core_utils.primitives.distributions import ratio_interval
from experiment_core_utils.primitives.energy_records import (
    ALL_DEVICES,
    END_TO_END,
    PREFERRED_SOURCES,
    Closure,
    EnergyFigure,
    EnergyOrigin,
    IdlePower,
    SettingEnergy,
    StageEnergies,
)
from experiment_core_utils.primitives.records import MeasuredSample

CLOSURE_LIMIT = 0.05
_ORIGIN = tuple(each.name for each in fields(EnergyOrigin))
_ABSENT = (None, None, None)


def sample_energy(sample: MeasuredSample) -> dict[str, Any]:
    """The energy keys of one entry of `per_sample_results`: of the run whose times are published."""
    energy, place = sample.energy, sample.run_place
    if energy is None or place is None:
        return dict.fromkeys(("energy_j", "energy_bound_j", "energy_method", "energy_source", "energy_reason"))
    joules = energy.joules[place]
    return {
        "energy_j": joules,
        "energy_bound_j": energy.bounds_j[place],
        "energy_method": None if joules is None else "apportioned",
        "energy_source": None if joules is None else f"{energy.source} ({energy.basis})",
        "energy_reason": energy.reason,
    }


def energy_entry(energy: SettingEnergy | None) -> dict[str, Any] | None:
    """The top-level key `energy`; None where it was not asked for."""
    if energy is None:
        return None
    stages = energy.stages
    return {
        "experiment_id": energy.experiment_id,
        "rank": energy.rank,
        "sample_id": energy.sample_id,
        "output_tokens": stages.output_tokens if stages else None,
        "summary": summary_entry(stages) if stages else None,
        "stages": {
            name: [figure_entry(figure) for figure in figures]
            for name, figures in (stages.figures.items() if stages else ())
        },
        "closures": [closure_entry(each) for each in stages.closures] if stages else [],
        "error_goal": stages.error_goal if stages else None,
        "source_ratios": dict(stages.source_ratios) if stages else {},
        "idle": [idle_entry(before, after) for before, after in stages.idle] if stages else [],
        "missing": dict(energy.missing),
        "reason": energy.reason,
    }


def figure_entry(figure: EnergyFigure) -> dict[str, Any]:
    """One stage by one source."""
    gross = figure.gross_j
    return {
        **asdict(figure.origin),
        "gross_j": gross.mean if gross else None,
        "gross_j_ci95_low": gross.ci_low if gross else None,
        "gross_j_ci95_high": gross.ci_high if gross else None,
        "uncertainty_j": figure.uncertainty_j,
        "idle_w": figure.idle_w,
        "idle_j": figure.idle_j,
        "net_j": figure.net_j,
        "net_uncertainty_j": figure.net_uncertainty_j,
        "act_s": figure.act_s,
        "num_acts": figure.count,
        "window_s": figure.window_s,
        "num_windows": figure.num_windows,
        "reason": figure.reason,
        "remark": figure.remark,
        "window_error": figure.window_error,
    }


def closure_entry(closure: Closure) -> dict[str, Any]:
    """The whole request against the sum of its stages, by one source."""
    values = asdict(closure)
    return {**values.pop("origin"), **values}


def idle_entry(before: IdlePower, after: IdlePower) -> dict[str, Any]:
    """Idle power by one source."""
    reasons = dict.fromkeys(each.reason for each in (before, after) if each.reason is not None)
    return {
        **asdict(before.origin),
        "before_w": before.watts,
        "after_w": after.watts,
        "seconds": before.seconds,
        "reason": "; ".join(reasons) or None,
    }


def summary_entry(stages: StageEnergies) -> dict[str, Any] | None:
    """The figures of the best source that measured the whole request, over its devices; None where none did."""
    whole = _chosen(stages.figures[END_TO_END])
    if whole is None or whole.gross_j is None:
        return None
    found = {name: _of(figures, whole.origin) for name, figures in stages.figures.items()}
    joules = {name: each.gross_j.mean for name, each in found.items() if each is not None and each.gross_j is not None}
    closure = next((each for each in stages.closures if each.origin == whole.origin), None)
    decode_j = joules.get("decode")
    return {
        **asdict(whole.origin),
        "vision_j": joules.get("vision"),
        "prefill_j": joules.get("prefill"),
        "decode_j": decode_j,
        "decode_j_per_token": None if decode_j is None else decode_j / stages.decode_steps,
        "end_to_end_j": whole.gross_j.mean,
        "end_to_end_uncertainty_j": whole.uncertainty_j,
        "end_to_end_idle_j": whole.idle_j,
        "end_to_end_net_j": whole.net_j,
        "j_per_output_token": whole.gross_j.mean / stages.output_tokens,
        "closure_residual_share": closure.residual_share if closure else None,
        "source_ratio": stages.source_ratios[END_TO_END] if whole.origin.component == "gpu" else None,
    }


def with_correct_answers(entry: Mapping[str, Any] | None, accuracy: Mapping[str, Any]) -> dict[str, Any] | None:
    """A setting's `energy` with what a correct answer takes in its summary: made anew where answers are scored anew.

    Joules per correct answer = `end_to_end_j` / (accuracy / best score): what one request takes over the share of
    requests that are answered correctly. A score between 0 and the best counts as that share of a correct answer. The
    energy is of one request, repeated in windows, not of the samples that accuracy is of, so that the two are
    independent: the interval is `ratio_interval` of the accuracy's own (over samples, by picture) and of the energy's
    (`expanded_interval`: windows and ticks). What requests differ in energy is in neither.

    Args:
        entry: as `energy_entry` gives it, or as a result file holds it.
        accuracy: the keys of `accuracy_entries`.
    """
    if entry is None or entry["summary"] is None:
        return None if entry is None else dict(entry)
    summary = dict(entry["summary"])
    (joules, low, high), reason = _per_correct_answer(summary, entry["stages"][END_TO_END], accuracy)
    summary |= {
        "j_per_correct_answer": joules,
        "j_per_correct_answer_ci95_low": low,
        "j_per_correct_answer_ci95_high": high,
        "j_per_correct_answer_reason": reason,
    }
    return {**entry, "summary": summary}


def _per_correct_answer(
    summary: Mapping[str, Any], figures: Sequence[Mapping[str, Any]], accuracy: Mapping[str, Any]
) -> tuple[tuple[float | None, float | None, float | None], str | None]:
    """The figure with its interval, and why one of them is not there."""
    if accuracy["metric_best"] != 1.0:
        return _ABSENT, f"{accuracy['metric']} gives up to {accuracy['metric_best']:g}: it counts no correct answers"
    if accuracy["accuracy"] is None:
        return _ABSENT, "no answer has a score"
    if accuracy["accuracy"] <= 0:
        return _ABSENT, "no answer is correct"
    gross, share = summary["end_to_end_j"], accuracy["accuracy"]
    whole = next(each for each in figures if all(each[name] == summary[name] for name in _ORIGIN))
    if whole["uncertainty_j"] is None or accuracy["accuracy_ci95"] is None:
        return (gross / share, None, None), "the uncertainty of the energy is not known"
    spread = whole["gross_j_ci95_high"] - gross
    energy = expanded_interval(gross, spread, whole["num_windows"], whole["uncertainty_j"])
    low, high = ratio_interval(gross, energy, share, accuracy["accuracy_ci95"])
    return (gross / share, low, high), None if high is not None else "the accuracy may be 0: there is no upper end"


def _chosen(figures: Sequence[EnergyFigure]) -> EnergyFigure | None:
    for component, basis in PREFERRED_SOURCES:
        found = [each for each in figures if (each.origin.component, each.origin.basis) == (component, basis)]
        measured = [each for each in found if each.gross_j is not None]
        if measured and len(measured) == len(found):
            return next((each for each in measured if each.origin.device == ALL_DEVICES), measured[0])
    return None


def _of(figures: Sequence[EnergyFigure], origin: EnergyOrigin) -> EnergyFigure | None:
    return next((each for each in figures if each.origin == origin), None)


def energy_caveats(entry: Mapping[str, Any] | None) -> list[str]:
    """A sentence each for what weakens the figures of a setting's `energy`."""
    if entry is None:
        return []
    summary = entry["summary"]
    if summary is None:
        return [f"energy: not measured: {entry['reason'] or _first_reason(entry)}"]
    source = (summary["component"], summary["basis"], summary["device"])
    caveats = []
    share = summary["closure_residual_share"]
    if share is None:
        caveats.append("energy: whether the stages add up to the whole is not known: a stage was not measured")
    elif abs(share) > CLOSURE_LIMIT:
        caveats.append(f"energy: the stages and the whole request differ by {share:+.1%}")
    own = {
        name: each
        for name, figures in entry["stages"].items()
        for each in figures
        if (each["component"], each["basis"], each["device"]) == source
    }
    short = [name for name, each in own.items() if each["num_windows"] and _mean_window_s(each) < LEAST_WINDOW_S]
    if short:
        caveats.append(f"energy: the windows of {', '.join(short)} are shorter than {LEAST_WINDOW_S:g} s")
    caveats += _missed_goal(own, entry["error_goal"])
    if summary["kind"] == "estimated":
        caveats.append(f"energy: estimated by {summary['source']}, not measured")
    if summary["component"] != "gpu" and any(name.startswith("energy counter of") for name in entry["missing"]):
        caveats.append("energy: the GPU's own energy is not in it")
    return caveats


def _missed_goal(figures: Mapping[str, Mapping[str, Any]], goal: float | None) -> list[str]:
    """One sentence for all stages whose longest window was not long enough."""
    errors = {name: each["window_error"] for name, each in figures.items() if each["window_error"] is not None}
    missed = [f"{name} {error:.1%}" for name, error in errors.items() if goal is not None and error > goal]
    if not missed:
        return []
    return [
        f"energy: the longest windows leave an error of up to {', '.join(missed)}, more than the goal of {goal:.1%}"
    ]


def _mean_window_s(figure: Mapping[str, Any]) -> float:
    mean: float = figure["window_s"] / figure["num_windows"]
    return mean


def _first_reason(entry: Mapping[str, Any]) -> str | None:
    return next((each["reason"] for each in entry["stages"].get(END_TO_END, ()) if each["reason"]), None)
