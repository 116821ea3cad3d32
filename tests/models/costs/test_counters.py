"""Counters against counts by hand, and where ptflops falls short."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from experiment_core_utils.models.costs.counters import count_flops, count_with_ptflops, meta_twin
from experiment_core_utils.primitives.errors import MeterUnavailable
from tests.tiny_models.tiny_causal_models import (
    causal_model,
    llama_config,
    llama_flops,
    mixtral_config,
    olmoe_config,
    olmoe_flops,
)

IDS = torch.arange(2, 13).unsqueeze(0)  # 11 tokens


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
        pytest.skip("this torch has no grouped GEMM")
    rows, weights = torch.randn(7, 16, dtype=torch.bfloat16), torch.randn(3, 16, 32, dtype=torch.bfloat16)
    offsets = torch.tensor([2, 5, 7], dtype=torch.int32)
    assert count_flops(lambda: torch._grouped_mm(rows, weights, offs=offsets)) == 7168


@pytest.mark.parametrize(("config", "expected"), [(llama_config(), llama_flops(11)), (olmoe_config(), olmoe_flops(11))])
def test_a_causal_model_by_hand(config: PreTrainedConfig, expected: int) -> None:
    model = causal_model(config)
    assert count_flops(lambda: model(input_ids=IDS)) == expected


@pytest.mark.parametrize("make", [llama_config, olmoe_config, mixtral_config])
def test_a_twin_without_weights_counts_as_the_model(make: Callable[[], PreTrainedConfig]) -> None:
    model = causal_model(make())
    assert isinstance(model, PreTrainedModel)
    twin = meta_twin(model)
    assert {parameter.device.type for parameter in twin.parameters()} == {"meta"}
    assert count_flops(lambda: twin(input_ids=IDS.to("meta"))) == count_flops(lambda: model(input_ids=IDS))
    assert model.config._attn_implementation == "sdpa"


def test_ptflops_leaves_out_fused_attention() -> None:
    attention = 2 * 4 * 11 * 11 * 32
    assert count_with_ptflops(causal_model(llama_config()), IDS) == llama_flops(11) - attention


def test_ptflops_does_not_see_the_experts() -> None:
    attention, expert = 2 * 4 * 11 * 11 * 32, 2 * 2 * 11 * 3 * 32 * 16
    for top_k in (1, 4):
        found = count_with_ptflops(causal_model(olmoe_config(top_k)), IDS)
        assert found == olmoe_flops(11, top_k) - attention - top_k * expert
    assert count_with_ptflops(causal_model(olmoe_config(1)), IDS) == count_with_ptflops(
        causal_model(olmoe_config(4)), IDS
    )


def test_ptflops_leaves_the_model_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    model = causal_model(llama_config()).train()
    before = dict(model.named_modules())
    count_with_ptflops(model, IDS)
    assert all(not each._forward_hooks and not each._forward_pre_hooks and each.training for each in before.values())
    assert capsys.readouterr() == ("", "")


class Failing(nn.Module):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise ValueError("cannot run")


def test_what_stops_the_model_in_ptflops_is_not_lost() -> None:
    with pytest.raises(ValueError, match="cannot run"):
        count_with_ptflops(Failing(), IDS)


def test_an_architecture_that_has_no_twin_is_one_line() -> None:
    model = causal_model(llama_config())
    assert isinstance(model, PreTrainedModel)
    model.config.hidden_act = "no such activation"
    with pytest.raises(MeterUnavailable, match="no copy of LlamaForCausalLM without weights") as caught:
        meta_twin(model)
    assert "\n" not in str(caught.value)


def test_a_parameter_that_is_handed_to_a_module_is_no_error() -> None:
    """As AFMoE hands its bias to the router. 3 rows of 4 into 5: 2 * 3 * 4 * 5."""
    bias, layer = nn.Parameter(torch.zeros(5)), nn.Linear(4, 5)
    assert count_flops(lambda: layer(torch.randn(3, 4)) + nn.Identity()(bias)) == 120
