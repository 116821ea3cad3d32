"""In: what was asked for and where it runs; out: the digest by which results know what they belong to.

Which engines run a model is known only once it is loaded, which a finished run does not wait for. So they are no part
of the digest: what a run finds of itself in its folder says with which engines it began, and others are refused.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from accelerate import Accelerator

from experiment_core_utils.b_model_loader import ModelSource
from experiment_core_utils.block_choice import block_choice_of
from experiment_core_utils.c_prompt_processing import fingerprint_of_ids
from experiment_core_utils.host_facts import environment_stamp
from experiment_core_utils.models.checkpoint_files import weights_stamp
from experiment_core_utils.models.interface import CUDA_GRAPH, MODULES
from experiment_core_utils.primitives.collectives import of_all_processes, of_main_process, processes_on_this_machine
from experiment_core_utils.primitives.config import ProfilingConfig
from experiment_core_utils.primitives.cpu_threads import environment_threads
from experiment_core_utils.primitives.errors import ConfigurationError, WorkerLost
from experiment_core_utils.primitives.journal import journals_in, read_journal
from experiment_core_utils.primitives.texts import short_digest
from experiment_core_utils.progress import Ledger
from experiment_core_utils.tasks.interface import Task

# Names of engines in results from before they had names of their own; those of `straight` ones are not known.
FORMER_ENGINES = {"eager": MODULES, "captured": CUDA_GRAPH}


def agreed_fingerprint(
    config: ProfilingConfig, source: ModelSource, task: Task, sample_ids: Sequence[int], accelerator: Accelerator
) -> str:
    """Digest of what a result depends on beside the knobs: model, samples, how it was measured, device, versions.

    The main process's, on every process: machines may keep the same weights in different places. A change of code or
    of a machine's load is not seen; the provenance in each file records the commit.

    Raises:
        WorkerLost: (in all of them) a process would measure something else than the main one.
    """
    parts = fingerprint_parts(config, source, task, sample_ids, accelerator)
    place = (str(source.folder.resolve()), weights_stamp(source.folder))
    found = of_all_processes((short_digest(repr(parts)), short_digest(repr((parts, place)))), accelerator)
    others = [rank for rank, (of_parts, _) in enumerate(found) if of_parts != found[0][0]]
    if others:
        raise WorkerLost(
            f"processes {', '.join(map(str, others))} would measure something else than process 0: all need the same "
            "arguments, weights, data, versions and kind of device"
        )
    return found[0][1]


def fingerprint_parts(
    config: ProfilingConfig, source: ModelSource, task: Task, sample_ids: Sequence[int], accelerator: Accelerator
) -> tuple[object, ...]:
    """What must be the same in all processes; of the weights the names and sizes."""
    choice, threads = block_choice_of(config, source.folder), environment_threads()
    return (
        source.revision,
        config.random_weights,
        config.dataset_name,
        task.split,
        config.dataset_revision,
        config.prompt_template,
        task.metric,
        sorted(task.source.items()),
        fingerprint_of_ids(sample_ids),
        max_new_tokens_of(config, task),
        config.num_runs_per_sample,
        config.num_warmup_runs,
        config.max_warmup_runs,
        config.until_precision,
        answered_in_batches(config, len(sample_ids)),
        config.device,
        config.num_threads,
        config.precision,
        config.experts_implementation,
        config.attn_implementation,
        sorted((choice.scores or {}).items()),
        [(name, size) for name, size, _ in weights_stamp(source.folder)],
        str(config.data_dir),
        most_processes_per_device(accelerator),
        (config.profiler, config.use_profiler_on_all_samples),
        (config.pareto_margin, config.pareto_alpha) if config.pareto_search else None,
        environment_stamp(accelerator.device),
        # Not where it is off: results from before the flag was there still count.
        *((("energy", config.energy),) if config.energy != "off" else ()),
        *((("quantization", config.quantization),) if config.quantization != "none" else ()),
        *((("OMP_NUM_THREADS", threads),) if config.num_threads is None and threads is not None else ()),
        *((("execution", config.execution),) if config.execution != "eager" else ()),
        *(("memory_timeline",) if config.memory_timeline else ()),
        *((("block_sets", sorted(choice.sets.items())),) if choice.sets is not None else ()),
    )


def refuse_other_engines(
    engines: Mapping[str, str], ledger: Ledger, keys: Sequence[str], journals: Path, accelerator: Accelerator
) -> None:
    """A run goes on with the engines that it began with, the same in all processes. A collective call.

    Args:
        engines: what runs each stage here, by name.
        keys: of the run's settings.

    Raises:
        WorkerLost: (in all processes) other engines run in one of them than in the main one.
        ConfigurationError: (in all processes) what is finished of this run was measured with others.
    """
    found = of_all_processes(dict(engines), accelerator)
    for rank, other in enumerate(found):
        if other != found[0]:
            raise WorkerLost(
                f"process {rank} would run other engines ({_named(other)}) than process 0 ({_named(found[0])}): all "
                "machines need the same C++ compiler and GPUs, or give --execution eager"
            )

    def refuse() -> None:
        begun = _engines_of_finished(ledger, keys, journals)
        if begun is not None and begun != dict(engines):
            raise ConfigurationError(
                f"{journals.parent} holds a part of this run that was measured with other engines ({_named(begun)}) "
                f"than run here now ({_named(engines)}); give another --output_dir, or restore what they need, such as "
                "the C++ compiler"
            )

    of_main_process(refuse, accelerator)


def _engines_of_finished(ledger: Ledger, keys: Sequence[str], journals: Path) -> dict[str, str] | None:
    """Those of the first result or journal of the run that names any: the others passed the same test."""
    for key in keys:
        result = ledger.result(key)
        stages = None if result is None else result.provenance.model.execution_stages
        if stages is not None:
            return {stage: FORMER_ENGINES.get(engine, engine) for stage, engine in stages.content().items()}
    contents = (read_journal(path) for path in journals_in(journals))
    own = (each.header for each in contents if each is not None and each.header.fingerprint == ledger.fingerprint)
    return next((dict(header.engines) for header in own if header.engines is not None), None)


def _named(engines: Mapping[str, str]) -> str:
    return ", ".join(f"{stage} {engine}" for stage, engine in engines.items())


def most_processes_per_device(accelerator: Accelerator) -> int:
    """How many processes share the cores of the machine that has most of them; 1 on GPUs, where each has its own.

    A collective call: only where a run starts.
    """
    on_machines = of_all_processes(processes_on_this_machine(accelerator), accelerator)
    return max(on_machines) if accelerator.device.type == "cpu" else 1


def answered_in_batches(config: ProfilingConfig, num_samples: int) -> tuple[int, int] | None:
    """How many samples are measured and how many of the others are answered together; None where all are measured."""
    if config.num_latency_samples is None or config.num_latency_samples >= num_samples:
        return None
    return config.num_latency_samples, config.accuracy_batch_size


def max_new_tokens_of(config: ProfilingConfig, task: Task) -> int:
    """The limit that was asked for, else the task's own."""
    return task.max_new_tokens if config.max_new_tokens is None else config.max_new_tokens
