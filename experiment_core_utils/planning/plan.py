"""The plan of a run: settings, samples and digest, and which settings still lack a result."""

import tempfile
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from experiment_core_utils.b_model_loader import find_requested_model
from experiment_core_utils.c_prompt_processing import (
    VISION_TASK,
    draw_other_samples,
    fingerprint_of_ids,
    open_task,
    refuse_picture_tasks,
    refuse_unfit_pictures,
    refuse_unfit_requests,
    with_task_named,
)
from experiment_core_utils.config.parts import TaskConfig
from experiment_core_utils.config.profiling import ProfilingConfig
from experiment_core_utils.d_energy_tracking import check_energy
from experiment_core_utils.f_experiment_info import shown_endpoints, variables_of
from experiment_core_utils.j_results_saving import save_setting_result
from experiment_core_utils.knobs.active_blocks import ACTIVE_BLOCKS, block_choice_of, blocks_of, fewer_by_default
from experiment_core_utils.knobs.block_choice import BlockChoice
from experiment_core_utils.knobs.interface import KnobRequest, RequestedValues
from experiment_core_utils.knobs.placebo import PLACEBO
from experiment_core_utils.knobs.registry import all_knobs, knob_named
from experiment_core_utils.knobs.setting import Setting, check_label, reference_setting
from experiment_core_utils.knobs.strategies import plan_settings
from experiment_core_utils.l_results_csv_cleaning import table_paths
from experiment_core_utils.meters.host_facts import environment_stamp
from experiment_core_utils.meters.stability import measuring_order
from experiment_core_utils.meters.stages import StageMeasurement
from experiment_core_utils.models.request_work import unusable_lines
from experiment_core_utils.models.source import ModelSource
from experiment_core_utils.planning.estimate import PlanSize
from experiment_core_utils.primitives.collectives import all_gather, broadcast_from_main, processes_on_this_machine
from experiment_core_utils.primitives.cpu_threads import environment_threads
from experiment_core_utils.primitives.device import visible_gpus
from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError, WorkerLost
from experiment_core_utils.primitives.files import check_replaceable, remove_leftovers
from experiment_core_utils.primitives.texts import and_more, counted, short_digest
from experiment_core_utils.primitives.units import span
from experiment_core_utils.records.caveats import Caveat, caveat
from experiment_core_utils.records.journal import (
    finished_samples,
    journals_in,
    own_journals,
    read_journal,
    tidy_journals,
)
from experiment_core_utils.records.ledger import PARTS_FOLDER, PLAN_VERSION, Ledger, RunPlan, read_plan
from experiment_core_utils.records.setting_result import PROTOCOL_VERSION
from experiment_core_utils.records.settings import MeasuringOrder
from experiment_core_utils.tasks.content import digests_of
from experiment_core_utils.tasks.datasets.files.data_file import DataFileTask
from experiment_core_utils.tasks.interface import Sample, Task
from experiment_core_utils.tasks.prompt_forms import described_form, form_of
from experiment_core_utils.tasks.sampling import SampledDataset


def knob_request(config: ProfilingConfig, source: ModelSource) -> KnobRequest:
    """What each knob sees of the run."""
    random_weights, seed = config.model.random_weights, config.task.seed
    return KnobRequest(config.knobs, source.limits, source.name, source.score_folder, random_weights, seed)


def chosen_blocks(config: ProfilingConfig, source: ModelSource) -> BlockChoice:
    """Which blocks run for a number; see `block_choice_of`."""
    return block_choice_of(knob_request(config, source))


def plan_for(config: ProfilingConfig, source: ModelSource) -> tuple[Setting, ...]:
    """The settings of the requested grid.

    Raises:
        ConfigurationError: no value that is given for a knob is possible in this model, or scores or sets of blocks
            do not fit it.
    """
    values = {name: requested.values for name, requested in requested_values(config, source).items()}
    return plan_settings(config.knobs.sampling_strategy, values, config.knobs.num_configs, config.task.seed)


