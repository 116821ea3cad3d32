"""Finite weights whose activations overflow in float16: every run fails in one line that names the sample."""

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from experiment_core_utils.primitives.files import EMBEDDED_MODEL
from experiments.block_importance import score_blocks
from experiments.core_exp import acc_lat_profiling
from experiments.text_exp import run_text_generation
from tests.models.tiny_checkpoints import write_checkpoint

REMEDY = "(float16 overflows; give --precision bfloat16 or float32)"


def scaled(folder: Path, factor: float = 1000.0) -> Path:
    """The model with larger gates and up projections in its decoder, whose products are above 65504."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name.rsplit(".", 2)[1:] in ([part, "weight"] for part in ("gate_proj", "up_proj")) and "mlp" in name:
                tensor.mul_(factor)
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def molmoe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scaled(Path(shutil.copytree(EMBEDDED_MODEL, tmp_path_factory.mktemp("models") / "molmoe")))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scaled(write_checkpoint("llama", tmp_path_factory.mktemp("models") / "llama"))


def profiled(monkeypatch: Any, model: Path, out: Path, *flags: str) -> int:
    argv = ["program", "--model_path", str(model), "--output_dir", str(out), "--device", "cpu", "--num_samples", "2"]
    argv += ["--max_new_tokens", "2", "--num_threads", "1", "--num_warmup_runs", "1", "--no_reference", *flags]
    monkeypatch.setattr(sys, "argv", argv)
    return acc_lat_profiling.main()


@pytest.mark.parametrize("execution", ["auto", "graph"])
def test_a_knob_run_fails_with_the_sample_and_the_remedy(
    molmoe: Path, execution: str, tmp_path: Path, capfd: Any, monkeypatch: Any
) -> None:
    """Samples 353 and 1860 are drawn; the proof of the knobs is the first to see logits."""
    setting = ("--tier_list", "low", "--top_k_list", "4", "--num_active_blocks_list", "12", "--execution", execution)
    assert profiled(monkeypatch, molmoe, tmp_path, "--precision", "float16", *setting) == 1
    assert (
        "failed: tier-low_topk4_blocks12: GenerationFailed after 1 attempt: logits are not finite at sample 353 "
        f"{REMEDY}\n" in capfd.readouterr().out
    )
    assert not list(tmp_path.glob("*.json"))


def test_the_same_weights_answer_in_bfloat16(llama: Path, tmp_path: Path, monkeypatch: Any) -> None:
    assert profiled(monkeypatch, llama, tmp_path, "--precision", "bfloat16") == 0


@pytest.mark.parametrize("measured", ["1", "2"])
def test_so_does_a_family_of_transformers(
    llama: Path, measured: str, tmp_path: Path, capfd: Any, monkeypatch: Any
) -> None:
    flags = ("--precision", "float16", "--num_latency_samples", measured)
    assert profiled(monkeypatch, llama, tmp_path, *flags) == 1
    assert re.search(rf"logits are not finite at sample \d+ {re.escape(REMEDY)}\n", capfd.readouterr().out)


def test_a_text_run_fails_with_the_prompt(llama: Path, tmp_path: Path, capfd: Any, monkeypatch: Any) -> None:
    argv = ["program", "--model_name", str(llama), "--output_dir", str(tmp_path), "--num_input_prompts", "3"]
    for value in ("device=cpu", "track_energy=false", "max_output_tokens=2"):
        argv += ["--set", value]
    monkeypatch.setattr(sys, "argv", [*argv, "--set", "fp_precision=float16"])
    assert run_text_generation.main() == 1
    # Of three prompts the shortest comes first, and is the second of them.
    line = (
        "GenerationFailed: logits are not finite at prompt 1 (float16 overflows; give fp_precision bfloat16 or float32)"
    )
    assert f"failed: {line}\n" in capfd.readouterr().err
    for mode in ("float32", "bfloat16"):
        monkeypatch.setattr(sys, "argv", [*argv, "--set", f"fp_precision={mode}"])
        assert run_text_generation.main() == 0


@pytest.mark.parametrize("method", ["activation_change", "gradient", "leave_one_out"])
def test_blocks_are_not_scored_by_such_logits(llama: Path, method: str, tmp_path: Path, capfd: Any) -> None:
    output = tmp_path / "scores.json"
    argv = ["--model_path", str(llama), "--output", str(output), "--num_samples", "2", "--method", method]
    assert score_blocks.main([*argv, "--precision", "float16", "--device", "cpu"]) == 1
    assert re.search(rf"logits are not finite at sample \d+ {re.escape(REMEDY)}\n", capfd.readouterr().err)
    assert not output.exists()
