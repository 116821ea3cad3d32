"""The parameters of a profiling run as requested."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel

from experiment_core_utils.config.profiling import ProfilingConfig
from experiment_core_utils.knobs.block_choice import BlockChoice
from experiment_core_utils.knobs.registry import all_knobs
from experiment_core_utils.primitives.texts import without_secrets
from experiment_core_utils.records.provenance import Variables


def variables_of(config: ProfilingConfig, max_new_tokens: int, choice: BlockChoice) -> Variables:
    """The experimental parameters as requested; `max_new_tokens` and the choice of blocks as they came out."""
    parts = (config.task, config.model, config.knobs, config.measuring, config.machine)
    found = {name: value for part in parts for name, value in part if name in Variables.model_fields}
    return Variables.of(
        **found
        | {
            "endpoint": shown_endpoints(config.model.endpoint),
            "model": list(config.model.model) if config.model.model is not None else None,
            "knob_flags": knob_flags(config.knobs),
            "ids": list(config.task.ids) if config.task.ids is not None else None,
            "columns": config.task.named_columns,
            "max_new_tokens": max_new_tokens,
            "batch_size": 1,
            "decoding": "greedy",
            "importance_scores_file": str(choice.file) if choice.scores is not None else None,
            "block_sets_file": str(choice.file) if choice.sets is not None else None,
            "sample_timeout_s": config.measuring.sample_timeout,
            "profiler": config.measuring.profiler,
            "first_block_top_k_rule": "the first block with experts keeps the model's own top-k",
        }
    )


def shown_endpoints(given: Any) -> Any:
    """The addresses of `--endpoint` as records show them; anything else as it is."""
    return [without_secrets(str(each)) for each in given] if isinstance(given, list | tuple) else given


def knob_flags(given: BaseModel) -> dict[str, Any]:
    """Flags of the knobs that are no lists of values and no files and not at their default, such as a rule."""
    return {
        name: value
        for knob in all_knobs()
        for name, value in knob.flags_beside_values(given)
        if not isinstance(value, Path)
    }
