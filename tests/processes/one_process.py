"""A run of settings in this process alone, without the folder's plan."""

from experiment_core_utils.a_distributed import setup_distributed
from experiment_core_utils.meters.stages import StageMeasurement
from experiment_core_utils.models.interface import Runnable
from experiment_core_utils.planning.plan import RequestedRun
from experiment_core_utils.planning.run import ProfilingRun, bench_of, context_of, load_bench, provenance_of_run
from experiment_core_utils.records.ledger import Ledger


def run_alone(
    requested: RequestedRun,
    ledger: Ledger,
    experiment_id: str,
    energy: StageMeasurement | None = None,
    model: Runnable | None = None,
) -> ProfilingRun:
    """The model of `requested`, loaded where none is given, ready to measure its settings."""
    accelerator = setup_distributed(requested.config.machine)
    context = context_of(requested, accelerator, ledger, experiment_id)
    settings = requested.settings
    if model is None:
        bench = load_bench(requested, context, accelerator, 1, settings)
    else:
        bench = bench_of(model, requested, context, accelerator, 1, settings)
    model = bench.model
    provenance = provenance_of_run(requested, accelerator, model.device, 1, experiment_id, model.describe())
    return ProfilingRun(requested, context, bench, provenance, energy=energy)
