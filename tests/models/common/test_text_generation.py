"""Which values a text run decodes by, the marks of its tokens, and how long its contexts are."""

from typing import Any

import pytest
import torch
from transformers import BloomConfig

from experiment_core_utils.config.text import validated
from experiment_core_utils.models.common.text_generation import (
    TokenMarks,
    context_length,
    describe_decoding,
    generation_values,
)
from experiment_core_utils.primitives.device import HostMarks
from tests.tiny_models.tiny_text_model import EOS, PAD, NumberTokenizer, ScriptedTextModel, tiny_text_model


def decoding_of(**decoding: Any) -> dict[str, Any]:
    config = validated({"decoder_config": decoding, "max_output_tokens": 6})
    return describe_decoding(config, generation_values(config, ScriptedTextModel({}), NumberTokenizer()))


def test_greedy_uses_none_of_the_numbers_and_says_so() -> None:
    assert decoding_of(decoding_mode="greedy", decoder_temperature=0.5, decoder_top_k=3) == {
        "decoding_mode": "greedy",
        "do_sample": False,
        "temperature": None,
        "top_k": None,
        "top_p": None,
        "max_new_tokens": 6,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "random_seed": 42,
        "ignored": {"decoder_temperature": 0.5, "decoder_top_k": 3},
    }


@pytest.mark.parametrize(
    ("mode", "in_force", "ignored"),
    [
        ("temperature", (0.5, None, None), {"decoder_top_k": 3, "decoder_top_p": 0.9}),
        ("top_k", (0.5, 3, None), {"decoder_top_p": 0.9}),
        ("top_p", (0.5, None, 0.9), {"decoder_top_k": 3}),
    ],
)
def test_a_mode_uses_the_temperature_and_the_number_of_its_name(mode: str, in_force: tuple, ignored: dict) -> None:
    found = decoding_of(decoding_mode=mode, decoder_temperature=0.5, decoder_top_k=3, decoder_top_p=0.9)
    assert (found["temperature"], found["top_k"], found["top_p"]) == in_force
    assert (found["do_sample"], found["ignored"]) == (True, ignored)


def test_marking_stops_nothing() -> None:
    marks = HostMarks()
    criteria = TokenMarks(marks.mark, 3, torch.device("cpu"))
    assert [criteria(torch.zeros(3, 5), None).tolist() for _ in range(2)] == [[False] * 3] * 2
    assert len(marks.seconds()) == 1


def test_the_context_is_the_decoders() -> None:
    assert context_length(tiny_text_model().config) == 64
    model = ScriptedTextModel({})
    model.config = BloomConfig()  # ALiBi: no limit that was learned
    assert context_length(model.config) is None