def reference_beside(config: ProfilingConfig, source: ModelSource, grid: Sequence[Setting]) -> Setting | None:
    """The reference setting, to be measured beside the grid; None where the grid contains it, or `--no_reference`."""
    reference = reference_setting(source.limits)
    in_grid = any(each.key == reference.key for each in grid)
    return None if in_grid or config.knobs.no_reference else reference


def placebo_beside(config: ProfilingConfig, source: ModelSource) -> Setting | None:
    """The reference setting again, as a control; None without `--placebo`."""
    values = {**reference_setting(source.limits).values, PLACEBO.name: "again"}
    return Setting(values) if config.knobs.placebo else None


def requested_values(config: ProfilingConfig, source: ModelSource) -> dict[str, RequestedValues[Any]]:
    """The values of each knob by name, given or by default, as far as they are possible.

    A value that the model cannot have is left out; a knob that cannot be turned stays at the model's own value.

    Raises:
        ConfigurationError: no value that is given for a knob is possible in this model.
    """
    request = knob_request(config, source)
    requested = {knob.name: knob.requested(request) for knob in all_knobs()}
    for name, of_knob in requested.items():
        for value in of_knob.values:
            check_label(knob_named(name), value)
    return requested


def left_out_by(config: ProfilingConfig, source: ModelSource, grid: Sequence[Setting]) -> tuple[str, ...]:
    """What was requested and is in no setting, a sentence each: impossible values, and those that other strategies than
    `full` leave out.
    """
    requested = requested_values(config, source)
    by_strategy = []
    for name, of_knob in requested.items():
        used, knob = {setting.level(name) for setting in grid}, knob_named(name)
        unused = [value for value in of_knob.values if knob.level(value) not in used] if of_knob.is_given else []
        if unused:
            by_strategy.append(f"{knob.plural} {', '.join(map(knob.listed, unused))}")
    return (
        *(f"left out: {reason}" for of_knob in requested.values() for reason in of_knob.impossible),
        *(
            f"left out by the sampling strategy: {values} (--sampling_strategy full measures all)"
            for values in by_strategy
        ),
    )


