"""Who measured what with what, gathered once for all settings of a run."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator

from experiment_core_utils.f_experiment_info import gather_provenance
from experiment_core_utils.facts.run_caveats import batching_caveats, caveats_of, crowded_cores_caveats, picture_caveats
from experiment_core_utils.facts.variables import variables_of
from experiment_core_utils.models.common.placement import placement_caveats
from experiment_core_utils.models.common.preferences import decoding_caveats
from experiment_core_utils.models.hf.slow_functions import slow_functions_caveats
from experiment_core_utils.models.interface import answers_in_batches
from experiment_core_utils.planning.plan import RequestedRun, chosen_blocks, max_new_tokens_of, num_timed
from experiment_core_utils.records.caveats import Caveat, caveat_fields
from experiment_core_utils.records.provenance import ASKED_AT, FinalPrompt, Model, Provenance, TaskDescription
from experiment_core_utils.tasks.sampling import few_samples_caveats


def facts_of_run(
    requested: RequestedRun,
    accelerator: Accelerator,
    device: torch.device,
    processes_here: int,
    experiment_id: str,
    described: Mapping[str, Any],
    final_prompt: FinalPrompt | None = None,
    started: Mapping[str, Any] | None = None,
    unseen: Sequence[Caveat] = (),
    run_uid: str | None = None,
    cores: float | None = None,
) -> Provenance:
    """Who measured what with what, and the caveats that hold for all settings; a setting adds its own.

    Args:
        processes_here: processes of the run on this machine.
        described: what the loaded model says of itself.
        final_prompt: what the model is given of the first sample.
        started: the facts of the moment at which the run began; None gathers them now.
        unseen: caveats of what is not seen in a server.
        cores: of the machine that the run may use; None for a run that nothing is said of.
    """
    config, source, task = requested.config, requested.source, requested.task
    origin = gather_provenance(accelerator, device, experiment_id, started)
    if source.is_served:
        origin["hardware"]["device"] = f"{ASKED_AT}{source.place}"
    choice = chosen_blocks(config, source)
    num_drawn, is_together = len(requested.drawn), answers_in_batches(described.get("execution_stages"))
    timed, num_processes = num_timed(config, num_drawn), config.model.tensor_parallel or processes_here
    caveats = [
        *caveats_of(config.model.random_weights, device, processes_here, task.source),
        *placement_caveats(described.get("device_map")),
        *slow_functions_caveats(described.get("slow_functions"), device),
        *decoding_caveats((described.get("decoding") or {}).get("left_out") or {}),
        *unseen,
        *picture_caveats(task, requested.sample_ids, source.takes_pictures),
        *(batching_caveats(num_drawn, timed, described.get("dtype")) if is_together else []),
        *few_samples_caveats(len(requested.settings), num_drawn),
        *([] if cores is None else crowded_cores_caveats(device, num_processes, cores)),
    ]
    return Provenance.model_validate(
        {
            **origin,
            "run_uid": run_uid,
            # What a backend does not say is None.
            "model": dict.fromkeys(Model.model_fields)
            | {"name": source.name, "revision": source.revision, **described}
            | {"execution_untimed": None if timed >= num_drawn else "batches" if is_together else "as timed"},
            "task": TaskDescription(
                name=task.name,
                split=task.split,
                metric=task.metric,
                max_new_tokens=task.max_new_tokens,
                source=dict(task.source),
                prompt_form=dict(requested.prompt_form) or None,
            ),
            "final_prompt": final_prompt,
            "experimental_variables": variables_of(config, max_new_tokens_of(config.task, task), choice),
            **caveat_fields(caveats),
        }
    )
