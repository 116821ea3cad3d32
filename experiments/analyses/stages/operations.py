"""Operations against time for each stage, with MFU where the GPU's peak is known."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from experiment_core_utils.records.stages import STAGES
from experiments.analyses.stages.scaling import LineFit, known_line

TERA = 1e12


@dataclass(frozen=True)
class StagePoint:
    """A stage of one setting: means over the samples that have it."""

    task: str
    setting: str
    stage: str
    n: int
    tflop: float  #: operations in 10^12, one multiply-add as 2; decode is all steps
    ms: float
    tflop_per_s: float  #: summed operations over summed time
    mfu: float | None  #: that as a fraction of the peak; None where the peak is not known


def with_stage_flops(samples: pd.DataFrame) -> pd.DataFrame:
    """The samples with `<stage>_tflop` and `<stage>_ms`; NaN where a sample lacks the stage or its operations."""
    steps = (samples["output_tokens"] - 1).where(samples["output_tokens"] > 1)
    return samples.assign(
        vision_tflop=samples["vision_flops"] / TERA,
        prefill_tflop=samples["prefill_flops"] / TERA,
        decode_tflop=samples["decode_flops_per_token"] * steps / TERA,
        vision_ms=samples["T_vision_total_ms"],
        prefill_ms=samples["T_LLM_prefill_ms"],
        decode_ms=samples["T_LLM_decode_ms"],
    )


def stage_points(samples: pd.DataFrame, peak_flops_per_s: float | None) -> list[StagePoint]:
    """The point of each setting and stage, settings in the frame's order; none where operations are not known."""
    points = []
    frame = with_stage_flops(samples)
    columns = {stage: frame[[f"{stage}_tflop", f"{stage}_ms"]].to_numpy(np.float64) for stage in STAGES}
    places: dict[tuple[str, str], list[int]] = {}
    for place, name in enumerate(zip(frame["task"], frame["setting"], strict=True)):
        places.setdefault(name, []).append(place)
    for (task, setting), own in places.items():
        for stage in STAGES:
            known = columns[stage][own]
            known = known[~np.isnan(known).any(axis=1)]
            if not len(known):
                continue
            work, time_ms = float(known[:, 0].sum()), float(known[:, 1].sum())
            speed = work / time_ms * 1e3
            mfu = None if peak_flops_per_s is None else speed * TERA / peak_flops_per_s
            n = len(known)
            points.append(StagePoint(task, setting, stage, n, work / n, time_ms / n, speed, mfu))
    return points


def stage_lines(samples: pd.DataFrame) -> dict[str, tuple[LineFit | None, str | None]]:
    """The line of ms against TFLOP over all samples for each stage; the intercept is what operations do not explain."""
    frame = with_stage_flops(samples)
    lines = {}
    for stage in STAGES:
        known = frame.dropna(subset=[f"{stage}_tflop", f"{stage}_ms"])
        pictures = list(zip(known["task"], known["image_id"], strict=True))
        settings = list(zip(known["task"], known["setting"], strict=True))
        lines[stage] = known_line(list(known[f"{stage}_tflop"]), list(known[f"{stage}_ms"]), (pictures, settings))
    return lines
