"""A run of settings in this process alone, without the folder's plan."""

from experiment_core_utils.a_distributed import setup_distributed
from experiment_core_utils.b_model_loader import load_requested
from experiment_core_utils.facts.run_facts import facts_of_run
from experiment_core_utils.meters.stages import StageMeasurement
from experiment_core_utils.models.interface import Runnable
from experiment_core_utils.planning.plan import RequestedRun
from experiment_core_utils.planning.run import ProfilingRun, bench_of, context_of, device_of_run
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
    config = requested.config
    if model is None:
        device = device_of_run(requested, accelerator, 1)
        model = load_requested(config, requested.source, requested.settings, device, None, shown=False)
    bench = bench_of(model, requested, context, accelerator, 1, requested.settings)
    at = requested, accelerator, model.device, 1, experiment_id, model.describe()
    return ProfilingRun(requested, context, bench, lambda: facts_of_run(*at), energy=energy)
