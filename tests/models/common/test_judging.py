"""A model's modules compute in higher precision, whatever their code asks for."""

import pytest
import torch
from torch.nn import functional as F

from experiment_core_utils.engines.engine_proof import higher_precision, relative_distance
from experiment_core_utils.models.common.judging import InPrecision, modules_in
from tests.tiny_models.tiny_causal_models import causal_model, llama_config

THIRD = torch.tensor([[1 / 3, 2 / 3, 0.1]], dtype=torch.float64)


@pytest.mark.parametrize(("low", "high"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)], ids=str)
def test_products_are_those_of_converted_operands(low: torch.dtype, high: torch.dtype) -> None:
    """Whatever the code between asks for: dtypes of tensors and conversions to lower precision are raised, too."""
    states, weight = THIRD.to(low), (3 * THIRD).to(low)
    table = torch.tensor([[0.1, 0.7, 0.3]]).to(low)
    with InPrecision(high):
        product = F.linear(states, weight)
        assert states.dtype == high and states.is_floating_point()
        halves = torch.zeros(2, dtype=states.dtype).to(torch.float16).half()
        looked_up = F.embedding(torch.tensor([0]), table)
        scaled = F.softmax(states, dim=-1, dtype=torch.float32)
        summed = states.clone()[0, 1:] + torch.cat([weight, weight])[0, :2]
    assert {tensor.dtype for tensor in (product, halves, looked_up, scaled, summed)} == {high}
    assert states.dtype == low
    torch.testing.assert_close(product, states.to(high) @ weight.to(high).T)
    torch.testing.assert_close(summed, states.to(high)[0, 1:] + weight.to(high)[0, :2])
    assert looked_up[0].tolist() == table[0].to(high).tolist()


def test_changes_in_place_keep_the_precision_of_what_they_change() -> None:
    sums = torch.zeros(2, dtype=torch.bfloat16)
    with InPrecision(torch.float32):
        sums.add_(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
        sums[0] = 5
    assert (sums.dtype, sums.tolist()) == (torch.bfloat16, [5.0, 2.0])


def test_a_model_computes_in_float64_as_one_that_was_converted() -> None:
    model = causal_model(llama_config()).eval()
    prompt = torch.tensor([[5, 3, 9, 4]])
    with torch.inference_mode():
        plain = model(prompt).logits
        with modules_in(model, torch.float64):
            judge = model(prompt).logits
        assert model(prompt).logits.equal(plain)
        converted = model.double()(prompt).logits
    assert judge.dtype == torch.float64
    # transformers computes norms and angles in float32 when its weights are float64.
    assert relative_distance(judge, converted) < relative_distance(plain, converted) < 1e-5
    assert higher_precision(torch.float16) == torch.float32
