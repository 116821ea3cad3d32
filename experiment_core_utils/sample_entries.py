"""In: one sample's measurement and score; out: its entries in the JSON file of a setting, under published names."""

from collections.abc import Sequence
from typing import Any

from experiment_core_utils.energy_entries import sample_energy
from experiment_core_utils.g_metrics_inference import vision_tokens_difference
from experiment_core_utils.primitives.knobs import KnobSetting
from experiment_core_utils.primitives.records import MeasuredSample, StagedRun, VisionGeometry
from experiment_core_utils.primitives.units import milliseconds
from experiment_core_utils.tasks.interface import Score


def score_entries(score: Score) -> dict[str, Any]:
    """The keys of a sample that depend on how its answer is scored."""
    return {
        "accuracy": score.value,
        "parse_status": score.parse_status,
        "score_details": dict(score.details),
    }


def sample_result(
    sample: MeasuredSample, score: Score, setting: KnobSetting, outlier_runs: Sequence[int] | None = None
) -> dict[str, Any]:
    """One entry of `per_sample_results`; the times are those of the run with the median total, None without runs.

    Args:
        outlier_runs: indices of runs that stand out; None where they were not judged.
    """
    shape, run, answer = sample.shape, sample.run, sample.answer
    theoretical, actual = shape.theoretical, shape.actual
    return {
        "sample_id": sample.sample_id,
        "target_vision_tokens": setting.vision.tokens or (theoretical.pooled_features if theoretical else None),
        "target_crops": theoretical.tiles if theoretical else None,
        "actual_vision_tokens": shape.vision_tokens,
        "vision_tokens_diff": vision_tokens_difference(sample),
        "pooled_image_features": actual.pooled_features if actual else None,
        "top_k": setting.top_k,
        "num_active_blocks": setting.num_active_blocks,
        "input_text_tokens": shape.text_tokens,
        "image_marker_tokens": shape.image_marker_tokens,
        "prompt_tokens": shape.prompt_tokens,
        "output_tokens": sample.output_tokens,
        "output_ended": sample.ended,
        **theoretical_entries(theoretical),
        "actual_num_crops": actual.tiles if actual else None,
        "actual_tiling": _listed(actual.tiling) if actual else None,
        "actual_image_size": _listed(actual.image_size) if actual else None,
        **score_entries(score),
        "pred": sample.prediction,
        "question_type": sample.question_type,
        "metadata": sample_metadata(sample),
        **run_times(run),
        "T_first_token": milliseconds(run.ttft_s) if run else None,
        "T_preprocess": milliseconds(shape.preprocess_s),
        "T_transfer": milliseconds(sample.transfer_s),
        "vision_flops": sample.flops.vision_flops if sample.flops else None,
        "prefill_flops": sample.flops.prefill_flops if sample.flops else None,
        "decode_flops_per_token": sample.flops.decode_flops_per_token if sample.flops else None,
        **sample_energy(sample),
        "outputs_identical": sample.outputs_identical,
        "outlier_runs": list(outlier_runs) if outlier_runs is not None else None,
        "accuracy_batch_size": answer.batch_size if answer else None,
        "accuracy_batch_limit": answer.batch_limit if answer else None,
        "runs": [
            {**run_times(each), "T_inter_token": [milliseconds(gap) for gap in each.inter_token_s]}
            for each in sample.runs
        ],
    }


def sample_metadata(sample: MeasuredSample) -> dict[str, Any]:
    """What the answer is judged against and what the task says; enough to score the answer again.

    What the task says does not replace the former.
    """
    judged = {"question": sample.metadata["question"], "answers": list(sample.references), "image_id": sample.image_id}
    if sample.options:
        judged |= {"options": list(sample.options), "answer_index": sample.answer_index}
    return judged | sample.metadata | judged


def run_times(run: StagedRun | None) -> dict[str, float | None]:
    """The published stage times of one run, in milliseconds; all None without a run."""
    return {
        "T_vision_total": milliseconds(run.vision_s) if run else None,
        "T_LLM_prefill": milliseconds(run.prefill_s) if run else None,
        "T_LLM_decode": milliseconds(run.decode_s) if run else None,
        "T_total": milliseconds(run.total_s) if run else None,
        "T_decode_per_token": milliseconds(run.tpot_s) if run else None,
    }


def theoretical_entries(geometry: VisionGeometry | None) -> dict[str, Any]:
    """What a picture's size and the vision target call for; all None without a picture."""
    if geometry is None:
        return dict.fromkeys(
            ("theoretical_num_crops", "theoretical_tiling", "theoretical_image_size", "theoretical_vision_tokens")
        )
    return {
        "theoretical_num_crops": geometry.tiles,
        "theoretical_tiling": _listed(geometry.tiling),
        "theoretical_image_size": _listed(geometry.image_size),
        "theoretical_vision_tokens": geometry.pooled_features,
    }


def _listed(pair: tuple[int, int] | None) -> list[int] | None:
    return None if pair is None else list(pair)
