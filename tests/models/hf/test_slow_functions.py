"""Functions that run in plain torch, found by what the classes of a model call; two families, and one without any."""

import importlib.util

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM

from experiment_core_utils.models.hf.slow_functions import slow_functions_caveats, slow_functions_of


@pytest.mark.skipif(importlib.util.find_spec("mamba_ssm") is not None, reason="its kernels are installed")
def test_a_state_space_model_names_the_packages_that_it_lacks() -> None:
    model = MambaForCausalLM(MambaConfig(vocab_size=32, hidden_size=16, state_size=4, num_hidden_layers=1))
    found = slow_functions_of(model)
    assert {"causal-conv1d", "mamba-ssm"} == set(found.values()) and found["mamba_selective_scan"] == "mamba-ssm"
    (on_gpu,), (on_cpu,) = (slow_functions_caveats(found, torch.device(name)) for name in ("cuda", "cpu"))
    assert "install it" in on_gpu.sentence and "mamba-ssm" in on_gpu.sentence
    assert "install" not in on_cpu.sentence


def test_a_model_of_usual_attention_lacks_nothing() -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    assert slow_functions_of(LlamaForCausalLM(config)) == {}
    assert slow_functions_caveats({}, torch.device("cuda")) == slow_functions_caveats(None, torch.device("cpu")) == []
