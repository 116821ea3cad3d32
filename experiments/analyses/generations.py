"""The stage times of each measured generation of a sweep, token by token."""

from experiment_core_utils.primitives.errors import ResultsRefused
from experiment_core_utils.records.setting_result import SampleResult
from experiments.analyses.stages.fractions import Generation
from experiments.analyses.sweeps import StoredSetting, Sweep, vision_label

NO_PICTURE = "no picture"


def generations_of(sweep: Sweep) -> list[Generation]:
    """The published run of every sample that was measured; samples answered in batches have no times and are left out.

    Raises:
        ResultsRefused: a file without the runs of its samples; it is named.
    """
    found = []
    for setting in sweep.settings:
        for sample in setting.result.per_sample_results:
            try:
                if sample.runs:
                    found.append(_generation(setting, sample))
            except (KeyError, TypeError, StopIteration) as error:
                raise ResultsRefused(f"{setting.path} lacks {error} in a sample; measure the setting again") from error
    return found


def _generation(setting: StoredSetting, sample: SampleResult) -> Generation:
    published = next(run for run in sample.runs if run.T_total == sample.T_total)
    return Generation(
        task=setting.task,
        setting=setting.key,
        vision=vision_label(setting.result) if sample.T_vision_total is not None else NO_PICTURE,
        top_k=sample.top_k,
        num_active_blocks=sample.num_active_blocks,
        picture=(setting.task, sample.metadata.image_id),
        image_features=sample.pooled_image_features,
        prompt_tokens=sample.prompt_tokens,
        vision_ms=published.T_vision_total,
        prefill_ms=published.T_LLM_prefill,
        inter_token_ms=tuple(published.T_inter_token),
    )
