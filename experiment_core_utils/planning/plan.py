"""The plan of a run: settings, samples and digest, and which settings still lack a result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from experiment_core_utils.b_model_loader import find_requested_model, find_variants
from experiment_core_utils.config.parts import ModelConfig, TaskConfig
from experiment_core_utils.config.profiling import ProfilingConfig
from experiment_core_utils.knobs.active_blocks import block_choice_of, blocks_of
from experiment_core_utils.knobs.batch_size import batch_size_of
from experiment_core_utils.knobs.block_choice import BlockChoice
from experiment_core_utils.knobs.interface import KnobRequest, Level, RequestedValues
from experiment_core_utils.knobs.loading import (
    ATTENTION,
    ENGINE,
    NUMBER_FORMAT,
    QUANTIZED,
    Loading,
    config_of_loading,
    loading_flags,
    loadings_of,
    variant_of,
)
from experiment_core_utils.knobs.placebo import PLACEBO
from experiment_core_utils.knobs.registry import all_knobs, knob_named
from experiment_core_utils.knobs.setting import Setting, check_label, reference_setting
from experiment_core_utils.knobs.strategies import plan_settings
from experiment_core_utils.meters.stability import measuring_order
from experiment_core_utils.models.source import CheckpointSource, ModelSource
from experiment_core_utils.planning.estimate import PlanSize
from experiment_core_utils.primitives.device import choose_device, choose_dtype
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.records.caveats import Caveat, caveat
from experiment_core_utils.records.ledger import PARTS_FOLDER
from experiment_core_utils.records.settings import MeasuringOrder
from experiment_core_utils.requests.drawing import draw_other_samples, open_task, with_task_named
from experiment_core_utils.requests.fitting import (
    refuse_long_limits,
    refuse_picture_tasks,
    refuse_unfit_pictures,
    refuse_unfit_requests,
    refuse_unscorable,
    refuse_unscored,
)
from experiment_core_utils.tasks.content import digests_of
from experiment_core_utils.tasks.interface import Sample, Task
from experiment_core_utils.tasks.prompt_forms import described_form
from experiment_core_utils.tasks.registry import scored_by
from experiment_core_utils.tasks.sampling import SampledDataset, choose_latency_ids, shards_of


def knob_request(config: ProfilingConfig, source: ModelSource) -> KnobRequest:
    """What each knob sees of the run."""
    model = config.model
    dtype = choose_dtype(model.precision, choose_device(config.machine.device))
    # By default a quantised checkpoint says itself what it is multiplied in.
    says_itself = model.precision == "auto" and hasattr(getattr(source, "config", None), "quantization_config")
    given: dict[str, Level | None] = {
        NUMBER_FORMAT.name: None if says_itself else str(dtype).removeprefix("torch."),
        QUANTIZED.name: model.quantization,
        ENGINE.name: model.execution,
        ATTENTION.name: model.attn_implementation,
    }
    return KnobRequest(
        config.knobs,
        source.limits,
        source.name,
        source.score_folder,
        model.random_weights,
        config.task.seed,
        {name: value for name, value in given.items() if value is not None},
    )


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
    variants: Mapping[str, CheckpointSource] = field(default_factory=dict)  #: other checkpoints of the model, by name
    #: why the loadings are not in memory together; None where they are, or are not decided yet
    in_turn_reason: str | None = None

    @property
    def settings(self) -> tuple[Setting, ...]:
        """The settings of the whole plan: the grid, then the reference setting where it is beside it, and a placebo."""
        return (*self.grid, *(each for each in (self.beside, self.placebo) if each is not None))

    @property
    def loadings(self) -> list[Loading]:
        """How the settings need the model to be loaded, the run's own way first; servers have loaded theirs."""
        return [()] if self.source.is_served else loadings_of(self.settings)

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
        order = measuring_order(self.keys, measuring.setting_order, seed)
        return order if self.in_turn_reason is None else replace(order, how="loads")

    def source_of(self, loading: Loading) -> ModelSource:
        """The checkpoint of a loading."""
        return self.variants.get(variant_of(loading), self.source)


def requested_run(config: ProfilingConfig) -> RequestedRun:
    """Find the model, plan its settings, open the task and draw its samples.

    Raises:
        ConfigurationError: what was requested does not fit the model or the task, or one of them is not there.
    """
    source = find_requested_model(config)
    grid = plan_for(config, source)
    # Questions without pictures suit every server; pictures that are scaled have to be some.
    sides = config.knobs.picture_side_list
    has_pictures = source.takes_pictures and (not source.may_lack_vision or sides is not None)
    config = config.model_copy(update={"task": with_task_named(config.task, takes_pictures=has_pictures)})
    named = (config.task.dataset_name,)
    refuse_picture_tasks(named, config.task, takes_pictures=source.takes_pictures, model=source.name)
    task = open_task(config.task, has_chat_template=source.has_chat_template, model_type=source.model_type)
    choice = chosen_blocks(config, source)
    drawn = draw_other_samples(task, config.task, choice, may_stop_early=config.measuring.until_precision is not None)
    if source.may_lack_vision:
        refuse_unfit_requests(task, drawn.sample_ids, config.task, sides=sides)
    else:
        takes_pictures = source.takes_pictures
        refuse_unfit_pictures(task, drawn.sample_ids, config.task, takes_pictures=takes_pictures, model=source.name)
    refuse_unscored(task.metric, config, is_served=source.is_served)
    refuse_unscorable(task, drawn.sample_ids, source.prompt_family, config.measuring.sample_timeout)
    limits = config.knobs.answer_limit_list, config.knobs.thinking_tokens_list
    refuse_long_limits(task, *limits, max_new_tokens_of(config.task, task))
    again = Setting({**reference_setting(source.limits).values, PLACEBO.name: "again"})
    beside = reference_beside(config, source, grid), again if config.knobs.placebo else None
    requested = RequestedRun(config, source, grid, task, drawn, *beside, find_variants(config, source))
    source.refuse_settings(requested.settings, task, drawn.sample_ids, max_new_tokens_of(config.task, task))
    return requested


