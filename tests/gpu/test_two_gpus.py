"""A model over two GPUs: marks wait for both, a whole run has the answers of one GPU, and a model that is larger than
one runs on two, its layers or its weights divided.
"""

import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig

from experiment_core_utils.primitives.device import new_marks
from experiment_core_utils.primitives.files import REPOSITORY
from experiments.benchmarks.kernels.shapes import config_of
from tests.gpu.test_runs import DRIVER, ran, results_in
from tests.models.published_moe import num_parameters, write_published_moe
from tests.models.tiny_checkpoints import write_checkpoint

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="runs on two GPUs")
FEW = ("--num_samples", "3", "--top_k_list", "1", "2", "--num_active_blocks_list", "2", "--max_new_tokens", "4",
       "--precision", "float32", "--execution", "eager")  # fmt: skip


def test_a_mark_is_reached_when_both_have_done_their_work() -> None:
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    factor = torch.ones(4096, 4096, device=second)
    marks = new_marks(first, second)
    marks.mark()
    for _ in range(50):
        factor = factor @ factor
    marks.mark()
    assert len(marks.seconds()) == 1
    # Reading the marks waits for the newest one, and so for the other GPU.
    assert torch.cuda.current_stream(second).query()


def test_a_run_over_two_gpus_has_the_answers_of_one(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    folder = write_checkpoint("olmoe", tmp_path / "model")
    for name, more in (("one", ()), ("two", ("--device_map", "auto"))):
        ran(*DRIVER, *FEW, *more, "--model_path", str(folder), "--output_dir", str(tmp_path / name))
    one, two = (results_in(tmp_path / name) for name in ("one", "two"))
    assert one.keys() == two.keys() and len(one) == 3
    for name, result in two.items():
        places = set(result["provenance"]["model"]["device_map"].values())
        assert places == {"cuda:0", "cuda:1"}
        assert [each["pred"] for each in result["per_sample_results"]] == [
            each["pred"] for each in one[name]["per_sample_results"]
        ]


# Two measured runs of each sample.
LARGE = ("--precision", "float32", "--top_k_list", "8", "2", "--num_samples", "2", "--num_runs_per_sample", "2",
         "--num_warmup_runs", "1", "--max_warmup_runs", "1", "--max_repeats", "0", "--max_new_tokens", "8",
         "--no_reference")  # fmt: skip
TENSOR_PARALLEL = ("-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "knob_profiler", "profile",
                   "--tensor_parallel", "2")  # fmt: skip


def larger_than(total_bytes: int) -> PreTrainedConfig:
    """Qwen3-30B-A3B with as many blocks as its float32 weights take 1.15 times that memory."""
    one, two = (num_parameters(config_of(f"qwen3_30b_a3b:{blocks}", "published")) for blocks in (1, 2))
    config = config_of("qwen3_30b_a3b", "published")
    config.num_hidden_layers = 1 + math.ceil((1.15 * total_bytes / 4 - one) / (two - one))
    return config


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder whose weights fit one GPU in bfloat16, as they are stored, and not in float32."""
    folder = tmp_path_factory.mktemp("large")
    config = larger_than(torch.cuda.get_device_properties(0).total_memory)
    stored, free = 2 * num_parameters(config), shutil.disk_usage(folder).free
    if 1.1 * stored > free:
        pytest.skip(f"the weights take {stored / 1e9:.0f} GB of disk, and {free / 1e9:.0f} GB are free")
    begun = time.monotonic()
    write_published_moe(folder, config, torch.device("cuda", 0))
    torch.cuda.empty_cache()
    print(f"\n{config.num_hidden_layers} blocks, {stored / 1e9:.1f} GB written in {time.monotonic() - begun:.0f} s")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def layers_divided(large: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of a run with some layers on each GPU."""
    out = tmp_path_factory.mktemp("layers")
    return finished((*DRIVER, "--device_map", "auto"), large, out)


def run_of(
    command: Sequence[str], model: Path, out: Path, more: Sequence[str], **environment: str
) -> subprocess.CompletedProcess[str]:
    """A run of the model; what it says and how long it took is printed."""
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, *command, *more, "--model_path", str(model), "--output_dir", str(out)],
        cwd=REPOSITORY, env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    print(f"\n{done.stderr[-3000:]}{done.stdout}whole run: {time.monotonic() - begun:.0f} s")
    return done


def finished(command: Sequence[str], model: Path, out: Path, more: Sequence[str] = LARGE) -> dict[str, Any]:
    """The results of a run that must succeed; what a reader of them wants to know is printed."""
    assert run_of(command, model, out, more).returncode == 0
    found = results_in(out)
    for name, result in found.items():
        times = {key: result["aggregate_stats"][f"{key}_p50"] for key in ("T_LLM_prefill", "T_LLM_decode", "T_total")}
        print(name, times, *(result[key] for key in ("memory", "realised", "hardware_utilisation")))
        print(result["provenance"]["caveats"])
    return found


def test_one_gpu_refuses_it_before_it_is_loaded(large: Path, tmp_path: Path) -> None:
    done = run_of(DRIVER, large, tmp_path, LARGE, CUDA_VISIBLE_DEVICES="0")
    assert done.returncode == 2 and not results_in(tmp_path)
    line = r"^error: .* needs ([\d.]+) GB in float32, cuda:0 has ([\d.]+) GB free; use (.*)$"
    found = re.search(line, done.stderr, re.MULTILINE)
    assert found is not None
    assert float(found[1]) > float(found[2]) and "--precision bfloat16" in found[3]


def test_two_gpus_run_it_with_layers_on_each(layers_divided: dict[str, Any]) -> None:
    assert [result["top_k"] for result in layers_divided.values()] == [2, 8]
    for result in layers_divided.values():
        assert set(result["provenance"]["model"]["device_map"].values()) == {"cuda:0", "cuda:1"}
        realised, reason = result["realised"], "its weights are on several devices (cuda:0, cuda:1)"
        assert (realised["execution"], realised["execution_reason"]) == ("eager", reason)
        assert set(realised["experts_per_token"][1:]) == {result["top_k"]}
        assert_stages(result)
        # All weights are on the GPUs, which together had more than one has.
        memory = result["memory"]
        one = torch.cuda.get_device_properties(0).total_memory
        assert memory["peak_memory_bytes"] > memory["weights_bytes"] > one


def test_two_gpus_run_it_with_the_weights_of_each_layer_divided(
    large: Path, layers_divided: dict[str, Any], tmp_path: Path
) -> None:
    """In float32 sums in another order differ in the sixth digit, and the two largest of 256 random logits almost
    always in the second: the same tokens are answered.
    """
    found = finished(TENSOR_PARALLEL, large, tmp_path)
    assert found.keys() == layers_divided.keys()
    for name, result in found.items():
        assert result["provenance"]["model"]["tensor_parallel"] == 2
        assert result["realised"]["execution_reason"] == "several processes share its weights"
        assert set(result["realised"]["experts_per_token"][1:]) == {result["top_k"]}
        assert_stages(result)
        assert answers(result) == answers(layers_divided[name])


def assert_stages(result: Mapping[str, Any]) -> None:
    """Every run has a prefill and a decode, and no vision."""
    for sample in result["per_sample_results"]:
        for run in sample["runs"]:
            assert run["T_vision_total"] is None and run["T_LLM_prefill"] > 0 and run["T_LLM_decode"] > 0


def answers(result: Mapping[str, Any]) -> list[tuple[str, int]]:
    return [(sample["pred"], sample["output_tokens"]) for sample in result["per_sample_results"]]
