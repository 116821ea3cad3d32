"""Models for text runs: a small random OLMoE that speaks the embedded tokenizer's ids, and one that says its script."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig, OlmoeConfig, OlmoeForCausalLM

from experiment_core_utils.config.text import TextConfig
from experiment_core_utils.measuring.text_generator import TextGenerator
from experiment_core_utils.models.common.preferences import NO_PREFERENCES
from experiment_core_utils.models.common.text_generation import generation_values, text_ends
from experiment_core_utils.primitives.files import EMBEDDED_MODEL

EOS, PAD = 9, 8
PROMPTS = (
    "How many red circles are there?",
    "a",
    "What is left of the blue square, and what is right of it?",
    "Is it raining?",
    "User: name the colour of the largest shape. Assistant:",
    "one two three four five six seven",
    "b c",
)


def tiny_tokenizer() -> Any:
    """The embedded model's tokenizer, padding on the left."""
    return AutoTokenizer.from_pretrained(EMBEDDED_MODEL, padding_side="left")


def tiny_text_model(seed: int = 7) -> Any:
    """2 blocks of 4 experts (top-2), width 32, 64 positions, no end-of-sequence token of its own; float32, random."""
    tokenizer = tiny_tokenizer()
    config = OlmoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.4,
    )
    torch.manual_seed(seed)
    return OlmoeForCausalLM(config).eval()


class ScriptedTextModel(torch.nn.Module):
    """Says `scripts[first id of the prompt]`, then only pads, until every row ends; remembers the shape of each call.

    Args:
        largest_batch: more rows do not fit into memory.
        reports_tokens: whether it asks its stopping criteria for each position, as transformers does.
    """

    def __init__(
        self, scripts: Mapping[int, Sequence[int]], largest_batch: int = 1000, reports_tokens: bool = True
    ) -> None:
        super().__init__()
        self.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=PAD)
        self.config = OlmoeConfig(max_position_embeddings=64)
        self.calls: list[tuple[int, int]] = []
        self.limits: list[int] = []
        self._scripts = scripts
        self._largest_batch = largest_batch
        self._reports_tokens = reports_tokens
        self._embeddings = torch.nn.Embedding(1, 1)

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self._embeddings

    def generate(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, generation_config: Any, stopping_criteria: Any
    ) -> torch.Tensor:
        rows, length = input_ids.shape
        self.calls.append((rows, length))
        self.limits.append(generation_config.max_new_tokens)
        if rows > self._largest_batch:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")
        firsts = [int(ids[mask.bool()][0]) for ids, mask in zip(input_ids, attention_mask, strict=True)]
        scripts = [list(self._scripts[first])[: generation_config.max_new_tokens] for first in firsts]
        for place in range(max(map(len, scripts))):
            column = [script[place] if place < len(script) else PAD for script in scripts]
            input_ids = torch.cat([input_ids, torch.tensor(column)[:, None]], dim=1)
            if self._reports_tokens and stopping_criteria(input_ids, None).all():
                break
        return input_ids


class NumberTokenizer:
    """Ids as words: [3, 4] is "3 4"; leaves out end-of-sequence and padding on request."""

    bos_token_id = None
    eos_token_id = EOS
    pad_token_id = PAD

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        left_out = {EOS, PAD} if skip_special_tokens else set()
        return " ".join(str(token) for token in token_ids if token not in left_out)


class ThinkingTokenizer(NumberTokenizer):
    """The same with the special tokens `<think>`, 20, and `</think>`, 21, which are left out on request as well."""

    all_special_ids = (EOS, PAD, 20, 21)

    def get_added_vocab(self) -> dict[str, int]:
        return {"<think>": 20, "</think>": 21}

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        left_out = self.all_special_ids if skip_special_tokens else ()
        texts = {token: text for text, token in self.get_added_vocab().items()}
        return " ".join(texts.get(token, str(token)) for token in token_ids if token not in left_out)


def number_generator(model: Any, config: TextConfig, tokenizer: NumberTokenizer | None = None) -> TextGenerator:
    """A generator of numbers as texts."""
    tokenizer = tokenizer or NumberTokenizer()
    values = generation_values(config, model, tokenizer)
    ends = text_ends(config, model, tokenizer, NO_PREFERENCES)[0]
    return TextGenerator(model, values, config.random_seed, ends)


def left_padded(rows: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """Rows of ids as tokenised prompts."""
    longest = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[PAD] * (longest - len(row)) + list(row) for row in rows]),
        "attention_mask": torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows]),
    }
