"""Fused vision weights are the modules' own, in the stated order; what the fused path cannot compute is refused."""

from typing import Any

import pytest
import torch

from experiment_core_utils.models.molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.models.molmoe.fused_weights import fuse_vision_weights
from experiment_core_utils.primitives.errors import ConfigurationError
from tests.conftest import tiny_config


@pytest.fixture
def model() -> MolmoeForConditionalGeneration:
    torch.manual_seed(7)
    built = MolmoeForConditionalGeneration(tiny_config()).eval()
    with torch.no_grad():
        for weight in built.model.vision_tower.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return built


def test_joint_rows_are_queries_keys_values_with_their_biases(model: MolmoeForConditionalGeneration) -> None:
    """The tower is 16 wide: rows 0..15, 16..31, 32..47."""
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    fused = fuse_vision_weights(model)
    prefix = "model.vision_tower.layers.1.self_attn."
    for position, part in enumerate(("q_proj", "k_proj", "v_proj")):
        rows = slice(16 * position, 16 * position + 16)
        assert torch.equal(fused.blocks[1].qkv[rows], before[f"{prefix}{part}.weight"])
        assert torch.equal(fused.blocks[1].qkv_bias[rows], before[f"{prefix}{part}.bias"])
    assert torch.equal(fused.connector.key_value[16:], before["model.connector.v_proj.weight"])
    assert torch.equal(fused.connector.gate_up[:16], before["model.connector.gate_proj.weight"])
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_nothing_is_stored_twice(model: MolmoeForConditionalGeneration) -> None:
    fused = fuse_vision_weights(model)
    layer: Any = model.model.vision_tower.layers[0]
    with torch.no_grad():
        layer.self_attn.v_proj.weight[3, 2] = 42.0
        layer.self_attn.k_proj.bias[1] = 43.0
        model.model.connector.up_proj.weight[0, 5] = 44.0
    assert fused.blocks[0].qkv[35, 2] == 42.0
    assert fused.blocks[0].qkv_bias[17] == 43.0
    assert fused.connector.gate_up[16, 5] == 44.0


def test_the_patch_embedding_gets_columns_of_zeros(model: MolmoeForConditionalGeneration) -> None:
    """3 * 14 * 14 = 588 pixels of a patch; the next multiple of 16 is 592."""
    fused = fuse_vision_weights(model)
    assert fused.patch_weight.shape == (16, 592)
    assert torch.equal(
        fused.patch_weight[:, :588], model.model.vision_tower.embeddings.patch_embedding.weight.flatten(1)
    )
    assert not fused.patch_weight[:, 588:].any()


def test_the_unused_last_block_is_left_out_unless_it_is_kept() -> None:
    config = tiny_config()
    config.vision_feature_layers = (-2, -2)
    assert len(fuse_vision_weights(MolmoeForConditionalGeneration(config)).blocks) == 1
    config.keep_unused_vision_blocks = True
    assert len(fuse_vision_weights(MolmoeForConditionalGeneration(config)).blocks) == 2


def test_another_activation_is_refused() -> None:
    config = tiny_config()
    config.vision_config.hidden_act = "gelu"
    with pytest.raises(ConfigurationError, match="is gelu, not quick_gelu; run it with --execution eager"):
        fuse_vision_weights(MolmoeForConditionalGeneration(config))


def test_weights_that_are_not_loaded_or_of_two_dtypes_are_refused(model: MolmoeForConditionalGeneration) -> None:
    model.model.connector.half()
    with pytest.raises(ConfigurationError, match=r"in several dtypes \(float16, float32\)"):
        fuse_vision_weights(model)
    with pytest.raises(ConfigurationError, match="not loaded"):
        fuse_vision_weights(model.float().to("meta"))
