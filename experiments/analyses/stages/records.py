"""The contents of E1's three JSON files and of its four CSV files."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from experiment_core_utils.knobs.registry import all_knobs
from experiment_core_utils.primitives.csv_tables import Cell, split_intervals
from experiment_core_utils.records.setting_result import FixedLengthTime
from experiment_core_utils.records.stages import STAGES
from experiments.analyses.stages.analysis import StageAnalysis
from experiments.analyses.stages.fractions import Regime, grouped, tokens_until_decode_is_half
from experiments.analyses.stages.profiles import PARTS, PartTime, ProfiledRequest, ProfiledStage
from experiments.analyses.stages.scaling import LineFit, StageLine
from experiments.analyses.sweeps import Sweep

SCHEMA_VERSION = 1
Row = dict[str, Cell]
# Of x, by stage; in the CSV, where all stages have the same columns, it is the unit of `driver`.
_UNITS = {"vision": "feature", "prefill": "token", "decode": "token"}


def source_fields(sweep: Sweep) -> dict[str, Any]:
    """The origin of the figures, in each of the files."""
    shared = asdict(sweep.provenance)
    return {
        **shared,
        "num_settings": len(sweep.settings),
        "num_samples": sweep.num_samples,
        "num_failed_samples": sum(setting.result.num_failed_samples for setting in sweep.settings),
        "num_pictures": len(
            {
                (each.task, sample.metadata.image_id)
                for each in sweep.settings
                for sample in each.result.per_sample_results
            }
        ),
    }


def contents_of(sweep: Sweep, found: StageAnalysis) -> dict[str, dict[str, Any]]:
    """The contents of E1's JSON files by name."""
    head = {"schema_version": SCHEMA_VERSION, "source": source_fields(sweep)}
    return {
        "e1_stage_latency_breakdown": head | _breakdown_fields(found),
        "e1_flops_vs_latency": head | _flops_fields(sweep, found),
        "e1_attention_ffn_breakdown": head
        # Null, with the reason, where there are none.
        | {"profiles": list(map(_profile_fields, found.profiles)) or None, "reason": found.profiles_reason},
    }


def tables_of(found: StageAnalysis) -> dict[str, list[Row]]:
    """The rows of E1's CSV files by name."""
    pooled = _pooled(found)
    return {
        "e1_stage_shares": [
            _fraction_row(each, found.fixed_lengths.get((each.task, str(each.setting))))
            | {"total_share_of_reference": found.share_of_reference(each)}
            for each in (*found.by_regime, *found.by_setting)
        ],
        "e1_line_fits": [
            {"stage": line.stage, **split_intervals(_line_fields(line, "unit", pooled))} for line in found.lines
        ],
        "e1_flops_vs_latency": [asdict(point) for point in found.points],
        "e1_attention_ffn_breakdown": _component_rows(found.profiles),
    }


def _breakdown_fields(found: StageAnalysis) -> dict[str, Any]:
    groups = grouped(found.generations, lambda each: (each.task, each.vision))
    pooled = _pooled(found)
    lines = {
        stage: [_line_fields(line, _UNITS[stage], pooled) for line in found.lines if line.stage == stage]
        for stage in STAGES
    }
    return {
        "num_measured": len(found.generations),
        "references": dict(found.references),
        "regimes": [asdict(each) for each in found.by_regime],
        "settings": [asdict(each) for each in found.by_setting],
        "fixed_length": [
            {"task": task, "setting": setting, "num_tokens": time.num_tokens, "mean_ms": time.mean, "how": time.how}
            for (task, setting), time in found.fixed_lengths.items()
        ],
        "decode_is_half": [
            {"task": task, "vision": vision, "output_tokens": tokens_until_decode_is_half(own)}
            for (task, vision), own in groups.items()
        ],
        "dominant_stage": [_dominated(stage, found.by_regime, found.by_setting) for stage in STAGES],
        "vision_vs_image_features": lines["vision"],
        "prefill_vs_input_tokens": lines["prefill"],
        "decode_vs_output_tokens": lines["decode"],
    }


def _dominated(stage: str, by_regime: Sequence[Regime], by_setting: Sequence[Regime]) -> dict[str, Any]:
    regimes = [
        {"task": each.task, "vision": each.vision, "output_tokens": each.output_tokens}
        for each in by_regime
        if each.dominant == stage
    ]
    settings = [{"task": each.task, "setting": each.setting} for each in by_setting if each.dominant == stage]
    return {"stage": stage, "regimes": regimes, "settings": settings}


