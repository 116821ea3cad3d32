"""A measured grid: what every request scored and took at every choice of the knobs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiment_core_utils.knobs.registry import knob_named
from experiment_core_utils.knobs.setting import Setting, setting_of
from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.primitives.statistics import fraction_above
from experiment_core_utils.primitives.texts import all_of, counted
from experiment_core_utils.primitives.units import check_fraction
from experiments.analyses.charts.style import joined_caption, tasks_named
from experiments.analyses.knobs.conclusion import voiding_caveats
from experiments.analyses.knobs.grid import TaskGrid, load_study
from experiments.analyses.sweeps import Sweep, vision_label
from experiments.controller.caveats import ControllerCaveat
from experiments.controller.knob_choices import has_all_knobs
from experiments.controller.policies.interface import PictureShape, RequestFeatures
from experiments.fitting.held_out import drawn_groups


@dataclass(frozen=True)
class MeasuredGrid:
    """The measurements of S choices in order of the knobs (see `Setting.order`) for N requests, task by task.

    Scores are those that the run gave. Of a metric that scores a run's answers together (`cider_score`) they depend on
    the run's other samples through the references alone, never through what was answered, so that scores of different
    choices may be mixed; they remain those of the whole run where only a part of its samples is looked at.
    """

    choices: tuple[Setting, ...]
    #: tasks, sample_ids, pictures: [N]; samples of one picture are not independent
    tasks: tuple[str, ...]
    sample_ids: tuple[int, ...]
    pictures: tuple[str, ...]
    scores: np.ndarray  #: [S, N], by each task's metric; nan where there is none
    best: np.ndarray  #: [N], the highest score of the request's metric
    total_s: np.ndarray  #: [S, N], mean `T_total` of the runs; nan for a sample that was not measured there
    #: [N], what a policy may see; None where the results do not contain it (a recorded table)
    requests: tuple[RequestFeatures, ...] | None
    metrics: Mapping[str, str]  #: task -> its metric
    left_out: tuple[str, ...]  #: settings that not every task has
    source: Mapping[str, Any]  #: provenance, as JSON
    setup: tuple[str, ...]  #: device, model, how it ran, for captions
    model: str | None = None  #: its name as given; None where the results do not contain it
    #: task -> the split that its samples are of; without those that the results do not contain
    splits: Mapping[str, str] = field(default_factory=dict)
    prompts: tuple[str | None, ...] | None = None  #: [N], the texts of the prompts; None where there are none
    reference: Setting | None = None  #: the model as it is; None where not every task measured it
    reference_in_grid: bool = True  #: whether the requested values of the knobs make it
    reference_s: np.ndarray | None = None  #: [N], its `total_s`, also where it is no choice; None without `reference`
    runs_s: np.ndarray | None = None  #: [R, S, N], `T_total` of each run, nan where there are fewer; None if only one
    voided_by: tuple[str, ...] = ()  #: why a run of it is INVALID, a sentence each; a recorded table does not say it

    def __len__(self) -> int:
        return len(self.sample_ids)

    @property
    def largest(self) -> Setting:
        """The choice with the largest values of the knobs that were requested."""
        inside = [choice for choice in self.choices if self.reference_in_grid or choice != self.reference]
        return (inside or self.choices)[-1]

    @property
    def landmarks(self) -> tuple[Setting, ...]:
        """The smallest choice, the largest, and the reference where it can be chosen; each once."""
        beside = [self.reference] if self.reference in self.choices and self.reference is not None else []
        return tuple(dict.fromkeys([self.choices[0], self.largest, *beside]))

    @property
    def reference_mean_s(self) -> float | None:
        """The mean time of the reference over the samples that were measured there; None without any."""
        if self.reference_s is None or not np.isfinite(self.reference_s).any():
            return None
        return float(np.nanmean(self.reference_s))

    @property
    def keys(self) -> tuple[tuple[str, int], ...]:
        """Task and sample id [N], which name a request."""
        return tuple(zip(self.tasks, self.sample_ids, strict=True))

    @property
    def caption(self) -> str:
        """The caption at the foot of a figure of these requests: of a part, only the part is counted."""
        size = f"n = {counted(len(self), 'request')}, {counted(len(self.choices), 'setting')}"
        return joined_caption([*self.setup, size, tasks_named(dict.fromkeys(self.tasks))])

    @property
    def times_s(self) -> np.ndarray:
        """The time [R, S, N] of every run: what a request may take."""
        return self.total_s[None] if self.runs_s is None else self.runs_s

    def late(self, budget_s: float) -> np.ndarray:
        """The fraction [S, N] of each request's runs that exceed a budget; nan where it was not measured."""
        return fraction_above(self.times_s, budget_s)

    def in_time(self, budget_s: float) -> np.ndarray:
        """Scores [S, N] as fractions of the best one, of which a late run has 0."""
        return np.asarray(self.shares * (1 - self.late(budget_s)))

    def rows(self, kept: Sequence[int] | np.ndarray) -> "MeasuredGrid":
        """The part of the grid with the choices at these rows."""
        return replace(
            self, choices=tuple(self.choices[row] for row in kept), scores=self.scores[kept],
            total_s=self.total_s[kept], runs_s=None if self.runs_s is None else self.runs_s[:, kept],
        )  # fmt: skip

    @property
    def shares(self) -> np.ndarray:
        """Scores [S, N] as fractions of the best one, so that tasks of different metrics can be combined."""
        return np.asarray(self.scores / self.best)

    @property
    def features(self) -> tuple[RequestFeatures, ...]:
        """The features [N] that policies see; of a recorded table names and prompts alone."""
        prompts = self.prompts or (None,) * len(self)
        if self.requests is not None:
            return tuple(replace(each, prompt=text) for each, text in zip(self.requests, prompts, strict=True))
        return tuple(RequestFeatures(*key, 0, {}, None, text) for key, text in zip(self.keys, prompts, strict=True))

    def take(self, which: np.ndarray) -> "MeasuredGrid":
        """The part of the grid with the requests of a mask [N] or of places."""
        places: list[int] = (np.flatnonzero(which) if which.dtype == bool else which).tolist()

        taken: dict[str, Any] = {
            name: tuple(values[place] for place in places)
            for name in ("tasks", "sample_ids", "pictures", "requests", "prompts")
            if (values := getattr(self, name)) is not None
        }
        return replace(
            self, scores=self.scores[:, places], best=self.best[places], total_s=self.total_s[:, places],
            reference_s=None if self.reference_s is None else self.reference_s[places],
            runs_s=None if self.runs_s is None else self.runs_s[:, :, places], **taken,
        )  # fmt: skip

    def with_all_knobs(self) -> "MeasuredGrid":
        """The part with settings of tier, top-k and blocks, among which the two-stage controller chooses.

        Raises:
            ResultsError: there are none.
        """
        kept = [row for row, choice in enumerate(self.choices) if has_all_knobs(choice)]
        if not kept:
            raise ResultsError(
                f"a two-stage controller chooses tier, top-k and blocks, and these are settings such as "
                f"{self.choices[0].key}; use a lookup table for such a model, or profile one that has all three by "
                "--tier_list, --top_k_list and --num_active_blocks_list"
            )
        others = tuple(choice.key for choice in self.choices if not has_all_knobs(choice))
        return replace(self.rows(kept), left_out=(*self.left_out, *others))

    @property
    def unchosen(self) -> list[ControllerCaveat]:
        """The caveats of what a two-stage controller cannot choose: the reference, and other settings."""
        caveats = []
        if self.reference is not None and not has_all_knobs(self.reference):
            caveats.append(ControllerCaveat.of("reference_not_chosen", setting=self.reference.key))
        others = [choice.key for choice in self.choices if not has_all_knobs(choice) and choice != self.reference]
        if others:
            counts = {"num_others": len(others), "num_settings": len(self.choices)}
            caveats.append(ControllerCaveat.of("others_not_chosen", **counts, setting=others[0]))
        return caveats

    @property
    def is_complete(self) -> np.ndarray:
        """Whether each request [N] has a score and a time at every choice."""
        return np.asarray(np.isfinite(self.scores).all(axis=0) & np.isfinite(self.total_s).all(axis=0))

    def complete(self) -> "MeasuredGrid":
        """The part of the grid with requests that have a score and a time at every choice.

        Raises:
            ResultsError: there are none.
        """
        whole = self.is_complete
        if not whole.any():
            raise ResultsError(
                f"no sample has a score and a time at {all_of(len(self.choices), 'setting')}; profile the whole "
                "grid, with every sample measured (--num_latency_samples of their number)"
            )
        return self.take(whole)


