"""FLOPs of prompts by hand, and what packed weights count as."""

import threading
import time
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BatchEncoding, GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

from experiment_core_utils.models.costs.prompt_flops import count_prompt_flops
from experiment_core_utils.primitives.errors import ConfigurationError
from tests.tiny_models.tiny_causal_models import causal_model, llama_config, llama_flops, olmoe_config, olmoe_flops


def flops_of(*arguments: Any, **options: Any) -> float | None:
    return count_prompt_flops(*arguments, **options).flops


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return causal_model(llama_config())


def test_prompts_of_one_length_are_one_count_times_their_number(llama: nn.Module) -> None:
    assert flops_of(llama, torch.full((3, 7), 5)) == 3 * llama_flops(7)


def test_padding_is_not_counted(llama: nn.Module) -> None:
    # True lengths 2, 5, 2, padded on the left and in the middle.
    mask = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1], [0, 1, 0, 0, 1]])
    tokenised = {"input_ids": torch.full((3, 5), 7), "attention_mask": mask}
    for method, counted_on in (("formula", "config"), ("counter", "model")):
        found = count_prompt_flops(llama, tokenised, method=method)  # type: ignore[arg-type]
        assert found.flops == 2 * llama_flops(2) + llama_flops(5)
        assert (found.num_prompts, found.num_tokens, found.counted_on, found.reason) == (3, 9, counted_on, None)
        assert found.method == method
        assert flops_of(llama, BatchEncoding(tokenised), method=method) == found.flops  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("eos", "lengths"),
    [
        # The padding token 9 is no other: it is left out at both ends, and stays between two tokens.
        (2, (4, 2, 3)),
        # It also ends texts: every prompt has one at its end, which stays.
        (9, (5, 3, 4)),
    ],
)
def test_padding_of_ids_without_a_mask_is_known_by_its_token(eos: int, lengths: tuple[int, ...]) -> None:
    ids = torch.tensor([[5, 9, 6, 7, 9], [9, 9, 5, 6, 9], [5, 6, 7, 9, 9]])
    model = causal_model(llama_config())
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 9, [3, eos]
    assert flops_of(model, ids) == sum(map(llama_flops, lengths))
    model.generation_config.pad_token_id = model.config.pad_token_id = None
    assert flops_of(model, ids) == 3 * llama_flops(5)
    model.config.pad_token_id = 8
    with pytest.raises(ConfigurationError, match="prompt 1 has no token"):
        flops_of(model, torch.tensor([[5, 8], [8, 8]]))


