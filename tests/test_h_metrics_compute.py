import pytest
import torch
from torch import nn

from experiment_core_utils.h_metrics_compute import count_flops, get_gpu_cpu_utilisation, get_memory


def test_a_linear_layer_by_hand() -> None:
    # 3 rows of 4 into 5: 2 * 3 * 4 * 5; the bias is not counted.
    layer = nn.Linear(4, 5)
    assert count_flops(lambda: layer(torch.randn(3, 4))) == 120


def test_fused_attention_by_hand() -> None:
    # 2 heads, 6 queries over 10 keys of width 8: scores and values, 2 * 2 * 2 * 6 * 10 * 8.
    query, key, value = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 10, 8), torch.randn(1, 2, 10, 8)
    assert count_flops(lambda: nn.functional.scaled_dot_product_attention(query, key, value)) == 3840


def test_grouped_products_count_rows_once() -> None:
    # 7 rows in 3 groups, each meets one matrix of 16 x 32: 2 * 7 * 16 * 32.
    if not hasattr(torch, "_grouped_mm"):
        pytest.skip("this torch has no grouped product")
    rows, weights = torch.randn(7, 16, dtype=torch.bfloat16), torch.randn(3, 16, 32, dtype=torch.bfloat16)
    offsets = torch.tensor([2, 5, 7], dtype=torch.int32)
    assert count_flops(lambda: torch._grouped_mm(rows, weights, offs=offsets)) == 7168


def test_the_cpu_has_no_allocator_figures_and_no_gpu_load() -> None:
    assert get_memory(torch.device("cpu")) is None
    load = get_gpu_cpu_utilisation(torch.device("cpu"))
    assert load["gpu_utilization_percent"] == []
    assert load["cpu_memory_usage_bytes"] > 10_000_000
