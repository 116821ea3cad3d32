"""Dynamic experts turned in place, against models whose mixtures are written here token by token."""

from collections.abc import Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module

from experiment_core_utils.models.hf.knobs.controller import DecoderKnobs
from experiment_core_utils.models.hf.knobs.expert_mass import ExpertMassAdapter, RouterScores
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.private_apis import SKIPS_SLOTS
from tests.models.hf.knobs.test_controller import ONE, PADDED, answer, blocks_of, reference
from tests.models.knob_families import ALL_BLOCKS, TEXT_FAMILIES, UNTRIED_FAMILIES, VISION_FAMILIES, KnobFamily, _text
from tests.models.mixtures import GroupedMixture, Mixture

OLMOE_SCALED = KnobFamily(
    lambda kept, k: _text("OlmoeConfig", kept, num_experts=6, num_experts_per_tok=k, norm_topk_prob=True)
)
QWEN3_SCALED = KnobFamily(
    lambda kept, k: _text(
        "Qwen3MoeConfig",
        kept,
        num_experts_per_tok=k,
        norm_topk_prob=True,
        head_dim=8,
        moe_intermediate_size=12,
        num_experts=6,
    )
)
# Whether the weights of the chosen experts are scaled to a sum of 1.
FAMILIES: Mapping[str, tuple[KnobFamily, bool]] = {
    "olmoe": (TEXT_FAMILIES["olmoe"], False),
    "olmoe, scaled": (OLMOE_SCALED, True),
    "mixtral": (TEXT_FAMILIES["mixtral"], True),
    "qwen2_moe": (TEXT_FAMILIES["qwen2_moe"], False),
    "qwen3_moe, block 1 dense": (TEXT_FAMILIES["qwen3_moe, block 1 dense"], False),
    "qwen3_moe, scaled": (QWEN3_SCALED, True),
    "qwen3_vl_moe": (VISION_FAMILIES["qwen3_vl_moe"], True),
    "deepseek_v3": (TEXT_FAMILIES["deepseek_v3"], True),
    "glm4v_moe": (VISION_FAMILIES["glm4v_moe"], True),
}
SIGMOIDS = ("deepseek_v3", "glm4v_moe")


@cache
def made(name: str) -> tuple[Any, DecoderKnobs, ExpertMassAdapter]:
    """A model, and what turns its knobs."""
    full = FAMILIES[name][0].built()
    for index, buffer in enumerate(each for key, each in full.named_buffers() if key.endswith("correction_bias")):
        buffer.copy_(torch.linspace(-0.3, 0.3, len(buffer)).roll(index))
    knobs = DecoderKnobs(full)
    adapter = knobs.adapters["expert_mass"]
    assert isinstance(adapter, ExpertMassAdapter) and adapter.unsupported_reason is None
    return full, knobs, adapter


def built(name: str, full: Any, mass: float, top_k: int, kept: Sequence[int]) -> tuple[Any, list[Mixture]]:
    """A model that is built so, with the same weights, and its mixtures with fewer experts for some tokens."""
    family, is_scaled = FAMILIES[name]
    model, mixtures = reference(family, full, top_k, kept), []
    for block, index in zip(blocks_of(model), kept, strict=True):
        if index in family.routed[1:]:
            block.mlp = (GroupedMixture if name in SIGMOIDS else Mixture)(block.mlp, top_k, mass, is_scaled)
            mixtures.append(block.mlp)
    return model, mixtures


SETTINGS = [(0.7, 3, ALL_BLOCKS), (0.5, 3, (0, 2, 3)), (0.4, 2, ALL_BLOCKS), (0.9, 5, (0, 1, 3)), (1e-6, 3, ALL_BLOCKS)]


