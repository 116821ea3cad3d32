"""Static KV cache of a fixed maximum length, with lengths and last tokens on the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from experiment_core_utils.engines.weights import DecoderWeights
from experiment_core_utils.primitives.finite_logits import checked_tokens


@dataclass
class KVCache:
    """Keys and values of L blocks, B requests, KV heads of width D and T positions each.

    Row i of L belongs to the i-th active block, whatever its index in the whole decoder. A request's positions from its
    length on are never read, so nothing is ever cleared.
    """

    keys: torch.Tensor  # [L, B, KV, T, D], contiguous
    values: torch.Tensor  # [L, B, KV, T, D], contiguous
    lengths: list[int]  # [B], positions in use, as the host knows them
    device_lengths: torch.Tensor  # [B] int64, the same beside the keys; a graphed step reads and advances it itself
    next_tokens: torch.Tensor  # [B] int64, the last token of each request: a step reads it and puts its choice there
    checked_tokens: torch.Tensor  # [B] int64, the choices of a step as `finite_logits.checked_tokens` gives them
    # [B], by how much rotary positions of new tokens are more than their places (pictures take fewer); None for 0, and
    # where the keys are on a GPU
    rotary_offsets: list[int] | None
    device_rotary_offsets: torch.Tensor  # [B] int64, the same beside the keys

    @classmethod
    @torch.inference_mode(False)
    def allocate(
        cls, decoder: DecoderWeights, max_seq_len: int, batch: int = 1, blocks: int | None = None
    ) -> "KVCache":
        """An empty KV cache beside the decoder's weights, in their dtype, for `blocks` rows (None: one a block)."""
        rows = len(decoder.blocks) if blocks is None else blocks
        shape = (rows, batch, decoder.num_kv_heads, max_seq_len, decoder.head_width)
        keys = torch.zeros(shape, dtype=decoder.dtype, device=decoder.device)
        lengths = torch.zeros(batch, dtype=torch.int64, device=decoder.device)
        tokens = torch.zeros_like(lengths), torch.zeros_like(lengths)
        return cls(keys, torch.zeros_like(keys), [0] * batch, lengths, *tokens, None, torch.zeros_like(lengths))

    @property
    def max_seq_len(self) -> int:
        """The number of positions T."""
        return int(self.keys.shape[3])

    @property
    def batch(self) -> int:
        """The number of requests B."""
        return int(self.keys.shape[1])

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Set the lengths [B], on the host and beside the keys."""
        self.lengths = list(lengths)
        if self.batch == 1:
            self.device_lengths.fill_(self.lengths[0])
        else:
            self.device_lengths.copy_(torch.tensor(self.lengths))

    def set_rotary_offset(self, offset: int | torch.Tensor) -> None:
        """Set the offset of the only request, a number or [1]; of one on a GPU the host does not learn."""
        if isinstance(offset, int):
            # A copy from the host would wait for all that is under way.
            self.device_rotary_offsets.fill_(offset)
        else:
            self.device_rotary_offsets.copy_(offset)
        self.rotary_offsets = None
        if self.keys.device.type == "cpu" and (known := int(offset)):
            self.rotary_offsets = [known]

    def copy_into_row(self, row: int, alone: "KVCache") -> None:
        """Copy the keys, values and length of the only request of another KV cache into a row."""
        length = alone.lengths[0]
        self.keys[:, row, :, :length] = alone.keys[:, 0, :, :length]
        self.values[:, row, :, :length] = alone.values[:, 0, :, :length]
        self.lengths[row] = length
        self.device_lengths[row : row + 1].fill_(length)
        self.device_rotary_offsets[row : row + 1].copy_(alone.device_rotary_offsets)
        if self.keys.device.type == "cpu":
            offsets = self.rotary_offsets or [0] * self.batch
            offsets[row] = 0 if alone.rotary_offsets is None else alone.rotary_offsets[0]
            self.rotary_offsets = offsets if any(offsets) else None

    def put_likeliest(self, logits: torch.Tensor) -> None:
        """Make the likeliest token of logits [B, V] the last one of each request."""
        self.next_tokens.copy_(logits.argmax(dim=-1))
        self.checked_tokens.copy_(checked_tokens(self.next_tokens, logits))

    def note_step(self) -> None:
        """Add one token to every request's length on the host; the step itself has advanced `device_lengths`."""
        self.lengths = [length + 1 for length in self.lengths]

    def rewind(self, steps: int) -> None:
        """Forget the last so many tokens of every request."""
        self.set_lengths([length - steps for length in self.lengths])


def suffix_mask(shared: int, tokens: int, rows: int) -> torch.Tensor:
    """The mask of S tokens and R rows after `shared` tokens: [S + R, shared + S + R] on the host, what each of them
    sees.
    """
    seen = torch.ones(tokens + rows, shared + tokens + rows, dtype=torch.bool)
    seen[:, shared:].tril_()
    seen[tokens:, shared + tokens :] = torch.eye(rows, dtype=torch.bool)
    return seen


def suffix_positions(shared: int, tokens: int, rows: int) -> torch.Tensor:
    """Positions [S + R] of S tokens and R rows after `shared` tokens, on the host."""
    return torch.arange(shared, shared + tokens + rows).clamp_(max=shared + tokens)
