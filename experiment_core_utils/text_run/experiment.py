"""One text experiment: the twelve steps in order."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from experiment_core_utils.a_distributed import generate_unique_id
from experiment_core_utils.config.text import TextConfig
from experiment_core_utils.d_energy_tracking import EnergySources, TextEnergy
from experiment_core_utils.e_inference import TextShard, prepare_gen_inference, run_prepared
from experiment_core_utils.f_experiment_info import (
    gather_experiment_info,
    gather_experimental_variables,
    get_model_architecture_info,
    shared_cores_caveats,
)
from experiment_core_utils.g_metrics_inference import combine_inference_metrics
from experiment_core_utils.h_metrics_compute import combine_comp_metrics, generation_metrics
from experiment_core_utils.i_metrics_energy import allocated_energy, allocated_energy_metrics, energy_metrics
from experiment_core_utils.j_results_saving import save_raw_results_json
from experiment_core_utils.k_results_aggregation import (
    load_and_aggregate_per_process_energy_results,
    pool_inference_results,
)
from experiment_core_utils.meters.load import LoadSampler, load_sampler
from experiment_core_utils.models.common.text_generation import logits_fault
from experiment_core_utils.primitives.collectives import all_gather, all_or_raise, processes_on_this_machine
from experiment_core_utils.primitives.device import MemoryWindow
from experiment_core_utils.records.caveats import Caveat, caveat, caveat_fields
from experiment_core_utils.records.compute import memory_timeline
from experiment_core_utils.records.text import InferenceResults
from experiment_core_utils.text_run.custom_metrics import run_custom_metrics
from experiment_core_utils.text_run.plan import DueExperiment

RAW = "raw_results"


def measure_experiment(
    due: DueExperiment,
    load: Callable[[TextConfig], tuple[Any, Any]],
    accelerator: Accelerator,
    results_dir: Path,
    sources: EnergySources | None = None,
) -> tuple[str, dict[str, Any]]:
    """Measure an experiment; returns its name (`experiment_0001`) and its fields, which only the main process has;
    every process takes part.

    Args:
        sources: what energy is read with; None finds it on the machine.

    Raises:
        SettingError: it cannot be run, such as OutOfMemory; in all processes, whichever it happened to.
        ConfigurationError: the model cannot be loaded.
        MeterUnavailable: energy is required and nothing on this machine measures it; nothing was loaded then.
        WorkerLost: a process is gone or late.
    """
    config, device = due.config, accelerator.device
    energy = TextEnergy(config, accelerator, sources or EnergySources())
    experiment_id = generate_unique_id(accelerator, results_dir=results_dir)
    save = partial(save_raw_results_json, experiment_id=experiment_id, accelerator=accelerator, results_dir=results_dir)
    # Machines may share the folder of results: each process writes its energy to a folder of its own.
    rank = accelerator.process_index
    folder = results_dir / RAW / experiment_id / (f"process_{rank}" if rank else "")
    model, tokenizer = all_or_raise(lambda: load(config), accelerator)
    tokenised = due.chosen.tokenised
    shard = prepare_gen_inference(model, tokenizer, tokenised, config, accelerator, energy.power())
    sampler = load_sampler()
    with MemoryWindow(device):
        own = energy.measured(lambda: _sampled(shard, accelerator, sampler), experiment_id, folder)
    compute = combine_comp_metrics(model, device, tokenised, accelerator, config, own, sampler.trace)
    save(energy_metrics(experiment_id, accelerator, folder, energy.reason), result_type="local_energy_results")
    # What all processes have is gathered last: from here on only the main one works.
    pooled = pool_inference_results(all_gather(own, accelerator))
    memories = all_gather(compute["memory"], accelerator)
    caveats = shared_cores_caveats(device, processes_on_this_machine(accelerator))
    name = f"experiment_{experiment_id}"
    if not accelerator.is_main_process:
        return name, {}
    flops, utilisation = generation_metrics(model, device, pooled, config)
    if config.memory_timeline:
        save(memory_timeline(sampler.trace).content(), result_type="memory_timeline")
    fractions = {"hardware_utilisation": utilisation.content()}
    parts: dict[str, Any] = {
        "experiment_setup": gather_experiment_info(config, accelerator, experiment_id),
        "experiment_variables": gather_experimental_variables(config),
        "model_architecture": get_model_architecture_info(model),
        "inference_metrics": {**combine_inference_metrics(pooled), **allocated_energy_metrics(pooled)},
        "compute_metrics": {**compute, **flops, **fractions, "memory_by_process": memories},
        "global_energy_results": load_and_aggregate_per_process_energy_results(
            experiment_id, accelerator.num_processes, results_dir=results_dir
        ),
    }
    caveats += _caveats(pooled, config, logits_fault(model, tokenised, device))
    return name, _entry(due, pooled, parts, experiment_id, caveats, save)


def _sampled(shard: TextShard, accelerator: Accelerator, sampler: LoadSampler) -> InferenceResults:
    with sampler:
        return run_prepared(shard, accelerator)


def _entry(
    due: DueExperiment,
    pooled: InferenceResults,
    parts: Mapping[str, Any],
    experiment_id: str,
    caveats: list[Caveat],
    save: Callable[..., Path],
) -> dict[str, Any]:
    """The content of the results file: every part is saved under its name, and all of them make the entry."""
    for result_type, part in parts.items():
        save(part, result_type=result_type)
    if due.config.energy_mode != "off":
        save(allocated_energy(pooled), result_type="apportioned_energy")
    custom = run_custom_metrics(due.custom_metrics, pooled, parts["inference_metrics"])
    if due.config.save_outputs:
        prompts, queries = due.chosen.texts, pooled["queries"]
        texts = [{"prompt": prompts[each["prompt_index"]], "output": each["output_text"]} for each in queries]
        save({"outputs": texts}, result_type="text_output")
        save({"output_token_ids": [each["output_token_ids"] for each in queries]}, result_type="token_output")
    return {
        "experiment_id": experiment_id,
        "digest": due.digest,
        "varied": dict(due.varied),
        **caveat_fields(caveats),
        "prompts": {
            **due.prompts.source,
            "num_prompts": len(due.chosen.texts),
            "num_too_long": due.chosen.num_too_long,
        },
        **parts,
        "custom": custom["columns"],
        "custom_failures": custom["failures"],
    }


def _caveats(pooled: InferenceResults, config: TextConfig, problem: str | None) -> list[Caveat]:
    """What a reader must know before quoting the figures; `problem` is what the model's output shows."""
    waiting_s = pooled["simulated_delay_s"]
    is_counted = waiting_s > 0 and config.energy_mode != "off"
    found = [caveat("simulated_waiting", waiting_s=waiting_s)] if is_counted else []
    return found + ([] if problem is None else [caveat("model_output", problem=problem)])
