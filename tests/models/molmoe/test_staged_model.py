"""Bytes of the staged model, by hand; its stages are tested with the model and with the pipeline."""

import weakref
from pathlib import Path

import pytest
import torch

from experiment_core_utils.b_model_loader import find_model
from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.registry import load_knob_module, unregister_knob
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import tier_target
from experiment_core_utils.models.molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.models.molmoe.engines.api import EngineKnobs
from experiment_core_utils.models.molmoe.engines.paused_runner import (
    EnginePausedPrefill,
    PausedPrefillShape,
)
from experiment_core_utils.models.molmoe.loader import load_processor
from experiment_core_utils.models.molmoe.staged_model import MolmoeStagedModel
from experiment_core_utils.primitives.errors import EngineRefused
from experiment_core_utils.primitives.files import REPOSITORY
from tests.conftest import tiny_config


def test_bytes_follow_the_setting(tiny_checkpoint: Path) -> None:
    model = MolmoeForConditionalGeneration(tiny_config()).to(torch.bfloat16).eval()
    stored = sum(each.numel() * each.element_size() for each in [*model.parameters(), *model.buffers()])
    staged = MolmoeStagedModel("tiny", model, load_processor(find_model(str(tiny_checkpoint))))
    # A block of width 32: four products of attention, norms of queries and keys, a router of 8, two norms; 8 experts of
    # three products of 32 x 16. Two bytes each.
    block, expert = 2 * (4 * 32 * 32 + 2 * 32 + 32 * 8 + 2 * 32), 2 * 3 * 32 * 16
    head = 2 * 32 * model.config.head_vocab_size
    for top_k, blocks, experts in ((4, (0, 1, 2, 3), 16), (2, (0, 1, 3), 8), (1, (0, 2), 5)):
        setting = Setting.of(vision=tier_target("low"), top_k=top_k, num_active_blocks=RunningBlocks.of(blocks))
        staged.apply(setting)
        found = staged.count_bytes(setting)
        assert found.weights_bytes == stored
        # Block 0 keeps its 4 experts.
        assert found.step_weights_bytes == len(blocks) * block + experts * expert + head
        # Keys and values of width 32, two bytes each.
        assert found.cache_bytes(1) == len(blocks) * 2 * 32 * 2
        assert model.active_setting == (top_k, blocks)


@pytest.mark.parametrize("plain_is_ready", [False, True])
def test_a_split_that_is_refused_leaves_no_store_behind(tiny_checkpoint: Path, plain_is_ready: bool) -> None:
    """The store that grew for the first shape is freed once no memory is found for the second, unless it is used."""
    processor = load_processor(find_model(str(tiny_checkpoint)))
    staged = MolmoeStagedModel("tiny", MolmoeForConditionalGeneration(tiny_config()).eval(), processor, "graph")
    inputs, choices = {"input_ids": torch.tensor([[7, 20, 33]])}, ((1, EngineKnobs(2, (0, 1))),)
    if plain_is_ready:
        staged.warm_up(inputs, 4)
    staged.warm_up_paused_prefill([PausedPrefillShape(600, None, 8, choices)])
    split = staged.split
    assert isinstance(split, EnginePausedPrefill)
    of_the_store = weakref.ref(split.last_token)
    del split
    with pytest.raises(EngineRefused, match="^requests with a pause: .*prompt of 10000000000000 tokens"):
        staged.warm_up_paused_prefill([PausedPrefillShape(10**13, None, 8, choices)])
    assert (of_the_store() is not None) == plain_is_ready
    logits, state = staged.prefill(inputs, None)
    assert staged.decode_step(logits.argmax(dim=-1, keepdim=True), state).shape == logits.shape


def test_engines_refuse_a_knob_that_acts_on_modules(tiny_checkpoint: Path) -> None:
    processor = load_processor(find_model(str(tiny_checkpoint)))
    staged = MolmoeStagedModel("tiny", MolmoeForConditionalGeneration(tiny_config()).eval(), processor, "graph")
    load_knob_module(REPOSITORY / "tests" / "knobs" / "head_fraction.py")
    try:
        setting = Setting.of(vision=tier_target("low"), top_k=2, num_active_blocks=RunningBlocks.of((0, 1)))
        with pytest.raises(EngineRefused, match="^head_fraction acts on modules, and engines call none; .*eager"):
            staged.prove(setting.replaced(head_fraction=0.5), {"input_ids": torch.tensor([[7, 20, 33]])})
        staged.prove(setting, {"input_ids": torch.tensor([[7, 20, 33]])})
    finally:
        unregister_knob("head_fraction")