def _pooled(found: StageAnalysis) -> dict[str, None]:
    """The knobs that lines name, those with published columns in any case."""
    names = [knob.name for knob in all_knobs() if knob.published and not knob.changes_tokens]
    return dict.fromkeys([*names, *(name for line in found.lines for name in line.levels)])


def _line_fields(line: StageLine, unit: str, pooled: Mapping[str, None]) -> dict[str, Any]:
    """Null for a knob whose values are pooled."""
    fit = _fit_fields(line.fit, line.reason, unit)
    return {"task": line.task, "driver": line.driver, **pooled, **line.levels, **fit}


def _fit_fields(fit: LineFit | None, reason: str | None, unit: str) -> dict[str, Any]:
    """The fields of a line by names with units; all null without a line."""
    names = {
        "intercept_ms": "intercept", "intercept_ms_ci95": "intercept_ci95", f"slope_ms_per_{unit}": "slope",
        f"slope_ms_per_{unit}_ci95": "slope_ci95", "r2": "r2", "residual_std_ms": "residual_std", "num_points": "n",
        "num_clusters": "num_clusters", "x_min": "x_min", "x_max": "x_max",
    }  # fmt: skip
    fields = {name: None if fit is None else getattr(fit, own) for name, own in names.items()}
    return fields | {"reason": reason}


def _flops_fields(sweep: Sweep, found: StageAnalysis) -> dict[str, Any]:
    return {
        "points": [asdict(point) for point in found.points],
        "reason": None if found.points else "no sample has operations: the architecture is not known",
        "mfu_reason": sweep.provenance.peak_reason if sweep.provenance.peak_flops_per_s is None else None,
        "fits": {stage: _fit_fields(fit, reason, "tflop") for stage, (fit, reason) in found.flops_lines.items()},
    }


def _profile_fields(profile: ProfiledRequest) -> dict[str, Any]:
    return {
        "trace": profile.trace.name,
        **{name: getattr(profile, name) for name in ("setting", "sample_id", "mode", "device")},
        "stages": {stage: _stage_fields(parts) for stage, parts in profile.stages.items()},
    }


def _stage_fields(stage: ProfiledStage) -> dict[str, Any]:
    parts = {"attention": stage.parts["attention"], "ffn": stage.ffn()}
    parts |= {name: stage.parts[name] for name in PARTS if name != "attention"}
    return {
        "calls": stage.calls,
        "host_ms": stage.whole.host_ms,
        "device_ms": stage.whole.device_ms,
        "parts": {name: _part_fields(part, stage.whole) for name, part in parts.items()},
    }


def _part_fields(part: PartTime, whole: PartTime) -> dict[str, float | None]:
    return {
        "host_ms": part.host_ms,
        "host_share": part.host_ms / whole.host_ms if whole.host_ms else None,
        "device_ms": part.device_ms,
        "device_share": part.device_ms / whole.device_ms if part.device_ms is not None and whole.device_ms else None,
    }


def _fraction_row(regime: Regime, fixed: FixedLengthTime | None) -> Row:
    row: Row = {
        "task": regime.task,
        "vision": regime.vision,
        "setting": regime.setting,
        "output_tokens": regime.output_tokens,
        "num_generations": regime.n,
        "num_pictures": regime.num_pictures,
        "num_shorter": regime.num_shorter,
        "total_ms": regime.total_ms,
        "dominant_stage": regime.dominant,
    }
    for stage, each in regime.stages.items():
        share = {f"{stage}_share": each.share, f"{stage}_share_ci95": each.share_ci95}
        row |= {f"{stage}_ms": each.mean_ms, **split_intervals(share)}
    return row | {
        "fixed_length_tokens": None if fixed is None else fixed.num_tokens,
        "fixed_length_ms": None if fixed is None else fixed.mean,
    }


def _component_rows(profiles: Sequence[ProfiledRequest]) -> list[Row]:
    """A row for each part of each stage of each profiled request."""
    return [
        {"setting": profile.setting, "sample_id": profile.sample_id, "stage": stage, "calls": parts.calls,
         "part": name, **entry}
        for profile in profiles
        for stage, parts in profile.stages.items()
        for name, entry in _stage_fields(parts)["parts"].items()
    ]  # fmt: skip