class Lengths(nn.Module):
    """Remembers what it was run with."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(4, 4)
        self.seen: list[list[int]] = []

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.seen.append(input_ids[0].tolist())
        return self.product(torch.ones(input_ids.shape[1], 4))


def test_one_prompt_of_each_length_is_run_with_its_true_tokens() -> None:
    model = Lengths()
    ids = torch.tensor([[0, 5, 6], [7, 8, 9], [0, 3, 4]])
    # 2 * 4 * 4 operations a token, 2 + 3 + 2 tokens.
    assert flops_of(model, {"input_ids": ids, "attention_mask": (ids > 0).long()}) == 32 * 7
    # Of the two of length 2 either does; the padding is gone.
    assert sorted(model.seen, key=len) in ([[5, 6], [7, 8, 9]], [[3, 4], [7, 8, 9]])


def test_the_count_moves_with_top_k() -> None:
    for top_k in (1, 4):
        model = causal_model(olmoe_config(top_k))
        for method in ("formula", "counter"):
            assert flops_of(model, torch.full((2, 6), 5), method=method) == 2 * olmoe_flops(6, top_k)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["formula", "counter"])
@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan")])
def test_no_time_is_no_limit_that_can_be_kept(llama: nn.Module, timeout_s: float, method: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot be counted in .* s; give more than 0, or None for no limit"):
        flops_of(llama, torch.full((1, 3), 5), timeout_s, method)


def test_ptflops_is_a_method_of_its_own(llama: nn.Module) -> None:
    found = count_prompt_flops(llama, torch.full((2, 11), 5), method="ptflops")
    # Without fused attention.
    assert (found.flops, found.method) == (2 * (llama_flops(11) - 2 * 4 * 11 * 11 * 32), "ptflops")


class Slow(nn.Module):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        time.sleep(30)
        return input_ids


@pytest.mark.parametrize("method", ["counter", "ptflops"])
def test_a_count_that_takes_too_long_is_none_with_the_reason(method: Any) -> None:
    found = count_prompt_flops(Slow(), torch.full((2, 3), 5), timeout_per_sample=0.1, method=method)
    assert (found.flops, found.reason) == (None, "a prompt of 3 tokens was not done after 0.1 s")


class PackedLinear(nn.Module):
    """What a product with packed weights is to a counter: an operator that it does not know."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.out_features = linear.out_features
        self.packed = nn.Parameter(torch.zeros(linear.weight.numel() // 2, dtype=torch.uint8), requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.new_zeros(*rows.shape[:-1], self.out_features)


def pack(model: Any) -> Any:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, PackedLinear(child))
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    return model


def test_packed_weights_keep_their_formula() -> None:
    found = count_prompt_flops(pack(causal_model(llama_config())), torch.full((2, 11), 5))
    assert (found.method, found.flops) == ("formula", 2 * llama_flops(11))


@pytest.mark.parametrize("method", ["counter", "ptflops"])
def test_packed_weights_have_the_flops_of_full_precision(method: Any) -> None:
    ids = torch.full((2, 11), 5)
    packed = pack(causal_model(llama_config()))
    found = count_prompt_flops(packed, ids, method=method)
    assert found.counted_on == "meta_twin" and found.reason is None
    # ptflops knows unfused attention, which the twin has.
    assert found.flops == 2 * llama_flops(11)
    assert packed.config.quantization_config["load_in_4bit"] is True


def test_packed_experts_count_too() -> None:
    packed, ids = pack(causal_model(olmoe_config())), torch.full((1, 6), 5)
    assert flops_of(packed, ids) == flops_of(packed, ids, method="counter") == olmoe_flops(6)


@pytest.mark.parametrize("top_k", [1, 4])
def test_ptflops_sees_attention_and_experts_of_a_mixture_only_where_its_weights_are_packed(top_k: int) -> None:
    ids = torch.full((1, 6), 5)
    plain, packed = causal_model(olmoe_config(top_k)), pack(causal_model(olmoe_config(top_k)))
    # Two blocks of scores and values over 6 x 6 positions, and of top_k experts for each of 6 tokens.
    attention, experts = 2 * 4 * 6 * 6 * 32, 2 * 2 * 6 * top_k * 3 * 32 * 16
    assert flops_of(plain, ids, method="ptflops") == olmoe_flops(6, top_k) - attention - experts
    assert flops_of(packed, ids, method="ptflops") == olmoe_flops(6, top_k)


def test_packed_weights_of_an_architecture_without_twin_are_none_with_the_reason() -> None:
    packed = pack(causal_model(llama_config()))
    packed.config.hidden_act = "no such activation"
    found = count_prompt_flops(packed, torch.full((1, 6), 5), method="counter")
    assert found.flops is None and "no copy of LlamaForCausalLM without weights" in str(found.reason)


def test_bitsandbytes_models_have_the_flops_of_full_precision(tmp_path: Any) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    causal_model(llama_config()).save_pretrained(tmp_path)  # type: ignore[operator]
    for wanted in ({"load_in_4bit": True}, {"load_in_8bit": True}):
        packed = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=BitsAndBytesConfig(**wanted))
        for method in ("formula", "counter"):
            assert flops_of(packed, torch.full((2, 11), 5), method=method) == 2 * llama_flops(11)  # type: ignore[arg-type]


def quantised_by_torch(model: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def opt() -> nn.Module:
    """No formula is known for it."""
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "vocab_size": 97}
    return OPTForCausalLM(OPTConfig(**sizes, num_hidden_layers=2, num_attention_heads=2)).eval()


