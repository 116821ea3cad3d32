"""The text run: the combinations of a grid, each measured and saved as one experiment.

A combination is one experiment with an id of its own. It is done once it is in
`results/{task_type}_results.json`: a run that was killed starts again at the combination it was at.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from experiment_core_utils.config.text_grid import Combination
from experiment_core_utils.j_results_saving import add_to_results, load_aggregated_results
from experiment_core_utils.l_results_csv_cleaning import write_experiments_table
from experiment_core_utils.meters.tracked_window import EnergySources
from experiment_core_utils.primitives.collectives import broadcast_from_main
from experiment_core_utils.primitives.errors import ConfigurationError, SettingError
from experiment_core_utils.primitives.interruption import StopRequest
from experiment_core_utils.text_run.experiment import measure_experiment
from experiment_core_utils.text_run.grid_run import LastModel, TextReport, result_lines, trace_of, watched_folder
from experiment_core_utils.text_run.plan import any_config, launched, plan_of


def run_text_experiments(
    grid: Sequence[Combination],
    results_dir: Path,
    say: Callable[[str], None],
    sources: EnergySources | None = None,
) -> TextReport:
    """Measure what is due of a grid; each combination is saved as soon as it is measured, and every process takes part.

    Args:
        say: takes one line for each combination, in the main process only.
        sources: what energy is read with; None finds it on the machine.

    Returns:
        What became of the grid; the main process has the saved results, and writes their table.

    Raises:
        ConfigurationError: not a single combination is possible here, or the weights of none can be used.
        EnergyRefused: energy is required and nothing on this machine measures it.
        ResultsRefused: another run is at work in the folder.
        WorkerLost: a process is gone or late.
    """
    accelerator, stop, task_type = launched(grid, results_dir), StopRequest(), any_config(grid).task_type
    is_main, memory = accelerator.is_main_process, LastModel(accelerator)
    measured: list[str] = []
    failed: dict[str, str] = {}
    refused: list[ConfigurationError] = []
    with ExitStack() as stack:
        broadcast_from_main(lambda: stack.enter_context(watched_folder(results_dir, stop)), accelerator)
        plan = plan_of(grid, results_dir, accelerator)
        for line in plan.lines() if is_main else ():
            say(line)
        for due in plan.due:
            try:
                name, result = measure_experiment(due, memory.get, accelerator, results_dir, sources, stop)
            except (SettingError, ConfigurationError) as error:
                failed[due.title] = f"{type(error).__name__}: {error}{trace_of(error, results_dir) if is_main else ''}"
                refused += [error] if isinstance(error, ConfigurationError) else []
                memory.drop()
            else:
                measured.append(name)
                if is_main:
                    add_to_results({name: result}, task_type, results_dir=results_dir)
            if len(refused) == len(plan.due) and not plan.saved:
                raise refused[0]
            if is_main:
                failure = failed.get(due.title)
                for line in [f"{due.title}: failed: {failure}"] if failure else result_lines(due.title, name, result):
                    say(line)
        everything = load_aggregated_results(task_type, results_dir=results_dir) if is_main else {}
        return TextReport(
            is_main_process=is_main,
            plan=plan,
            results={name: everything[name] for name in (*plan.saved.values(), *measured) if name in everything},
            num_measured=len(measured),
            failed=failed,
            # Also where nothing was due: a run that was killed may have left it short.
            csv_path=write_experiments_table(task_type, results_dir) if is_main else None,
        )
