"""A sweep as a function call, and its results as records and frames."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from experiment_core_utils.config.parts import QuestionConfig, validated_as
from experiment_core_utils.config.profiling import ProfilingConfig
from experiment_core_utils.knobs.registry import load_knob_module
from experiment_core_utils.pipeline import run_profiling
from experiment_core_utils.primitives.contrasts import ACCURACY_MARGIN
from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError
from experiment_core_utils.primitives.notebook_html import block, listed, paragraph
from experiment_core_utils.primitives.texts import counted, did_you_mean
from experiment_core_utils.records.conclusion import Conclusion
from experiment_core_utils.records.price_list import PriceList
from experiment_core_utils.records.setting_result import SettingResult, setting_key
from experiment_core_utils.records.settings import SettingFailure
from experiments.analyses.charts.knob_charts import fronts_chart
from experiments.analyses.charts.style import caption_of
from experiments.analyses.knobs.analysis import NUM_DRAWS, analyse_knobs
from experiments.analyses.knobs.conclusion import answered, conclude, invalid_tasks
from experiments.analyses.knobs.grid import TaskGrid, grids_of
from experiments.analyses.knobs.objectives import COSTS, LATENCY_MEAN, NoObjectives
from experiments.analyses.knobs.records import FrontAnalysis, TaskAnalysis
from experiments.analyses.report.page import write_report
from experiments.analyses.sweeps import Sweep, labels_of, load_sweep, samples_frame, settings_frame
from experiments.analyses.two_runs import RATIO_MARGIN, compare_runs, runs_in
from experiments.core_exp.closing_lines import concluded_and_saved
from knob_profiler.comparing import ComparedResults
from knob_profiler.keywords import flags_of, in_words_of
from knob_profiler.pictures import figure_for_notebooks
from knob_profiler.tables import task_html


@dataclass(frozen=True, repr=False)
class Results:
    """The settings of one sweep."""

    folder: Path  #: of the results; it can be moved, and read again by `load`
    settings: tuple[SettingResult, ...]  #: one record for each setting that was measured, now or before
    failed: Mapping[str, SettingFailure]  #: settings that could not be run, by key; empty for results that were loaded

    def __repr__(self) -> str:
        tasks = dict.fromkeys(each.provenance.task.name for each in self.settings)
        failed = f", {len(self.failed)} failed" if self.failed else ""
        return (
            f"Results({str(self.folder)!r}: {counted(len(self.settings), 'setting')} of "
            f"{', '.join(tasks) or 'no task'}{failed})"
        )

    @cached_property
    def sweep(self) -> Sweep:
        """What the analyses take: these settings as the files in the folder have them.

        Raises:
            ResultsError: there are none, or files in the folder do not belong to one sweep.
        """
        found, own = load_sweep(self.folder), {(each.provenance.task.name, setting_key(each)) for each in self.settings}
        return Sweep(found.provenance, tuple(each for each in found.settings if (each.task, each.key) in own))

    def frame(self) -> pd.DataFrame:
        """One row a setting, by the columns of the CSV of settings, also those without a value; NaN where absent."""
        return settings_frame(self.sweep)

    def samples(self) -> pd.DataFrame:
        """One row a sample that ran, of every setting."""
        return samples_frame(self.sweep)

    def front(self, cost: str = "latency_mean", num_draws: int = NUM_DRAWS) -> pd.DataFrame:
        """The settings that none beats in both accuracy and cost, cheapest first, for each task.

        Columns: task, setting, accuracy (fraction), `<cost>_<unit>`, `word` (how sure it is that the setting is on the
        front: yes, likely, can't tell or no, as everywhere), the `p_value` that it is not, for all settings together,
        and `status`, which is made from the word: `established` for yes, `dominated` for no, else `within_noise`. The
        three are None where the run is INVALID, and of latencies of requests that arrived at a rate.

        Args:
            cost: `latency_mean`, `latency_p95`, `latency_p99`, `energy`, `flops` or `memory`.

        Raises:
            ResultsError: there is no such cost, or it was not measured.
        """
        void = invalid_tasks(self._grids, self.sweep.settings)
        verdicts = ("word", "p_value", "status")
        return pd.DataFrame(
            [
                {
                    "task": each.found.task,
                    "setting": point.key,
                    "accuracy": point.accuracy,
                    f"{each.found.of.name}_{each.found.of.unit}": point.cost,
                }
                | (
                    dict.fromkeys(verdicts)
                    if each.found.task in void or each.found.have_waited
                    else {name: getattr(point, name) for name in verdicts}
                )
                for each in self._fronts(cost, num_draws)
                for point in each.front.points
                if point.on_front
            ]
        )

    def plot(self, cost: str = "latency_mean", num_draws: int = NUM_DRAWS) -> Figure:
        """The picture of the front, a panel for each task; a notebook shows it.

        Args:
            cost: as of `front`.
        """
        fronts = self._fronts(cost, num_draws)
        caption = caption_of([self.sweep.provenance], len(self.sweep.settings), self.sweep.num_samples)
        invalid = invalid_tasks(self._grids, self.sweep.settings)
        return figure_for_notebooks(fronts_chart(fronts, invalid), caption)

    def conclusions(self) -> list[Conclusion]:
        """Which setting of each task to take, how sure that is, why, and what voids it; printed, the last lines of a
        run.
        """
        return [conclude(task, self.sweep.settings) for task in self._by_mean_latency]

    @cached_property
    def conclusion(self) -> Conclusion:
        """The conclusion of the only task.

        Raises:
            ResultsError: there are several.
        """
        found = self.conclusions()
        if len(found) > 1:
            raise ResultsError(f"there are {len(found)} tasks, each with a conclusion; take them from conclusions()")
        return found[0]

    def choose(
        self,
        accept_loss: float | None = None,
        *,
        min_accuracy: float | None = None,
        budget_ms: float | None = None,
        budget_p95_ms: float | None = None,
        budget_j: float | None = None,
    ) -> list[PriceList]:
        """What an accepted loss saves, and what fits into budgets, of each task; the answers of `knobprof choose`.

        Args:
            accept_loss: accuracy that may be lost, as a fraction of the best score; None for five losses.
            min_accuracy: as a fraction of the best score, that the cheapest setting is to have.
            budget_ms: for the mean latency of the most accurate setting.
            budget_p95_ms: for the 95th percentile of its latencies.
            budget_j: for its mean energy.

        Raises:
            ConfigurationError: a value that is not possible.
        """
        given = {name: value for name, value in locals().items() if name != "self"}
        question = validated_as(QuestionConfig, given, lambda location: str(location[0]))
        void = invalid_tasks(self._grids, self.sweep.settings)
        return [answered(grid, question, void.get(grid.task)) for grid in self._grids]

    def report(self, path: Path | str | None = None) -> Path:
        """Write one HTML page about the folder's results; returns its path, by default `report.html` in the folder."""
        output = self.folder / "report.html" if path is None else Path(path)
        write_report([self.folder], output)
        return output

    @cached_property
    def _grids(self) -> Sequence[TaskGrid]:
        return grids_of(self.sweep)

    @cached_property
    def _by_mean_latency(self) -> Sequence[TaskAnalysis]:
        return analyse_knobs(self._grids, (LATENCY_MEAN,)).tasks

    def _fronts(self, cost: str, num_draws: int) -> list[FrontAnalysis]:
        """The front of each task; raises ResultsError where there is no such cost."""
        if cost not in COSTS:
            raise ResultsError(f"there is no cost {cost!r}{did_you_mean(cost, COSTS)}; give one of {', '.join(COSTS)}")
        is_usual = (COSTS[cost], num_draws) == (LATENCY_MEAN, NUM_DRAWS)
        tasks = self._by_mean_latency if is_usual else None
        fronts = []
        for task in tasks or analyse_knobs(self._grids, (COSTS[cost],), num_draws).tasks:
            (found,) = task.fronts
            if isinstance(found, NoObjectives):
                raise ResultsError(f"{found.task} has no front of accuracy and {found.of.label}: {found.reason}")
            fronts.append(found)
        return fronts

    def _repr_html_(self) -> str:
        """As a notebook shows it: the conclusion, the front and the table of settings of each task."""
        lost = [f"{key} failed: {failure.reason}" for key, failure in self.failed.items()]
        try:
            tasks = [part for task in self._by_mean_latency for part in task_html(task, self.sweep, self.frame())]
        except ResultsError as error:
            tasks = [paragraph(str(error))]
        return block(*tasks, listed(lost), paragraph(repr(self), is_quiet=True))


def profile(
    model: Path | str | None = None,
    task: str | None = None,
    *,
    tiers: Sequence[str] | str | None = None,
    vision_tokens: Sequence[int] | int | None = None,
    top_k: Sequence[int] | int | None = None,
    active_blocks: Sequence[int] | int | None = None,
    samples: int | None = None,
    output_dir: Path | str | None = None,
    **flags: Any,
) -> Results:
    """Measure each combination of the knobs' values on the same samples, or resume where the folder has a part.

    What is left out has the default of the command `knobprof profile`; `flags` are its flags by name, such as
    `num_runs_per_sample=1`, those of further knobs and `knob_module` too. One value stands for a list of one. Failures
    of single settings and samples are in the results, where one setting has some.

    Args:
        model: folder or hub id; None: the embedded model.
        task: see `knobprof tasks list`.
        tiers: of the vision knob; or `vision_tokens`, numbers of them.
        top_k: numbers of experts per token.
        active_blocks: numbers of active transformer blocks, block 0 counted.
        samples: number of samples, drawn without replacement.
        output_dir: folder of the results.

    Raises:
        ProfilerError: (`primitives.errors`) what was requested cannot be done, or the run broke off.
        ResultsError: no setting gave a result, with the reason of each.
    """
    if flags.get("dry_run"):
        raise ConfigurationError("dry_run: this call measures; for a plan run the command `knobprof profile --dry_run`")
    named = {
        "model": None if model is None else str(model),
        "task": task,
        "tiers": tiers,
        "vision_tokens": vision_tokens,
        "top_k": top_k,
        "active_blocks": active_blocks,
        "samples": samples,
        "output_dir": output_dir,
    }
    given = {name: value for name, value in named.items() if value is not None} | flags
    if given.get("knob_module"):
        # It brings flags.
        load_knob_module(Path(given["knob_module"]))
    with in_words_of(given):
        config = ProfilingConfig.of(**flags_of(given))
        report = run_profiling(config)
    concluded_and_saved(report, config.machine.tracker)
    # Other processes have no results at all.
    if report.failed and not report.results and report.is_main_process:
        raise ResultsError(_no_result(report.failed))
    return Results(report.output_dir, report.results, report.failed)


def _no_result(failed: Mapping[str, SettingFailure]) -> str:
    """Why there are no results, each reason once with the settings that it is of."""
    keys: dict[str, list[str]] = {}
    for key, failure in failed.items():
        keys.setdefault(f"{failure.error}: {failure.reason}", []).append(key)
    reasons = [f"{', '.join(each)} failed with {why}" for why, each in keys.items()]
    return f"no setting gave a result: {'; '.join(reasons)}"


def load(folder: Path | str, knob_module: Path | str | None = None) -> Results:
    """The results in a folder, wherever they were measured.

    Args:
        knob_module: Python file that registers the knobs of one's own that the results were measured with.

    Raises:
        ResultsError: there are none, or the files do not belong to one sweep.
    """
    if knob_module is not None:
        load_knob_module(Path(knob_module))
    return Results(Path(folder), tuple(each.result for each in load_sweep(Path(folder)).settings), {})


def compare(
    first: Results | Path | str,
    *others: Results | Path | str,
    margin: float = RATIO_MARGIN,
    accuracy_margin: float = ACCURACY_MARGIN,
    between_runs: float | None = None,
) -> ComparedResults:
    """Results against the first, on the settings and samples that all have, as `knobprof compare` does.

    Args:
        first: results, or a folder of them; of a folder with sub-folders `1`, `2`, ... each is a run of one side.
        margin: change of a ratio that is `SAME`.
        accuracy_margin: the same of accuracy, as a part of the metric's best score.
        between_runs: how much runs of one thing differ in speed, a standard deviation; used where no side has two runs.

    Raises:
        ResultsError: nothing to compare with, no results, or no setting or question in common.
    """
    if not others:
        raise ResultsError("one run is given; compare it with another: compare(first, second)")
    folders = [each.folder if isinstance(each, Results) else Path(each) for each in (first, *others)]
    sides = [(each.sweep,) if isinstance(each, Results) else runs_in(Path(each)) for each in (first, *others)]
    labels = labels_of([side[0] for side in sides], folders)
    return ComparedResults(compare_runs(sides, labels, margin, accuracy_margin, between_runs))
