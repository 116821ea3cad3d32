"""A staged model of transformers on tiny checkpoints: settings proven, stages and marks, effective values, bytes."""

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import OPTConfig, OPTForCausalLM

from experiment_core_utils.b_model_loader import find_model
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.engines.greedy import generate_greedily
from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import tier_target, vision_of
from experiment_core_utils.measuring.sample_runs import check_proof
from experiment_core_utils.measuring.staged_runs import run_staged
from experiment_core_utils.models.common.describe import implementations
from experiment_core_utils.models.hf.adapter import TransformersModel
from experiment_core_utils.models.hf.knobs.patches import AttributeChange
from experiment_core_utils.models.hf.loader import skeleton_of
from experiment_core_utils.primitives.device import NoMarks
from experiment_core_utils.primitives.errors import ConfigurationError, KnobDidNotAct, SettingError
from experiment_core_utils.primitives.private_apis import SKIPS_SLOTS
from experiment_core_utils.records.requests import RequestShape
from experiment_core_utils.tasks.interface import Sample
from tests.models.depth_families import LISTED, built
from tests.models.knob_families import TEXT_FAMILIES
from tests.models.tiny_checkpoints import write_checkpoint
from tests.same_floats import assert_same_floats

CPU = torch.device("cpu")
LOW = tier_target("low")
Loaded = Callable[[str], TransformersModel]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    @cache
    def loaded(family: str) -> TransformersModel:
        folder = write_checkpoint(family, tmp_path_factory.mktemp(family))
        config = parse_config(["--model_path", str(folder), "--device", "cpu", "--execution", "eager"])
        model = find_model(str(folder)).load(config.model, CPU)
        assert isinstance(model, TransformersModel)
        return model

    return loaded


def picture(width: int = 60, height: int = 40) -> Sample:
    pixels = np.random.default_rng(3).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Sample(7, "picture", "What is it?", ("a cat",), Image.fromarray(pixels), "what")


def inputs_of(model: TransformersModel, setting: Setting) -> Any:
    return model.to_device(model.prepare(picture(), "What is it?", vision_of(setting).bounds).inputs)


# Of 3 blocks, 4 experts, top-k 2. The first block with experts keeps 2; block 0 of GLM-4V is dense.
PROVEN = {
    ("olmoe", 1, (0, 1, 2)): (2, 1, 1),
    ("olmoe", 4, (0, 2)): (2, 4),
    ("llava", 1, (0, 2)): (2, 1),
    ("qwen3_vl_moe", 1, (0, 1)): (2, 1),
    ("qwen3_vl_moe", 3, (0, 2)): (2, 3),
    ("glm4v_moe", 1, (0, 1, 2)): (None, 2, 1),
    ("glm4v_moe", 1, (0, 2)): (None, 1),
    ("llava_next", None, (0, 2)): (None, None),
    ("qwen2_5_vl", None, (0,)): (None,),
    ("internvl", None, (0, 1)): (None, None),
    ("llama", None, (0, 1, 2)): (None, None, None),
    # Two attentions a block, and so two layers of the cache.
    ("longcat_flash", None, (0, 1)): (3, 3),
}


@pytest.mark.parametrize(("family", "top_k", "blocks"), PROVEN)
def test_a_setting_is_proven_by_what_ran(
    model_of: Loaded, family: str, top_k: int | None, blocks: tuple[int, ...]
) -> None:
    model, setting = model_of(family), Setting.of(vision=LOW, top_k=top_k, num_active_blocks=RunningBlocks.of(blocks))
    expected = PROVEN[family, top_k, blocks]
    proof = model.prove(setting, inputs_of(model, setting))
    assert proof.experts_per_token == model.expected_experts(setting) == expected
    assert (proof.blocks_run, proof.blocks_run_decode, proof.cache_layers) == (blocks, blocks, len(blocks))
    assert model.active_setting == (top_k, blocks)
    check_proof(proof, setting, model)
    other = RunningBlocks.of((0,) if len(blocks) > 1 else (0, 1))
    with pytest.raises(KnobDidNotAct):
        check_proof(proof, setting.replaced(num_active_blocks=other), model)


