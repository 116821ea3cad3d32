"""The text run: the combinations of a grid, each measured and saved as one experiment.

A combination is one experiment with an id of its own. It is done once it is in
`results/{task_type}_results.json`: a run that was killed starts again at the combination it was at.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from experiment_core_utils.a_distributed import generate_unique_id, setup_distributed
from experiment_core_utils.config.text import TextConfig
from experiment_core_utils.config.text_grid import Combination
from experiment_core_utils.e_inference import prepare_gen_inference, run_prepared
from experiment_core_utils.f_experiment_info import (
    gather_experiment_info,
    gather_experimental_variables,
    get_model_architecture_info,
)
from experiment_core_utils.facts.run_caveats import shared_cores_caveats
from experiment_core_utils.g_metrics_inference import combine_inference_metrics
from experiment_core_utils.h_metrics_compute import combine_comp_metrics
from experiment_core_utils.i_metrics_energy import (
    allocated_energy,
    allocated_energy_metrics,
    energy_metrics,
    with_batch_energy,
)
from experiment_core_utils.j_results_saving import (
    add_to_results,
    experiment_result,
    load_aggregated_results,
    save_raw_results_json,
)
from experiment_core_utils.k_results_aggregation import (
    load_and_aggregate_per_process_energy_results,
    pool_inference_results,
    with_indices_of_source,
)
from experiment_core_utils.l_results_csv_cleaning import write_experiments_table
from experiment_core_utils.measuring.text_shard import TextShard, Window
from experiment_core_utils.meters.load import LoadSampler, load_sampler
from experiment_core_utils.models.common.preferences import decoding_caveats
from experiment_core_utils.primitives.collectives import (
    all_gather,
    all_or_raise,
    broadcast_from_main,
    processes_on_this_machine,
)
from experiment_core_utils.primitives.device import MemoryWindow, set_cpu_threads
from experiment_core_utils.primitives.errors import (
    ConfigurationError,
    GenerationFailed,
    SettingError,
    UnforeseenError,
    traceback_of,
)
from experiment_core_utils.primitives.files import remove_leftovers
from experiment_core_utils.primitives.interruption import StopRequest
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.records.caveats import Caveat
from experiment_core_utils.records.compute import memory_timeline
from experiment_core_utils.records.journal import only_run_in
from experiment_core_utils.records.ledger import PARTS_FOLDER
from experiment_core_utils.records.result_files import saved_traceback
from experiment_core_utils.records.text import InferenceResults
from experiment_core_utils.saved_results.result_caveats import ANSWER_CAVEATS, text_caveats
from experiment_core_utils.text_run.custom_metrics import run_custom_metrics
from experiment_core_utils.text_run.energy import EnergySources, TextEnergy
from experiment_core_utils.text_run.generated_compute import with_generation
from experiment_core_utils.text_run.last_model import LastModel
from experiment_core_utils.text_run.plan import DueExperiment, TextPlan, any_config, plan_of

Report = Callable[[str], None]
RAW = "raw_results"


@dataclass(frozen=True)
class TextReport:
    """What became of a grid."""

    is_main_process: bool
    plan: TextPlan
    results: Mapping[str, Mapping[str, Any]]  #: of its combinations, those that an earlier run saved included, by name
    num_measured: int  #: of them by this run
    failed: Mapping[str, str]  #: title -> how it failed
    csv_path: Path | None

    @property
    def exit_code(self) -> int:
        """1 where a combination failed."""
        return 1 if self.failed else 0


def launched(grid: Sequence[Combination], results_dir: Path) -> Accelerator:
    """This process's place among those that measure a grid.

    Raises:
        ConfigurationError: the results' folder is a file.
        WorkerLost: the processes launched are not those requested.
    """
    first = any_config(grid)
    accelerator = setup_distributed(first)
    set_cpu_threads(first.num_threads, processes_on_this_machine(accelerator))
    if results_dir.exists() and not results_dir.is_dir():
        raise ConfigurationError(f"{results_dir} is a file; give a folder for the results")
    return accelerator


def run_text_experiments(
    grid: Sequence[Combination], results_dir: Path, say: Report, sources: EnergySources | None = None
) -> TextReport:
    """Measure what is due of a grid; each combination is saved as soon as it is measured.

    Args:
        say: takes one line for each combination, in the main process only.
        sources: what energy is read with; None finds it on the machine.

    Raises:
        ConfigurationError: not a single combination is possible here, or the weights of none can be used.
        EnergyRefused: energy is required and nothing on this machine measures it.
        ResultsRefused: another run is at work in the folder.
        WorkerLost: a process is gone or late.
    """
    accelerator = launched(grid, results_dir)
    is_main, task_type, memory = accelerator.is_main_process, any_config(grid).task_type, LastModel(accelerator)
    failed: dict[str, str] = {}
    refused: list[ConfigurationError] = []
    measured: list[str] = []
    with ExitStack() as stack:
        stop = StopRequest()
        # In the main process: a folder or lock that is removed ends the run before the next batch.
        broadcast_from_main(
            lambda: stack.enter_context(
                stop.watching(stack.enter_context(only_run_in(results_dir / PARTS_FOLDER)).refresh)
            ),
            accelerator,
        )
        if is_main:
            # An experiment that was killed is measured again under another id: nobody else writes in its folder.
            for folder in (results_dir, *(results_dir / RAW).glob("**/")):
                remove_leftovers(folder)
        plan = plan_of(grid, results_dir, accelerator)
        for line in plan.lines() if is_main else ():
            say(line)
        for due in plan.due:
            try:
                name, result = measure_experiment(due, memory.get, accelerator, results_dir, sources, stop)
            except (SettingError, ConfigurationError) as error:
                failed[due.title] = f"{type(error).__name__}: {error}{_trace_of(error, results_dir) if is_main else ''}"
                refused += [error] if isinstance(error, ConfigurationError) else []
                memory.drop()
            else:
                measured.append(name)
                if is_main:
                    add_to_results({name: result}, task_type, results_dir=results_dir)
                    say(_line(due.title, name, result))
                    for each in result["caveat_records"]:
                        if each["kind"] in ANSWER_CAVEATS:
                            say(f"warning: {Caveat.model_validate(each).sentence}")
            if len(refused) == len(plan.due) and not plan.saved:
                raise refused[0]
            if is_main and due.title in failed:
                say(f"{due.title}: failed: {failed[due.title]}")
        everything = load_aggregated_results(task_type, results_dir=results_dir) if is_main else {}
        # Also where nothing was due: a run that was killed may have left it short.
        csv_path = write_experiments_table(task_type, results_dir) if is_main else None
    return TextReport(
        is_main_process=is_main,
        plan=plan,
        results={name: everything[name] for name in (*plan.saved.values(), *measured) if name in everything},
        num_measured=len(measured),
        failed=failed,
        csv_path=csv_path,
    )


def _trace_of(error: SettingError | ConfigurationError, results_dir: Path) -> str:
    """Where the traceback of the library's error behind this one is saved, as the end of a message; "" for none."""
    cause = error.__cause__
    if not isinstance(error, GenerationFailed | UnforeseenError) or cause is None:
        return ""
    return saved_traceback(traceback_of(cause), type(cause).__name__, results_dir)


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
    energy = TextEnergy(config, accelerator, sources or EnergySources())
    experiment_id = generate_unique_id(accelerator, results_dir=results_dir)
    save = partial(save_raw_results_json, experiment_id=experiment_id, accelerator=accelerator, results_dir=results_dir)
    # Machines may share the folder of results: each process writes its energy to a folder of its own.
    rank = accelerator.process_index
    folder = results_dir / RAW / experiment_id / (f"process_{rank}" if rank else "")
    model, tokenizer = all_or_raise(lambda: load(config), accelerator)
    tokenised = due.chosen.tokenised
    facts: dict[str, Any] = {
        "experiment_setup": gather_experiment_info(config, accelerator, experiment_id),
        "experiment_variables": gather_experimental_variables(config),
        "model_architecture": get_model_architecture_info(model),
    }
    caveats = shared_cores_caveats(device, processes_on_this_machine(accelerator))
    indices = due.chosen.indices
    shard = prepare_gen_inference(model, tokenizer, tokenised, config, accelerator, energy.clock, indices)
    sampler = load_sampler()
    with MemoryWindow(device):
        generated, power = energy.measured(lambda: _sampled(shard, accelerator, sampler, stop), experiment_id, folder)
    compute = combine_comp_metrics(model, device, tokenised, accelerator, config, generated, sampler.trace)
    own = with_batch_energy(generated, power)
    all_or_raise(stop.raise_if_requested, accelerator)
    save(energy_metrics(experiment_id, accelerator, folder, energy.reason), result_type="local_energy_results")
    # What all processes have is gathered last: from here on only the main one works.
    pooled = with_indices_of_source(pool_inference_results(all_gather(own, accelerator)), indices)
    memories = all_gather(compute["memory"], accelerator)
    name = f"experiment_{experiment_id}"
    if not accelerator.is_main_process:
        return name, {}
    energy_of_all = load_and_aggregate_per_process_energy_results(
        experiment_id, accelerator.num_processes, results_dir=results_dir
    )
    inference = combine_inference_metrics(pooled)
    compute_of_all = with_generation(compute, memories, model, device, pooled, config)
    parts = facts | {
        "inference_metrics": {**inference, **allocated_energy_metrics(pooled)},
        "compute_metrics": compute_of_all,
        "global_energy_results": energy_of_all,
    }
    if config.memory_timeline:
        save(memory_timeline(sampler.trace).content(), result_type="memory_timeline")
    caveats += text_caveats(pooled, energy_of_all, config.energy_mode, config.max_output_tokens)
    caveats += decoding_caveats(pooled["decoding"]["preferences_left_out"])
    return name, _saved(due, pooled, parts, experiment_id, caveats, save)


def _sampled(
    shard: TextShard, accelerator: Accelerator, sampler: LoadSampler, stop: StopRequest
) -> tuple[InferenceResults, list[Window]]:
    with sampler:
        return run_prepared(shard, accelerator, stop)


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
    prompts = {
        **due.prompts.source,
        "num_prompts": len(due.chosen.texts),
        "num_too_long": due.chosen.num_too_long,
        **due.chosen.form,
    }
    return experiment_result(experiment_id, due.fingerprint, due.varied, caveats, prompts, parts, custom)


def _line(title: str, name: str, result: Mapping[str, Any]) -> str:
    """`1/2 decoding_mode=greedy: experiment_0001: 240 prompts, 512.3 output tokens/s`."""
    metrics = result["inference_metrics"]
    rate = metrics["tokens_per_second"]
    speed = "no output tokens" if rate is None else f"{rate:.1f} output tokens/s"
    return f"{title}: {name}: {counted(metrics['num_prompts'], 'prompt')}, {speed}"
