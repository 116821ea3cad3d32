"""The provenance that every file of a run carries."""

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator

from experiment_core_utils.accuracy_batches import batching_caveats
from experiment_core_utils.asked_run import AskedRun
from experiment_core_utils.block_choice import block_choice_of
from experiment_core_utils.c_prompt_processing import picture_caveats
from experiment_core_utils.f_experiment_info import caveats_of, gather_provenance, variables_of
from experiment_core_utils.fingerprint import max_new_tokens_of
from experiment_core_utils.setting_result import Provenance
from experiment_core_utils.tasks.interface import Task
from experiment_core_utils.tasks.sampling import few_samples_sentence


def provenance_of_run(
    asked: AskedRun,
    accelerator: Accelerator,
    device: torch.device,
    processes_here: int,
    experiment_id: str,
    described: Mapping[str, Any],
) -> Provenance:
    """Who measured what with what, and the caveats that hold for all settings; a setting adds its own.

    Args:
        processes_here: processes of the run on this machine.
        described: what the loaded model says of itself.
    """
    config, source = asked.config, asked.source
    choice = block_choice_of(config, source.folder)
    of_pictures = picture_caveats(asked.task, asked.drawn.sample_ids, source.takes_pictures)
    return Provenance.model_validate(
        {
            **gather_provenance(accelerator, device, experiment_id),
            "model": {"name": source.name, "revision": source.revision, **described},
            "task": task_entry(asked.task),
            "experimental_variables": variables_of(config, max_new_tokens_of(config, asked.task), choice),
            "caveats": [
                *caveats_of(config, device, processes_here, asked.task.source),
                *of_pictures,
                *batching_caveats(len(asked.drawn), config.num_latency_samples, described["dtype"]),
                *few_samples_caveats(asked),
            ],
        }
    )


def task_entry(task: Task) -> dict[str, Any]:
    """A task as the provenance names it."""
    return {
        "name": task.name,
        "split": task.split,
        "metric": task.metric,
        "max_new_tokens": task.max_new_tokens,
        "source": dict(task.source),
    }


def few_samples_caveats(asked: AskedRun) -> list[str]:
    """Of a whole run; in a search each setting has a number of samples, and so a caveat, of its own."""
    if asked.config.pareto_search:
        return []
    sentence = few_samples_sentence(len(asked.settings), len(asked.drawn))
    return [] if sentence is None else [sentence]