@pytest.mark.parametrize("method", ["formula", "counter"])
def test_what_torch_quantised_after_loading_has_the_flops_of_full_precision(method: Any) -> None:
    # Per token and block 4 x 32 x 32 + 2 x 32 x 64 products, the head 32 x 97; attention 4 x 7 x 7 x 32 in each block.
    expected = 2 * 7 * (2 * (4 * 32 * 32 + 2 * 32 * 64) + 32 * 97) + 2 * 4 * 7 * 7 * 32
    found = count_prompt_flops(quantised_by_torch(opt()), torch.full((3, 7), 5), method=method)
    assert (found.flops, found.counted_on, found.reason) == (3 * expected, "meta_twin", None)
    assert flops_of(quantised_by_torch(causal_model(llama_config())), torch.full((1, 7), 5), method=method) == (
        llama_flops(7)
    )


def test_what_torch_quantised_without_a_config_is_none_with_the_reason() -> None:
    found = count_prompt_flops(quantised_by_torch(nn.Sequential(nn.Linear(3, 4))), torch.full((1, 7), 5))
    assert found.flops is None and "Sequential are packed, and no config describes" in str(found.reason)


def test_packed_weights_whose_knobs_were_turned_are_not_counted_by_their_config() -> None:
    ids, packed = torch.full((1, 6), 5), quantised_by_torch(causal_model(olmoe_config()))
    routers = [module for module in packed.modules() if "top_k" in vars(module)]
    for router in routers:
        router.top_k = 1
    assert flops_of(packed, ids) == olmoe_flops(6, 1)
    found = count_prompt_flops(packed, ids, method="counter")
    assert found.flops is None and "other experts or blocks run than the config says" in str(found.reason)
    packed.get_decoder().layers = packed.get_decoder().layers[:1]
    found = count_prompt_flops(packed, ids)
    assert found.flops is None and "the config does not describe what runs: the 1 blocks" in str(found.reason)


def test_packed_weights_of_a_model_that_looks_for_padding_are_counted() -> None:
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 97}
    plain = GPT2LMHeadModel(GPT2Config(**sizes, pad_token_id=3)).eval()
    expected = flops_of(plain, torch.full((2, 7), 5))
    plain.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    found = count_prompt_flops(plain, torch.full((2, 7), 5))
    assert (found.flops, found.counted_on) == (expected, "meta_twin") and expected


class Failing(nn.Module):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise ValueError("it takes\npictures")


@pytest.mark.parametrize("method", ["formula", "counter", "ptflops"])
def test_a_model_that_cannot_be_run_is_none_with_the_reason(method: Any) -> None:
    found = count_prompt_flops(Failing(), torch.full((1, 3), 5), method=method)
    assert (found.flops, found.reason) == (None, "Failing cannot be run to be counted: ValueError: it takes")


def test_no_prompt_has_no_figure(llama: nn.Module) -> None:
    found = count_prompt_flops(llama, torch.zeros((0, 5), dtype=torch.long))
    assert (found.flops, found.num_prompts, found.reason) == (None, 0, "there is no prompt")


@pytest.mark.parametrize(
    ("tokenised", "method", "output"),
    [
        (torch.zeros(1, 2), "guess", "cannot be counted by 'guess'; choose one of formula, counter, ptflops"),
        (torch.zeros(5), "counter", r"shape \[N, T\] were expected, found \[5\]"),
        (
            {"input_ids": torch.zeros(1, 2), "attention_mask": torch.ones(1, 3)},
            "counter",
            r"found \[1, 2\] and \[1, 3\]",
        ),
        ({"input_ids": torch.zeros(2, 2), "attention_mask": torch.tensor([[1, 1], [0, 0]])}, "counter", "prompt 1 has"),
    ],
)
def test_what_cannot_be_counted_is_refused(llama: nn.Module, tokenised: Any, method: Any, output: str) -> None:
    with pytest.raises(ConfigurationError, match=output):
        flops_of(llama, tokenised, method=method)


def test_a_time_limit_needs_the_main_thread(llama: nn.Module) -> None:
    found: list[Any] = []

    def elsewhere() -> None:
        found.append(flops_of(llama, torch.full((1, 7), 5), timeout_per_sample=None, method="counter"))
        try:
            flops_of(llama, torch.full((1, 7), 5), method="counter")
        except ConfigurationError as error:
            found.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found[0] == llama_flops(7)
    assert found[1] == "a time limit works in the main thread only; drop it (timeout_per_sample=None) or run from there"
