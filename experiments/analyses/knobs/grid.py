"""The grid of each task of a sweep: its settings by knob, and what every sample scored and cost at each."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiment_core_utils.knobs.batch_size import batch_size_of
from experiment_core_utils.knobs.interface import Level
from experiment_core_utils.knobs.registry import all_knobs, knob_named
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError
from experiment_core_utils.primitives.replication import (
    IN_ROUNDS,
    OPEN_LOOP,
    UNKNOWN,
    Replication,
    across_runs,
    in_passes,
)
from experiment_core_utils.primitives.statistics import fraction_of, mean_of
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.records.controls import Control
from experiment_core_utils.records.sample_result import SampleResult, is_same_question
from experiment_core_utils.records.setting_result import SettingResult, throughput_of
from experiment_core_utils.tasks.answers import scored_text
from experiment_core_utils.tasks.registry import score_name
from experiments.analyses.charts.style import caption_of, joined_caption, joint_setup, tasks_named
from experiments.analyses.knobs.controls import controls_of
from experiments.analyses.knobs.run_variance import is_in_rounds, over_loads, stated_run_deviation
from experiments.analyses.recorded_table import RecordedTable, named_picture, read_table
from experiments.analyses.stages.records import source_fields
from experiments.analyses.sweeps import StoredSetting, Sweep, load_sweeps

SamplesById = dict[int, SampleResult]
# Where settings of several sweeps are compared, the sweep (its model, precision, execution ...) is one more knob.
SWEEP = "sweep"
NO_VALUE = "none"  # of a knob that one of several models lacks
NO_PASSES = in_passes(())


def knob_names() -> tuple[str, ...]:
    """Every knob by name, the sweep last."""
    return (*(knob.name for knob in all_knobs()), SWEEP)


def knob_title(name: str) -> str:
    """What a knob is called in sentences and pictures."""
    return name if name == SWEEP else knob_named(name).title


@dataclass(frozen=True)
class KnobPoint:
    """A setting among those that are compared."""

    key: str  #: behind the sweep's label where there are several
    setting: Setting
    sweep: str = ""  #: label of its sweep beside others; empty alone
    is_reference: bool = False  #: whether it is the model as it is
    in_grid: bool = True  #: False for a reference beside the requested values of the knobs, which is no part of effects

    def value(self, knob: str) -> Level:
        """The value of one of `knob_names`."""
        if knob == SWEEP:
            return self.sweep or NO_VALUE
        level = self.setting.level(knob)
        return NO_VALUE if level is None else level


@dataclass(frozen=True)
class TaskGrid:
    """The grid of a task: S settings in order of the knobs, N samples in order of their ids; nan where one has none."""

    task: str
    metric: str
    best: float  #: the metric's highest score
    points: tuple[KnobPoint, ...]
    sample_ids: tuple[int, ...]
    pictures: tuple[str, ...]  #: of each sample; samples of one picture are not independent
    scores: np.ndarray  #: [S, N], from 0 to `best`
    total_ms: np.ndarray  #: [S, N], mean `T_total` of the runs; samples that were answered in batches have none
    energy_j: np.ndarray  #: [S, N], of the run whose time it is, idle power included
    flops: np.ndarray  #: [S, N], of vision, prefill and all decode steps of the request
    log_times: np.ndarray  #: [S, N], mean over a sample's runs of the natural logarithm of `T_total` in ms
    times: Replication  #: the levels at which times were repeated
    energies: Replication = NO_PASSES  #: the same of energies
    prompts: tuple[str, ...] = ()  #: of each sample; empty where the results do not contain them
    #: `unreadable_fraction` of each setting's answers; empty where it is not known
    unreadable: tuple[float, ...] = ()
    runs_ms: np.ndarray | None = None  #: [R, S, N], `T_total` of each run, nan where there are fewer; None if only one
    #: [S, N], of the setting: weights, KV cache and activations by formula; None where no setting has it
    memory_bytes: np.ndarray | None = None
    question_types: tuple[str, ...] = ()  #: of each sample; empty where the results do not contain them
    controls: tuple[Control, ...] = ()  #: of settings that took turns
    independent: str = "pictures"  #: what `pictures` names: `samples` where none has a picture
    #: [S, N], a number for each different answer with its score, nan where there is none; None where answers are not
    #: known
    answers: np.ndarray | None = None
    #: [S], where the batch size is turned: requests per second of each setting, nan where not measured; None elsewhere
    requests_per_s: np.ndarray | None = None

    @property
    def score_name(self) -> str:
        """What the metric's scores are called."""
        return score_name((self.metric, self.best))

    @property
    def batch_sizes(self) -> np.ndarray:
        """[S], how many requests run together."""
        return np.array([batch_size_of(point.setting) for point in self.points])


