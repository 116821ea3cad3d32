"""The contents of E3's JSON and CSV files, and the lines that its driver prints."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from experiment_core_utils.primitives.csv_tables import Cell
from experiment_core_utils.records.caveats import sentences
from experiments.analyses.latency.analysis import LatencyModel
from experiments.analyses.latency.guardrail import BUDGET_PERCENTILES, guardrail_curve
from experiments.analyses.latency.recalibration import METHODS, RecalibrationStudy
from experiments.analyses.latency.stage_regression import PREDICTED, measured_times
from experiments.analyses.latency.validation import Errors
from experiments.analyses.sweeps import Sweep

SCHEMA_VERSION = 1
FEATURES = ("vision_tokens", "crops", "text_tokens", "top_k", "num_active_blocks", "output_tokens")
# Of a validation, in its file by the same names.
FIGURES = ("estimator", "linear", "forest", "repeatability", "noise", "after_vision", "coverage")


def contents_of(
    sweep: Sweep, found: LatencyModel, studies: Sequence[RecalibrationStudy]
) -> dict[str, Mapping[str, Any]]:
    """The contents of E3's JSON files by name."""
    return {
        "e3_latency_estimator": found.estimator.content(),
        "e3_validation": _validation_fields(sweep, found, studies),
    }


def tables_of(found: LatencyModel) -> dict[str, list[dict[str, Cell]]]:
    """The rows of E3's CSV file by name."""
    return {"e3_predictions": _prediction_rows(found)}


def _validation_fields(sweep: Sweep, found: LatencyModel, studies: Sequence[RecalibrationStudy]) -> dict[str, Any]:
    samples, estimator, validation = found.samples, found.estimator, found.validation
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "latency_estimator_validation",
        "model": sweep.provenance.model,
        "device": sweep.provenance.device,
        "execution": sweep.provenance.execution,
        "commands": list(sweep.provenance.commands),
        "num_samples": len(samples),
        "num_settings": len(np.unique(samples.knobs)),
        "num_folds": validation.num_folds,
        "level": estimator.level,
        "caveats": sentences(found.caveats),
        "caveat_records": [each.model_dump() for each in found.caveats],
        "forms": {name: stage.form for name, stage in estimator.fitted.stages.items()},
        **{key: {name: asdict(each) for name, each in getattr(validation, key).items()} for key in FIGURES},
        "left_out": {name: asdict(each) for name, each in validation.others.items()},
        "control_drift": found.drift,
        "recalibrations": [asdict(each) for each in studies],
        "guardrail": {
            "budget_percentiles": list(BUDGET_PERCENTILES),
            "margins": [asdict(each) for each in found.curve],
            "by_length": {
                length: [asdict(each) for each in guardrail_curve(total, samples.times["T_total"])]
                for length, total in validation.totals.items()
            },
        },
    }


def _prediction_rows(found: LatencyModel) -> list[dict[str, Cell]]:
    """A row for each sample; times in ms, each predicted with its setting left out."""
    samples, left_out = found.samples, found.validation.left_out
    columns: dict[str, Any] = {"task": samples.tasks, "setting": [key.split(" ", 1)[1] for key in samples.settings]}
    columns |= {name: getattr(samples.requests, name) for name in FEATURES}
    measured = measured_times(samples)
    for name in PREDICTED:
        columns[f"{name}_measured_ms"] = measured[name]
        columns[f"{name}_predicted_ms"] = left_out.times[name]
        columns[f"{name}_low_ms"] = left_out.low[name]
        columns[f"{name}_high_ms"] = left_out.high[name]
    cells = {name: [_cell(value, name) for value in values] for name, values in columns.items()}
    return [dict(zip(cells, row, strict=True)) for row in zip(*cells.values(), strict=True)]


def _cell(value: Any, name: str) -> Cell:
    if isinstance(value, str) or np.isnan(value):
        return str(value) if isinstance(value, str) else None
    return int(value) if name in FEATURES and float(value).is_integer() else round(float(value), 6)


def detail_lines(model: LatencyModel, studies: Sequence[RecalibrationStudy]) -> Iterator[str]:
    """The tables that the driver prints on request."""
    fitted, validation = model.estimator.fitted, model.validation
    yield f"{fitted.num_settings} settings, {fitted.num_samples} samples; errors at settings left out, in %"
    header = f"{'setting':>8}{'linear':>8}{'forest':>8}{'noise':>7}"
    yield f"{'':<20}{'form':<14}{header} {header.replace('setting', ' sample')}{'coverage':>10}"
    for name, found in validation.estimator.items():
        form = fitted.stages[name].form if name in fitted.stages else "-"
        errors = found, validation.linear[name], validation.forest[name]
        noise = validation.noise.get(name)
        of_setting, of_sample = (
            ("-", "-") if noise is None else (f"{noise.setting_mape:.1%}", f"{noise.sample_mape:.1%}")
        )
        yield (
            f"{name:<20}{form:<14}{_cells(errors, 'setting_mape')}{of_setting:>7} "
            f"{_cells(errors, 'sample_mape')}{of_sample:>7}{validation.coverage[name].share:>10.1%}"
        )
    yield from _after_vision_lines(validation.after_vision)
    for what, left_out in validation.others.items():
        yield f"whole levels of {what} left out" if what != "pictures" else "whole pictures left out"
        if left_out.reason is not None:
            yield f"  none: {left_out.reason}"
        for name, found in left_out.estimator.items():
            errors = found, left_out.linear[name], left_out.forest[name]
            yield f"  {name:<32}{_cells(errors, 'setting_mape')}{'':>8}{_cells(errors, 'sample_mape')}"
        yield from _after_vision_lines(left_out.after_vision)
    for study in studies:
        yield from _recalibration_lines(study)
    for each in model.curve:
        violations = "-" if each.violation_rate is None else f"{each.violation_rate:.1%}"
        rejected = "-" if each.false_rejection_rate is None else f"{each.false_rejection_rate:.1%}"
        yield f"margin {each.margin:+.2f}: {violations} of admitted requests late, {rejected} of fitting ones rejected"


def _after_vision_lines(found: Mapping[str, Errors]) -> Iterator[str]:
    for name, each in found.items():
        yield f"  {f'{name}, after vision':<32}{each.setting_mape:>8.1%}{'':>24}{each.sample_mape:>8.1%}"


def _cells(errors: Sequence[Errors], measure: str) -> str:
    return "".join(f"{getattr(each, measure):>8.1%}" for each in errors)


def _recalibration_lines(study: RecalibrationStudy) -> Iterator[str]:
    """A line for each method: the error of T_total by number of samples."""
    if study.reason is not None:
        yield f"recalibration ({study.kind}): none, {study.reason}"
        return
    yield f"recalibration ({study.kind}), from {study.source} to {study.target}, error of T_total:"
    for method in METHODS:
        found = [each for each in study.errors if each.name == "T_total" and each.method == method]
        yield f"  {method:<14}" + "".join(f"{each.num_samples:>5}: {each.median:.1%}" for each in found)
