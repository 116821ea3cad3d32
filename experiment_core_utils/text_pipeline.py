"""The text run: the combinations of a grid, each measured and saved as one experiment.

A combination is one experiment (`text_run.experiment`) with an id of its own. It is done once it is in
`results/{task_type}_results.json`: a run that was killed starts again at the combination it was at.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from experiment_core_utils.a_distributed import setup_distributed
from experiment_core_utils.b_model_loader import LastModel
from experiment_core_utils.config.text import TextConfig
from experiment_core_utils.config.text_grid import Combination
from experiment_core_utils.d_energy_tracking import EnergySources
from experiment_core_utils.j_results_saving import add_to_results, load_aggregated_results
from experiment_core_utils.primitives.collectives import broadcast_from_main, processes_on_this_machine
from experiment_core_utils.primitives.device import set_cpu_threads
from experiment_core_utils.primitives.errors import ConfigurationError, ResultsRefused, SettingError
from experiment_core_utils.primitives.files import check_replaceable
from experiment_core_utils.records.journal import only_run_in
from experiment_core_utils.records.ledger import PARTS_FOLDER
from experiment_core_utils.records.result_files import aggregated_path, raw_result_path
from experiment_core_utils.records.text import SavedExperiment, ShownExperiment
from experiment_core_utils.text_run.experiment import measure_experiment
from experiment_core_utils.text_run.plan import TextPlan, plan_experiments

Report = Callable[[str], None]


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
    """This process's place in measuring a grid.

    Raises:
        ConfigurationError: the results' folder is a file.
        WorkerLost: the processes launched are not those requested.
    """
    first = _any_config(grid)
    accelerator = setup_distributed(first)
    set_cpu_threads(first.num_threads, processes_on_this_machine(accelerator))
    if results_dir.exists() and not results_dir.is_dir():
        raise ConfigurationError(f"{results_dir} is a file; give a folder for the results")
    return accelerator


def plan_of(grid: Sequence[Combination], results_dir: Path, accelerator: Accelerator) -> TextPlan:
    """What is to be done for a grid.

    Raises:
        ConfigurationError: not a single combination is possible here.
        ResultsRefused: what an earlier run saved here is broken.
        OutputRefused: something else than a regular file has the name of the results file.
    """
    task_type = _any_config(grid).task_type
    path = aggregated_path(task_type, ".json", results_dir)
    advice = "repair it, or remove the experiment, and the same command measures it again"

    def load() -> dict[str, dict[str, Any]]:
        # It is written again at the end.
        check_replaceable(path)
        return load_aggregated_results(task_type, results_dir=results_dir)

    def has_outputs(experiment_id: str) -> bool:
        texts = raw_result_path(experiment_id, "text_output", results_dir)
        if os.path.lexists(texts) and not texts.is_file():
            raise ResultsRefused(
                f"{texts} is not a result, but a folder, a pipe, a device or a link to nothing; move it away"
            )
        return texts.is_file()

    saved = broadcast_from_main(load, accelerator)
    for name, each in saved.items():
        if "digest" in each:
            SavedExperiment.read(each, f"{path}: {name}", advice)
    plan = plan_experiments(grid, saved, accelerator, has_outputs)
    for name in plan.saved.values():
        ShownExperiment.read(saved[name], f"{path}: {name}", advice)
    return plan


def run_text_experiments(
    grid: Sequence[Combination], results_dir: Path, say: Report, sources: EnergySources | None = None
) -> TextReport:
    """Measure what is due of a grid; each combination is saved as soon as it is measured.

    Args:
        say: takes one line for each combination, in the main process only.
        sources: what energy is read with; None finds it on the machine.

    Raises:
        ConfigurationError: not a single combination is possible here, or the weights of none can be used.
        MeterUnavailable: energy is required and nothing on this machine measures it.
        ResultsRefused: another run is at work in the folder.
        WorkerLost: a process is gone or late.
    """
    accelerator = launched(grid, results_dir)
    is_main, task_type, memory = accelerator.is_main_process, _any_config(grid).task_type, LastModel(accelerator)
    failed: dict[str, str] = {}
    refused: list[ConfigurationError] = []
    measured: list[str] = []
    with ExitStack() as stack:
        broadcast_from_main(lambda: stack.enter_context(only_run_in(results_dir / PARTS_FOLDER)), accelerator)
        plan = plan_of(grid, results_dir, accelerator)
        for line in plan.lines() if is_main else ():
            say(line)
        for due in plan.due:
            try:
                name, result = measure_experiment(due, memory.get, accelerator, results_dir, sources)
            except (SettingError, ConfigurationError) as error:
                failed[due.title] = f"{type(error).__name__}: {error}"
                refused += [error] if isinstance(error, ConfigurationError) else []
                memory.drop()
            else:
                measured.append(name)
                if is_main:
                    add_to_results({name: result}, task_type, results_dir=results_dir)
                    say(_line(due.title, name, result))
            if len(refused) == len(plan.due) and not plan.saved:
                raise refused[0]
            if is_main and due.title in failed:
                say(f"{due.title}: failed: {failed[due.title]}")
        everything = load_aggregated_results(task_type, results_dir=results_dir) if is_main else {}
        # Also where nothing was due: a run that was killed may have left it short.
        csv_path = add_to_results({}, task_type, results_dir=results_dir)[1] if everything else None
    return TextReport(
        is_main_process=is_main,
        plan=plan,
        results={name: everything[name] for name in (*plan.saved.values(), *measured) if name in everything},
        num_measured=len(measured),
        failed=failed,
        csv_path=csv_path,
    )


def _line(title: str, name: str, result: Mapping[str, Any]) -> str:
    """`1/2 decoding_mode=greedy: experiment_0001: 240 prompts, 512.3 output tokens/s`."""
    metrics = result["inference_metrics"]
    rate = metrics["tokens_per_second"]
    speed = "no output tokens" if rate is None else f"{rate:.1f} output tokens/s"
    return f"{title}: {name}: {metrics['num_prompts']} prompts, {speed}"


def _any_config(grid: Sequence[Combination]) -> TextConfig:
    """Any combination's configuration, for the keys of the launch, which all combinations share."""
    return next(each.config for each in grid if each.config is not None)