@pytest.mark.parametrize(("mass", "top_k", "kept"), SETTINGS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_mass_equals_a_model_that_is_built_so(name: str, mass: float, top_k: int, kept: tuple[int, ...]) -> None:
    full, knobs, adapter = made(name)
    if knobs.top_k_limit is not None:
        # A token may use the experts of one group of two.
        top_k = min(top_k, knobs.top_k_limit[0])
    whole = answer(full, ONE)
    small, mixtures = built(name, full, mass, top_k, kept)
    with knobs.applied(top_k, kept):
        at_top_k = answer(full, PADDED)
        adapter.put(mass)
        found, expected = answer(full, PADDED), answer(small, PADDED)
        adapter.put(1.0)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-4)
    assert torch.equal(found[0], expected[0])
    assert not torch.allclose(at_top_k[1][0], expected[1][0], atol=1e-2)
    used = {number for mixture in mixtures for number in mixture.used}
    # Of k sigmoids the largest has at least a k-th of their sum.
    is_one = mass < 1e-3 or (name in SIGMOIDS and mass * top_k < 1)
    assert used == {1} if is_one else len(used) > 1 and used <= set(range(1, top_k + 1))
    again = answer(full, ONE)
    assert torch.equal(again[1], whole[1])


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_every_implementation_of_experts_leaves_the_slots_out(implementation: str) -> None:
    """`eager` and `grouped_mm` compute nothing for them, `batched_mm` as many as the token with the most needs."""
    full, knobs, adapter = made("olmoe, scaled")
    if not hasattr(blocks_of(full)[2].mlp.experts, SKIPS_SLOTS):
        pytest.skip("this version of transformers computes every slot")
    small, mixtures = built("olmoe, scaled", full, 0.6, 3, ALL_BLOCKS)
    before = full.get_experts_implementation()
    full.set_experts_implementation(implementation)
    given: list[torch.Tensor] = []
    with knobs.applied(3, ALL_BLOCKS), torch.inference_mode():
        adapter.put(0.6)
        handle = blocks_of(full)[2].mlp.experts.register_forward_pre_hook(lambda _, inputs: given.append(inputs[1]))
        found = full(**ONE).logits, full(input_ids=ONE["input_ids"][:, :1]).logits
        handle.remove()
        adapter.put(1.0)
    full.set_experts_implementation(before)
    expected = small(**ONE).logits, small(input_ids=ONE["input_ids"][:, :1]).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    used = mixtures[1].used
    assert len(used) == 10 and min(used) < max(used)
    assert [int((ids < 6).sum()) for ids in given] == [sum(used[:9]), used[9]]
    widths = [max(used[:9]), used[9]] if implementation == "batched_mm" else [3, 3]
    assert [ids.shape[1] for ids in given] == widths


def refusal(family: KnobFamily) -> str | None:
    return DecoderKnobs(family.built()).adapters["expert_mass"].unsupported_reason


def test_a_router_of_a_model_that_is_spread_over_devices_is_tried_by_itself() -> None:
    full = TEXT_FAMILIES["mixtral"].built()
    weights = {"never copied": torch.zeros(2)}
    hook = AlignDevicesHook(execution_device="meta", io_same_device=True, weights_map=weights)
    for block in blocks_of(full):
        add_hook_to_module(block.mlp.gate, hook)
    adapter = ExpertMassAdapter(blocks_of(full)[1:])
    assert adapter.unsupported_reason is None
    assert all(router._hf_hook.weights_map is weights for router, _, _ in adapter._parts)


def test_routers_are_known_by_what_they_give_and_others_are_refused() -> None:
    assert refusal(TEXT_FAMILIES["llama"]) == "the model is dense"
    for name in ("gpt_oss", "granitemoe", "qwen3_next"):
        adapter = DecoderKnobs(TEXT_FAMILIES[name].built()).adapters["expert_mass"]
        assert isinstance(adapter, ExpertMassAdapter) and adapter.unsupported_reason is None
        assert {scores for _, _, scores in adapter._parts} == {RouterScores(is_sigmoid=False, is_scaled=True)}
    assert refusal(UNTRIED_FAMILIES["inkling_text"]) == (
        "the weights of its router (InklingTopkRouter) are neither those of a softmax nor of sigmoids of its logits"
    )
    only_last = KnobFamily(
        lambda kept, k: _text(
            "Qwen3MoeConfig", kept, num_experts_per_tok=k, head_dim=8, num_experts=6, mlp_only_layers=[0, 1, 2]
        ),
        routed=(3,),
    )
    assert "the first such block keeps its own number" in str(refusal(only_last))
    with pytest.raises(ConfigurationError, match=r"expert mass 0.5 cannot be set: the model is dense; give 1.0"):
        DecoderKnobs(TEXT_FAMILIES["llama"].built()).adapters["expert_mass"].put(0.5)


def test_experts_that_are_computed_in_another_way_are_refused() -> None:
    full, _, adapter = made("olmoe")
    experts = blocks_of(full)[1].mlp.experts
    before, experts.config = experts.config, SimpleNamespace(_experts_implementation="deepgemm")
    with pytest.raises(ConfigurationError, match="where deepgemm computes the experts; give .* or batched_mm"):
        adapter.put(0.5)
    experts.config = before
    assert adapter.engines_unsupported_reason is None
