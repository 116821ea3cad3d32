"""What a request leaves in modules: tables are no state, planted state is refused, and stretched positions forget."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from experiment_core_utils.models.common.text_generation import context_length
from experiment_core_utils.models.hf.request_state import (
    forget_longer_requests,
    stages_unsupported_reason,
    state_in_question,
)

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 4.0]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16, **FACTORS}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


def llama(**chosen: Any) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **chosen})).eval()


def phi3() -> Any:
    torch.manual_seed(0)
    lengths = {"max_position_embeddings": 256, "original_max_position_embeddings": 16}
    return Phi3ForCausalLM(Phi3Config(**SIZES, **lengths, rope_parameters=LONGROPE)).eval()


def logits(model: Any, tokens: int) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(tokens)[None] % 97).logits
    return found


def keep_a_table(block: Any, _args: Any, kwargs: Any) -> None:
    """What a request needs of a table is the same whichever request made it."""
    length = kwargs["position_ids"].shape[-1]
    if len(getattr(block, "table", ())) < length:
        block.table = torch.arange(length)


def keep_a_request(block: Any, args: Any, _kwargs: Any) -> Any:
    """The block adds what the request before left."""
    states = args[0]
    changed = states + getattr(block, "before", torch.zeros(32))
    block.before = states[:, -1:].clone()
    return (changed, *args[1:]), _kwargs


def test_a_table_that_grows_is_no_state() -> None:
    model = llama()
    model.model.layers[1].register_forward_pre_hook(keep_a_table, with_kwargs=True)
    assert stages_unsupported_reason(model) is None


def test_what_another_request_sees_is_state() -> None:
    model = llama()
    assert stages_unsupported_reason(model) is None
    model.model.layers[1].register_forward_pre_hook(keep_a_request, with_kwargs=True)
    assert stages_unsupported_reason(model) == (
        "its blocks keep the state of a request in themselves and not in the cache (model.layers.1.before)"
    )


def test_the_second_table_of_longrope_is_no_state() -> None:
    """The prompts of 7 and 35 tokens are below and above its original length."""
    assert stages_unsupported_reason(phi3()) is None
    with torch.device("meta"):
        model = phi3()
    assert state_in_question(model) is None


@pytest.mark.parametrize("tokens", [12, 30, 41])
def test_dynamic_positions_are_those_of_the_request_alone(tokens: int) -> None:
    chosen = {"max_position_embeddings": 24, "rope_parameters": DYNAMIC}
    expected = logits(llama(**chosen), tokens)
    raw, mended = llama(**chosen), llama(**chosen)
    forget_longer_requests(mended)
    for model in (raw, mended):
        logits(model, 90)
    assert torch.equal(logits(mended, tokens), expected)
    # Below the length as it was trained transformers forgets by itself.
    assert torch.equal(logits(raw, tokens), expected) == (tokens < 24)


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, 24),
        (DYNAMIC, 96),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, 24),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 3.0, "original_max_position_embeddings": 24}, 72),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 3.0, "original_max_position_embeddings": 8}, 24),
    ],
)
def test_the_context_reaches_as_far_as_positions_are_stretched(rope: dict[str, Any], length: int) -> None:
    assert context_length(LlamaConfig(**SIZES, max_position_embeddings=24, rope_parameters=rope)) == length


def test_the_context_of_longrope_is_the_whole() -> None:
    assert context_length(phi3().config) == 256
