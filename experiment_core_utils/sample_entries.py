"""One sample's measurement and score as a record of its setting's result."""

from collections.abc import Sequence
from typing import Any

from experiment_core_utils.energy_entries import sample_energy
from experiment_core_utils.primitives.knobs import KnobSetting
from experiment_core_utils.primitives.records import MeasuredSample, StagedRun
from experiment_core_utils.primitives.units import milliseconds
from experiment_core_utils.setting_result import Metadata, RunTimes, SampleResult
from experiment_core_utils.tasks.interface import Score
from experiment_core_utils.vision_entries import listed


def score_fields(score: Score) -> dict[str, Any]:
    """The fields of a `SampleResult` that depend on how its answer is scored."""
    return {"accuracy": score.value, "parse_status": score.parse_status, "score_details": dict(score.details)}


def sample_result(
    sample: MeasuredSample, score: Score, setting: KnobSetting, outlier_runs: Sequence[int] | None = None
) -> SampleResult:
    """One sample of a result; the times are those of the run with the median total, None without runs.

    Args:
        outlier_runs: indices of runs that stand out; None where they were not judged.
    """
    shape, run, answer, flops = sample.shape, sample.run, sample.answer, sample.flops
    theoretical, actual = shape.theoretical, shape.actual
    return SampleResult.model_construct(
        sample_id=sample.sample_id,
        target_vision_tokens=setting.vision.tokens or (theoretical.pooled_features if theoretical else None),
        target_crops=theoretical.tiles if theoretical else None,
        actual_vision_tokens=shape.vision_tokens,
        vision_tokens_diff=shape.vision_tokens_difference,
        pooled_image_features=actual.pooled_features if actual else None,
        top_k=setting.top_k,
        num_active_blocks=setting.num_active_blocks,
        input_text_tokens=shape.text_tokens,
        image_marker_tokens=shape.image_marker_tokens,
        prompt_tokens=shape.prompt_tokens,
        output_tokens=sample.output_tokens,
        output_ended=sample.ended,
        theoretical_num_crops=theoretical.tiles if theoretical else None,
        theoretical_tiling=listed(theoretical.tiling) if theoretical else None,
        theoretical_image_size=listed(theoretical.image_size) if theoretical else None,
        theoretical_vision_tokens=theoretical.pooled_features if theoretical else None,
        actual_num_crops=actual.tiles if actual else None,
        actual_tiling=listed(actual.tiling) if actual else None,
        actual_image_size=listed(actual.image_size) if actual else None,
        **score_fields(score),
        pred=sample.prediction,
        question_type=sample.question_type,
        metadata=sample_metadata(sample),
        **_run_times(run),
        T_first_token=milliseconds(run.ttft_s) if run else None,
        T_preprocess=milliseconds(shape.preprocess_s),
        T_transfer=milliseconds(sample.transfer_s),
        vision_flops=flops.vision_flops if flops else None,
        prefill_flops=flops.prefill_flops if flops else None,
        decode_flops_per_token=flops.decode_flops_per_token if flops else None,
        **sample_energy(sample),
        outputs_identical=sample.outputs_identical,
        outlier_runs=list(outlier_runs) if outlier_runs is not None else None,
        accuracy_batch_size=answer.batch_size if answer else None,
        accuracy_batch_limit=answer.batch_limit if answer else None,
        runs=[
            RunTimes.model_construct(
                **_run_times(each), T_inter_token=[milliseconds(gap) for gap in each.inter_token_s]
            )
            for each in sample.runs
        ],
    )


def sample_metadata(sample: MeasuredSample) -> Metadata:
    """What the answer is judged against and what the task says; enough to score the answer again.

    What the task says does not replace the former.
    """
    judged = {"question": sample.metadata["question"], "answers": list(sample.references), "image_id": sample.image_id}
    if sample.options:
        judged |= {"options": list(sample.options), "answer_index": sample.answer_index}
    return Metadata.model_construct(**(judged | sample.metadata | judged))


def _run_times(run: StagedRun | None) -> dict[str, Any]:
    """The published stage times of one run, in milliseconds; all None without a run."""
    return {
        "T_vision_total": milliseconds(run.vision_s) if run else None,
        "T_LLM_prefill": milliseconds(run.prefill_s) if run else None,
        "T_LLM_decode": milliseconds(run.decode_s) if run else None,
        "T_total": milliseconds(run.total_s) if run else None,
        "T_decode_per_token": milliseconds(run.tpot_s) if run else None,
    }
