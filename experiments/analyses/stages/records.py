"""The contents of E1's three JSON files and of its four CSV files."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from experiment_core_utils.models.interface import STAGES
from experiment_core_utils.primitives.csv_tables import Cell
from experiments.analyses.stages.analysis import StageAnalysis
from experiments.analyses.stages.fractions import Generation, Regime, grouped, tokens_until_decode_is_half
from experiments.analyses.stages.operations import StagePoint
from experiments.analyses.stages.profiles import PARTS, PartTime, ProfiledRequest, StageParts
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
        "num_failed_samples": sum(each.result.num_failed_samples for each in sweep.settings),
        "num_pictures": len(
            {
                (each.task, sample.metadata.image_id)
                for each in sweep.settings
                for sample in each.result.per_sample_results
            }
        ),
    }


def breakdown_content(
    sweep: Sweep,
    generations: Sequence[Generation],
    by_regime: Sequence[Regime],
    by_setting: Sequence[Regime],
    lines: Sequence[StageLine],
) -> dict[str, Any]:
    """`e1_stage_latency_breakdown.json`."""
    groups = grouped(generations, lambda each: (each.task, each.vision))
    return {
        "schema_version": SCHEMA_VERSION,
        "source": source_fields(sweep),
        "num_measured": len(generations),
        "regimes": [asdict(each) for each in by_regime],
        "settings": [asdict(each) for each in by_setting],
        "decode_is_half": [
            {"task": task, "vision": vision, "output_tokens": tokens_until_decode_is_half(own)}
            for (task, vision), own in groups.items()
        ],
        "dominant_stage": [_dominated(stage, by_regime, by_setting) for stage in STAGES],
        "vision_vs_image_features": [_line_fields(each) for each in lines if each.stage == "vision"],
        "prefill_vs_input_tokens": [_line_fields(each) for each in lines if each.stage == "prefill"],
        "decode_vs_output_tokens": [_line_fields(each) for each in lines if each.stage == "decode"],
    }


def _dominated(stage: str, by_regime: Sequence[Regime], by_setting: Sequence[Regime]) -> dict[str, Any]:
    regimes = [
        {"task": each.task, "vision": each.vision, "output_tokens": each.output_tokens}
        for each in by_regime
        if each.dominant == stage
    ]
    settings = [{"task": each.task, "setting": each.setting} for each in by_setting if each.dominant == stage]
    return {"stage": stage, "regimes": regimes, "settings": settings}


def _line_fields(line: StageLine) -> dict[str, Any]:
    return {
        "task": line.task,
        "driver": line.driver,
        "top_k": line.top_k,
        "num_active_blocks": line.num_active_blocks,
        **line_fields(line.fit, line.reason, _UNITS[line.stage]),
    }


def line_fields(fit: LineFit | None, reason: str | None, unit: str) -> dict[str, Any]:
    """The fields of a line by names with units; all null without a line."""
    return {
        "intercept_ms": None if fit is None else fit.intercept,
        "intercept_ms_ci95": None if fit is None else fit.intercept_ci95,
        f"slope_ms_per_{unit}": None if fit is None else fit.slope,
        f"slope_ms_per_{unit}_ci95": None if fit is None else fit.slope_ci95,
        "r2": None if fit is None else fit.r2,
        "residual_std_ms": None if fit is None else fit.residual_std,
        "num_points": None if fit is None else fit.n,
        "num_clusters": None if fit is None else fit.num_clusters,
        "x_min": None if fit is None else fit.x_min,
        "x_max": None if fit is None else fit.x_max,
        "reason": reason if fit is None else fit.reason,
    }


def flops_content(
    sweep: Sweep, points: Sequence[StagePoint], lines: Mapping[str, tuple[LineFit | None, str | None]]
) -> dict[str, Any]:
    """The content of `e1_flops_vs_latency.json`."""
    return {
        "schema_version": SCHEMA_VERSION,
        "source": source_fields(sweep),
        "points": [asdict(each) for each in points],
        "reason": None if points else "no sample has operations: the architecture is not known",
        "mfu_reason": sweep.provenance.peak_reason if sweep.provenance.peak_flops_per_s is None else None,
        "fits": {stage: line_fields(fit, reason, "tflop") for stage, (fit, reason) in lines.items()},
    }


def components_content(sweep: Sweep, profiles: Sequence[ProfiledRequest], reason: str | None) -> dict[str, Any]:
    """The content of `e1_attention_ffn_breakdown.json`; `profiles` is null, with the reason, where there are none."""
    return {
        "schema_version": SCHEMA_VERSION,
        "source": source_fields(sweep),
        "profiles": [_profile_fields(each) for each in profiles] or None,
        "reason": reason,
    }


def _profile_fields(profile: ProfiledRequest) -> dict[str, Any]:
    return {
        "trace": profile.trace.name,
        **{name: getattr(profile, name) for name in ("setting", "sample_id", "mode", "device")},
        "stages": {stage: _stage_fields(parts) for stage, parts in profile.stages.items()},
    }


def _stage_fields(stage: StageParts) -> dict[str, Any]:
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


def fraction_rows(regimes: Sequence[Regime]) -> list[Row]:
    """Rows of the CSV: one for each regime or setting."""
    rows = []
    for each in regimes:
        row: Row = {
            "task": each.task,
            "vision": each.vision,
            "setting": each.setting,
            "output_tokens": each.output_tokens,
            "num_generations": each.n,
            "num_pictures": each.num_pictures,
            "num_shorter": each.num_shorter,
            "total_ms": each.total_ms,
            "dominant_stage": each.dominant,
        }
        for stage, share in each.stages.items():
            low, high = share.share_ci95 or (None, None)
            row |= {
                f"{stage}_ms": share.mean_ms,
                f"{stage}_share": share.share,
                f"{stage}_share_ci95_low": low,
                f"{stage}_share_ci95_high": high,
            }
        rows.append(row)
    return rows


def line_rows(lines: Sequence[StageLine]) -> list[Row]:
    """Rows of the CSV: one for each line, with intervals in two columns."""
    rows = []
    for line in lines:
        entries = line_fields(line.fit, line.reason, "unit")
        row: Row = {"stage": line.stage, "task": line.task, "driver": line.driver}
        row |= {"top_k": line.top_k, "num_active_blocks": line.num_active_blocks}
        rows.append(row | dict(cell for key, entry in entries.items() for cell in _cells(key, entry)))
    return rows


def _cells(key: str, entry: Any) -> list[tuple[str, Cell]]:
    if not key.endswith("_ci95"):
        return [(key, entry)]
    low, high = entry or (None, None)
    return [(f"{key}_low", low), (f"{key}_high", high)]


def point_rows(points: Sequence[StagePoint]) -> list[Row]:
    """Rows of the CSV: one for each stage of each setting."""
    return [asdict(each) for each in points]


def component_rows(profiles: Sequence[ProfiledRequest]) -> list[Row]:
    """Rows of the CSV: one for each part of each stage of each profiled request."""
    return [
        {"setting": profile.setting, "sample_id": profile.sample_id, "stage": stage, "calls": parts.calls,
         "part": name, **entry}
        for profile in profiles
        for stage, parts in profile.stages.items()
        for name, entry in _stage_fields(parts)["parts"].items()
    ]  # fmt: skip


def contents_of(sweep: Sweep, found: StageAnalysis) -> dict[str, dict[str, Any]]:
    """The contents of E1's JSON files by name."""
    return {
        "e1_stage_latency_breakdown": breakdown_content(
            sweep, found.generations, found.by_regime, found.by_setting, found.lines
        ),
        "e1_flops_vs_latency": flops_content(sweep, found.points, found.flops_lines),
        "e1_attention_ffn_breakdown": components_content(sweep, found.profiles, found.profiles_reason),
    }


def tables_of(found: StageAnalysis) -> dict[str, list[Row]]:
    """The rows of E1's CSV files by name."""
    return {
        "e1_stage_shares": fraction_rows([*found.by_regime, *found.by_setting]),
        "e1_line_fits": line_rows(found.lines),
        "e1_flops_vs_latency": point_rows(found.points),
        "e1_attention_ffn_breakdown": component_rows(found.profiles),
    }
