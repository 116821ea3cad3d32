"""Questions and answers about one picture, packed side by side with the mask that keeps them apart.

A picture is costly and a question is cheap, so several questions use one picture: each sees the picture and itself, at
the positions it would have alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Slot:
    """A question with its answer as ids."""

    prompt: list[int]
    answer: list[int]


def make_slot(tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str) -> Slot:
    """The slot of one question: the answer follows the prompt after a space and ends with end-of-sequence."""
    return Slot(
        prompt=tokenizer(prompt, add_special_tokens=False)["input_ids"],
        answer=[*tokenizer(f" {answer}", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id],
    )


def slot_positions(prefix: int, widths: Sequence[int], total: int) -> torch.Tensor:
    """Positions [total]: 0..prefix-1, then each slot counts on from the prefix; padding at the end stays at 0."""
    parts = [torch.arange(prefix), *(prefix + torch.arange(width) for width in widths)]
    positions = torch.cat(parts)
    return torch.nn.functional.pad(positions, (0, total - len(positions)))


def slot_mask(prefix: int, widths: Sequence[int], total: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """The mask [1, 1, total, total] (bool): causal, and no slot sees another; padding at the end sees itself."""
    numbers = torch.arange(len(widths) + 1).repeat_interleave(torch.tensor([prefix, *widths]))
    # Of each position: 0 in the prefix, the slot's number from 1 on, -1 in the padding.
    owners = torch.nn.functional.pad(numbers, (0, total - len(numbers)), value=-1).to(device)
    of_same = owners[:, None] == owners[None, :]
    sees_prefix = (owners[None, :] == 0) & (owners[:, None] >= 0)
    return (of_same | sees_prefix).tril()[None, None]