def windowed(model: Any = None) -> TransformersModel:
    requests = SimpleNamespace(
        config_for=lambda _: {},
        has_vision=False,
        placeholder=None,
        vision_knob_unsupported_reason=None,
        tokenizer=None,
        chat_template=None,
        text_of=None,
        opens_thinking=False,
        thinking=None,
        name="m",
    )
    return TransformersModel("windowed", model or built(LISTED["gemma3"]), cast(Any, requests))


def test_a_block_with_the_mask_and_window_of_another_is_no_proof() -> None:
    """Blocks 0, 2 and 4 have windows, a window and full attention; the prompt is longer than the window."""
    model, setting = windowed(), Setting.of(vision=LOW, top_k=None, num_active_blocks=RunningBlocks.of((0, 2, 4)))
    inputs = {"input_ids": torch.arange(10, 20).unsqueeze(0)}
    assert model.prove(setting, inputs).blocks_run == (0, 2, 4)
    changes = model.knobs._blocks.changes
    config = model.model.config.get_text_config()

    def with_other_kinds(blocks: Any) -> Any:
        wrong = ["sliding_attention", "full_attention", "sliding_attention"]
        planned = changes(blocks)
        return [*planned, AttributeChange(config, "layer_types", wrong)] if len(blocks) == 3 else planned

    model.knobs._blocks.changes = with_other_kinds  # type: ignore[method-assign]
    with pytest.raises(KnobDidNotAct, match="block 2 is given another .* than in the full model"):
        model.prove(setting, inputs)


@pytest.mark.parametrize("family", ["olmoe", "qwen3_vl_moe", "llava_next", "internvl"])
def test_marked_and_staged_runs_give_one_answer_at_every_setting(model_of: Loaded, family: str) -> None:
    model = model_of(family)
    answers = set()
    for top_k, blocks in ((1 if model.num_experts else None, (0, 2)), (model.default_top_k, (0, 1, 2))):
        setting = Setting.of(vision=LOW, top_k=top_k, num_active_blocks=RunningBlocks.of(blocks))
        model.apply(setting)
        inputs = inputs_of(model, setting)
        marked = run_staged(model, inputs, 6)
        assert marked.token_ids == generate_greedily(model, inputs, 6, NoMarks()).token_ids
        assert len(marked.token_ids) == 6 or marked.token_ids[-1] in model.eos_token_ids
        # The stages are the spans of one run.
        stages = (marked.vision_s or 0.0) + marked.prefill_s + (marked.decode_s or 0.0)
        assert stages == pytest.approx(marked.total_s)
        assert (marked.vision_s is None) == (family == "olmoe")
        answers.add(marked.token_ids)
    # Other blocks and experts answer differently.
    assert len(answers) == 2


def test_the_config_of_llava_next_follows_the_crops(model_of: Loaded) -> None:
    model = model_of("llava_next")
    for tier, crops in (("medium", 6), ("low", 2)):
        setting = Setting.of(vision=tier_target(tier), top_k=None, num_active_blocks=RunningBlocks.of((0, 1, 2)))
        model.apply(setting)
        request = model.prepare(picture(), "What is it?", vision_of(setting).bounds)
        assert request.shape.actual is not None and request.shape.actual.num_crops == crops
        features = model.encode_image(model.to_device(request.inputs))
        assert sum(len(each) for each in features.pooler_output) == request.shape.vision_tokens


