"""Layers' weights and biases lie one after the other and stay the layers' own; what cannot be fused is named."""

from typing import Any

import pytest
import torch
from torch import nn

from experiment_core_utils.engines.description import DecoderDescription
from experiment_core_utils.engines.weights import BlockWeights, DecoderWeights, fused_rows, fusing_unsupported_reason
from experiment_core_utils.primitives.errors import ConfigurationError


def layers() -> list[nn.Linear]:
    """Of 2 and 3 rows."""
    return [nn.Linear(4, 2), nn.Linear(4, 3)]


def test_rows_and_biases_in_the_order_of_the_layers() -> None:
    first, second = both = layers()
    weights, biases = [layer.weight.clone() for layer in both], [layer.bias.clone() for layer in both]
    assert torch.equal(fused_rows(both), torch.cat(weights))
    assert torch.equal(fused_rows(both, "bias"), torch.cat(biases))
    assert torch.equal(first.weight, weights[0]) and torch.equal(second.bias, biases[1])


def test_the_layers_own_are_views_that_can_be_written_to() -> None:
    _, second = both = layers()
    with torch.inference_mode():
        rows, biases = fused_rows(both), fused_rows(both, "bias")
    with torch.no_grad():
        second.weight[1, 3] = 42.0
        second.bias[2] = 43.0
    assert rows[2 + 1, 3] == 42.0
    assert biases[2 + 2] == 43.0
    assert second.weight.requires_grad and second.bias.requires_grad


class Replaced(nn.Linear):
    """As a quantiser leaves a layer."""


@pytest.mark.parametrize(
    ("also", "weights", "reason"),
    [
        ([], [torch.zeros(2), torch.ones(3)], None),
        ([Replaced(4, 4)], [torch.zeros(2)], "its weights are quantised"),
        ([], [torch.zeros(2), torch.zeros(2, dtype=torch.int8)], "its weights are quantised"),
        ([], [torch.zeros(2), torch.zeros(2, device="meta")], "its weights are on several devices (cpu, meta)"),
        ([], [torch.zeros(2, device="meta")], "its weights are not loaded"),
        ([], [torch.zeros(2), torch.zeros(2).half()], "its weights are in several dtypes (float16, float32)"),
    ],
)
def test_what_is_against_fusing(also: list[nn.Module], weights: list[torch.Tensor], reason: str | None) -> None:
    assert fusing_unsupported_reason([*layers(), *also], iter(weights)) == reason


def decoder(**other: Any) -> DecoderWeights:
    """One block 8 wide: 2 query heads and 1 key head of width 4, 3 experts of width 5, 20 logits."""
    described = {"width": 8, "num_heads": 2, "num_kv_heads": 1, "head_width": 4, "num_experts": 3, "expert_width": 5}
    sizes = DecoderDescription(
        **{**described, "head_rows": 20, **other}, norm_eps=1e-5, default_top_k=2, normalise_top_k=False
    )
    block = BlockWeights(
        input_norm=torch.ones(8),
        qkv=torch.ones(16, 8),
        query_norm=torch.ones(8),
        key_norm=torch.ones(4),
        output=torch.ones(8, 8),
        ffn_norm=torch.ones(8),
        router=torch.ones(3, 8),
        gate_up=torch.ones(3, 10, 8),
        down=torch.ones(3, 8, 5),
    )
    return DecoderWeights.of(
        sizes,
        blocks=(block,),
        embedding=torch.ones(16, 8),
        final_norm=torch.ones(8),
        head=torch.ones(20, 8),
        inverse_frequencies=torch.ones(2),
    )


@pytest.mark.parametrize(
    ("other", "fault"),
    [
        ({"head_rows": 16}, r"the head is of \(20, 8\), its config says \(16, 8\)"),
        ({"num_kv_heads": 2}, r"qkv of block 0 is of \(16, 8\), its config says \(24, 8\)"),
        ({"num_experts": 4}, r"router of block 0 is of \(3, 8\), its config says \(4, 8\)"),
        ({"expert_width": 6}, r"gate_up of block 0 is of \(3, 10, 8\), its config says \(3, 12, 8\)"),
    ],
)
def test_tensors_are_of_the_sizes_that_the_description_says(other: dict[str, int], fault: str) -> None:
    assert decoder().num_experts == 3
    with pytest.raises(ConfigurationError, match=fault):
        decoder(**other)