def levels_of(points: Sequence[KnobPoint], knob: str) -> tuple[Level, ...]:
    """The values of a knob, smallest first: numbers by size, the vision knob in the order of the settings."""
    values = tuple(dict.fromkeys(point.value(knob) for point in points))
    return tuple(sorted(values)) if all(isinstance(value, int | float) for value in values) else values


def knobs_of(points: Iterable[KnobPoint]) -> tuple[str, ...]:
    """The knobs that these settings name, and the sweep where they are of several: not those at rest in all of them."""
    named = {name for point in points for name in (*point.setting.values, *[SWEEP] * bool(point.sweep))}
    return tuple(name for name in knob_names() if name in named)


def grids_of(*sweeps: Sweep) -> tuple[TaskGrid, ...]:
    """The grid of each task, with the settings of all sweeps.

    Raises:
        ResultsError: settings of one task scored by two metrics, samples of one id that are different questions, or a
            file without a key that this needs.
    """
    settings = [setting for sweep in sweeps for setting in (*sweep.settings, *sweep.placebos)]
    tasks = sorted({each.task for each in settings})
    return tuple(grid_of(task, [each for each in settings if each.task == task]) for task in tasks)


def grid_of(task: str, settings: Sequence[StoredSetting]) -> TaskGrid:
    """The grid of one task's settings; raises as `grids_of`."""
    metrics = {(setting.result.metric, float(setting.result.metric_best)) for setting in settings}
    if len(metrics) > 1:
        names = " and ".join(sorted(name for name, _ in metrics))
        raise ResultsError(f"settings of {task} are scored by {names}; give results scored by one metric")
    ((metric, best),) = metrics
    _check_same_questions(task, settings)
    runs = _by_run(settings).values()
    took_turns = [own for own in runs if _shared_rounds([each.result for each in own])]
    controls = tuple(control for own in took_turns for control in controls_of(own))
    # A placebo is a control, and no setting that anyone would choose.
    settings = [each for each in settings if not each.result.is_placebo]
    rows: list[SamplesById] = [
        {sample.sample_id: sample for sample in setting.result.per_sample_results} for setting in settings
    ]
    ids = sorted({sample_id for row in rows for sample_id in row})
    samples = {sample_id: row[sample_id] for row in rows for sample_id in row}
    metadata = {sample_id: each.metadata for sample_id, each in samples.items()}
    log_times = _matrix(rows, ids, mean_log_time)
    numbers: dict[tuple[str, float | None], int] = {}
    return TaskGrid(
        task=task,
        metric=metric,
        best=best,
        points=tuple(
            KnobPoint(each.name, each.setting, each.sweep, bool(each.result.is_reference), each.result.in_grid)
            for each in settings
        ),
        sample_ids=tuple(ids),
        pictures=tuple(picture_of(samples[sample_id]) for sample_id in ids),
        scores=_matrix(rows, ids, lambda sample: sample.accuracy),
        total_ms=_matrix(rows, ids, lambda sample: sample.mean_total),
        energy_j=_matrix(rows, ids, lambda sample: sample.energy_j),
        flops=_matrix(rows, ids, lambda sample: sample.request_flops),
        log_times=log_times,
        times=_times_of(settings, rows),
        energies=_energies_of(settings),
        prompts=tuple(metadata[sample_id].prompt or metadata[sample_id].question for sample_id in ids),
        unreadable=tuple(unreadable_fraction(each.result) for each in settings),
        runs_ms=_runs_ms(rows, ids),
        memory_bytes=_memory_bytes(settings, len(ids)),
        question_types=tuple(samples[sample_id].question_type for sample_id in ids),
        controls=controls,
        independent="pictures" if any(each.may_have_picture for each in samples.values()) else "samples",
        answers=_matrix(rows, ids, lambda sample: numbers.setdefault((sample.pred, sample.accuracy), len(numbers))),
        requests_per_s=_requests_per_s(settings),
    )


def _requests_per_s(settings: Sequence[StoredSetting]) -> np.ndarray | None:
    if all(batch_size_of(each.setting) == 1 for each in settings):
        return None
    return np.array([throughput_of(each.result).requests_per_s for each in settings], dtype=float)


def _memory_bytes(settings: Sequence[StoredSetting], num_samples: int) -> np.ndarray | None:
    """[S, N], the counted memory of each setting for each of its samples; None where no setting has it."""
    memory = [None if each.result.memory is None else each.result.memory.counted_memory_bytes for each in settings]
    if not any(memory):
        return None
    return np.repeat(np.array(memory, dtype=float)[:, None], num_samples, axis=1)


