"""The contents of E3's JSON and CSV files, and the lines that its driver prints."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import pandas as pd

from experiment_core_utils.primitives.csv_tables import Cell
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.records.caveats import sentences
from experiments.analyses.latency.analysis import LatencyModel
from experiments.analyses.latency.features import RUNS, RequestColumns
from experiments.analyses.latency.guardrail import BUDGET_PERCENTILES, guardrail_curve
from experiments.analyses.latency.recalibration import METHODS, RecalibrationStudy
from experiments.analyses.latency.stage_regression import PREDICTED, measured_times
from experiments.analyses.latency.validation import ModelErrors, NoiseFloor
from experiments.analyses.sweeps import Sweep

SCHEMA_VERSION = 1
FEATURES = tuple(each.name for each in fields(RequestColumns))
# Of a validation, in its file by the same names.
FIGURES = ("estimator", "linear", "logs", "forest", "repeatability", "noise", "after_vision", "coverage")


def contents_of(
    sweep: Sweep, found: LatencyModel, studies: Sequence[RecalibrationStudy]
) -> dict[str, Mapping[str, Any]]:
    """The contents of E3's JSON files by name."""
    return {
        "e3_latency_estimator": found.estimator.content(),
        "e3_validation": _validation_fields(sweep, found, studies),
    }


def _validation_fields(sweep: Sweep, found: LatencyModel, studies: Sequence[RecalibrationStudy]) -> dict[str, Any]:
    samples, estimator, validation = found.samples, found.estimator, found.validation
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "latency_estimator_validation",
        "model": sweep.provenance.model,
        "device": sweep.provenance.device,
        "execution": sweep.provenance.execution,
        "commands": list(sweep.provenance.commands),
        "num_runs": found.num_runs,
        "num_samples": len(samples),
        "num_settings": len(np.unique(samples.knobs)),
        "num_folds": validation.num_folds,
        "level": estimator.level,
        "caveats": sentences(found.caveats),
        "caveat_records": [caveat.model_dump() for caveat in found.caveats],
        **{key: {name: asdict(each) for name, each in getattr(validation, key).items()} for key in FIGURES},
        "left_out": {name: asdict(each) for name, each in validation.others.items()},
        "recalibrations": [asdict(study) for study in studies],
        "guardrail": {
            "budget_percentiles": list(BUDGET_PERCENTILES),
            "margins": [asdict(each) for each in found.curve],
            "by_length": {
                length: [asdict(each) for each in guardrail_curve(total, samples.run_totals)]
                for length, total in validation.totals.items()
            },
        },
    }


def tables_of(found: LatencyModel) -> dict[str, list[dict[str, Cell]]]:
    """The rows of E3's CSV file by name: one for each sample, times in ms, each predicted with its setting left out."""
    samples, left_out = found.samples, found.validation.left_out
    columns: dict[str, Any] = {"task": samples.tasks, "setting": [key.split(" ", 1)[1] for key in samples.settings]}
    columns |= {"run": samples.wholes[RUNS]} if RUNS in samples.wholes else {}
    columns |= {name: getattr(samples.requests, name) for name in FEATURES}
    measured = measured_times(samples)
    for name in PREDICTED:
        columns[f"{name}_measured_ms"] = measured[name]
        columns[f"{name}_predicted_ms"] = left_out.times[name]
        columns[f"{name}_low_ms"] = left_out.low[name]
        columns[f"{name}_high_ms"] = left_out.high[name]
    cells = {name: [_cell(value, name) for value in values] for name, values in columns.items()}
    return {"e3_predictions": [dict(zip(cells, row, strict=True)) for row in zip(*cells.values(), strict=True)]}


def _cell(value: Any, name: str) -> Cell:
    if isinstance(value, str) or np.isnan(value):
        return str(value) if isinstance(value, str) else None
    return int(value) if name in FEATURES and float(value).is_integer() else round(float(value), 6)


def detail_lines(model: LatencyModel, studies: Sequence[RecalibrationStudy]) -> Iterator[str]:
    """The tables that the driver prints on request."""
    fitted, validation = model.estimator.fitted, model.validation
    size = f"{counted(fitted.num_settings, 'setting')}, {counted(fitted.num_samples, 'sample')}"
    yield f"{size}; errors at settings left out"
    yield _error_table(validation, validation.noise)
    yield _percentages(pd.DataFrame({"coverage": {name: each.share for name, each in validation.coverage.items()}}))
    for what, left_out in validation.others.items():
        yield f"whole {what} left out" if what in ("pictures", RUNS) else f"whole levels of {what} left out"
        yield _error_table(left_out, {}) if left_out.reason is None else f"none: {left_out.reason}"
    for study in studies:
        if study.reason is not None:
            yield f"recalibration ({study.kind}): none, {study.reason}"
            continue
        yield f"recalibration ({study.kind}), from {study.source} to {study.target}, error of T_total by samples:"
        errors = pd.DataFrame([asdict(error) for error in study.errors if error.name == "T_total"])
        yield _percentages(errors.pivot(index="method", columns="num_samples", values="median").reindex(METHODS))
    yield "by margin, fractions of admitted requests that are late and of fitting ones that are rejected:"
    rates = pd.DataFrame([asdict(each) for each in model.curve]).set_index("margin").astype(float)
    yield _percentages(rates[["violation_rate", "false_rejection_rate"]])


def _error_table(found: ModelErrors, noise: Mapping[str, NoiseFloor]) -> str:
    """A row for each time: errors at the typical request of a setting, and at a single request."""
    errors = {"estimator": found.estimator, "line": found.linear, "in logs": found.logs, "forest": found.forest,
              "noise": noise, "after vision": found.after_vision}  # fmt: skip
    columns = {
        (measure, label): {name: getattr(each, f"{measure}_mape") for name, each in own.items()}
        for measure in ("setting", "sample")
        for label, own in errors.items()
        if own
    }
    return _percentages(pd.DataFrame(columns).reindex(list(found.estimator)))


def _percentages(table: pd.DataFrame) -> str:
    return table.to_string(float_format="{:.1%}".format, na_rep="-")
