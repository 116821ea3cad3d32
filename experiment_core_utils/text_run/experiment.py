"""One experiment of a text run: measured by all processes, saved by the main one."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from experiment_core_utils.a_distributed import generate_unique_id
from experiment_core_utils.c_prompt_processing import checked_prompts
from experiment_core_utils.config.text import TextConfig
from experiment_core_utils.e_inference import prepare_gen_inference, run_shard
from experiment_core_utils.f_experiment_info import (
    gather_experiment_info,
    gather_experimental_variables,
    get_model_architecture_info,
)
from experiment_core_utils.facts.run_caveats import shared_cores_caveats
from experiment_core_utils.g_metrics_inference import combine_inference_metrics
from experiment_core_utils.h_metrics_compute import combine_comp_metrics
from experiment_core_utils.i_metrics_energy import (
    aggregate_energy_metrics,
    allocated_energy,
    allocated_energy_metrics,
    with_batch_energy,
)
from experiment_core_utils.j_results_saving import save_raw_results_json
from experiment_core_utils.k_results_aggregation import (
    load_and_aggregate_per_process_energy_results,
    pool_inference_results,
    with_indices_of_source,
)
from experiment_core_utils.measuring.text_shard import TextShard, Window
from experiment_core_utils.meters.host_facts import facts_of_start
from experiment_core_utils.meters.load import LoadSampler, load_sampler
from experiment_core_utils.meters.tracked_window import EnergySources
from experiment_core_utils.models.common.preferences import decoding_caveats
from experiment_core_utils.primitives.collectives import all_gather, all_or_raise, processes_on_this_machine
from experiment_core_utils.primitives.device import MemoryWindow
from experiment_core_utils.primitives.interruption import StopRequest
from experiment_core_utils.records.caveats import Caveat, caveat_fields
from experiment_core_utils.records.compute import memory_timeline
from experiment_core_utils.records.text import InferenceResults
from experiment_core_utils.saved_results.result_caveats import text_answer_caveats, text_energy_caveats
from experiment_core_utils.text_run.custom_metrics import run_custom_metrics
from experiment_core_utils.text_run.energy import TextEnergy
from experiment_core_utils.text_run.generated_compute import generation_metrics
from experiment_core_utils.text_run.plan import DueExperiment

RAW = "raw_results"


def measure_experiment(
    due: DueExperiment,
    load: Callable[[TextConfig], tuple[Any, Any]],
    accelerator: Accelerator,
    results_dir: Path,
    sources: EnergySources | None = None,
    stop: StopRequest | None = None,
) -> tuple[str, dict[str, Any]]:
    """Measure an experiment; returns its name (`experiment_0001`) and its fields, which only the main process has;
    every process takes part.

    Args:
        sources: what energy is read with; None finds it on the machine.
        stop: asked between two batches and before anything is saved; None never stops.

    Raises:
        SettingError: it cannot be run, such as OutOfMemory; in all processes, whichever it happened to.
        ConfigurationError: the model cannot be loaded.
        EnergyRefused: energy is required and nothing on this machine measures it; nothing was loaded then.
        MeterUnavailable: energy is required and was lost on the way.
        WorkerLost: a process is gone or late.
    """
    config, device, stop = due.config, accelerator.device, stop or StopRequest()
    # Where energy is required, a meter that is not there is reported before the weights are read.
    find_energy = partial(TextEnergy, config, accelerator, sources or EnergySources())
    energy = find_energy() if config.energy_mode == "required" else None
    experiment_id = generate_unique_id(accelerator, results_dir=results_dir)
    save = partial(save_raw_results_json, experiment_id=experiment_id, accelerator=accelerator, results_dir=results_dir)
    # Machines may share the folder of results: each process writes its energy to a folder of its own.
    rank = accelerator.process_index
    folder = results_dir / RAW / experiment_id / (f"process_{rank}" if rank else "")
    model, tokenizer = all_or_raise(lambda: load(config), accelerator)
    tokenised, indices = checked_prompts(due.chosen.tokenised), due.chosen.indices
    started, energy = facts_of_start()["timestamp"], energy or find_energy()
    shard = prepare_gen_inference(model, tokenizer, tokenised, config, accelerator, energy.clock, indices)
    sampler = load_sampler()
    with MemoryWindow(device):
        generated, power = energy.measured(lambda: _sampled(shard, accelerator, sampler, stop), experiment_id, folder)
    facts: dict[str, Any] = {
        "experiment_setup": {**gather_experiment_info(config, accelerator, experiment_id), "timestamp": started},
        "experiment_variables": gather_experimental_variables(config),
        "model_architecture": get_model_architecture_info(model),
    }
    caveats = shared_cores_caveats(device, processes_on_this_machine(accelerator))
    compute = combine_comp_metrics(model, device, tokenised, accelerator, config, generated, sampler.trace)
    own_results = with_batch_energy(generated, power)
    all_or_raise(stop.raise_if_requested, accelerator)
    saved = aggregate_energy_metrics(experiment_id, accelerator, folder, energy.reason)
    save(saved, result_type="local_energy_results")
    # What all processes have is gathered last: from here on only the main one works.
    pooled = with_indices_of_source(pool_inference_results(all_gather(own_results, accelerator)), indices)
    memories = all_gather(compute["memory"], accelerator)
    name = f"experiment_{experiment_id}"
    if not accelerator.is_main_process:
        return name, {}
    energy_of_all = load_and_aggregate_per_process_energy_results(
        experiment_id, accelerator.num_processes, results_dir=results_dir
    )
    inference = combine_inference_metrics(pooled)
    flops, utilisation = generation_metrics(model, device, pooled, config)
    parts = facts | {
        "inference_metrics": {**inference, **allocated_energy_metrics(pooled)},
        "compute_metrics": {
            **compute,
            **flops,
            "hardware_utilisation": utilisation.content(),
            "memory_by_process": memories,
        },
        "global_energy_results": energy_of_all,
    }
    if config.memory_timeline:
        save(memory_timeline(sampler.trace).content(), result_type="memory_timeline")
    caveats += text_energy_caveats(energy_of_all, config.energy_mode, pooled["simulated_delay_s"])
    caveats += text_answer_caveats(pooled, config.max_output_tokens)
    caveats += decoding_caveats(pooled["decoding"]["preferences_left_out"])
    return name, _saved(due, pooled, parts, experiment_id, caveats, save)


def _sampled(
    shard: TextShard, accelerator: Accelerator, sampler: LoadSampler, stop: StopRequest
) -> tuple[InferenceResults, list[Window]]:
    with sampler:
        return all_or_raise(lambda: run_shard(shard, stop), accelerator)


def _saved(
    due: DueExperiment,
    pooled: InferenceResults,
    parts: Mapping[str, Any],
    experiment_id: str,
    caveats: list[Caveat],
    save: Callable[..., Path],
) -> dict[str, Any]:
    """The entry of the results file; every part is saved under its name as well."""
    for result_type, part in parts.items():
        save(part, result_type=result_type)
    if due.config.energy_mode != "off":
        save(allocated_energy(pooled), result_type="apportioned_energy")
    custom = run_custom_metrics(due.custom_metrics, pooled, parts["inference_metrics"])
    if due.config.save_outputs:
        queries = pooled["queries"]
        indices = [query["prompt_index"] for query in queries]
        texts = [
            {
                "prompt_index": query["prompt_index"],
                "prompt": due.prompts.texts[query["prompt_index"]],
                "output": query["output_text"],
                "answer": query["answer_text"],
                "thinking_tokens": query["thinking_tokens"],
            }
            for query in queries
        ]
        save({"outputs": texts}, result_type="text_output")
        token_ids = [each["output_token_ids"] for each in queries]
        save({"prompt_indices": indices, "output_token_ids": token_ids}, result_type="token_output")
    return {
        "experiment_id": experiment_id,
        "digest": due.fingerprint,
        "varied": dict(due.varied),
        **caveat_fields(caveats),
        "prompts": {
            **due.prompts.source,
            "num_prompts": len(due.chosen.texts),
            "num_too_long": due.chosen.num_too_long,
            **due.chosen.form,
        },
        **parts,
        "custom": custom["columns"],
        "custom_failures": custom["failures"],
    }
