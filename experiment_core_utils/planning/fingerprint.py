"""The digest of what a result depends on beside the knobs, the same in all processes, and engines that must stay."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from accelerate import Accelerator

from experiment_core_utils.c_prompt_processing import fingerprint_of_ids
from experiment_core_utils.config.profiling import ProfilingConfig
from experiment_core_utils.knobs.block_choice import BlockChoice
from experiment_core_utils.knobs.registry import all_knobs
from experiment_core_utils.meters.host_facts import environment_stamp
from experiment_core_utils.planning.plan import (
    RequestedRun,
    chosen_blocks,
    knob_request,
    max_new_tokens_of,
    num_timed,
    stops_of,
)
from experiment_core_utils.primitives.collectives import all_gather, broadcast_from_main, processes_on_this_machine
from experiment_core_utils.primitives.cpu_threads import environment_threads
from experiment_core_utils.primitives.device import visible_gpus
from experiment_core_utils.primitives.errors import ConfigurationError, WorkerLost
from experiment_core_utils.primitives.texts import short_digest
from experiment_core_utils.records.journal import (
    journals_in,
    read_journal,
)
from experiment_core_utils.records.ledger import Ledger
from experiment_core_utils.records.setting_result import PROTOCOL_VERSION
from experiment_core_utils.requests.drawing import VISION_TASK
from experiment_core_utils.tasks.prompt_forms import form_of


def agreed_fingerprint(requested: RequestedRun, accelerator: Accelerator) -> str:
    """Digest of what a result depends on beside the knobs: model, samples, how it was measured, device, versions.

    The same wherever model and results lie. A change of code or of a machine's load is not seen; the provenance of a
    result records the commit.

    Raises:
        WorkerLost: (in all of them) a process would measure something else than the main one.
    """
    digests = [each.digest() for each in (requested.source, *requested.variants.values())]
    parts = fingerprint_parts(requested, accelerator), *digests
    if requested.in_turn_reason is not None:
        parts = (*parts, "loads in turn")
    found = all_gather(short_digest(repr(parts)), accelerator)
    others = [rank for rank, each in enumerate(found) if each != found[0]]
    if others:
        raise WorkerLost(
            f"processes {', '.join(map(str, others))} would measure something else than process 0: all need the same "
            "arguments, weights, data, versions and kind of device"
        )
    return found[0]


def fingerprint_parts(requested_run: RequestedRun, accelerator: Accelerator) -> tuple[object, ...]:
    """What must be the same in all processes; of the weights the names and sizes, of the samples their content."""
    config, source, task = requested_run.config, requested_run.source, requested_run.task
    sample_ids, digests = requested_run.sample_ids, requested_run.digests
    of_task, data = dict(task.source), str(config.task.data_dir)
    if digests is not None:
        of_task.pop("path", None)
        data = short_digest(repr(sorted(digests.items())))
    requested, model, measuring = config.task, config.model, config.measuring
    choice = chosen_blocks(config, source)
    # Of a file the name has always been that one.
    name = requested.dataset_name or VISION_TASK
    named = name, task.split, requested.dataset_revision, requested.prompt_template, task.metric
    warm_up = measuring.num_warmup_runs, measuring.max_warmup_runs
    timed = num_timed(config, len(sample_ids))
    return (
        source.revision,
        model.random_weights,
        *named,
        sorted(of_task.items()),
        fingerprint_of_ids(sample_ids),
        max_new_tokens_of(requested, task),
        measuring.num_runs_per_sample,
        *warm_up,
        measuring.until_precision,
        # How many samples are measured and how many of the others are answered together, where not all are measured.
        None if timed >= len(sample_ids) else (timed, measuring.accuracy_batch_size),
        config.machine.device,
        config.machine.num_threads,
        model.precision,
        model.experts_implementation,
        model.attn_implementation,
        sorted((choice.scores or {}).items()),
        [(name, size) for name, size, _ in source.weight_files],
        data,
        most_processes_per_device(accelerator),
        (PROTOCOL_VERSION, "rounds"),
        (measuring.profiler, measuring.use_profiler_on_all_samples),
        environment_stamp(accelerator.device),
        *_later_parts(config, choice, stops_of(requested, task)),
        *_prompt_part(requested_run),
        *((knob.name, *part) for knob in all_knobs() if (part := knob.fingerprint(knob_request(config, source)))),
    )


def _later_parts(config: ProfilingConfig, choice: BlockChoice, stop: Sequence[str]) -> Iterator[object]:
    """What counts only where it is not as it was before its flag was there: results from then still count."""
    model, measuring, module, threads = config.model, config.measuring, config.task.task_module, environment_threads()
    if model.concurrency != 1:
        yield "concurrency", model.concurrency
    if model.request_rate is not None:
        yield "request_rate", model.request_rate, config.task.seed
    if measuring.energy not in ("auto", "off"):
        yield "energy", measuring.energy
    if model.quantization != "none":
        yield "quantization", model.quantization
    if model.device_map is not None:
        yield "device_map", model.device_map, len(visible_gpus())
    if model.tensor_parallel is not None:
        yield "tensor_parallel", model.tensor_parallel
    if config.machine.num_threads is None and threads is not None:
        yield "OMP_NUM_THREADS", threads
    if model.execution != "eager":
        yield "execution", model.execution
    if module:
        yield "task_module", short_digest(module.read_bytes())
    if config.knobs.knob_module:
        yield "knob_module", short_digest(config.knobs.knob_module.read_bytes())
    if measuring.max_repeats != 2:
        yield "max_repeats", measuring.max_repeats
    if measuring.memory_timeline:
        yield "memory_timeline"
    if config.task.named_columns is not None:
        yield "columns", sorted(config.task.named_columns)
    if config.task.text_only:
        yield "text_only"
    if choice.sets is not None:
        yield "block_sets", sorted(choice.sets.items())
    if stop:
        yield "stop", *stop
    if config.task.ignore_eos:
        yield "ignore_eos"


def _prompt_part(requested: RequestedRun) -> Iterator[object]:
    """The words in which a model is asked, where they are not those of before: Molmo's, or the task's own."""
    family, asked = requested.source.prompt_family, requested.config.task
    is_new = form_of(requested.task, family) is not None or asked.no_chat_template or asked.system_prompt is not None
    if is_new or requested.source.prompt_date is not None:
        yield "prompt_form", sorted(requested.prompt_form.items())


def refuse_other_engines(
    engines: Mapping[str, str], ledger: Ledger, keys: Sequence[str], journals: Path, accelerator: Accelerator
) -> None:
    """A run resumes with the engines that it began with, the same in all processes. A collective call.

    Args:
        engines: what runs each stage here, by name.
        keys: of the run's settings.

    Raises:
        WorkerLost: (in all processes) other engines run in one of them than in the main one.
        ConfigurationError: (in all processes) what is finished of this run was measured with others.
    """
    found = all_gather(dict(engines), accelerator)
    for rank, other in enumerate(found):
        if other != found[0]:
            raise WorkerLost(
                f"process {rank} would run other engines ({_named(other)}) than process 0 ({_named(found[0])}): all "
                "machines need the same C++ compiler and GPUs, or give --execution eager"
            )

    def refuse() -> None:
        first = _engines_of_finished(ledger, keys, journals)
        if first is not None and first != dict(engines):
            raise ConfigurationError(
                f"{journals.parent} contains a part of this run that was measured with other engines ({_named(first)}) "
                f"than run here now ({_named(engines)}); give another --output_dir, or restore what they need: the C++ "
                "compiler, the GPU, or their --execution"
            )

    broadcast_from_main(refuse, accelerator)


def _engines_of_finished(ledger: Ledger, keys: Sequence[str], journals: Path) -> dict[str, str] | None:
    """Engines of the first result or journal of the run that names any: the others passed the same test."""
    for key in keys:
        result = ledger.result(key)
        stages = None if result is None else result.provenance.model.execution_stages
        if stages is not None:
            return stages.content()
    contents = (read_journal(path) for path in journals_in(journals))
    own = (each.header for each in contents if each is not None and each.header.fingerprint == ledger.fingerprint)
    return next((dict(header.engines) for header in own if header.engines is not None), None)


def _named(engines: Mapping[str, str]) -> str:
    return ", ".join(f"{stage} {engine}" for stage, engine in engines.items())


def most_processes_per_device(accelerator: Accelerator) -> int:
    """How many processes share the cores of the machine that has most of them; 1 on GPUs, where each has its own.

    A collective call: only where a run starts.
    """
    on_machines = all_gather(processes_on_this_machine(accelerator), accelerator)
    return max(on_machines) if accelerator.device.type == "cpu" else 1