def test_fields_of_the_last_crops_are_put_back_where_the_next_ones_have_none() -> None:
    fields: dict[int, dict[str, Any]] = {3: {"vision_rows": 3, "vision_side": 7}, 8: {"vision_rows": 8}, 15: {}}
    requests = SimpleNamespace(
        config_for=lambda crops: fields[crops.max_crops],
        has_vision=False,
        vision_knob_unsupported_reason=None,
        tokenizer=None,
        chat_template=None,
        text_of=None,
        opens_thinking=False,
        thinking=None,
        name="m",
    )
    decoder = built(LISTED["gemma3"])
    decoder.config.vision_rows, decoder.config.vision_side = 1, 2
    model = TransformersModel("fields", decoder, cast(Any, requests))
    seen = []
    for tier in ("low", "medium", "high", "low", "high"):
        model.apply(Setting.of(vision=tier_target(tier), top_k=None, num_active_blocks=RunningBlocks.of((0, 2))))
        seen.append((decoder.config.vision_rows, decoder.config.vision_side))
    assert seen == [(3, 7), (8, 2), (1, 2), (3, 7), (1, 2)]


def test_a_setting_that_is_not_possible_leaves_what_was_in_force(model_of: Loaded) -> None:
    model = model_of("olmoe")
    model.apply(Setting.of(vision=LOW, top_k=1, num_active_blocks=RunningBlocks.of((0, 2))))
    for top_k, blocks, message in ((5, (0, 1, 2), "give 1 to 4, the experts of a block"), (2, (0, 3), "3")):
        with pytest.raises(ConfigurationError, match=message):
            model.apply(Setting.of(vision=LOW, top_k=top_k, num_active_blocks=RunningBlocks.of(blocks)))
        assert model.active_setting == (1, (0, 2))


def test_a_picture_is_sent_in_the_models_precision_and_ids_stay_numbers(model_of: Loaded) -> None:
    model = model_of("llava")
    setting = Setting.of(vision=LOW, top_k=2, num_active_blocks=RunningBlocks.of((0, 1, 2)))
    model.model.to(torch.bfloat16)
    try:
        sent = inputs_of(model, setting)
        assert sent["pixel_values"].dtype == torch.bfloat16
        assert sent["input_ids"].dtype == torch.int64
    finally:
        model.model.to(torch.float32)


# --- figures ------------------------------------------------------------------------------------------------------


def test_bytes_of_a_step_are_those_of_its_blocks_and_experts(model_of: Loaded) -> None:
    model = model_of("olmoe")
    rows = model.model.get_output_embeddings().weight.shape[0]
    # Width 32, 2 of 4 heads for keys and values, experts of width 24, 4 bytes a number.
    attention = 2 * 32 * 32 + 2 * 32 * 16 + (32 + 16)
    norms_and_router = 2 * 32 + 4 * 32
    expert = 3 * 32 * 24
    for top_k, blocks, chosen in ((2, (0, 1, 2), 6), (1, (0, 1, 2), 4), (1, (0, 2), 3), (None, (0,), 2)):
        found = model.count_bytes(Setting.of(vision=LOW, top_k=top_k, num_active_blocks=RunningBlocks.of(blocks)))
        assert found is not None
        dense = len(blocks) * (attention + norms_and_router) + rows * 32
        assert found.step_weights_bytes == pytest.approx(4 * (dense + chosen * expert))
        assert found.cache_bytes(1) == len(blocks) * 2 * 16 * 4
        # Stored is the whole model, whatever runs: embedding, head, three blocks, last norm; and two tables of RoPE.
        whole = 2 * rows * 32 + 3 * (attention + norms_and_router + 4 * expert) + 32
        assert found.weights_bytes == pytest.approx(4 * whole, abs=2 * 4 * 8)


