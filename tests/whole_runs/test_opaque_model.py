"""A model that implements `Runnable` alone is measured to the end, and its results say what cannot be seen of it."""

from pathlib import Path

import pytest

from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.pipeline import measure_settings
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.records.ledger import Ledger
from experiment_core_utils.sweep.plan import requested_run
from experiment_core_utils.sweep.run import ProfilingRun
from tests.processes.one_process import run_alone
from tests.scripted.opaque_model import OpaqueModel


def run_of(model: OpaqueModel, checkpoint: Path, folder: Path, *more: str) -> ProfilingRun:
    """Two settings, planned for a MolmoE and run by the model; one sample timed, two answered beside it."""
    flags = ["--model_path", str(checkpoint), "--output_dir", str(folder), "--num_samples", "3", "--tier_list", "low"]
    flags += ["--top_k_list", "2", "4", "--num_active_blocks_list", "3", "--num_runs_per_sample", "2", "--no_reference"]
    flags += ["--num_warmup_runs", "0", "--max_repeats", "0", "--num_threads", "1", "--max_new_tokens", "3"]
    requested = requested_run(parse_config([*flags, *more]))
    return run_alone(requested, Ledger(folder, "f00d", trackers=folder / "trackers"), "0001", model=model)


def test_it_is_measured_to_the_end_and_what_is_not_seen_is_a_caveat(tiny_checkpoint: Path, tmp_path: Path) -> None:
    model = OpaqueModel()
    run = run_of(model, tiny_checkpoint, tmp_path, "--num_latency_samples", "1")
    assert measure_settings(run, run.requested.settings) == {}
    results = [run.context.ledger.result(key) for key in run.requested.keys]
    assert len(results) == 2
    for result in results:
        assert result is not None and len(result.per_sample_results) == 3
        assert result.num_total_blocks == 4  # as planned
        realised = result.content()["realised"]
        assert (realised["experts_per_token"], realised["blocks_run"], realised["cache_layers"]) == (None, None, None)
        assert realised["knobs_not_seen"] == {
            "top_k": "the model shows no experts",
            "num_active_blocks": "the model shows no blocks",
        }
        seen_not = "top_k: the model shows no experts; num_active_blocks: the model shows no blocks"
        assert any(seen_not in caveat for caveat in result.provenance.content()["caveats"])
    # A batch that nothing proves is not made.
    assert set(model.batches) == {1}


def test_stages_one_by_one_are_refused_where_the_profiler_needs_them(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="needs stages that run one by one, which opaque does not have"):
        run_of(OpaqueModel(), tiny_checkpoint, tmp_path, "--use_profiler")