def refuse_unfilled_batches(requested: RequestedRun, num_processes: int) -> None:
    """Raises ConfigurationError for batches that the timed samples of some process do not fill."""
    largest, config = max(map(batch_size_of, requested.settings)), requested.config
    ids = requested.sample_ids
    timed = choose_latency_ids(ids, num_timed(config, len(ids)), config.task.seed)
    fewest = min(len(timed.intersection(shard)) for shard in shards_of(ids, num_processes).values())
    if largest > 1 and config.measuring.until_precision is not None:
        raise ConfigurationError(
            "--until_precision looks at samples one by one, and batches of --batch_size_list share them; drop one"
        )
    if largest > max(fewest, 1):
        whose = "" if num_processes == 1 else f" for each of {num_processes} processes"
        raise ConfigurationError(
            f"--batch_size_list {largest} needs as many timed samples, and there are {fewest}{whose}; give at most "
            f"{max(fewest, 1)}, or raise --num_samples and --num_latency_samples"
        )


def loads_decided(requested: RequestedRun, device: torch.device, processes_here: int) -> RequestedRun:
    """The run, with the reason why its copies of the model are loaded in turn, where they are.

    Args:
        processes_here: that have copies of their own in the same memory.

    Raises:
        ConfigurationError: `--loads` has nothing to act on, another flag does not go with it, or a copy cannot be
            loaded on the device.
    """
    how, loadings = requested.config.model.loads, requested.loadings
    if len(loadings) == 1:
        if how == "auto":
            return requested
        raise ConfigurationError(f"--loads {how} is of several copies of the model, and there is one; drop it")
    for loading in loadings[1:]:
        try:
            requested.source_of(loading).refuse_load(config_of_copy(requested.config.model, loading), device)
        except ConfigurationError as error:
            flags = loading_flags(loading)
            raise ConfigurationError(f"{flags} cannot be loaded here, leave it out: {error}") from error
    reason = (
        "--loads in_turn"
        if how == "in_turn"
        else None
        if how == "together"
        else _room_lacking(requested, device, processes_here)
    )
    if reason is not None and requested.config.measuring.until_precision is not None:
        raise ConfigurationError(
            f"--until_precision looks at rounds, and copies of the model that are loaded in turn have none ({reason}); "
            "drop it"
        )
    return replace(requested, in_turn_reason=reason)


def config_of_copy(config: ModelConfig, loading: Loading) -> ModelConfig:
    """The flags of the model as a copy of it is loaded."""
    return config.model_copy(update=config_of_loading(loading))


def _room_lacking(requested: RequestedRun, device: torch.device, processes_here: int) -> str | None:
    """Why the copies of a run do not fit into memory together; None where they do, by estimate."""
    needs = list[int]()
    for loading in requested.loadings:
        source = requested.source_of(loading)
        assert isinstance(source, CheckpointSource)
        sizes, how = source.memory_of(config_of_copy(requested.config.model, loading), device)
        needs.append(how.need_bytes(sizes))
    # On the CPU all processes take it from one memory.
    need, room = sum(needs) * (processes_here if device.type == "cpu" else 1), how.room
    if need <= room.free_bytes:
        return None
    return f"together they need {need / 1e9:.3g} GB, and {room.name} has {room.free_bytes / 1e9:.3g} GB free"


def block_caveats(requested: RequestedRun, settings: Sequence[Setting]) -> list[Caveat]:
    """What a reader must know of how the blocks of these settings were chosen; nothing where all of them run."""
    config, total = requested.config, requested.source.limits.num_total_blocks
    choice = chosen_blocks(config, requested.source)
    if total is None or config.model.random_weights or all(len(blocks_of(setting)) == total for setting in settings):
        return []
    if not choice.is_made:
        return [caveat("first_blocks")]
    return [] if choice.questions is not None else [caveat("blocks_chosen_unknown", file=str(choice.file))]


def plan_size(config: ProfilingConfig, num_samples: int, num_processes: int) -> PlanSize:
    """How often each setting runs a request."""
    runs = config.measuring.num_runs_per_sample, config.measuring.num_warmup_runs
    timed = num_timed(config, num_samples)
    sharing = config.model.tensor_parallel or 1
    return PlanSize(num_samples, *runs, num_processes, config.model.request_rate, timed, sharing)


# A P95 needs 86 pictures for a verdict, and 100 show a difference of 5 % in mean latency (`verdict_level`).
TIMED_SAMPLES = 100


def num_timed(config: ProfilingConfig, num_samples: int) -> int:
    """How many of the samples are measured; the others are only answered.

    Where a rule decides when there are enough, all may be.
    """
    measuring = config.measuring
    if measuring.num_latency_samples is not None:
        return min(measuring.num_latency_samples, num_samples)
    return num_samples if measuring.until_precision is not None else min(TIMED_SAMPLES, num_samples)


def max_new_tokens_of(config: TaskConfig, task: Task) -> int:
    """The requested limit, else the task's own; 1 where log-probabilities are scored, and nothing is generated."""
    if scored_by(task.metric) is not None:
        return 1
    return task.max_new_tokens if config.max_new_tokens is None else config.max_new_tokens


def stops_of(config: TaskConfig, task: Task) -> tuple[str, ...]:
    """The texts that end an answer: the task's own and the requested ones, each once."""
    return tuple(dict.fromkeys([*getattr(task, "stop", ()), *(config.stop or ())]))
