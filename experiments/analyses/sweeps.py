"""The results of a run's folder: settings and samples, checked to belong together, and tidy frames of both."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from experiment_core_utils.knobs.batch_size import batch_size_of
from experiment_core_utils.knobs.interface import Level
from experiment_core_utils.knobs.loading import Loading, loading_of
from experiment_core_utils.knobs.registry import all_knobs
from experiment_core_utils.knobs.setting import Setting, setting_of
from experiment_core_utils.knobs.vision_tokens import vision_of
from experiment_core_utils.l_results_csv_cleaning import read_results
from experiment_core_utils.primitives.csv_tables import Cell
from experiment_core_utils.primitives.errors import ResultsError, ResultsRefused
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.records.columns import SAMPLE_COLUMNS
from experiment_core_utils.records.json_record import Record
from experiment_core_utils.records.provenance import Model
from experiment_core_utils.records.result_files import RESULT_FILES
from experiment_core_utils.records.sample_result import RunTimes
from experiment_core_utils.records.setting_result import SettingResult, setting_key
from experiment_core_utils.records.stages import SERVER
from experiment_core_utils.tables.frames import sample_columns, sample_rows, typed
from experiment_core_utils.tables.frames import settings_frame as table_of_settings

# Folders inside a run's folder that contain other things than its measurements.
NOT_DATASETS = ("rescored_", ".")
# What the files of one sweep have in common, by the name that a message gives it, as keys of the provenance.
COMMON = {
    "model": ("model", "name"),
    "model class": ("model", "model_class"),
    "parameters": ("model", "total_parameters"),
    "number format": ("model", "dtype"),
    "attention implementation": ("model", "attn_implementation"),
    "experts implementation": ("model", "experts_implementation"),
    "execution": ("model", "execution"),
    "GPU": ("hardware", "gpu_name"),
    "processor": ("hardware", "cpu"),
    "torch": ("versions", "torch"),
    "transformers": ("versions", "transformers"),
    "random weights": ("experimental_variables", "random_weights"),
}


@dataclass(frozen=True)
class SweepProvenance:
    """The fields that all settings of a sweep have in common."""

    device: str  #: name of the GPU, or of the processor where there is none; of servers where they were asked
    is_gpu: bool  #: which of the two
    model: str  #: name as given; its last part is enough for a caption
    dtype: str | None  #: number format of the weights; None where a server or a backend does not say it
    execution: str | None  #: `eager`, or how the model was compiled; `server` where one has it; None where not known
    tasks: tuple[str, ...]  #: in alphabetical order
    fingerprints: Mapping[str, str]  #: task -> digest of all but the knobs
    random_weights: bool  #: accuracy means nothing then
    versions: Mapping[str, str | None]  #: of torch, transformers and others; None for one that is not installed
    git_commit: str | None  #: of the checkout that measured; None outside one
    commands: tuple[str, ...]  #: that measured, each once
    caveats: tuple[str, ...]  #: of all settings, each once
    peak_flops_per_s: float | None  #: of the GPU for `dtype`, by its data sheet; None with `peak_reason`
    peak_bytes_per_s: float | None  #: of its memory; None with `peak_reason`
    peak_reason: str | None  #: why a peak, or a fraction of it, is not known; None where all are

    @property
    def how(self) -> str:
        """Number format and execution, as far as they are known."""
        return ", ".join(each for each in (self.dtype, self.execution) if each is not None) or "not known"


@dataclass(frozen=True)
class StoredSetting:
    """A setting of one task: `result` is the content of `path`."""

    task: str
    key: str
    path: Path
    result: SettingResult
    sweep: str = ""  #: what sets its sweep apart, beside others; empty alone

    @property
    def name(self) -> str:
        """The key, behind what sets its sweep apart."""
        return f"{self.sweep} {self.key}".strip()

    @property
    def run(self) -> tuple[str, ...]:
        """What settings of one run share: its `run_uid`; in files of dfe8f148 of one folder the ids of its runs.

        Settings of two sweeps are never of one run: a folder and its copy are not.
        """
        provenance = self.result.provenance
        if provenance.run_uids:
            return self.sweep, *provenance.run_uids
        return self.sweep, str(self.path.parent.resolve()), *(provenance.experiment_ids or ())

    @cached_property
    def setting(self) -> Setting:
        """The value of each knob."""
        return setting_of(self.result)


@dataclass(frozen=True, repr=False)
class Sweep:
    """The settings in order of task and knobs, the fewest vision features first."""

    provenance: SweepProvenance
    settings: tuple[StoredSetting, ...]
    label: str = ""  #: what sets it apart, beside others, such as `bfloat16` or `eager`; empty alone
    placebos: tuple[StoredSetting, ...] = ()  #: references measured again, which are controls and no settings

    def __repr__(self) -> str:
        name = f"{self.label}: " if self.label else ""
        return f"Sweep({name}{counted(len(self.settings), 'setting')} of {', '.join(self.provenance.tasks)})"

    @cached_property
    def samples(self) -> tuple[Mapping[str, Cell], ...]:
        """The rows of the samples that ran, in the order of the settings, by the columns of the CSV of samples."""
        return tuple(row for setting in self.settings for row in sample_rows(setting.result, setting.key))

    @property
    def num_samples(self) -> int:
        """The number of samples that ran, over all settings."""
        return sum(len(setting.result.per_sample_results) for setting in self.settings)


def load_sweep(*results_dirs: Path) -> Sweep:
    """The settings in a folder and in its direct sub-folders (one for each dataset, as the multi-dataset run makes).

    Sub-folders of rescored results are left out; give such a folder itself to read it. Several folders are read as one
    sweep, each once.

    Raises:
        ResultsError: no results, a file that is broken or of another schema (it is named), or files that do not belong
            to one sweep: another model, device or version, one task measured in two ways, or settings that were
            executed in different ways.
    """
    folders = {folder.resolve(): folder for folder in results_dirs}.values()
    return _one_sweep([each for folder in folders for each in _stored(folder)])


def load_sweeps(*results_dirs: Path) -> tuple[Sweep, ...]:
    """The sweeps in several folders, side by side: folders that belong to one sweep are one, others have labels.

    A label is what sets a sweep apart from the others: model, number format, `execution …` or `device …`;
    where these do not, also the name of its (first) folder.

    Raises:
        ResultsError: as `load_sweep` for one of the folders.
    """
    found: list[tuple[Path, Sweep]] = []
    for folder in {folder.resolve(): folder for folder in results_dirs}.values():
        own = load_sweep(folder)
        for at, (first, sweep) in enumerate(found):
            try:
                found[at] = first, _one_sweep([*sweep.settings, *sweep.placebos, *own.settings, *own.placebos])
                break
            except ResultsError:  # another sweep
                continue
        else:
            found.append((folder, own))
    if len(found) == 1:
        return (found[0][1],)
    labels = labels_of([sweep for _, sweep in found], [folder for folder, _ in found])
    labelled = []
    for label, (_, sweep) in zip(labels, found, strict=True):
        parts = [tuple(replace(each, sweep=label) for each in own) for own in (sweep.settings, sweep.placebos)]
        labelled.append(replace(sweep, settings=parts[0], label=label, placebos=parts[1]))
    return tuple(labelled)


def labels_of(sweeps: Sequence[Sweep], folders: Sequence[Path]) -> list[str]:
    """What sets each sweep apart from the others, as of `load_sweeps`; `folders` are where they are from."""
    named = [_set_apart_by(sweep) for sweep in sweeps]
    differing = [at for at in range(len(named[0])) if len({each[at] for each in named}) > 1]
    labels = [[part for at in differing if (part := each[at]) is not None] for each in named]
    if len(set(map(tuple, labels))) < len(labels):
        are_distinct = len({folder.name for folder in folders}) == len(folders)
        for label, folder in zip(labels, folders, strict=True):
            label.append(folder.name if are_distinct else str(folder))
    return list(map(", ".join, labels))


def _set_apart_by(sweep: Sweep) -> tuple[str | None, ...]:
    shared, variables = sweep.provenance, sweep.settings[0].result.provenance.experimental_variables
    quantised = getattr(variables, "quantization", None) or "none"
    dtype = shared.dtype if quantised == "none" else f"{shared.dtype} {quantised}"
    execution = f"execution {shared.execution or 'not known'}"
    ways = execution, f"device {shared.device}"
    return Path(shared.model).name, dtype, *ways


def _one_sweep(stored: Sequence[StoredSetting]) -> Sweep:
    settings = sorted(stored, key=setting_order)
    paths: dict[tuple[str, str], Path] = {}
    for each in settings:
        path = paths.setdefault((each.task, each.key), each.path)
        if path != each.path:
            raise ResultsError(f"{each.key} of {each.task} is in {path} and in {each.path}; give the folder of one run")
    _check_common(settings)
    by_task: dict[str, StoredSetting] = {}
    for each in settings:
        first = by_task.setdefault(each.task, each)
        if each.result.fingerprint != first.result.fingerprint:
            raise ResultsError(
                f"{first.path} and {each.path} have different fingerprints: other samples or other flags than the "
                "knobs; give a folder with the results of one run"
            )
    mixed = mixed_executions([setting.result for setting in settings])
    if mixed is not None:
        raise ResultsError(mixed)
    own = tuple(each for each in settings if not each.result.is_placebo)
    placebos = tuple(each for each in settings if each.result.is_placebo)
    return Sweep(_provenance(settings), own or placebos, placebos=placebos if own else ())


def mixed_executions(results: Sequence[SettingResult]) -> str | None:
    """The sentence that refuses settings of one run, loading and batch size that were not all executed in the same way;
    None where they were.

    A model runs several times faster by engines or CUDA graphs than by its modules, whatever its other knobs are. How
    many requests run together decides which kernels do, which is a part of what it costs.
    """
    alike: dict[tuple[Loading, int], list[SettingResult]] = {}
    for result in results:
        setting = setting_of(result)
        alike.setdefault((loading_of(setting), batch_size_of(setting)), []).append(result)
    return next((found for own in alike.values() if (found := _mixed(own)) is not None), None)


def _mixed(results: Sequence[SettingResult]) -> str | None:
    ways: dict[str, list[SettingResult]] = {}
    for result in results:
        if result.realised is not None:
            ways.setdefault(_way_of(result.realised), []).append(result)
    if len(ways) < 2:
        return None
    fewest = min(ways, key=lambda way: len(ways[way]))
    odd, others = ways[fewest][0], ", ".join(way for way in ways if way != fewest)
    reason = (odd.realised or {}).get("execution_reason")
    return (
        f"{len(ways[fewest])} of {len(results)} settings ran as {fewest} ({setting_key(odd)}"
        f"{'' if reason is None else f': {reason}'}), the others as {others}: their times cannot be compared; measure "
        "all in the same way, such as with --execution eager and another --output_dir"
    )


def _way_of(realised: Mapping[str, Any]) -> str:
    """What ran each stage of a setting; by one word in files that say no more."""
    stages = realised.get("execution_stages")
    if stages is not None:
        return ", ".join(f"{stage} {engine}" for stage, engine in sorted(stages.items()))
    is_prefill_alone = str(realised.get("execution_reason")).startswith("prefill: ")
    way = realised.get("execution") or "not known"
    return f"{way} but for the prefill" if way == "graph" and is_prefill_alone else str(way)


def settings_frame(sweep: Sweep) -> pd.DataFrame:
    """The table of settings, by the columns of the CSV of settings, also those without a value."""
    return table_of_settings([setting.result for setting in sweep.settings])


def knob_columns(settings: Sequence[Setting]) -> dict[str, list[Level | None]]:
    """The level of each setting by knob: of those with published columns, and of others that any of them names."""
    return {
        knob.name: [setting.level(knob.name) for setting in settings]
        for knob in all_knobs()
        if knob.published or any(knob.name in each.values for each in settings)
    }


def joint_settings_frame(sweeps: Sequence[Sweep]) -> pd.DataFrame:
    """`settings_frame` of all sweeps; of several, `sweep` is the label and stands first."""
    frames = [settings_frame(sweep) for sweep in sweeps]
    if len(sweeps) == 1:
        return frames[0]
    for sweep, frame in zip(sweeps, frames, strict=True):
        frame.insert(0, "sweep", sweep.label)
    return pd.concat(frames, ignore_index=True)


def samples_frame(sweep: Sweep) -> pd.DataFrame:
    """One row a sample that ran, by the columns of the CSV of samples, and one of each knob's name; numbers are floats,
    NaN where absent.
    """
    frame = pd.DataFrame(sample_columns((each.result, each.key) for each in sweep.settings))
    knobs = knob_columns([each.setting for each in sweep.settings])
    counts = [len(setting.result.per_sample_results) for setting in sweep.settings]
    for name, levels in knobs.items():
        if name not in frame:
            frame[name] = [level for level, count in zip(levels, counts, strict=True) for _ in range(count)]
    text, flags = ([column.name for column in SAMPLE_COLUMNS if column.kind is kind] for kind in (str, bool))
    whole = ("sample_id", "prompt_tokens", "output_tokens", "actual_vision_tokens")
    return typed(frame, text, flags, whole)


def runs_frame(sweep: Sweep) -> pd.DataFrame:
    """One row a run: `sample` (its row in `samples_frame`), `run` (from 0), and times in ms, NaN where absent."""
    samples = [sample for setting in sweep.settings for sample in setting.result.per_sample_results]
    names = [name for name in RunTimes.model_fields if name != "T_inter_token"]
    rows = [
        (place, number, *(getattr(run, name) for name in names))
        for place, sample in enumerate(samples)
        for number, run in enumerate(sample.runs)
    ]
    frame = pd.DataFrame(rows, columns=["sample", "run", *(f"{name}_ms" for name in names)])
    return frame.astype({f"{name}_ms": "float64" for name in names})


def results_folders(results_dir: Path) -> list[Path]:
    """The folder and its direct sub-folders, those with results; the folder itself where none has any."""
    if not results_dir.is_dir():
        return [results_dir]
    below = (path for path in results_dir.iterdir() if path.is_dir() and not path.name.startswith(NOT_DATASETS))
    return [each for each in (results_dir, *sorted(below)) if any(each.glob(RESULT_FILES))] or [results_dir]


def _stored(results_dir: Path) -> Iterator[StoredSetting]:
    for folder in results_folders(results_dir):
        for name, result in read_results(folder).items():
            yield StoredSetting(result.provenance.task.name, setting_key(result), folder / name, result)


def setting_order(setting: StoredSetting) -> tuple[str, tuple[tuple[float, ...], ...], str]:
    """The place of a setting in a sweep: by task, then knobs, fewest vision features first."""
    return setting.task, setting.setting.order, setting.key


def _check_common(settings: Sequence[StoredSetting]) -> None:
    by_loading: dict[Loading, StoredSetting] = {}
    for each in settings:
        alike = by_loading.setdefault(loading_of(each.setting), each)
        for name, place in COMMON.items():
            # The model as it was loaded; everything else is common to all.
            first = alike if place[0] == "model" and name != "model" else settings[0]
            one, other = (_at(setting, *place) for setting in (first, each))
            if one != other:
                raise ResultsError(
                    f"{first.path} and {each.path} are of two sweeps: their {name} is {one} and {other}; "
                    "give a folder with the results of one"
                )


def _at(setting: StoredSetting, *place: str) -> Any:
    """The value at this place of the provenance, which every result of a sweep must have; None where a backend does
    not say it of its model.

    Raises:
        ResultsRefused: there is none.
    """
    content: Any = setting.result.provenance
    for key in place:
        if isinstance(content, Model) and key != "name":
            return getattr(content, key)
        if key not in content.model_fields_set if isinstance(content, Record) else key not in content:
            raise ResultsRefused(
                f"{setting.path} lacks {key!r}: it is broken or not a setting's result; remove it or measure again"
            )
        content = getattr(content, key) if isinstance(content, Record) else content[key]
    return content


def _provenance(settings: Sequence[StoredSetting]) -> SweepProvenance:
    # The model as it is, where it was measured.
    first = next((each for each in settings if not loading_of(each.setting)), settings[0])
    hardware = first.result.provenance.hardware
    peaks = first.result.hardware_utilisation
    return SweepProvenance(
        device=hardware.computing,
        is_gpu=hardware.gpu_name is not None,
        model=_at(first, "model", "name"),
        dtype=_at(first, "model", "dtype"),
        execution=_at(first, "model", "execution") or _served(first),
        tasks=tuple(sorted({each.task for each in settings})),
        fingerprints={setting.task: setting.result.fingerprint for setting in settings},
        random_weights=_at(first, "experimental_variables", "random_weights"),
        versions=dict(_at(first, "versions")),
        git_commit=_at(first, "git_commit"),
        commands=tuple(dict.fromkeys(_at(each, "command") for each in settings)),
        caveats=tuple(dict.fromkeys(caveat for each in settings for caveat in _at(each, "caveats"))),
        peak_flops_per_s=peaks.peak_flops_per_s,
        peak_bytes_per_s=peaks.peak_bytes_per_s,
        peak_reason=peaks.utilisation_reason,
    )


def _served(setting: StoredSetting) -> str | None:
    """The execution of a model that a server runs; None for any other."""
    return None if setting.result.provenance.experimental_variables.endpoint is None else SERVER


def vision_label(result: SettingResult) -> str:
    """The label of a setting's vision knob; see `VisionTarget.value`."""
    return vision_of(setting_of(result)).value
