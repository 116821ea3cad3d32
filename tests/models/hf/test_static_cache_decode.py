"""Steps over memory of fixed size, replayed, against what `generate()` gives with a growing cache."""

from typing import Any

import pytest
import torch
from transformers.cache_utils import StaticLayer

from experiment_core_utils.engines.cuda_graphs import Reruns
from experiment_core_utils.models.hf.generate import GenerateStages, greedy_config
from experiment_core_utils.models.hf.graphed_prefill import GraphedDecoder
from experiment_core_utils.models.hf.static_cache_decode import FixedCacheDecode
from experiment_core_utils.primitives.errors import ConfigurationError, SettingError
from tests.models.depth_families import LISTED, RECURRENT, built
from tests.models.knob_families import TEXT_FAMILIES, VISION_FAMILIES
from tests.models.recorded_replays import RecordedReplays
from tests.models.tiny_families import VOCABULARY
from tests.same_floats import assert_same_floats

NEW_TOKENS = 6
# With windows of 4 tokens, with recurrent blocks beside attention, and with those alone.
HYBRID = {
    **{name: LISTED[name] for name in ("gemma2", "exaone4", "mimo_v2_flash")},
    **{name: RECURRENT[name] for name in ("qwen3_5_moe", "lfm2", "kimi_linear", "falcon_mamba", "mamba2")},
}

RECORDED = ("llama", "gpt_oss", "exaone4", "lfm2", "mamba2")


