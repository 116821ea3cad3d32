"""Counting where there are no formulas: against sums by hand and against formulas, and what happens when it fails."""

import sys
from typing import Any

import pytest
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    OpenAIGPTConfig,
    Qwen3NextConfig,
)

from experiment_core_utils.models.costs.architecture import Architecture, UnknownArchitecture, architecture_of
from experiment_core_utils.models.costs.counted import CountedDecoder, count_requests, counted_flops
from experiment_core_utils.models.costs.counters import countable
from experiment_core_utils.primitives.errors import MeterUnavailable
from experiment_core_utils.records.requests import RequestFlops, RequestSize, StageFlops
from tests.models.tiny_families import TEXT_FAMILIES

# Far beyond what a spawned process that imports transformers takes on a busy machine.
AMPLE_S = 300.0


def gpt2(**changed: Any) -> GPT2Config:
    return GPT2Config(vocab_size=90, n_embd=16, n_layer=3, n_head=2, n_positions=64, **changed)


def gpt2_pass(tokens: int, attended: int) -> int:
    """Three blocks of width 16: 3 + 1 + 4 + 4 products of width 16 x 16, attention; head on one position."""
    return 3 * (2 * tokens * 12 * 16 * 16 + 4 * tokens * attended * 16) + 2 * 16 * 90


@pytest.mark.parametrize("output_tokens", [1, 2, 9])
def test_an_unknown_architecture_by_hand(output_tokens: int) -> None:
    assert isinstance(architecture_of(gpt2()), UnknownArchitecture)
    steps = [gpt2_pass(1, 11 + step) for step in range(1, output_tokens)]
    mean = 2 * sum(steps) / len(steps) if steps else None
    expected = RequestFlops(StageFlops(None, 2 * gpt2_pass(11, 11), mean), 2 * sum(steps))
    assert count_requests(gpt2(), [RequestSize(11, output_tokens, requests=2)]) == [expected]


def test_without_a_cache_a_prefill_alone_is_counted() -> None:
    """OpenAI GPT has the products of GPT-2 and gives no cache back, which only a second token needs."""
    config = OpenAIGPTConfig(vocab_size=90, n_embd=16, n_layer=3, n_head=2, n_positions=64)
    expected = RequestFlops(StageFlops(None, gpt2_pass(11, 11), None), 0)
    assert count_requests(config, [RequestSize(11, 1)]) == [expected]
    with pytest.raises(MeterUnavailable, match="it keeps no cache of keys"):
        count_requests(config, [RequestSize(11, 2)])