@dataclass(frozen=True)
class RequestedRun:
    """What is to be measured, of what and on what; the same on every process."""

    config: ProfilingConfig
    source: ModelSource
    grid: tuple[Setting, ...]  #: the settings that the requested values of the knobs make, done or due
    task: Task
    drawn: SampledDataset[Sample]  #: the task's samples, in the order in which every setting measures them
    beside: Setting | None = None  #: the reference setting, where it is measured beside the grid
    placebo: Setting | None = None  #: the reference setting again, as a control; None without `--placebo`

    @property
    def settings(self) -> tuple[Setting, ...]:
        """The settings of the whole plan: the grid, then the reference setting where it is beside it, and a placebo."""
        return (*self.grid, *(each for each in (self.beside, self.placebo) if each is not None))

    @property
    def sample_ids(self) -> tuple[int, ...]:
        """The samples, in that order."""
        return self.drawn.sample_ids

    @cached_property
    def digests(self) -> Mapping[int, str] | None:
        """Content of the samples when it is first requested; see `content.digests_of`."""
        return digests_of(self.task, self.sample_ids, self.config.measuring.sample_timeout)

    @property
    def prompt_form(self) -> Mapping[str, Any]:
        """The words in which the model is asked; empty where the task does not report its own."""
        source, task = self.source, self.config.task
        return described_form(
            self.task,
            source.prompt_family,
            chat_template=source.chat_template_use,
            system_prompt=task.system_prompt,
            date=source.prompt_date,
        )

    @property
    def journals(self) -> Path:
        """The folder in which finished samples are kept until their setting is saved."""
        return self.config.machine.output_dir / PARTS_FOLDER

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the settings, in the order of the plan."""
        return tuple(setting.key for setting in self.settings)

    @property
    def order(self) -> MeasuringOrder:
        """Order in which the settings are measured."""
        measuring, seed = self.config.measuring, self.config.task.seed
        return measuring_order(self.keys, measuring.setting_order, seed)


def requested_run(config: ProfilingConfig) -> RequestedRun:
    """Find the model, plan its settings, open the task and draw its samples.

    Raises:
        ConfigurationError: what was requested does not fit the model or the task, or one of them is not there.
    """
    source = find_requested_model(config)
    grid = plan_for(config, source)
    # Questions without pictures suit every server; pictures that are scaled have to be some.
    sides, limits = config.knobs.picture_side_list, config.knobs.answer_limit_list
    has_pictures = source.takes_pictures and (not source.may_lack_vision or sides is not None)
    config = config.model_copy(update={"task": with_task_named(config.task, takes_pictures=has_pictures)})
    named = (config.task.dataset_name,)
    refuse_picture_tasks(named, config.task, takes_pictures=source.takes_pictures, model=source.name)
    task = open_task(config.task, has_chat_template=source.has_chat_template, model_type=source.model_type)
    choice = chosen_blocks(config, source)
    drawn = draw_other_samples(task, config.task, choice, may_stop_early=config.measuring.until_precision is not None)
    if source.may_lack_vision:
        most = max_new_tokens_of(config.task, task)
        ids = drawn.sample_ids
        refuse_unfit_requests(task, ids, config.task, sides=sides, limits=limits, max_new_tokens=most)
    else:
        takes_pictures = source.takes_pictures
        refuse_unfit_pictures(task, drawn.sample_ids, config.task, takes_pictures=takes_pictures, model=source.name)
    reference, placebo = reference_beside(config, source, grid), placebo_beside(config, source)
    requested = RequestedRun(config, source, grid, task, drawn, reference, placebo)
    source.refuse_settings(requested.settings, task, drawn.sample_ids, max_new_tokens_of(config.task, task))
    return requested


def block_caveats(requested: RequestedRun, settings: Sequence[Setting]) -> list[Caveat]:
    """What a reader must know of how the blocks of these settings were chosen; nothing where all of them run."""
    config, total = requested.config, requested.source.limits.num_total_blocks
    choice = chosen_blocks(config, requested.source)
    if total is None or config.model.random_weights or all(len(blocks_of(setting)) == total for setting in settings):
        return []
    if not choice.is_made:
        return [caveat("first_blocks")]
    return [] if choice.questions is not None else [caveat("blocks_chosen_unknown", file=str(choice.file))]


def unusable_lines_of(requested: RequestedRun, settings: Sequence[Setting]) -> list[str]:
    """`unusable_lines` of settings that are to be measured, by the first samples, before the model is loaded."""
    if not settings:
        return []
    source, limit = requested.source, max_new_tokens_of(requested.config.task, requested.task)
    planned = source.planned_requests(requested.task, requested.sample_ids, limit)
    return unusable_lines(planned, settings, reference_setting(source.limits))


def knob_lines(requested: RequestedRun) -> list[str]:
    """What the plan and the screen say of the knobs: the largest top-k; which blocks run by default and how to get
    scores, whose questions are left out, and the caveats.
    """
    config, source, sampling = requested.config, requested.source, requested.drawn.sampling
    lines = [each.sentence for each in block_caveats(requested, requested.settings)]
    if source.limits.top_k_limit is not None:
        lines.append("top-k: at most {}, since {}".format(*source.limits.top_k_limit))
    is_set = ACTIVE_BLOCKS.name not in source.limits.unsupported and source.limits.num_total_blocks != 1
    if is_set and config.knobs.num_active_blocks_list is None and not fewer_by_default(knob_request(config, source)):
        lines.append(
            f"blocks: all {source.limits.num_total_blocks} run in every setting, because nothing says which matter "
            f"least; run `knobprof blocks --model_path {config.model.model_path} --method activation_change --output "
            "scores.json` (minutes) and give --importance_scores_file scores.json"
        )
    if sampling.num_left_out:
        choice = chosen_blocks(config, source)
        lines.append(
            f"blocks: {sampling.num_left_out} of the {counted(sampling.num_in_split, 'sample')} of "
            f"{requested.task.name} {requested.task.split} chose them ({choice.file}); {len(requested.drawn)} others "
            "are measured"
        )
    return lines


def check_and_make_folder(requested: RequestedRun, energy: StageMeasurement | None) -> None:
    """Refuse what can be known to fail before anything is written, then make the folder of the results.

    Raises:
        ConfigurationError: the folder cannot be made or written to.
        EnergyRefused: energy is required and nothing on this machine measures it.
        OutputRefused: a folder, a link or a device has the name of a table that the run would write at its end.
    """
    config = requested.config
    folder = config.machine.output_dir
    if config.measuring.energy == "required":
        check_energy(requested.source, config.machine.device, folder, energy)
    for path in table_paths(requested.task.name, folder, config.machine.format) if folder.is_dir() else ():
        check_replaceable(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"--output_dir {folder} cannot be written to ({error.strerror}); give another folder"
        ) from error


def due_keys(order: MeasuringOrder, ledger: Ledger) -> tuple[str, ...]:
    """Keys of the settings that have no result yet, in `order`."""
    return tuple(key for key in order.keys if ledger.result(key) is None)


def fill_in_places(requested: RequestedRun, ledger: Ledger) -> None:
    """Write into results of earlier runs whether they are of the reference setting, and that the grid has them now."""
    for setting in requested.settings:
        result = ledger.result(setting.key)
        if result is None:
            continue
        found = {
            "is_reference": setting == reference_setting(requested.source.limits),
            "in_grid": setting not in (requested.beside, requested.placebo) or result.in_grid,
        }
        if (result.is_reference, result.in_grid) != tuple(found.values()):
            path = ledger.result_path(setting.key)
            assert path is not None
            save_setting_result(result.with_keys(**found), path)


def tidy_folder(folder: Path, ledger: Ledger, keys: Collection[str], due: Collection[str]) -> dict[str, int]:
    """Put the files of earlier runs in order; of the settings' journals those that are `due` are kept.

    Returns:
        as `tidy_journals`.

    Raises:
        ResultsError: a process of another run is writing here.
    """
    remove_leftovers(folder)
    ledger.list_found()
    return tidy_journals(folder / PARTS_FOLDER, ledger.fingerprint, lambda key: key in keys and key not in due)


# By which a file server's clock may be ahead.
_CLOCK_SLACK_S = 120.0


def resumed_lines(plan: RunPlan, aside: Mapping[str, int], folder: Path) -> list[str]:
    """What of earlier runs counts in this one, what does not, and that the clock stepped back since.

    Args:
        aside: finished samples that were set aside, by their setting.
    """
    taken, lines = plan.num_samples_before, []
    if taken:
        whole = plan.num_samples * len(plan.due)
        lines.append(f"resumed: {taken} of {counted(whole, 'sample')} to measure had finished before, and are taken up")
    if any(aside.values()):
        lines.append(
            f"warning: {counted(sum(aside.values()), 'finished sample')} of {counted(len(aside), 'setting')} are set "
            "aside, measured with other flags, data, files or versions: that run's command takes them up again (or "
            f"remove {folder / PARTS_FOLDER}/*.jsonl.*)"
        )
    ahead_s = max((path.stat().st_mtime for path in folder.glob("*.json")), default=0.0) - plan.started_unix_s
    if ahead_s > _CLOCK_SLACK_S:
        lines.append(
            f"warning: the clock of this machine stepped back: {folder} has files from {span(ahead_s)} ahead of it; "
            "set it, or dates and what `status` says of times are wrong"
        )
    return lines


def settings_of(keys: Sequence[str], plan: Sequence[Setting]) -> list[Setting]:
    """The settings that the main process will measure, in its order.

    Raises:
        WorkerLost: this process was not given one of them.
    """
    by_key = {setting.key: setting for setting in plan}
    missing = [key for key in keys if key not in by_key]
    if missing:
        raise WorkerLost(f"this process was not given the setting {missing[0]}: all need the same arguments")
    return [by_key[key] for key in keys]


def run_uid_of(requested: RequestedRun, ledger: Ledger, due: Sequence[Setting]) -> str:
    """The random identity of the run: that of the run before where this one resumes it, else a new one.

    A run resumes another of the same settings and flags where settings that are due have samples of it.
    """
    try:
        before = read_plan(requested.config.machine.output_dir)
    except ResultsError:  # none, or one that this run writes anew
        return uuid.uuid4().hex
    is_alike = (before.keys, before.fingerprint) == (requested.keys, ledger.fingerprint)
    journals = [own_journals(requested.journals, each.key, ledger.fingerprint).values() for each in due]
    begun = {uid for own in journals for content in own for uid in content.run_uids}
    return before.run_uid if before.run_uid in begun and is_alike else uuid.uuid4().hex


def plan_of(
    requested: RequestedRun,
    experiment_id: str | None,
    ledger: Ledger,
    due: Sequence[Setting],
    num_processes: int,
    run_uid: str | None = None,
) -> RunPlan:
    """What this run sets out to do, for those who ask how far it has come."""
    before = [finished_samples(requested.journals, setting.key, ledger.fingerprint) for setting in due]
    return RunPlan(
        schema_version=PLAN_VERSION,
        experiment_id=experiment_id,
        run_uid=run_uid,
        fingerprint=ledger.fingerprint,
        task=requested.task.name,
        keys=requested.keys,
        due=tuple(setting.key for setting in due),
        num_samples=len(requested.drawn),
        num_processes=num_processes,
        num_samples_before=sum(map(len, before)),
        started_unix_s=time.time(),
        arrivals_s=plan_size(requested.config, len(requested.drawn), num_processes).arrivals_s,
    )


def plan_size(config: ProfilingConfig, num_samples: int, num_processes: int) -> PlanSize:
    """How often each setting runs a request."""
    runs = config.measuring.num_runs_per_sample, config.measuring.num_warmup_runs
    timed = num_timed(config, num_samples)
    sharing = config.model.tensor_parallel or 1
    return PlanSize(num_samples, *runs, num_processes, config.model.request_rate, timed, sharing)


# Requested parameters that change no figure: results are recognised without them.
NOT_IN_FINGERPRINT = {
    "enable_memory_optimization", "max_config_retries", "sample_timeout_s", "sampling_strategy",
}  # fmt: skip


# A P95 needs 86 pictures for a verdict, and 100 show a difference of 5 % in mean latency (`verdict_level`).
TIMED_SAMPLES = 100
# Of broken rows the first so many are named.
_SHOWN_ROWS = 5


def broken_rows(task: Task, sample_ids: Sequence[int]) -> list[str]:
    """Where each row of a data file is that cannot be used, among these samples, and why; none where it is no file.

    Columns, answers and texts are checked, and that a picture is there and has a header that can be read.
    """
    return list(task.faults(sample_ids)) if isinstance(task, DataFileTask) else []


def data_remarks(task: Task) -> list[str]:
    """What to know of the rows of a data file before their scores are read; nothing where it is no file."""
    return task.remarks if isinstance(task, DataFileTask) else []


def broken_rows_lines(faults: Sequence[str], num_rows: int) -> list[str]:
    """How many of `num_rows` rows cannot be used, the first five with the reason, and how many more there are."""
    if not faults:
        return []
    more = and_more(len(faults) - _SHOWN_ROWS)
    return [
        f"{len(faults)} of {counted(num_rows, 'row')} of the data file cannot be used, and are failed samples in a "
        "run:",
        *[f"  {fault}" for fault in faults[:_SHOWN_ROWS]],
        *[f" {more}"] * bool(more),
    ]


def replaced_results_lines(requested: RequestedRun, ledger: Ledger, due: Collection[str]) -> list[str]:
    """Lines about results of another run in the folder, and what differs: of settings that are due, which this run
    replaces as it goes on, and of other settings, which are then no sweep with this run's.
    """
    folder, found = requested.config.machine.output_dir, ledger.contents_of_others(requested.task.name)
    replaced = [content for key, content in found if key in due]
    beside = [content for key, content in found if key not in due]
    lines = []
    if replaced:
        lines.append(
            f"{len(replaced)} of the {counted(len(due), 'setting')} to measure have results in {folder} that were "
            f"measured otherwise and will be replaced ({_differing(requested, replaced)}); give another --output_dir "
            "to keep them"
        )
    if beside:
        lines.append(
            f"{counted(len(beside), 'other result')} in {folder}, measured otherwise "
            f"({_differing(requested, beside)}): analyses refuse a folder of both; give another --output_dir"
        )
    return lines


def _differing(requested: RequestedRun, others: Sequence[Mapping[str, Any]]) -> str:
    unnamed = "the model's files, data, devices, versions or flags of knobs"
    return ", ".join(_differences(requested, others)) or unnamed


def _differences(requested: RequestedRun, others: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What this run has and what others have in its place, by flag; keys that others lack are not compared."""
    config, source, task = requested.config, requested.source, requested.task
    choice = chosen_blocks(config, source)
    variables = variables_of(config, max_new_tokens_of(config.task, task), choice).content()
    own = {f"--{name}": ("experimental_variables", name, value) for name, value in variables.items()}
    own |= {"--model_path": ("model", "name", source.name), "--split": ("task", "split", task.split)}
    made = [each["provenance"] for each in others if isinstance(each.get("provenance"), dict)]
    for flag, (part, name, value) in own.items():
        parts = [each[part] for each in made if isinstance(each.get(part), dict)]
        found = [each[name] for each in parts if name in each]
        there = [each for each in (map(shown_endpoints, found) if name == "endpoint" else found) if each != value]
        if there and name not in NOT_IN_FINGERPRINT:
            yield f"{flag} {_as_given(value)}, there {' or '.join(dict.fromkeys(map(_as_given, there)))}"
    sources = [each["task"].get("source") for each in made if isinstance(each.get("task"), dict)]
    defined = {each.get("definition") for each in sources if isinstance(each, dict)}
    if defined - {None, task.source.get("definition")}:
        yield "the task's file or code has changed"
    yield from _other_data(requested.digests or {}, others)


