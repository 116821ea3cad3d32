"""A sweep as a function call, and its results as records and frames."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from experiment_core_utils.config.profiling import ProfilingConfig
from experiment_core_utils.knobs.registry import load_knob_module
from experiment_core_utils.pipeline import run_profiling
from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError
from experiment_core_utils.records.conclusion import Conclusion
from experiment_core_utils.records.setting_result import SettingResult, setting_key
from experiment_core_utils.records.settings import SettingFailure
from experiments.analyses.knobs.analysis import NUM_DRAWS, analyse_knobs
from experiments.analyses.knobs.conclusion import conclude
from experiments.analyses.knobs.grid import grids_of
from experiments.analyses.knobs.objectives import COSTS, LATENCY_MEAN, NoObjectives
from experiments.analyses.report.page import write_report
from experiments.analyses.sweeps import Sweep, load_sweep, samples_frame, settings_frame
from experiments.core_exp.closing_lines import concluded_and_saved


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
            f"Results({str(self.folder)!r}: {len(self.settings)} settings of {', '.join(tasks) or 'no task'}{failed})"
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
        """One row a setting: task, knobs, accuracy, times in ms, tokens, FLOPs, energy in J; NaN where absent."""
        return settings_frame(self.sweep)

    def samples(self) -> pd.DataFrame:
        """One row a sample that ran, of every setting."""
        return samples_frame(self.sweep)

    def front(self, cost: str = "latency_mean", num_draws: int = NUM_DRAWS) -> pd.DataFrame:
        """The settings that none beats in both accuracy and cost, cheapest first, for each task.

        Columns: task, setting, accuracy (fraction), `<cost>_<unit>`, `probability` of a place on the front over
        `num_draws` bootstrap draws of the samples, and `status`: `established`, or `within_noise` of another setting.

        Args:
            cost: `latency_mean`, `latency_p95`, `latency_p99`, `energy` or `flops`.

        Raises:
            ResultsError: there is no such cost, or it was not measured.
        """
        if cost not in COSTS:
            raise ResultsError(f"there is no cost {cost!r}; give one of {', '.join(COSTS)}")
        of, rows = COSTS[cost], []
        for task in analyse_knobs(grids_of(self.sweep), (of,), num_draws).tasks:
            (found,) = task.fronts
            if isinstance(found, NoObjectives):
                raise ResultsError(f"{found.task} has no front of accuracy and {of.label}: {found.reason}")
            rows += [
                {
                    "task": found.found.task,
                    "setting": point.key,
                    "accuracy": point.accuracy,
                    f"{of.name}_{of.unit}": point.cost,
                    "probability": point.probability,
                    "status": point.status,
                }
                for point in found.front.points
                if point.on_front
            ]
        return pd.DataFrame(rows)

    def conclusions(self, num_draws: int = NUM_DRAWS) -> list[Conclusion]:
        """Which setting of each task to take, how sure that is, and what voids it; printed, the last lines of a run."""
        tasks = analyse_knobs(grids_of(self.sweep), (LATENCY_MEAN,), num_draws).tasks
        return [conclude(task, self.sweep.settings) for task in tasks]

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

    def report(self, path: Path | str | None = None) -> Path:
        """Write one HTML page about the folder's results; returns its path, by default `report.html` in the folder."""
        output = self.folder / "report.html" if path is None else Path(path)
        write_report([self.folder], output)
        return output


def profile(
    model: Path | str | None = None,
    task: str | None = None,
    *,
    tiers: Sequence[str] | None = None,
    vision_tokens: Sequence[int] | None = None,
    top_k: Sequence[int] | None = None,
    active_blocks: Sequence[int] | None = None,
    samples: int | None = None,
    output_dir: Path | str | None = None,
    **flags: Any,
) -> Results:
    """Measure each combination of the knobs' values on the same samples, or resume where the folder has a part.

    What is left out has the default of the command `knobprof profile`; `flags` are its flags by name, such as
    `num_runs_per_sample=1`, those of further knobs and `knob_module` too. Failures of single settings and samples are
    in the results.

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
    """
    if flags.get("dry_run"):
        raise ConfigurationError("dry_run: this call measures; for a plan run the command `knobprof profile --dry_run`")
    named = {
        "model_path": None if model is None else str(model),
        "dataset_name": task,
        "tier_list": tiers,
        "vision_tokens_list": vision_tokens,
        "top_k_list": top_k,
        "num_active_blocks_list": active_blocks,
        "num_samples": samples,
        "output_dir": output_dir,
    }
    given = {name: value for name, value in named.items() if value is not None}
    if twice := [name for name in given if name in flags]:
        raise ConfigurationError(f"{twice[0]}: given twice, also by its short name; give one of the two")
    config = ProfilingConfig.of(**flags, **given)
    report = run_profiling(config)
    concluded_and_saved(report, config.machine.tracker)
    return Results(report.output_dir, report.results, report.failed)


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