def unreadable_fraction(result: SettingResult) -> float:
    """The fraction of a result's answers that say nothing; 0 without samples.

    The largest of four: those that are empty, could not be read as an answer, are one token where most references have
    several words, or were cut at the limit of tokens and score 0 (one that was cut behind the right answer was read).
    """
    samples = result.per_sample_results
    counts = (
        sum(not scored_text(sample.pred, sample.answer).strip() for sample in samples),
        sum(each.output_ended is False and not each.accuracy for each in samples),
    )
    shares = [fraction_of(count, result.num_samples) for count in counts]
    return max(each or 0.0 for each in (*shares, result.share_unparsed, result.share_one_token))


def _check_same_questions(task: str, settings: Sequence[StoredSetting]) -> None:
    """Raises ResultsError where settings of two sweeps have different questions under one id."""
    first_of: dict[int, tuple[SampleResult, StoredSetting]] = {}
    # All settings of a sweep have the same samples.
    for setting in {each.sweep: each for each in settings}.values():
        for sample in setting.result.per_sample_results:
            first, other = first_of.setdefault(sample.sample_id, (sample, setting))
            if not is_same_question(first, sample):
                raise ResultsError(
                    f"sample {sample.sample_id} of {task} is another question in {setting.path.parent} than in "
                    f"{other.path.parent}; give sweeps of the same data and split, or compare them by compare_runs.py"
                )


def mean_log_time(sample: SampleResult) -> float | None:
    """Mean over the sample's runs of the natural logarithm of `T_total` in ms; None for one answered in a batch."""
    return mean_of([math.log(run.T_total) for run in sample.runs])


def _times_of(settings: Sequence[StoredSetting], rows: Sequence[SamplesById]) -> Replication:
    """The levels at which times were repeated, rounds, loads or runs; not known of settings that did not take turns."""
    if any(each.result.open_loop is not None for each in settings):
        return OPEN_LOOP
    runs = _by_run(settings).values()
    if len(runs) == 1 and (found := over_loads([each.result for each in settings], rows)) is not None:
        return found
    in_turn = all(_shared_rounds([each.result for each in own]) for own in runs)
    return _with_runs(IN_ROUNDS if in_turn else UNKNOWN, settings)


def _energies_of(settings: Sequence[StoredSetting]) -> Replication:
    """The same of energies, which are parts of windows in passes."""
    passes = [None if each.result.energy is None else each.result.energy.passes for each in settings]
    measured = [each.j_per_request_by_pass for each in passes if each is not None]
    return _with_runs(in_passes(measured if len(measured) == len(passes) else ()), settings)


def _with_runs(within: Replication, settings: Sequence[StoredSetting]) -> Replication:
    deviation = stated_run_deviation([each.result for each in settings])
    return across_runs(within, deviation**2, [each.run for each in settings])


def _by_run(settings: Sequence[StoredSetting]) -> dict[object, list[StoredSetting]]:
    keys = dict.fromkeys(each.run for each in settings)
    return {run: [each for each in settings if each.run == run] for run in keys}


def _shared_rounds(results: Sequence[SettingResult]) -> bool:
    """Whether these settings of one run took turns; of those that were measured alone there is only one."""
    orders = [None if each.setting_order is None else each.setting_order.how for each in results]
    samples = [sample for each in results for sample in each.per_sample_results]
    alone = {run.place_in_round is None for sample in samples for run in sample.runs}
    return all(map(is_in_rounds, orders)) and len(alone) < 2


def picture_of(sample: SampleResult) -> str:
    """The name of the picture; a sample without one stands for itself."""
    return named_picture(sample.sample_id, sample.metadata.image_id)


def _matrix(
    rows: Sequence[SamplesById], ids: Sequence[int], read: Callable[[SampleResult], float | None]
) -> np.ndarray:
    """The values that `read` gives of each sample at each setting; nan where there is none."""
    values = [[read(row[sample_id]) if sample_id in row else None for sample_id in ids] for row in rows]
    matrix = np.array(values, dtype=float).reshape(len(rows), len(ids))
    matrix[~np.isfinite(matrix)] = np.nan
    return matrix


def _runs_ms(rows: Sequence[SamplesById], ids: Sequence[int]) -> np.ndarray | None:
    most = max((len(sample.runs) for row in rows for sample in row.values()), default=0)
    if most < 2:
        return None
    runs = np.full((most, len(rows), len(ids)), np.nan)
    places = {sample_id: at for at, sample_id in enumerate(ids)}
    for at, row in enumerate(rows):
        for sample_id, sample in row.items():
            runs[: len(sample.runs), at, places[sample_id]] = sample.run_totals
    return runs


@dataclass(frozen=True)
class Study:
    """The data that E2 analyses."""

    source: Mapping[str, Any]  #: provenance, as JSON
    caption: str  #: the line at the foot of figures of all of it
    setup: tuple[str, ...]  #: device, model, how it ran: what such a line says of any part of it
    random_weights: bool  #: accuracy means nothing then
    grids: tuple[TaskGrid, ...]
    sweeps: tuple[Sweep, ...]  #: the results as they were read; none for a table