def test_bytes_of_keys_and_values_follow_the_windows_of_the_active_blocks() -> None:
    """Blocks 0 and 2 have a window of 4; keys and values of 2 heads of 8, 4 bytes a number."""
    model, position = windowed(TEXT_FAMILIES["gpt_oss"].built()), 2 * 16 * 4
    inputs = {"input_ids": torch.arange(10, 20).unsqueeze(0)}
    # A cache of 10 positions keeps 3 in a window, one of 3 all. The steps after a prompt of 3 see 4, 5 and 6 keys.
    for blocks, kept, few, read in (
        ((0, 1, 2, 3), 2 * 3 + 2 * 10, 4 * 3, 2 * 12 + 2 * 15),
        ((0, 2), 2 * 3, 2 * 3, 2 * 12),
        ((0, 3), 3 + 10, 2 * 3, 12 + 15),
        ((1,), 10, 3, 15),
    ):
        setting = Setting.of(vision=LOW, top_k=None, num_active_blocks=RunningBlocks.of(blocks))
        found = model.count_bytes(setting)
        assert found is not None
        assert (found.cache_bytes(10), found.cache_bytes(3)) == (kept * position, few * position)
        assert found.step_bytes(3, 3) == pytest.approx(3 * found.step_weights_bytes + read * position)
        model.apply(setting)
        _, state = model.prefill(inputs, None)
        assert sum(each.keys.nbytes + each.values.nbytes for each in state.cache.layers) == found.cache_bytes(10)


def test_operations_follow_the_setting_where_a_formula_is_known(model_of: Loaded) -> None:
    model = model_of("qwen3_vl_moe")
    shape = model.prepare(picture(), "What is it?", LOW.crops).shape
    settings = ((2, (0, 1, 2)), (1, (0, 1, 2)), (1, (0, 2)))
    flops = [
        model.count_flops(Setting.of(vision=LOW, top_k=top_k, num_active_blocks=RunningBlocks.of(blocks)), shape, 5)
        for top_k, blocks in settings
    ]
    prefill = [each.prefill_flops for each in flops if each is not None]
    # One expert: three products of 32 x 16, two operations for each of its numbers and tokens, in the last two blocks.
    assert prefill[0] - prefill[1] == 2 * (2 * 3 * 32 * 16) * shape.prompt_tokens
    assert prefill[1] > prefill[2] and len(prefill) == 3
    assert len({each.vision_flops for each in flops if each is not None}) == 1


def test_without_a_formula_operations_are_counted() -> None:
    """Of one block: 4 products of 16 x 16 and 2 of 16 x 24 for each token, and a head of 16 x 97."""
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=97, hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=16
    )
    tokens = SimpleNamespace(
        vision_knob_unsupported_reason="it takes no pictures",
        vision_options={},
        config_for=lambda crops: {},
        tokenizer=None,
        chat_template=None,
        text_of=None,
        opens_thinking=False,
        thinking=None,
        name="m",
    )
    unknown = TransformersModel("opt", OPTForCausalLM(config).eval(), cast(Any, tokens))
    setting = Setting.of(vision=LOW, top_k=None, num_active_blocks=RunningBlocks.of((0,)))
    found = unknown.count_flops(setting, RequestShape(None, None, 0, 0, 9, 0.0), 5)
    block, head = 2 * (4 * 16 * 16 + 2 * 16 * 24), 2 * 16 * 97
    # Scores and values of 9 x 9 positions; a step sees 10 to 13.
    assert found is not None
    assert (found.vision_flops, found.prefill_flops) == (None, 9 * block + head + 4 * 16 * 9 * 9)
    assert found.decode_flops_per_token == block + head + 4 * 16 * 11.5


def test_what_is_reported_is_what_is_in_force(model_of: Loaded) -> None:
    found = model_of("glm4v_moe").describe()
    assert (found["model_class"], found["model_type"]) == ("Glm4vMoeForConditionalGeneration", "glm4v_moe")
    assert (found["first_routed_block"], found["first_block_top_k"], found["num_experts"]) == (1, 2, 4)
    assert (found["knobs_refused"], found["timed_inside"], found["num_total_blocks"]) == ({}, "generate", 3)
    dense = model_of("llava_next").describe()
    assert (dense["first_routed_block"], dense["first_block_top_k"], dense["num_experts"]) == (None, None, None)
    assert dense["knobs_refused"] == {"top_k": "the model is dense"}
    assert dense["experts_implementation"] is dense["experts_implementation_decode"] is None
    assert set(model_of("llava").describe()["knobs_refused"]) == {"vision_tokens"}


