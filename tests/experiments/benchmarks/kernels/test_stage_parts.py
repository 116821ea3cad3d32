"""What a decode step reads, against MolmoE-1B's shape by hand."""

import pytest
import torch

from experiment_core_utils.engines.weights import BlockWeights, DecoderWeights

# The benchmark imports the kernels.
pytest.importorskip("triton")
from experiments.benchmarks.kernels.stage_parts import kernel_bytes, step_bytes


def molmoe_1b() -> DecoderWeights:
    def weight(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    block = BlockWeights(
        input_norm=weight(2048),
        qkv=weight(6144, 2048),
        query_norm=weight(2048),
        key_norm=weight(2048),
        output=weight(2048, 2048),
        ffn_norm=weight(2048),
        router=weight(64, 2048),
        gate_up=weight(64, 2048, 2048),
        down=weight(64, 2048, 1024),
    )
    return DecoderWeights(
        blocks=(block,) * 16,
        embedding=weight(50304, 2048),
        final_norm=weight(2048),
        head=weight(50304, 2048),
        inverse_frequencies=torch.empty(64, device="meta"),
        width=2048,
        num_experts=64,
        expert_width=1024,
        head_rows=50304,
        num_heads=16,
        num_kv_heads=16,
        head_width=128,
        norm_eps=1e-5,
        default_top_k=8,
        normalise_top_k=False,
    )


def test_bytes_of_each_kernel() -> None:
    assert kernel_bytes(molmoe_1b(), top_k=4, positions=1000) == {
        "qkv": 2 * 6144 * 2048,
        "attention": 2 * 1000 * 2 * 2048,
        "output": 2 * (2048 + 64) * 2048,
        "gate_up": 2 * 4 * 2 * 1024 * 2048,
        "down": 2 * 4 * 2048 * 1024,
        "head": 2 * 50304 * 2048,
    }


def chosen(block_0: int, others: int) -> dict[int, torch.Tensor]:
    """The experts of one request, so many in block 0 and so many in each other block."""
    return {block: torch.arange(others if block else block_0)[None] for block in range(16)}


def test_a_step_reads_the_experts_that_each_block_chooses() -> None:
    """2.36 GB with 8 experts in each of 16 blocks, 1.60 GB with 4 in 15; 8.6 MB a block of keys and values."""
    decoder = molmoe_1b()
    assert step_bytes(decoder, chosen(8, 8), 0) / 1e9 == pytest.approx(2.36, abs=0.005)
    assert step_bytes(decoder, chosen(8, 4), 0) / 1e9 == pytest.approx(1.60, abs=0.005)
    with_cache = step_bytes(decoder, chosen(8, 8), 1053) - step_bytes(decoder, chosen(8, 8), 0)
    assert with_cache == 16 * 1053 * 2 * 2048 * 2


def test_requests_together_read_shared_experts_once() -> None:
    """Three requests of two experts each that are three experts in all, each with its own keys and values."""
    decoder = molmoe_1b()
    together = step_bytes(decoder, {3: torch.tensor([[0, 1], [1, 2], [2, 0]])}, 1000)
    alone = step_bytes(decoder, {3: torch.tensor([[0, 1, 2]])}, 1000)
    assert together - alone == 2 * (1000 * 2 * 2048 * 2)
