"""Figures of a process and a setting by hand, and those that a machine does not have."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from experiment_core_utils.h_metrics_compute import combine_comp_metrics, get_flops, get_gpu_cpu_utilisation, get_memory
from tests.models.costs.test_prompt_flops import Lengths, Slow
from tests.tiny_models.tiny_causal_models import causal_model, llama_config, llama_flops

CPU = torch.device("cpu")
MAIN = SimpleNamespace(process_index=2, local_process_index=0)


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return causal_model(llama_config())


def test_flops_are_a_number_alone_or_none(llama: nn.Module) -> None:
    assert get_flops(llama, torch.full((3, 7), 5)) == 3 * llama_flops(7)
    assert get_flops(Slow(), torch.full((2, 3), 5), timeout_per_sample=0.1, method="counter") is None


def test_the_cpu_has_no_allocator_figures_and_no_gpu_load() -> None:
    memory = get_memory(CPU)
    assert {key: memory[key] for key in memory if key != "reason"} == dict.fromkeys(  # type: ignore[literal-required]
        (
            "gpu_current_memory_allocated_bytes",
            "gpu_max_memory_allocated_bytes",
            "gpu_current_memory_reserved_bytes",
            "gpu_max_memory_reserved_bytes",
        )
    )
    assert memory["reason"] == "cpu is not a GPU: torch records no such figures there"
    load = get_gpu_cpu_utilisation(CPU)
    assert (load["gpu_utilization_percent"], load["reason"]) == ([], "cpu is not a GPU")
    assert 0 <= load["cpu_usage_percent"] <= 100
    assert load["cpu_memory_usage_bytes"] > 10_000_000


def test_all_figures_of_a_process(llama: nn.Module) -> None:
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    tokenised = {"input_ids": torch.full((2, 3), 7), "attention_mask": mask}
    config = SimpleNamespace(flops_method="counter", flops_timeout_s=5.0)
    metrics: Any = combine_comp_metrics(llama, CPU, tokenised, MAIN, config)
    flops = llama_flops(2) + llama_flops(3)
    assert metrics["memory"].items() >= get_memory(CPU).items()
    # Embedding and head 2 * 64 * 32, in each block 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 and two norms, a norm; the
    # rotary embedding's 4 frequencies, twice. Four bytes each.
    weights = 2 * 64 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32) + 32 + 8
    assert metrics["memory"]["weights_bytes"] == 4 * weights
    assert (metrics["memory"]["kv_cache_bytes"], metrics["memory"]["activation_bytes"]) == (None, None)
    assert metrics["memory"]["parts_reason"] == "no results were given, so the size of the cache is unknown"
    assert set(metrics["compute_utilisation"]) == set(get_gpu_cpu_utilisation(CPU))
    assert {key: value for key, value in metrics.items() if key not in ("memory", "compute_utilisation")} == {
        "flops": flops,
        "flops_method": "counter",
        "flops_counted_on": "model",
        "flops_prompts": 2,
        "flops_tokens": 5,
        "flops_per_prompt": flops / 2,
        "flops_per_token": flops / 5,
        "flops_reason": None,
        "process_index": 2,
    }


def test_the_configuration_chooses_method_and_time_limit() -> None:
    metrics = combine_comp_metrics(Slow(), CPU, torch.full((1, 3), 5), MAIN, {"flops_timeout_s": 0.1})
    assert (metrics["flops"], metrics["flops_per_prompt"]) == (None, None)
    assert metrics["flops_reason"] == "a prompt of 3 tokens was not done after 0.1 s"
    chosen = combine_comp_metrics(Lengths(), CPU, torch.full((1, 3), 5), MAIN, {"flops_method": "ptflops"})
    # ptflops counts each of 4 biases as a multiply-add, too: 3 tokens, 2 * (4 * 4 + 4).
    assert (chosen["flops_method"], chosen["flops"]) == ("ptflops", 3 * 40)
