"""In: keys and values of what prompts share, a text and rows behind it; out: their states behind each of some blocks.

Text and rows pass a block together: the text is causal, a row sees the prompt and itself alone. Nothing that is shared
is copied, whatever the number of rows.
"""

import torch

from experiment_core_utils.models.molmoe.key_value_store import KVCache
from experiment_core_utils.models.molmoe.packed_blocks import DecoderWeights
from experiment_core_utils.models.molmoe.prompt_tail import suffix_mask, suffix_positions
from experiment_core_utils.models.molmoe.straight_decoder import ReferencePrefill, RotaryTable
from experiment_core_utils.primitives.errors import ConfigurationError


class ReferenceSuffix:
    """What goes on where a prefill has filled the first slots of request 0.

    Args:
        blocks: that run it; what they note of experts is of the last call.
    """

    def __init__(self, decoder: DecoderWeights, blocks: ReferencePrefill) -> None:
        self._decoder = decoder
        self._blocks = blocks
        self._rotary = RotaryTable.of(decoder, 0)

    @torch.inference_mode()
    def states_of_each(
        self, text: torch.Tensor, rows: torch.Tensor, shared: int, blocks: int, kv_cache: KVCache
    ) -> torch.Tensor:
        """Embeddings [S, H] and [R, H] -> states [P, S + R, H] behind blocks 0 to P - 1, not normalised.

        Every block uses the model's own number of experts. Slots from `shared` on are overwritten.

        Args:
            text: the prompt's last tokens, at least one.
            rows: each is behind the prompt as if it were alone there.
            shared: tokens of the prompt before them, whose slots are filled in the first `blocks` blocks.

        Raises:
            ConfigurationError: the store has too few slots.
        """
        last, end = shared + len(text), shared + len(text) + len(rows)
        if end > kv_cache.max_seq_len:
            raise ConfigurationError(
                f"a prompt of {last} tokens and {len(rows)} rows do not fit into a KV cache "
                f"of {kv_cache.max_seq_len} tokens"
            )
        if len(self._rotary.cosine) <= last:
            self._rotary = RotaryTable.of(self._decoder, kv_cache.max_seq_len)
        sizes, device = (shared, len(text), len(rows)), kv_cache.keys.device
        rotary, seen = self._rotary.rows(suffix_positions(*sizes).to(device)), suffix_mask(*sizes).to(device)
        states, suffix = torch.cat([text, rows.to(text.dtype)]), []
        for index in range(blocks):
            kept = kv_cache.keys[index, 0, :, :end], kv_cache.values[index, 0, :, :end]
            states = self._blocks.suffix_block(index, states, kept, rotary, seen)
            suffix.append(states)
        return torch.stack(suffix)
