"""The text run: the combinations of a grid, each measured and saved as one experiment.

A combination is one experiment with an id of its own. It is done once it is in
`results/{task_type}_results.json`: a run that was killed starts again at the combination it was at.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from experiment_core_utils.config.text_grid import Combination
from experiment_core_utils.meters.tracked_window import EnergySources
from experiment_core_utils.primitives.collectives import broadcast_from_main
from experiment_core_utils.primitives.interruption import StopRequest
from experiment_core_utils.text_run.grid_run import TextReport, measure_plan, watched_folder
from experiment_core_utils.text_run.plan import any_config, launched, plan_of


def run_text_experiments(
    grid: Sequence[Combination],
    results_dir: Path,
    say: Callable[[str], None],
    sources: EnergySources | None = None,
) -> TextReport:
    """Measure what is due of a grid; each combination is saved as soon as it is measured.

    Args:
        say: takes one line for each combination, in the main process only.
        sources: what energy is read with; None finds it on the machine.

    Raises:
        ConfigurationError: not a single combination is possible here, or the weights of none can be used.
        EnergyRefused: energy is required and nothing on this machine measures it.
        ResultsRefused: another run is at work in the folder.
        WorkerLost: a process is gone or late.
    """
    accelerator, stop = launched(grid, results_dir), StopRequest()
    with ExitStack() as stack:
        broadcast_from_main(lambda: stack.enter_context(watched_folder(results_dir, stop)), accelerator)
        plan = plan_of(grid, results_dir, accelerator)
        return measure_plan(plan, any_config(grid).task_type, accelerator, results_dir, say, sources, stop)