def test_the_switch_that_the_library_makes_while_decoding_on_a_gpu_is_reported(model_of: Loaded) -> None:
    model = model_of("olmoe")
    source = find_model(model.name).hf
    assert source is not None
    # Not on the CPU, as the model without storage shows: `generate()` asks for the device's type alone.
    elsewhere = skeleton_of(source)
    for given, decode in (("grouped_mm", "batched_mm"), ("eager", "eager"), ("batched_mm", "batched_mm")):
        elsewhere.set_experts_implementation(given)
        known = implementations(elsewhere)
        assert (known["experts_implementation"], known["experts_implementation_decode"]) == (given, decode)
    assert model.describe()["experts_implementation_decode"] == "grouped_mm"


def test_a_cache_that_forgets_is_not_taken_back(model_of: Loaded) -> None:
    model = model_of("llama")
    setting = Setting.of(vision=LOW, top_k=None, num_active_blocks=RunningBlocks.of((0, 1, 2)))
    model.apply(setting)
    with torch.inference_mode():
        logits, state = model.prefill(inputs_of(model, setting), None)
        first = logits.argmax(-1, keepdim=True)
        once = model.decode_step(first, state)
        model.rewind(state, 1)
        assert_same_floats(model.decode_step(first, state), once)

        class Forgets:
            def crop(self, _length: int) -> None:
                raise ValueError("Cannot crop a sliding window")

        state.steps[-1][1]["past_key_values"] = Forgets()
        with pytest.raises(SettingError, match="the cache of this llama cannot be taken back by 1 steps"):
            model.rewind(state, 1)


def test_dynamic_experts_are_counted_and_flops_follow(model_of: Loaded) -> None:
    """Of 3 blocks, 4 experts, top-k 2: FLOPs of the last two blocks follow the experts that were computed."""
    model, blocks = model_of("olmoe"), RunningBlocks.of((0, 1, 2))
    shape = RequestShape(None, None, 0, 0, 20, 0.0)

    def at(top_k: int, mass: float) -> Setting:
        return Setting.of(vision=LOW, top_k=top_k, expert_mass=mass, num_active_blocks=blocks)

    def flops(setting: Setting) -> tuple[float, ...]:
        stages = model.count_flops(setting, shape, 5)
        assert stages is not None and stages.decode_flops_per_token is not None
        return stages.prefill_flops, stages.decode_flops_per_token

    setting = at(3, 0.6)
    inputs = inputs_of(model, setting)
    assert model.count_flops(setting, shape, 5) is None
    proof = model.prove(setting, inputs)
    assert proof.experts_per_token == (2, 3, 3)
    check_proof(proof, setting, model)
    counted = proof.counted["expert_mass"]
    mean = counted["mean_experts_per_token"]
    assert 1 < mean["prefill"] < 3 and 1 <= mean["decode"] <= 3
    # Versions of transformers that can leave slots out compute those alone that are used; others compute all 3.
    leaves_out = hasattr(model.decoder_blocks[1].mlp.experts, SKIPS_SLOTS)
    computed = counted["mean_computed_experts"]
    assert computed == (mean if leaves_out else {"prefill": 3, "decode": 3})
    # An expert of three products of 32 x 24 in two blocks, for 20 tokens and for one.
    one_more = 2 * 2 * 3 * 32 * 24
    found, least = flops(setting), flops(at(1, 1.0))
    assert found[0] - least[0] == round((computed["prefill"] - 1) * 20 * one_more)
    assert found[1] - least[1] == pytest.approx((computed["decode"] - 1) * one_more)
    read = model.count_bytes(setting), model.count_bytes(at(1, 1.0))
    assert read[0] is not None and read[1] is not None
    more = read[0].step_weights_bytes - read[1].step_weights_bytes
    assert more == pytest.approx((computed["decode"] - 1) * 2 * 3 * 32 * 24 * 4)
    assert model.prove(at(3, 1.0), inputs).counted == {}
    # Nothing is computed dynamically where only the first block with experts runs.
    alone = at(3, 0.6).replaced(num_active_blocks=RunningBlocks.of((0,)))
    unseen = check_proof(model.prove(alone, inputs), alone, model)
    assert unseen == {"expert_mass": "no block with experts after the first one runs"}
    assert flops(alone) == flops(alone.replaced(expert_mass=1.0))


