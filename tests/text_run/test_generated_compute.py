"""What a text run's compute metrics are put together from, on tiny models; the parts have tests of their own."""

from typing import Any

import pytest
import torch
from transformers import GPT2Config

from experiment_core_utils.models.costs.active_shapes import generation_flops
from experiment_core_utils.text_run.generated_compute import generation_metrics, products_dtype, text_memory
from tests.models.tiny_families import build
from tests.text_records import text_run
from tests.tiny_models.tiny_causal_models import causal_model, llama_config, olmoe_config

CPU = torch.device("cpu")
RUN = text_run([[(5, 3), (2, 1)], [(9, 2)]])
PLAIN = "no"
# Embedding and head 2 * 64 * 32, blocks, last norm, the rotary embedding's 4 frequencies twice; 4 bytes each.
LLAMA_BYTES = 4 * (2 * 64 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32) + 32 + 8)


def test_a_generation_has_operations_and_on_the_cpu_no_fractions() -> None:
    model = causal_model(olmoe_config())
    flops, fractions = generation_metrics(model, CPU, RUN, {})
    assert flops == generation_flops(model, RUN)
    assert {name: value for name, value in fractions.content().items() if value is not None} == {
        "peak_dtype": "float32",
        "utilisation_reason": "cpu is not a GPU: its peak speed is unknown",
    }


def test_a_windows_memory_in_parts() -> None:
    # Two rows of 5 + 3 - 1 positions; two blocks of 2 key-value heads of 8, keys and values, 4 bytes.
    cache = 2 * 7 * 2 * 2 * 16 * 4
    found = text_memory(causal_model(llama_config()), CPU, PLAIN, RUN, peak_bytes=LLAMA_BYTES + cache + 1234)
    assert (found["weights_bytes"], found["kv_cache_bytes"], found["activation_bytes"]) == (LLAMA_BYTES, cache, 1234)
    assert found["parts_reason"] is None and found["process_rss_bytes"] > 10_000_000
    half = text_memory(causal_model(llama_config()).to(torch.bfloat16), CPU, PLAIN, RUN, peak_bytes=None)
    assert (half["kv_cache_bytes"], half["activation_bytes"]) == (cache // 2, None)
    assert half["parts_reason"] == "cpu is not a GPU: torch records no peak memory there"


@pytest.mark.parametrize(
    ("model", "mixed_precision", "reason"),
    [
        (build(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=97)), PLAIN, "no formula is known for 'gpt2'"),
        (causal_model(llama_config()), "bf16", "under mixed_precision bf16"),
        (torch.nn.Linear(2, 2), PLAIN, "no formula is known for a Linear"),
    ],
)
def test_a_cache_that_is_not_known_has_a_reason(model: Any, mixed_precision: str, reason: str) -> None:
    found = text_memory(model, CPU, mixed_precision, RUN, peak_bytes=10_000_000)
    assert found["weights_bytes"] is not None
    assert (found["kv_cache_bytes"], found["activation_bytes"]) == (None, None)
    assert str(found["parts_reason"]).startswith(reason)


def test_the_number_format_of_products() -> None:
    model: Any = causal_model(llama_config())
    assert products_dtype(model, PLAIN) == "float32"
    assert products_dtype(model.to(torch.float16), PLAIN) == "float16"
    assert products_dtype(model, "bf16") == "bfloat16"
    model.config.quantization_config = {"quant_method": "fp8"}
    assert products_dtype(model, PLAIN) == "float8"
