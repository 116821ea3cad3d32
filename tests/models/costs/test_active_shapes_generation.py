"""Operations of what was generated, against sums by hand and against what transformers' own generation computes."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config

from experiment_core_utils.models.costs.active_shapes import generation_flops, request_sizes
from experiment_core_utils.models.costs.counters import count_flops
from experiment_core_utils.records.requests import RequestSize
from tests.models.tiny_families import TEXT_FAMILIES, VOCABULARY, build, turn
from tests.text_records import text_run
from tests.tiny_models.tiny_causal_models import causal_model, llama_config


def llama_pass(tokens: int, keys: int) -> int:
    """Of `llama_config`: two blocks, the head on one position."""
    return 2 * (2 * tokens * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48) + 4 * tokens * keys * 32) + 2 * 32 * 64


def test_prompts_and_steps_by_hand() -> None:
    # Padding to 5 and the second row's positions after its first token are computed, and not counted.
    found = generation_flops(causal_model(llama_config()), text_run([[(5, 3), (2, 1)], [(5, 3)]]))
    prefill = 2 * llama_pass(5, 5) + llama_pass(2, 2)
    decode = 2 * (llama_pass(1, 6) + llama_pass(1, 7))
    assert found == {
        "prefill_flops": prefill,
        "decode_flops": decode,
        "generation_flops": prefill + decode,
        "generation_flops_per_output_token": (prefill + decode) / 7,
        "generation_flops_source": "formula",
        "generation_flops_reason": None,
    }


@pytest.mark.parametrize(("top_k", "active_blocks"), [(None, None), (1, (0, 2))])
def test_a_generation_agrees_with_the_counter(top_k: int | None, active_blocks: tuple[int, ...] | None) -> None:
    model: Any = build(TEXT_FAMILIES["olmoe"]())
    turn(model, top_k, active_blocks)
    prompt = torch.randint(10, VOCABULARY, (2, 9))
    counted = count_flops(
        lambda: model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=4,
                               min_new_tokens=4)
    )  # fmt: skip
    found = generation_flops(model, text_run([[(9, 4), (9, 4)]]))
    assert found["generation_flops"] == pytest.approx(counted, rel=1e-3)


def test_sizes_that_occur_more_than_once_are_one() -> None:
    sizes = request_sizes(text_run([[(5, 3), (2, 1)], [(5, 3)]])["queries"])
    assert sizes == [RequestSize(5, 3, requests=2), RequestSize(2, 1)]


def test_nothing_generated_has_no_figure() -> None:
    found = generation_flops(causal_model(llama_config()), text_run([]))
    assert found["generation_flops"] is None and found["generation_flops_reason"] == "nothing was generated"


def test_an_unknown_architecture_is_counted_in_a_process() -> None:
    model = build(GPT2Config(vocab_size=90, n_embd=16, n_layer=3, n_head=2, n_positions=64))

    def gpt2_pass(tokens: int, keys: int) -> int:
        return 3 * (2 * tokens * 12 * 16 * 16 + 4 * tokens * keys * 16) + 2 * 16 * 90

    found = generation_flops(model, text_run([[(5, 2), (3, 1)]]), limit_s=300.0)
    assert found["prefill_flops"] == gpt2_pass(5, 5) + gpt2_pass(3, 3)
    assert found["decode_flops"] == gpt2_pass(1, 6)
    assert (found["generation_flops_source"], found["generation_flops_reason"]) == ("counted", None)


def test_a_count_that_takes_too_long_is_none_with_the_reason() -> None:
    model = build(GPT2Config(vocab_size=90, n_embd=16, n_layer=1, n_head=2, n_positions=64))
    found = generation_flops(model, text_run([[(5, 2)]]), limit_s=1e-3)
    assert found["generation_flops"] is None
    assert found["generation_flops_reason"] == "counting 'gpt2' took longer than 0.001 s"


def test_a_turned_model_that_its_config_does_not_describe_is_not_counted_by_it() -> None:
    model: Any = causal_model(llama_config())
    model.model.layers = model.model.layers[:1]
    found = generation_flops(model, text_run([[(5, 2)]]))
    assert found["generation_flops"] is None
    assert found["generation_flops_reason"] == "the 1 blocks of this llama are not the 2 of its config"


def test_what_is_no_model_of_transformers_has_a_reason() -> None:
    found = generation_flops(nn.Linear(2, 2), text_run([[(5, 2)]]))
    assert found["generation_flops"] is None and "not a model of transformers" in str(found["generation_flops_reason"])