def load_grid(paths: Sequence[Path]) -> MeasuredGrid:
    """Folders of runs, read as one sweep, or tables of `collect_table.py`, one for each task.

    Raises:
        ResultsError: no results, broken ones or of different sweeps, random weights, requests that waited for each
            other, or no setting that all tasks have.
    """
    study = load_study(paths)
    if study.random_weights:
        raise ResultsError("these results are of random weights, so accuracy cannot be used; profile a trained model")
    if any(grid.times.is_open_loop for grid in study.grids):
        raise ResultsError(
            "these requests arrived at a rate and waited for each other, and a controller is of requests one by one; "
            "measure again without --request_rate"
        )
    if len(study.sweeps) > 1:
        labels = "; ".join(sweep.label for sweep in study.sweeps)
        raise ResultsError(f"these are {len(study.sweeps)} sweeps ({labels}); give the folders of one")
    grids = study.grids
    choices, left_out = _shared_choices(grids)
    own = {point.key: point for point in grids[0].points if point.is_reference}
    reference = next((choice for choice in choices if choice.key in own), None)
    total_s = _side_by_side(grids, choices, lambda grid: grid.total_ms) / 1000
    most = max(1 if grid.runs_ms is None else len(grid.runs_ms) for grid in grids)
    runs = [_side_by_side(grids, choices, partial(_run_ms, run=run)) / 1000 for run in range(most)]
    made = MeasuredGrid(
        choices=choices,
        tasks=tuple(grid.task for grid in grids for _ in grid.sample_ids),
        sample_ids=tuple(sample_id for grid in grids for sample_id in grid.sample_ids),
        pictures=tuple(str(picture) for grid in grids for picture in grid.pictures),
        scores=_side_by_side(grids, choices, lambda grid: grid.scores),
        best=np.array([grid.best for grid in grids for _ in grid.sample_ids]),
        total_s=total_s,
        requests=None,
        metrics={grid.task: grid.metric for grid in grids},
        left_out=left_out,
        source=study.source,
        setup=study.setup,
        model=study.source.get("model"),
        # Tables are of one split.
        splits={grid.task: study.source["split"] for grid in grids} if "split" in study.source else {},
        prompts=_prompts(grids),
        reference=reference,
        reference_in_grid=reference is None or own[reference.key].in_grid,
        reference_s=None if reference is None else total_s[choices.index(reference)],
        runs_s=np.stack(runs) if most > 1 else None,
    )
    if not study.sweeps:
        return made
    # What only the results of a run have: what policies may see, the splits, and what voids it.
    settings, features = study.sweeps[0].settings, _features_of(study.sweeps[0])
    splits = {setting.task: setting.result.provenance.task.split for setting in settings}
    requests, voided_by = tuple(features[key] for key in made.keys), tuple(voiding_caveats(settings).values())
    return replace(made, requests=requests, splits=splits, voided_by=voided_by)


