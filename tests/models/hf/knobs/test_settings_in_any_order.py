"""Settings of one process, in any order, against a model that was never turned; recurrent families; refusals."""

import random
from typing import Any

import pytest
import torch

from experiment_core_utils.models.common.block_modules import block_stack
from experiment_core_utils.models.hf.generate import GenerateStages
from experiment_core_utils.models.hf.knobs.active_blocks import ActiveBlocks
from experiment_core_utils.models.hf.knobs.controller import DecoderKnobs
from experiment_core_utils.models.hf.knobs.patches import AttributeChange
from experiment_core_utils.models.hf.request_state import stages_unsupported_reason
from tests.models.depth_families import LISTED, NUM_BLOCKS, RECURRENT, REFUSED, WHOLE, built
from tests.models.knob_families import TEXT_FAMILIES, VISION_FAMILIES

ALL = tuple(range(NUM_BLOCKS))
# Longer than the windows of 4 tokens.
IDS = torch.tensor([[10, 11, 12, 13, 14, 15, 16]])
NEW_TOKENS = 2
FAMILIES = {
    **{name: lambda make=make: built(make) for name, make in {**LISTED, **RECURRENT}.items()},
    **{f"{name}, 4 blocks": family.built for name, family in {**TEXT_FAMILIES, **VISION_FAMILIES}.items()},
}


def answer(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    model.generation_config.eos_token_id = None
    out = model.generate(
        input_ids=IDS, max_new_tokens=NEW_TOKENS, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    return out.sequences, torch.stack(out.logits)


def grid(knobs: DecoderKnobs) -> list[tuple[int | None, tuple[int, ...]]]:
    total = knobs.num_total_blocks
    fewer = 1 if knobs.top_k_unsupported_reason is None else None
    return [(None, tuple(range(total))), (fewer, tuple(i for i in range(total) if i != 2)), (None, (1, total - 1))]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_setting_does_not_depend_on_what_was_turned_before(name: str) -> None:
    fresh = {}
    turned = FAMILIES[name]()
    knobs = DecoderKnobs(turned)
    assert knobs.blocks_unsupported_reason is None
    settings = grid(knobs)
    for setting in settings:
        model = FAMILIES[name]()
        DecoderKnobs(model).apply(*setting)
        fresh[setting] = answer(model)
    for seed in (1, 2):
        for setting in random.Random(seed).sample(settings, len(settings)):
            knobs.apply(*setting)
            tokens, logits = answer(turned)
            assert torch.equal(tokens, fresh[setting][0]), setting
            # The same weights and operators at other addresses: last bits of float32 may differ, by some 1e-6.
            torch.testing.assert_close(logits, fresh[setting][1], rtol=1e-4, atol=1e-4)


def test_lists_by_block_are_those_of_the_setting_after_another_setting() -> None:
    model = built(LISTED["gemma3"])
    kinds = list(model.config.layer_types)
    knobs = DecoderKnobs(model)
    for blocks in ((0, 1), (1, 3, 4), ALL, (0, 4)):
        knobs.apply(None, blocks)
        assert model.config.layer_types == [kinds[block] for block in blocks]
        assert model.config.num_hidden_layers == len(blocks)


def test_a_decoders_own_list_by_block_follows() -> None:
    """Molmo2 keeps a list of its own, and names blocks by their indices in a list that is as long as its blocks."""
    model = built(LISTED["olmo3"])
    stack: Any = model.get_decoder()
    stack.rope_types = ["scaled", "unscaled", "scaled", "unscaled", "scaled"]
    model.config.rope_scaling_layers = [0, 2, 4]
    found = ActiveBlocks(model, block_stack(model)).changes((1, 2, 4))
    changes = {change.name: change.value for change in found}
    assert changes["rope_types"] == ["unscaled", "scaled", "scaled"]
    assert changes["rope_scaling_layers"] == [1, 2]
    assert AttributeChange(stack, "rope_types", ["unscaled", "scaled", "scaled"]) in found


# --- recurrent families -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*RECURRENT, *WHOLE])
def test_the_stages_of_a_recurrent_family_answer_as_generate_does(name: str) -> None:
    model = built(RECURRENT[name] if name in RECURRENT else WHOLE[name][0])
    knobs = DecoderKnobs(model)
    assert stages_unsupported_reason(model) is None
    kept = ALL if name in WHOLE else (0, 1, 3)
    stages = GenerateStages(model)
    with knobs.applied(None, kept), torch.inference_mode():
        tokens, expected = answer(model)
        logits, state = stages.prefill({"input_ids": IDS}, None)
        assert state.filled_layers == len(kept)
        found = [logits]
        for _ in range(NEW_TOKENS - 1):
            found.append(stages.decode_step(found[-1].argmax(dim=-1, keepdim=True), state))
    # One operator at a time on the same numbers: last bits alone.
    torch.testing.assert_close(torch.stack(found), expected, rtol=1e-4, atol=1e-4)
    assert [int(each.argmax()) for each in found] == tokens[0, IDS.shape[1] :].tolist()


@pytest.mark.parametrize("name", WHOLE)
def test_blocks_are_refused_with_the_reason(name: str) -> None:
    make, reason = WHOLE[name]
    assert DecoderKnobs(built(make)).blocks_unsupported_reason == reason


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_without_separate_stages_is_refused(name: str) -> None:
    make, reason = REFUSED[name]
    model = built(make)
    unsupported_reason = stages_unsupported_reason(model)
    assert unsupported_reason is not None and unsupported_reason.startswith(reason)