def prompt_of(tokens: int, seed: int = 1) -> dict[str, torch.Tensor]:
    ids = torch.randint(10, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def plain(model: Any, inputs: dict[str, torch.Tensor]) -> list[int]:
    rows = model.generate(**inputs, max_new_tokens=NEW_TOKENS)
    tokens: list[int] = rows[0, inputs["input_ids"].shape[1] :].tolist()
    return tokens


def ready(family: Any) -> Any:
    model = family.built()
    model.generation_config = greedy_config(model)
    return model


@torch.inference_mode()
def replayed(model: Any, decode: FixedCacheDecode, inputs: dict[str, torch.Tensor]) -> list[int]:
    """The answer, with some steps taken back and done again: two, or all where a recurrent state is kept."""
    stages = GenerateStages(model)
    logits, state = stages.prefill(inputs, stages.encode_image(inputs))
    decode.begin(state, logits)
    tokens = [int(decode.token)]
    for _ in range(NEW_TOKENS - 1):
        logits = decode.step()
        tokens.append(int(logits.argmax()))
    steps = NEW_TOKENS - 1 if any(hasattr(layer, "recurrent_states") for layer in state.cache.layers) else 2
    decode.rewind(steps)
    decode.put_token(torch.tensor([[tokens[-steps - 1]]]))
    again = [int(decode.step().argmax()) for _ in range(steps)]
    assert again == tokens[-steps:]
    assert decode.length == inputs["input_ids"].shape[1] + NEW_TOKENS - 1
    return tokens


@pytest.mark.parametrize("name", [*TEXT_FAMILIES, *HYBRID])
def test_prompts_of_several_lengths_share_one_recording(name: str) -> None:
    if name in HYBRID:
        model: Any = built(HYBRID[name])
        model.generation_config = greedy_config(model)
    else:
        model = ready(TEXT_FAMILIES[name])
    # Replays of recorded operators take long; they show what the host counts.
    decode = FixedCacheDecode(model, 32, RecordedReplays() if name in RECORDED else Reruns())
    # The longest stands in the middle: what it leaves in the slots must not be read by the next.
    for inputs in (prompt_of(9), prompt_of(20, seed=2), prompt_of(5, seed=3)):
        assert replayed(model, decode, inputs) == plain(model, inputs)


@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_a_prompt_with_a_picture(name: str) -> None:
    family: Any = VISION_FAMILIES[name]
    model, inputs = ready(family), family.picture()
    decode = FixedCacheDecode(model, inputs["input_ids"].shape[1] + NEW_TOKENS, Reruns())
    assert replayed(model, decode, inputs) == plain(model, inputs)


@torch.inference_mode()
def test_a_recurrent_state_is_taken_back_to_the_prompt_alone() -> None:
    model: Any = built(RECURRENT["lfm2"])
    model.generation_config = greedy_config(model)
    decode, stages = FixedCacheDecode(model, 32, Reruns()), GenerateStages(model)
    logits, state = stages.prefill(prompt_of(9), None)
    decode.begin(state, logits)
    decode.step()
    decode.step()
    with pytest.raises(SettingError, match="prompt's end"):
        decode.rewind(1)


def test_a_cache_that_counts_on_the_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ready(TEXT_FAMILIES["llama"])
    monkeypatch.setattr(StaticLayer, "is_compileable", False)
    with pytest.raises(ConfigurationError, match="layers that count on the host .StaticLayer."):
        FixedCacheDecode(model, 32, Reruns())


def test_no_step_goes_past_the_last_slot() -> None:
    model, inputs = ready(TEXT_FAMILIES["llama"]), prompt_of(9)
    decode = FixedCacheDecode(model, 10, Reruns())
    stages = GenerateStages(model)
    with torch.inference_mode():
        logits, state = stages.prefill(inputs, None)
        decode.begin(state, logits)
        decode.step()
        with pytest.raises(ConfigurationError, match="10 slots"):
            decode.step()
        logits, state = stages.prefill(prompt_of(10), None)
        with pytest.raises(ConfigurationError, match="10 slots and the prompt 10"):
            decode.begin(state, logits)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe, block 1 dense", "llava, olmoe", "qwen2_5_vl"])
@torch.inference_mode()
def test_a_recorded_decoder_gives_the_logits_of_other_inputs(name: str) -> None:
    family = {**TEXT_FAMILIES, **VISION_FAMILIES}[name]
    model = ready(family)
    first = prompt_of(9) if family.picture is None else family.picture()
    second = (
        prompt_of(9, seed=2) if family.picture is None else {**first, "pixel_values": first["pixel_values"].flip(-1)}
    )
    stages, decoder = GenerateStages(model), GraphedDecoder(model, Reruns())
    with decoder.in_place(captures_new=True):
        stages.prefill(first, stages.encode_image(first))
    expected, _ = stages.prefill(second, stages.encode_image(second))
    with decoder.in_place():
        logits, state = stages.prefill(second, stages.encode_image(second))
    assert_same_floats(logits, expected)
    assert state.cache.get_seq_length() == second["input_ids"].shape[1]
    assert decoder.replays == 1
    assert "forward" not in vars(model.get_decoder())


@torch.inference_mode()
def test_a_shape_without_a_graph_runs_eagerly() -> None:
    model = ready(TEXT_FAMILIES["llama"])
    stages, decoder = GenerateStages(model), GraphedDecoder(model, Reruns())
    expected, _ = stages.prefill(prompt_of(7), None)
    with decoder.in_place():
        logits, _ = stages.prefill(prompt_of(7), None)
    assert_same_floats(logits, expected)
    assert decoder.replays == 0


def test_the_longest_unused_graphs_are_let_go() -> None:
    model = ready(TEXT_FAMILIES["llama"])
    stages, decoder = GenerateStages(model), GraphedDecoder(model, Reruns(), most=2)
    names = []
    with torch.inference_mode():
        for tokens in (4, 5, 4, 6):
            with decoder.in_place(captures_new=True) as served:
                stages.prefill(prompt_of(tokens), None)
            names.append(tuple(served))
    assert [len(served) for served in names] == [1, 1, 1, 1]
    assert names[0] == names[2]
    assert [decoder.has_graphs(served) for served in names] == [True, False, True, True]
    assert not decoder.has_graphs(names[0] + names[1])
    with torch.inference_mode(), decoder.in_place():
        for tokens in (4, 5, 6):
            stages.prefill(prompt_of(tokens), None)
    # 4 was used again before 6 came, so 5 went; the third prompt of those recorded was a replay too.
    assert decoder.replays == 1 + 2