def _run_ms(grid: TaskGrid, run: int) -> np.ndarray:
    """The times [S, N] of one run of each sample; nan where there are fewer."""
    times = grid.total_ms[None] if grid.runs_ms is None else grid.runs_ms
    return np.asarray(times[run] if run < len(times) else np.full(times.shape[1:], np.nan))


def _prompts(grids: Sequence[TaskGrid]) -> tuple[str | None, ...] | None:
    texts = [text or None for grid in grids for text in grid.prompts or [""] * len(grid.sample_ids)]
    return tuple(texts) if any(texts) else None


def _side_by_side(
    grids: Sequence[TaskGrid], choices: Sequence[Setting], read: Callable[[TaskGrid], np.ndarray]
) -> np.ndarray:
    """Values [S, N] of every task's [its settings, its samples]: the rows of the choices, one task beside the other."""
    parts = []
    for grid in grids:
        rows = {point.key: row for row, point in enumerate(grid.points)}
        parts.append(read(grid)[[rows[choice.key] for choice in choices]])
    return np.concatenate(parts, axis=1)


def _shared_choices(grids: Sequence[TaskGrid]) -> tuple[tuple[Setting, ...], tuple[str, ...]]:
    found = [{point.key: point.setting for point in grid.points} for grid in grids]
    keys = dict.fromkeys(key for each in found for key in each)
    shared = [key for key in keys if all(key in each for each in found)]
    if not shared:
        raise ResultsError(
            "no setting of these results is one that every task has; profile all tasks with the same values of the "
            "knobs"
        )
    choices = tuple(sorted((found[0][key] for key in shared), key=lambda choice: choice.order))
    return choices, tuple(key for key in keys if key not in shared)


def _features_of(sweep: Sweep) -> dict[tuple[str, int], RequestFeatures]:
    """Request shapes by task and sample id; vision targets that a sample was not run at are left out.

    Of settings of one vision target, one without further knobs says what its tokens are, where there is one. The length
    of the answer is left open: it is not known before the request runs.
    """
    text_tokens: dict[tuple[str, int], int] = {}
    shapes: dict[tuple[str, int], dict[str, PictureShape]] = {}
    for each in sweep.settings:
        vision = vision_label(each.result)
        has_further = any(knob_named(name).neutral is not None for name in setting_of(each.result).values)
        for sample in each.result.per_sample_results:
            key = each.task, sample.sample_id
            if sample.input_text_tokens is None or sample.actual_vision_tokens is None:
                raise ResultsError(
                    f"{each.path}: only a server knows the tokens of its prompts; measure a model in this process"
                )
            text_tokens[key] = sample.input_text_tokens
            if not has_further or vision not in shapes.get(key, {}):
                # Without a picture there are no crops.
                shape = PictureShape(sample.actual_num_crops or 0, sample.actual_vision_tokens)
                shapes.setdefault(key, {})[vision] = shape
    return {key: RequestFeatures(*key, text_tokens[key], shapes[key], None) for key in shapes}


def split_by_picture(grid: MeasuredGrid, share: float, seed: int) -> tuple[MeasuredGrid, MeasuredGrid]:
    """Two parts without a common picture: about the fraction `share` of each task's pictures, and the rest.

    Raises:
        ConfigurationError: the fraction is not between 0 and 1.
        ResultsError: one of them would be empty.
    """
    check_fraction("--calibration_share", share)
    mask = drawn_groups(grid.pictures, grid.tasks, share, seed)
    if mask.all() or not mask.any():
        raise ResultsError(
            f"{counted(len(set(grid.pictures)), 'picture')} cannot be split at {share:g}; profile more samples, or "
            "give the calibration results of their own"
        )
    return grid.take(mask), grid.take(~mask)
