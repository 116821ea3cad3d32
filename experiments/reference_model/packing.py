"""Questions and answers about one picture, packed side by side with the mask that keeps them apart.

A picture is costly and a question is cheap, so several questions use one picture: each sees the picture and itself, at
the positions it would have alone. Training on the pack equals training on each question by itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import PreTrainedTokenizerBase

IGNORED = -100


@dataclass(frozen=True)
class Slot:
    """A question with its answer as ids; `weight` scales its loss."""

    prompt: list[int]
    answer: list[int]
    weight: float = 1.0


@dataclass(frozen=True)
class PackedSlots:
    """The slots of B scenes, N each, every slot padded to its width; L is the sum of the widths."""

    input_ids: torch.Tensor  #: [B, L]
    labels: torch.Tensor  #: [B, L] the token that each position must predict, -100 where there is no loss
    weights: torch.Tensor  #: [B, L] weight of each label
    widths: tuple[int, ...]  #: N widths, shared by all scenes

    def pin_memory(self) -> "PackedSlots":
        """The slots in page-locked memory."""
        return PackedSlots(
            self.input_ids.pin_memory(), self.labels.pin_memory(), self.weights.pin_memory(), self.widths
        )


def make_slot(tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str, weight: float = 1.0) -> Slot:
    """The slot of one question: the answer follows the prompt after a space and ends with end-of-sequence."""
    return Slot(
        prompt=tokenizer(prompt, add_special_tokens=False)["input_ids"],
        answer=[*tokenizer(f" {answer}", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id],
        weight=weight,
    )


def pack_slots(scenes: Sequence[Sequence[Slot]], pad_id: int, multiple: int = 4) -> PackedSlots:
    """The slots of each scene side by side; all scenes have equally many."""
    count = len(scenes[0])
    lengths = [max(len(scene[n].prompt) + len(scene[n].answer) - 1 for scene in scenes) for n in range(count)]
    widths = tuple(-(-length // multiple) * multiple for length in lengths)
    total = sum(widths)
    input_ids = torch.full((len(scenes), total), pad_id)
    labels = torch.full((len(scenes), total), IGNORED)
    weights = torch.zeros(len(scenes), total)
    for row, scene in enumerate(scenes):
        start = 0
        for slot, width in zip(scene, widths, strict=True):
            ids = [*slot.prompt, *slot.answer]
            input_ids[row, start : start + len(ids) - 1] = torch.tensor(ids[:-1])
            first = start + len(slot.prompt) - 1
            labels[row, first : first + len(slot.answer)] = torch.tensor(slot.answer)
            weights[row, first : first + len(slot.answer)] = slot.weight
            start += width
    return PackedSlots(input_ids, labels, weights, widths)


def slot_positions(prefix: int, widths: Sequence[int], total: int) -> torch.Tensor:
    """Positions [total]: 0..prefix-1, then each slot counts on from the prefix; padding at the end stays at 0."""
    parts = [torch.arange(prefix), *(prefix + torch.arange(width) for width in widths)]
    positions = torch.cat(parts)
    return torch.nn.functional.pad(positions, (0, total - len(positions)))


def slot_mask(prefix: int, widths: Sequence[int], total: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """The mask [1, 1, total, total] (bool): causal, and no slot sees another; padding at the end sees itself."""
    places = torch.arange(total, device=device)
    sees = _sees(_owners(prefix, widths, total, device))
    return sees(0, 0, places[:, None], places[None, :])[None, None]


def slot_block_mask(prefix: int, widths: Sequence[int], total: int, device: torch.device) -> BlockMask:
    """The same mask for FlexAttention, which skips the blocks of it that are empty."""
    sees = _sees(_owners(prefix, widths, total, device))
    return create_block_mask(sees, None, None, total, total, device=device)


def _owners(prefix: int, widths: Sequence[int], total: int, device: torch.device | str) -> torch.Tensor:
    """Of each position [total]: 0 in the prefix, the slot's number from 1 on, -1 in the padding."""
    numbers = torch.arange(len(widths) + 1).repeat_interleave(torch.tensor([prefix, *widths]))
    return torch.nn.functional.pad(numbers, (0, total - len(numbers)), value=-1).to(device, non_blocking=True)


def _sees(owners: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Whether a position sees another one, in the form that FlexAttention takes."""

    def sees(batch: Any, head: Any, place: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        owner, others = owners[place], owners[other]
        return (place >= other) & ((owner == others) | ((others == 0) & (owner >= 0)))

    return sees
