"""Bytes by formula against a tiny model's own tensors and sums by hand."""

import torch

from experiment_core_utils.models.costs.architecture import Architecture, architecture_of
from experiment_core_utils.models.costs.memory import cache_elements
from experiment_core_utils.models.molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.models.molmoe.memory import activation_elements, parameter_count
from tests.conftest import tiny_config


def test_parameters_and_cache_are_those_of_a_real_model() -> None:
    config = tiny_config()
    model = MolmoeForConditionalGeneration(config).eval()
    assert parameter_count(config) == sum(parameter.numel() for parameter in model.parameters())
    with torch.no_grad():
        _, state = model.prefill(torch.arange(5, 15)[None], None, top_k=2, active_blocks=(0, 1, 3))
    held = sum(
        layer.keys.numel() + layer.values.numel() for layer in state.past_key_values.layers if layer.is_initialized
    )
    # Keys and values of 10 positions, 3 blocks, width 32.
    architecture = architecture_of(tiny_config())
    assert isinstance(architecture, Architecture)
    blocks = architecture.at_setting(active_blocks=(0, 1, 3)).decoder.blocks
    assert cache_elements(blocks, 10) == 2 * 10 * 3 * 32 == held


def test_the_vision_stage_by_hand() -> None:
    # A crop: 3 * 336^2 pixels; 576 patches kept from 2 blocks of width 16; an MLP of 577 * (2 * 16 + 2 * 32), which is
    # wider than the pooling, 2 * 18432 + 2 * 576 * 16 = 55296.
    crop = 338_688 + 18_432 + 55_392
    assert activation_elements(tiny_config(), 3, 100, 4) == 3 * crop


def test_the_prefill_by_hand() -> None:
    # 100 tokens: 3 * 32 of the residual, and 4 experts' rows of 2 * 32 + 3 * 16, which is wider than 4 * 32.
    assert activation_elements(tiny_config(), 0, 100, 4) == 100 * (96 + 448)
    # With one expert (112) attention's 4 * 32 is the wider.
    assert activation_elements(tiny_config(), 0, 100, 1) == 100 * (96 + 128)