def test_a_mass_of_one_and_what_follows_a_mass_are_the_model_itself(model_of: Loaded) -> None:
    model, blocks = model_of("qwen3_vl_moe"), RunningBlocks.of((0, 1, 2))
    whole = Setting.of(vision=LOW, top_k=2, expert_mass=1.0, num_active_blocks=blocks)
    inputs = inputs_of(model, whole)

    def logits() -> torch.Tensor:
        return model.prefill(inputs, model.encode_image(inputs))[0]

    model.apply(whole.replaced(expert_mass=None))
    before = logits()
    model.apply(whole)
    assert torch.equal(logits(), before)
    with model.apply(whole.replaced(expert_mass=0.3)):
        assert not torch.allclose(logits(), before, atol=1e-3)
    assert torch.equal(logits(), before)


def test_a_knob_that_changes_no_logit_is_said() -> None:
    """Block 3 adds nothing to its input; the norms behind attention and MLP keep 0."""
    decoder = built(LISTED["gemma3"])
    for name, parameter in decoder.get_decoder().layers[3].named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.zeros_(parameter)
    model, inputs = windowed(decoder), {"input_ids": torch.arange(10, 20).unsqueeze(0)}
    seen = {}
    for blocks in ((0, 1, 2, 3, 4), (0, 1, 2, 4), (0, 1, 3, 4)):
        setting = Setting.of(vision=LOW, top_k=None, num_active_blocks=RunningBlocks.of(blocks))
        seen[blocks] = dict(model.prove(setting, inputs).knobs_not_seen)
    same = {"num_active_blocks": "the logits of its first prompt are those of the model as it is"}
    assert list(seen.values()) == [{}, same, {}]


def test_blocks_that_use_the_keys_of_others_need_no_layer_of_the_cache(model_of: Loaded) -> None:
    """Of 6 blocks the last 3 do; transformers 5.17 makes no layers for these, and 5.23 does."""
    model = model_of("gemma4_e2b")
    inputs = inputs_of(model, Setting.of(vision=LOW, top_k=None, num_active_blocks=RunningBlocks.of(range(6))))
    _, state = model.prefill(inputs, model.encode_image(inputs))
    for layers, blocks in ((6, 6), (3, 6), (2, 2)):
        del state.cache.layers[layers:]
        assert model._cached_blocks(state) == blocks


def test_a_reference_that_is_not_the_model_is_refused() -> None:
    """A fault is planted: at the model's own setting a block is left out."""
    model, inputs = windowed(), {"input_ids": torch.arange(10, 20).unsqueeze(0)}
    setting = Setting.of(vision=LOW, top_k=None, num_active_blocks=RunningBlocks.of((0, 1, 2, 3, 4)))
    generate = model.generate_timed

    def without_a_block(*args: Any) -> Any:
        with model.knobs.applied(None, (0, 1, 2, 3)):
            return generate(*args)

    model.generate_timed = without_a_block  # type: ignore[method-assign]
    with pytest.raises(KnobDidNotAct, match=r"as the model is, its token \d is \d+, and that of its own generate\(\)"):
        model.prove(setting, inputs)
