"""Fused weights are the modules' own, nothing is stored twice, and what the fused path cannot compute is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from experiment_core_utils.models.molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.models.molmoe.fused_weights import fuse_decoder_weights
from experiment_core_utils.primitives.errors import ConfigurationError
from tests.conftest import tiny_config
from tests.same_floats import assert_same_floats

PROMPT = torch.tensor([[7, 20, 33, 46, 59, 72, 85, 98]])


def built(change: Callable[[Any], None] = lambda text: None) -> MolmoeForConditionalGeneration:
    config = tiny_config()
    change(config.text_config)
    torch.manual_seed(7)
    return MolmoeForConditionalGeneration(config).eval()


def with_one_kv_head(text: Any) -> None:
    text.num_key_value_heads = 1


def test_rows_are_queries_then_keys_then_values() -> None:
    """Two query heads of width 16 and one key head: rows 0..31, 32..47 and 48..63 of the fused tensor."""
    model = built(with_one_kv_head)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    fused = fuse_decoder_weights(model)
    attention = "model.language_model.layers.2.self_attn."
    qkv = fused.blocks[2].qkv
    assert qkv.shape == (64, 32)
    assert torch.equal(qkv[:32], before[attention + "q_proj.weight"])
    assert torch.equal(qkv[32:48], before[attention + "k_proj.weight"])
    assert torch.equal(qkv[48:], before[attention + "v_proj.weight"])
    assert (fused.num_heads, fused.num_kv_heads, fused.head_width) == (2, 1, 16)


def test_sizes_are_read_off_the_weights() -> None:
    fused = fuse_decoder_weights(built())
    assert (fused.width, fused.num_experts, fused.expert_width, fused.default_top_k) == (32, 8, 16, 4)
    assert len(fused.blocks) == 4
    assert fused.inverse_frequencies.shape == (8,)
    assert fused.inverse_frequencies[0] == 1.0


def test_modules_and_fused_weights_share_their_memory() -> None:
    model = built()
    fused = fuse_decoder_weights(model)
    block, mine = model.all_blocks[1], fused.blocks[1]
    with torch.no_grad():
        block.self_attn.k_proj.weight[0, 0] = 42.0
        block.mlp.experts.down_proj[3, 2, 1] = 43.0
    assert mine.qkv[32, 0] == 42.0
    assert mine.down[3, 2, 1] == 43.0
    assert mine.output.data_ptr() == block.self_attn.o_proj.weight.data_ptr()


def test_eager_runs_and_saved_files_do_not_change(tmp_path: Path) -> None:
    model = built()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with torch.inference_mode():
        expected, _ = model.prefill(PROMPT)
        fuse_decoder_weights(model)
        found, _ = model.prefill(PROMPT)
    assert_same_floats(found, expected)
    model.save_pretrained(tmp_path)
    loaded = MolmoeForConditionalGeneration.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in before.items())


def test_blocks_that_are_skipped_are_fused_too() -> None:
    model = built()
    model.set_knobs(2, (0, 3))
    assert len(fuse_decoder_weights(model).blocks) == 4


def clipped(text: Any) -> None:
    text.clip_qkv = 8.0


def biased(text: Any) -> None:
    text.attention_bias = True


def gelu(text: Any) -> None:
    text.hidden_act = "gelu"


def scaled(text: Any) -> None:
    text.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("change", "reason"),
    [(clipped, "clip_qkv 8.0"), (biased, "has a bias"), (gelu, "do not use silu"), (scaled, "of the kind dynamic")],
)
def test_other_arithmetic_is_refused(change: Callable[[Any], None], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        fuse_decoder_weights(built(change))


def test_weights_that_are_not_loaded_are_refused() -> None:
    with torch.device("meta"):
        model = MolmoeForConditionalGeneration(tiny_config())
    with pytest.raises(ConfigurationError, match="not loaded"):
        fuse_decoder_weights(model)


def test_mixed_dtypes_are_refused() -> None:
    model = built()
    model.lm_head.half()
    with pytest.raises(ConfigurationError, match="several dtypes .float16, float32"):
        fuse_decoder_weights(model)


def test_replaced_linear_layers_are_refused() -> None:
    """As a quantiser leaves them."""

    class Replaced(nn.Linear):
        pass

    model = built()
    model.all_blocks[0].self_attn.o_proj = Replaced(32, 32, bias=False)
    with pytest.raises(ConfigurationError, match="quantised"):
        fuse_decoder_weights(model)
