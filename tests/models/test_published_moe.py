"""The checkpoint that is made for runs over several GPUs is one that transformers loads: every expert has its place."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from experiment_core_utils.models.common.checkpoint_files import find_tensors, read_tensor
from experiments.benchmarks.kernels.shapes import config_of
from tests.models.published_moe import num_parameters, write_published_moe


def test_experts_are_stored_one_by_one_and_loaded_together(tmp_path: Path) -> None:
    config = config_of("qwen3_30b_a3b:2", "tiny")
    write_published_moe(tmp_path, config, torch.device("cpu"))
    stored = find_tensors(tmp_path)
    assert len(stored) == 3 + 2 * (9 + 8 * 3) and {each.dtype for each in stored.values()} == {"BF16"}
    model, found = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not any(found.values())
    weights = dict(model.named_parameters())
    assert sum(weight.numel() for weight in weights.values()) == num_parameters(config)
    expert = "model.layers.1.mlp.experts.7.{}.weight"
    parts = [read_tensor(name, stored[name]).float() for name in map(expert.format, ("gate_proj", "up_proj"))]
    assert torch.equal(weights["model.layers.1.mlp.experts.gate_up_proj"][7], torch.cat(parts))
    # Only the 256 bytes of the tokenizer can be answered.
    assert weights["lm_head.weight"][255].any() and not weights["lm_head.weight"][256:].any()
