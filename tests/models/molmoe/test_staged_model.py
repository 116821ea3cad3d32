"""Bytes of the staged model, by hand; its stages are tested with the model and with the pipeline."""

import copy
import weakref
from pathlib import Path

import pytest
import torch

from experiment_core_utils.b_model_loader import find_model
from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.paused_runner import (
    EnginePausedPrefill,
    PausedPrefillShape,
)
from experiment_core_utils.knobs.active_blocks import RunningBlocks, blocks_of
from experiment_core_utils.knobs.expert_mass import mass_of
from experiment_core_utils.knobs.registry import load_knob_module, unregister_knob
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.top_k import experts_of
from experiment_core_utils.knobs.vision_tokens import tier_target
from experiment_core_utils.measuring.sample_runs import check_proof
from experiment_core_utils.models.molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.models.molmoe.loader import load_processor
from experiment_core_utils.models.molmoe.staged_model import MolmoeStagedModel
from experiment_core_utils.primitives.errors import EngineRefused
from experiment_core_utils.records.requests import RequestShape
from tests.conftest import tiny_config
from tests.models.mixtures import Mixture
from tests.same_floats import assert_same_floats


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
    of_the_store = weakref.ref(split.last_tokens)
    del split
    with pytest.raises(EngineRefused, match="^requests with a pause: .*prompt of 10000000000000 tokens"):
        staged.warm_up_paused_prefill([PausedPrefillShape(10**13, None, 8, choices)])
    assert (of_the_store() is not None) == plain_is_ready
    logits, state = staged.prefill(inputs, None)
    assert staged.decode_step(logits.argmax(dim=-1, keepdim=True), state).shape == logits.shape


def test_engines_refuse_a_knob_that_acts_on_modules(tiny_checkpoint: Path) -> None:
    processor = load_processor(find_model(str(tiny_checkpoint)))
    staged = MolmoeStagedModel("tiny", MolmoeForConditionalGeneration(tiny_config()).eval(), processor, "graph")
    load_knob_module(Path("knob_profiler.head_fraction"))
    try:
        setting = Setting.of(vision=tier_target("low"), top_k=2, num_active_blocks=RunningBlocks.of((0, 1)))
        with pytest.raises(EngineRefused, match="^head_fraction acts on modules, and engines call none; .*eager"):
            staged.prove(setting.replaced(head_fraction=0.5), {"input_ids": torch.tensor([[7, 20, 33]])})
        staged.prove(setting, {"input_ids": torch.tensor([[7, 20, 33]])})
    finally:
        unregister_knob("head_fraction")


def at(mass: float, top_k: int = 4, blocks: tuple[int, ...] = (0, 1, 2, 3)) -> Setting:
    return Setting.of(
        vision=tier_target("low"), top_k=top_k, expert_mass=mass, num_active_blocks=RunningBlocks.of(blocks)
    )


def built_so(model: MolmoeForConditionalGeneration, setting: Setting) -> MolmoeForConditionalGeneration:
    """A copy whose blocks after the first have their mixtures from another hand."""
    copied = copy.deepcopy(model)
    copied.set_knobs(experts_of(setting), blocks_of(setting))
    for block in copied.all_blocks[1:]:
        block.mlp = Mixture(block.mlp, experts_of(setting) or 0, mass_of(setting), is_scaled=False)
    return copied


@pytest.mark.parametrize("setting", [at(0.5), at(0.4, 2, (0, 1, 3)), at(0.8, 6), at(1e-6)], ids=lambda each: each.key)
def test_dynamic_experts_equal_a_model_that_is_built_so(tiny_checkpoint: Path, setting: Setting) -> None:
    torch.manual_seed(7)
    model = MolmoeForConditionalGeneration(tiny_config()).eval()
    staged = MolmoeStagedModel("tiny", model, load_processor(find_model(str(tiny_checkpoint))))
    inputs = {"input_ids": torch.randint(6, 100, (1, 20))}
    small, tokens = built_so(model, setting), [*torch.randint(6, 100, (3, 1, 1))]
    with torch.inference_mode():
        staged.apply(setting)
        found, state = staged.prefill(inputs, None)
        expected, copied = small.prefill(
            inputs["input_ids"], top_k=experts_of(setting), active_blocks=blocks_of(setting)
        )
        assert_same_floats(found, expected)
        for token in tokens:
            assert_same_floats(staged.decode_step(token, state), small.decode_step(token, copied))
    proof = staged.prove(setting, inputs)
    assert check_proof(proof, setting, staged) == {}
    assert proof.experts_per_token == staged.expected_experts(setting)
    mean = proof.counted["expert_mass"]["mean_experts_per_token"]
    used = [number for block in small.all_blocks[1:] for number in block.mlp.used[:20]]
    assert mean["prefill"] == pytest.approx(sum(used) / len(used))
    batch = [inputs, {"input_ids": inputs["input_ids"][:, 5:]}]
    alone = [staged.answer_batch([each], 4)[0] for each in batch]
    assert staged.answer_batch(batch, 4) == alone


def test_flops_follow_the_experts_that_were_computed(tiny_checkpoint: Path) -> None:
    model = MolmoeForConditionalGeneration(tiny_config()).eval()
    staged = MolmoeStagedModel("tiny", model, load_processor(find_model(str(tiny_checkpoint))))
    shape = RequestShape(None, None, 0, 0, 20, 0.0)
    assert staged.count_flops(at(0.5), shape, 5) is None
    proof = staged.prove(at(0.5), {"input_ids": torch.randint(6, 100, (1, 20))})
    mean = proof.counted["expert_mass"]["mean_computed_experts"]
    found, one = staged.count_flops(at(0.5), shape, 5), staged.count_flops(at(1.0, 1), shape, 5)
    assert found is not None and one is not None
    # Three blocks with experts of three products of 32 x 16.
    one_more = 3 * 2 * 3 * 32 * 16
    assert found.prefill_flops - one.prefill_flops == round((mean["prefill"] - 1) * 20 * one_more)
    assert found.decode_flops_per_token is not None and one.decode_flops_per_token is not None
    assert found.decode_flops_per_token - one.decode_flops_per_token == pytest.approx((mean["decode"] - 1) * one_more)


def test_engines_refuse_dynamic_experts_and_the_modules_run_them(tiny_checkpoint: Path) -> None:
    processor = load_processor(find_model(str(tiny_checkpoint)))
    staged = MolmoeStagedModel("tiny", MolmoeForConditionalGeneration(tiny_config()).eval(), processor, "graph")
    inputs = {"input_ids": torch.tensor([[7, 20, 33]])}
    assert staged.describe()["execution"] != "eager"
    staged.apply(at(0.5))
    for run in (
        lambda: staged.warm_up(inputs, 4),
        lambda: staged.prefill(inputs, None),
        lambda: staged.answer_batch([inputs], 4),
        lambda: staged.follow_batch([inputs], [(7,)]),
        lambda: staged.prove(at(0.5), inputs),
    ):
        with pytest.raises(EngineRefused, match=r"expert mass 0.5 is set in the modules only; .* --execution eager"):
            run()
    staged.run_next_way("expert mass 0.5")
    assert staged.prove(at(0.5), inputs).execution == "eager"
    staged.apply(at(1.0))
    assert len(staged.answer_batch([inputs], 4)[0]) == 4