def _other_data(digests: Mapping[int, str], others: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What is known of samples of the same id that have another content in the results of others."""
    lists = [each["per_sample_results"] for each in others if isinstance(each.get("per_sample_results"), list)]
    samples = [each for found in lists for each in found if isinstance(each, dict) and each.get("sample_id") in digests]
    known = [sample for sample in samples if sample.get("data_sha256") is not None]
    changed = sorted({each["sample_id"] for each in known if each["data_sha256"] != digests[each["sample_id"]]})
    if changed:
        yield f"the data of {counted(len(changed), 'sample')} have changed, the first is sample {changed[0]}"


def _as_given(value: object) -> str:
    if value is None:
        return "not given"
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def agreed_fingerprint(requested: RequestedRun, accelerator: Accelerator) -> str:
    """Digest of what a result depends on beside the knobs: model, samples, how it was measured, device, versions.

    The same wherever model and results lie. A change of code or of a machine's load is not seen; the provenance of a
    result records the commit.

    Raises:
        WorkerLost: (in all of them) a process would measure something else than the main one.
    """
    parts = fingerprint_parts(requested, accelerator), requested.source.digest()
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
        answered_in_batches(config, len(sample_ids)),
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
    if measuring.energy != "off":
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
    if config.task.columns is not None:
        yield "columns", sorted(config.task.columns)
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


def num_timed(config: ProfilingConfig, num_samples: int) -> int:
    """How many of the samples are measured; the others are only answered.

    Where a rule decides when there are enough, all may be.
    """
    measuring = config.measuring
    if measuring.num_latency_samples is not None:
        return min(measuring.num_latency_samples, num_samples)
    return num_samples if measuring.until_precision is not None else min(TIMED_SAMPLES, num_samples)


def answered_in_batches(config: ProfilingConfig, num_samples: int) -> tuple[int, int] | None:
    """How many samples are measured and how many of the others are answered together; None where all are measured."""
    timed = num_timed(config, num_samples)
    return None if timed >= num_samples else (timed, config.measuring.accuracy_batch_size)


def max_new_tokens_of(config: TaskConfig, task: Task) -> int:
    """The requested limit, else the task's own."""
    return task.max_new_tokens if config.max_new_tokens is None else config.max_new_tokens


def stops_of(config: TaskConfig, task: Task) -> tuple[str, ...]:
    """The texts that end an answer: the task's own and the requested ones, each once."""
    return tuple(dict.fromkeys([*getattr(task, "stop", ()), *(config.stop or ())]))