@pytest.mark.parametrize("tokens", [1, 2, 5, 12])
def test_states_of_recurrent_blocks_are_in_the_cache(tokens: int) -> None:
    """Two key heads of width 8 a token; a state of 4 heads 4 x 6, and 3 columns of 2 x 2 x 4 + 4 x 6 channels."""
    config = Qwen3NextConfig(
        vocab_size=90, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        layer_types=["linear_attention", "full_attention"], num_key_value_heads=2, head_dim=8,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=4, linear_value_head_dim=6,
        linear_conv_kernel_dim=3, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
    )  # fmt: skip
    model = countable(lambda: AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    assert CountedDecoder(model).cache_elements(tokens) == 2 * 2 * 8 * tokens + 4 * 4 * 6 + 3 * (2 * 2 * 4 + 4 * 6)


def test_many_requests_cost_few_counts_and_are_as_each_by_itself() -> None:
    sizes = [RequestSize(tokens, 1 + tokens % 5) for tokens in (3, 4, 7, 8, 12, 20, 31)]
    for size, found in zip(sizes, count_requests(gpt2(), sizes), strict=True):
        steps = [gpt2_pass(1, size.prompt_tokens + step) for step in range(1, size.output_tokens)]
        assert found.stages.prefill_flops == gpt2_pass(size.prompt_tokens, size.prompt_tokens)
        assert found.decode_flops == sum(steps)


@pytest.mark.parametrize("name", ["llama", "mistral, window", "starcoder2", "olmoe", "mixtral", "qwen2_moe"])
def test_counts_agree_with_the_formulas_where_there_are_some(name: str) -> None:
    """With a window of 8 keys the steps from 5 tokens on do not lie on a line."""
    config, size = TEXT_FAMILIES[name](), RequestSize(5, 12)
    architecture = architecture_of(config)
    assert isinstance(architecture, Architecture)
    by_formula = architecture.request_flops(size)
    (counted,) = count_requests(config, [size])
    assert counted.total_flops == pytest.approx(by_formula.total_flops, rel=1e-3)
    assert counted.decode_flops == pytest.approx(by_formula.decode_flops, rel=1e-3)


def test_packed_weights_count_as_full_precision() -> None:
    packed = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    size = RequestSize(5, 3)
    assert count_requests(gpt2(quantization_config=packed), [size]) == count_requests(gpt2(), [size])


def test_a_model_that_looks_for_padding_among_its_ids_is_counted() -> None:
    size = RequestSize(11, 3)
    assert count_requests(gpt2(pad_token_id=3), [size]) == count_requests(gpt2(), [size])


def test_a_model_that_looks_into_its_mask_is_counted() -> None:
    """Linear attention without a mask: ids and mask have no values."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 4, "pad_token_id": 0}
    config = Qwen3NextConfig(**sizes, linear_num_value_heads=4, linear_num_key_heads=2)
    (found,) = count_requests(config, [RequestSize(5, 3)])
    assert found.total_flops > 0


def test_the_config_stays_as_it_was() -> None:
    config = TEXT_FAMILIES["olmoe"]()
    before = str(vars(config))
    count_requests(config, [RequestSize(5, 1)])
    assert str(vars(config)) == before


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (
            BertConfig(num_hidden_layers=1, hidden_size=24, num_attention_heads=5),
            "'bert' cannot be counted .*ValueError",
        ),
        (MambaConfig(hidden_size=8, num_hidden_layers=1), "'mamba' cannot be counted .* it keeps no cache of keys"),
    ],
)
def test_what_cannot_be_counted_is_named(config: Any, named: str) -> None:
    with pytest.raises(MeterUnavailable, match=named):
        count_requests(config, [RequestSize(5, 3)])


def test_a_process_of_its_own_counts_the_same() -> None:
    sizes = [RequestSize(11, 3), RequestSize(5, 1)]
    figures = counted_flops(gpt2(), sizes, AMPLE_S)
    assert {(figure.reason, figure.source) for figure in figures} == {(None, "counted")}
    assert [figure.flops for figure in figures] == count_requests(gpt2(), sizes)


def test_failure_in_the_process_is_a_reason() -> None:
    (figure,) = counted_flops(GPT2Config(n_embd=15, n_head=2), [RequestSize(5, 3)], AMPLE_S)
    assert figure.flops is None
    assert figure.reason is not None and "'gpt2' cannot be counted" in figure.reason


class Unreadable(LlamaConfig):
    """A config that another process cannot make sense of."""

    def __reduce__(self) -> Any:
        return sys.exit, (7,)


def test_a_process_that_dies_is_a_reason() -> None:
    (figure,) = counted_flops(Unreadable(), [RequestSize(5, 3)], AMPLE_S)
    assert figure.flops is None
    assert figure.reason == "the process that counted 'llama' ended with exit code 7"


def test_the_time_limit_ends_the_process() -> None:
    """A process that imports transformers does not answer within a millisecond."""
    (figure,) = counted_flops(gpt2(), [RequestSize(5, 3)], timeout_s=1e-3)
    assert figure.flops is None
    assert figure.reason == "counting 'gpt2' took longer than 0.001 s"


def test_pictures_are_not_counted() -> None:
    (figure,) = counted_flops(gpt2(), [RequestSize(5, 3, crops=1)], AMPLE_S)
    assert figure.flops is None
    assert figure.reason is not None and "pictures" in figure.reason
