"""Decode steps of each length give the tokens of `generate()`, on caches of several kinds, and can be taken back."""

from typing import Any

import pytest
import torch

from experiment_core_utils.models.hf.generate import GenerateStages, greedy_config
from experiment_core_utils.models.hf.length_decode import LengthDecode
from experiment_core_utils.primitives.errors import ConfigurationError, SettingError
from tests.models.knob_families import TEXT_FAMILIES, UNTRIED_FAMILIES
from tests.models.recorded_replays import RecordedReplays

NEW_TOKENS = 6
# A window of 4 tokens, which the prompts exceed; states beside a window; all rows in each of its blocks.
FAMILIES = {"gpt_oss": TEXT_FAMILIES["gpt_oss"], "llama": TEXT_FAMILIES["llama"], **UNTRIED_FAMILIES}


def made(name: str) -> tuple[Any, GenerateStages]:
    model = FAMILIES[name].built()
    model.generation_config = greedy_config(model)
    return model, GenerateStages(model)


def prompt_of(tokens: int, seed: int = 1) -> dict[str, torch.Tensor]:
    drawn = torch.randint(10, 90, (1, tokens), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": drawn, "attention_mask": torch.ones_like(drawn)}


@torch.inference_mode()
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "inkling_text"])
def test_tokens_are_those_of_generate(name: str) -> None:
    model, stages = made(name)
    decode = LengthDecode(model, 24, RecordedReplays())
    # The second uses steps of the first, and adds some before them.
    for tokens, seed in ((9, 1), (7, 2), (9, 3)):
        inputs = prompt_of(tokens, seed)
        expected = model.generate(**inputs, max_new_tokens=NEW_TOKENS)[0, tokens:].tolist()
        logits, state = stages.prefill(inputs, None)
        assert decode.prepare(state, logits, NEW_TOKENS) == tokens + NEW_TOKENS
        found = [int(decode.token), *(int(decode.step().argmax()) for _ in range(NEW_TOKENS - 1))]
        assert found == expected
        decode.rewind(NEW_TOKENS - 1)
        decode.put_token(torch.tensor([expected[:1]]))
        assert [int(decode.step().argmax()) for _ in range(NEW_TOKENS - 1)] == expected[1:]
    assert sorted(decode._replays) == list(range(7, 15))


@torch.inference_mode()
def test_what_is_not_ready_is_refused() -> None:
    model, stages = made("inkling_text")
    decode = LengthDecode(model, 24, RecordedReplays())
    logits, state = stages.prefill(prompt_of(9), None)
    decode.prepare(state, logits, 2)
    decode.step()
    decode.step()
    with pytest.raises(ConfigurationError, match="no decode step was made ready for 11 tokens"):
        decode.step()
    with pytest.raises(SettingError, match="prompt's end"):
        decode.rewind(1)
    with pytest.raises(ConfigurationError, match="8 slots and the prompt 9 tokens"):
        LengthDecode(model, 8, RecordedReplays()).begin(state, logits)