def load_study(paths: Sequence[Path]) -> Study:
    """Folders of runs, of one sweep or several side by side, or files that `collect_table.py` wrote, one for each task.

    Raises:
        ResultsError: no results, broken ones, folders that each contain several sweeps, sweeps of different samples,
            tables of one task or of different models or machines, or a table among folders.
    """
    if not any(path.is_file() for path in paths):
        sweeps = load_sweeps(*paths)
        source = source_fields(sweeps[0])
        if len(sweeps) > 1:
            source = {"sweeps": {sweep.label: source_fields(sweep) for sweep in sweeps}}
        shared = [sweep.provenance for sweep in sweeps]
        count = sum(len(sweep.settings) for sweep in sweeps)
        caption = caption_of(shared, count, sum(sweep.num_samples for sweep in sweeps))
        is_random = any(each.random_weights for each in shared)
        return Study(source, caption, joint_setup(shared), is_random, grids_of(*sweeps), sweeps)
    if not all(path.is_file() for path in paths):
        raise ResultsError(f"{len(paths)} inputs, some of them files: give folders of runs, or tables alone")
    tables = [read_table(path) for path in paths]
    try:
        tasks = [table.origin["task"] for table in tables]
        if len(set(tasks)) < len(tasks):
            raise ResultsError(f"several tables are of the same task ({', '.join(tasks)}); give one for each task")
        for key in ("model", "split", "hardware", "versions", "precision", "num_threads"):
            if any(table.origin.get(key) != tables[0].origin.get(key) for table in tables):
                raise ResultsError(f"these tables differ in {key}; give tables of one model, measured in one way")
        return Study(_source(tables), _caption(tables), _setup(tables[0]), False, tuple(map(grid_of_table, tables)), ())
    except (KeyError, TypeError) as error:
        names = ", ".join(map(str, paths))
        raise ResultsError(f"{names} lacks {error} in its origin; collect the table again") from error


def grid_of_table(table: RecordedTable) -> TaskGrid:
    """The grid of a recorded table, which has scores and one time a sample, but no energy and no operations."""
    absent = np.full(table.scores.shape, np.nan)
    points = tuple(_recorded_point(key, table) for key in table.settings)
    log_times = np.log(1000 * table.seconds)
    in_rounds = is_in_rounds(table.origin.get("setting_order"))
    return TaskGrid(
        task=table.origin["task"],
        metric=table.origin["metric"],
        best=float(table.best),
        points=points,
        sample_ids=table.sample_ids,
        pictures=table.pictures,
        scores=table.scores,
        total_ms=1000 * table.seconds,
        energy_j=absent,
        flops=absent,
        log_times=log_times,
        times=IN_ROUNDS if in_rounds else UNKNOWN,
        prompts=table.prompts,
        runs_ms=None if table.runs is None else 1000 * table.runs,
    )


def _recorded_point(key: str, table: RecordedTable) -> KnobPoint:
    try:
        setting = Setting.named(key)
    except ConfigurationError as error:
        raise ResultsError(f"{error}; collect the table again") from error
    is_reference = key == table.reference
    in_grid = table.reference_in_grid or not is_reference
    return KnobPoint(key, setting, is_reference=is_reference, in_grid=in_grid)


def _source(tables: Sequence[RecordedTable]) -> dict[str, Any]:
    origin = dict(tables[0].origin)
    if len(tables) > 1:
        del origin["task"], origin["metric"]  # each table's own
        origin["caveats"] = list(dict.fromkeys(each for table in tables for each in table.origin.get("caveats", ())))
    return {
        **origin,
        "tasks": [table.origin["task"] for table in tables],
        "num_settings": sum(len(table.settings) for table in tables),
        "num_samples": _num_generations(tables),
        "num_pictures": len({picture for table in tables for picture in table.pictures}),
    }


def _num_generations(tables: Sequence[RecordedTable]) -> int:
    return sum(int(np.isfinite(table.seconds).sum()) for table in tables)


def _setup(table: RecordedTable) -> tuple[str, ...]:
    hardware = table.origin["hardware"]
    return hardware["gpu_name"] or hardware["cpu"] or "CPU", table.origin["model"]


def _caption(tables: Sequence[RecordedTable]) -> str:
    num_settings = sum(len(table.settings) for table in tables)
    size = f"n = {counted(_num_generations(tables), 'generation')}, {counted(num_settings, 'setting')}"
    tasks = tasks_named([table.origin["task"] for table in tables])
    return joined_caption([*_setup(tables[0]), size, tasks])
