"""Whole runs on a GPU, by the commands that users give: what they report is true, and settings are comparable."""

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from experiment_core_utils.primitives.files import REPOSITORY

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="runs on a GPU")
DRIVER = ("experiments/core_exp/acc_lat_profiling.py", "--device", "cuda")
QUICKSTART = (
    *("--tier_list", "low", "medium", "high", "--top_k_list", "4", "8", "--num_active_blocks_list", "12", "16"),
    *("--num_samples", "16", "--num_runs_per_sample", "2", "--max_warmup_runs", "3"),
)
ONE = ("--tier_list", "low", "--top_k_list", "8", "--num_active_blocks_list", "16", "--no_reference")
GRAPHS = dict.fromkeys(("vision", "prefill", "decode"), "cuda graph")
# A setting with more work may be measured as this much faster: half of the spread that was seen between two runs.
NOISE = 0.05


def ran(*command: str) -> str:
    """What a command of the repository printed, which must succeed."""
    done = subprocess.run([sys.executable, *command], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def results_in(folder: Path) -> dict[str, Any]:
    """The results of the settings, by file name."""
    return {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("*_blocks*.json"))}


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The results of README's quickstart, and what it printed."""
    folder = tmp_path_factory.mktemp("quickstart")
    printed = ran(*DRIVER, *QUICKSTART, "--output_dir", str(folder))
    return results_in(folder), printed


def test_all_settings_of_quickstart_run_as_graphs(quickstart: tuple[dict[str, Any], str]) -> None:
    found, printed = quickstart
    assert len(found) == 13
    for result in found.values():
        realised = result["realised"]
        assert (realised["execution"], realised["execution_reason"]) == ("graph", None)
        assert realised["execution_stages"] == result["provenance"]["model"]["execution_stages"] == GRAPHS
        # Roundings of bfloat16, which are 0.4 % each.
        assert 0 < realised["engine_error"] < 0.05 and 0 < realised["modules_error"] < 0.05
    assert "conclusion: " in printed


def test_times_grow_with_experts_and_blocks(quickstart: tuple[dict[str, Any], str]) -> None:
    def medians(stage: str) -> dict[tuple[str, int, int], float]:
        return {
            (result["tier"], result["top_k"], result["num_active_blocks"]): statistics.median(
                run[stage] for sample in result["per_sample_results"] for run in sample["runs"]
            )
            for result in quickstart[0].values()
        }

    for stage in ("T_LLM_prefill", "T_LLM_decode"):
        times = medians(stage)
        for tier in ("low", "medium", "high"):
            for few, many in (((4, 12), (8, 12)), ((4, 16), (8, 16)), ((4, 12), (4, 16)), ((8, 12), (8, 16))):
                assert times[tier, *many] > (1 - NOISE) * times[tier, *few], (stage, tier, few, many)


def test_the_report_and_the_analyses_take_them(quickstart: tuple[dict[str, Any], str], tmp_path: Path) -> None:
    for name, result in quickstart[0].items():
        (tmp_path / name).write_text(json.dumps(result))
    ran("experiments/core_exp/e2_knob_pareto.py", str(tmp_path), "--output_dir", str(tmp_path / "e2"))
    assert (tmp_path / "e2").is_dir()


def test_graphs_give_the_tokens_of_the_modules_in_float32(tmp_path: Path) -> None:
    found = {}
    knobs = ("--tier_list", "low", "high", "--top_k_list", "2", "8", "--num_active_blocks_list", "11", "16")
    for execution in ("graph", "eager"):
        folder = tmp_path / execution
        ran(*DRIVER, *knobs, "--num_samples", "4", "--precision", "float32", "--execution", execution,
            "--output_dir", str(folder))  # fmt: skip
        found[execution] = {
            name: [(sample["pred"], sample["output_tokens"]) for sample in result["per_sample_results"]]
            for name, result in results_in(folder).items()
        }
    assert found["graph"] == found["eager"] and len(found["graph"]) == 9


def test_energy_of_stages_adds_up(tmp_path: Path) -> None:
    """Windows of each stage have edges of their own, and the card's power changes meanwhile: a fifth at most."""
    ran(*DRIVER, *ONE, "--num_samples", "2", "--energy", "required", "--output_dir", str(tmp_path))
    (result,) = results_in(tmp_path).values()
    summary = result["energy"]["summary"]
    stages = summary["vision_j"] + summary["prefill_j"] + summary["decode_j"]
    assert stages == pytest.approx(summary["end_to_end_j"], rel=0.2)


def test_texts_are_generated(tmp_path: Path) -> None:
    """Both batch sizes and both ways of decoding of the example."""
    ran("experiments/text_exp/run_text_generation.py", "--config", "experiments/text_exp/example.yaml",
        "--num_input_prompts", "8", "--output_dir", str(tmp_path))  # fmt: skip
    table = next(tmp_path.rglob("*.csv")).read_text().splitlines()
    assert len(table) == 1 + 2 * 2


def test_convolutions_are_profiled(tmp_path: Path) -> None:
    ran("experiments/performance_prediction/run_profile.py", "--model", "resnet50", "--algorithm", "guess", "--test",
        "--output-dir", str(tmp_path))  # fmt: skip
    assert list(tmp_path.rglob("*.csv"))


def test_a_request_is_adapted_while_it_runs() -> None:
    printed = ran("-m", "experiments.benchmarks.controller_overhead", "--num_samples", "1", "--rounds", "1",
                  "--device", "cuda", "--budgets_ms", "5")  # fmt: skip
    found = json.loads(printed[printed.index("{") :])
    assert found["execution"] == "graph"
    assert found["adaptive_total_ms"]["p50"] > 0
