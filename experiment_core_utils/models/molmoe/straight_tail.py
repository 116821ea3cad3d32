"""In: keys and values of what prompts share, a text and rows behind it; out: their states behind each of some blocks.

Text and rows pass a block together: the text is causal, a row sees the prompt and itself alone. Nothing that is shared
is copied, whatever the number of rows.
"""

import torch

from experiment_core_utils.models.molmoe.key_value_store import KeyValueStore
from experiment_core_utils.models.molmoe.packed_blocks import PackedDecoder
from experiment_core_utils.models.molmoe.prompt_tail import tail_mask, tail_positions
from experiment_core_utils.models.molmoe.straight_decoder import RotaryTable, StraightPrefill
from experiment_core_utils.primitives.errors import ConfigurationError


class StraightTail:
    """What goes on where a prefill has filled the first slots of request 0.

    Args:
        blocks: that run it; what they note of experts is of the last call.
    """

    def __init__(self, decoder: PackedDecoder, blocks: StraightPrefill) -> None:
        self._decoder = decoder
        self._blocks = blocks
        self._rotary = RotaryTable.of(decoder, 0)

    @torch.inference_mode()
    def behind_each(
        self, text: torch.Tensor, rows: torch.Tensor, shared: int, blocks: int, store: KeyValueStore
    ) -> torch.Tensor:
        """Embeddings [S, H] and [R, H] -> states [P, S + R, H] behind blocks 0 to P - 1, not normalised.

        Every block uses the model's own number of experts. Slots from `shared` on are overwritten.

        Args:
            text: the prompt's last tokens, at least one.
            rows: each stands behind the prompt as if it were alone there.
            shared: tokens of the prompt before them, whose slots are filled in the first `blocks` blocks.

        Raises:
            ConfigurationError: the store has too few slots.
        """
        last, end = shared + len(text), shared + len(text) + len(rows)
        if end > store.slots:
            raise ConfigurationError(
                f"a prompt of {last} tokens and {len(rows)} rows behind it have no room in a key-value store of "
                f"{store.slots} slots"
            )
        if len(self._rotary.cosine) <= last:
            self._rotary = RotaryTable.of(self._decoder, store.slots)
        sizes, device = (shared, len(text), len(rows)), store.keys.device
        rotary, seen = self._rotary.rows(tail_positions(*sizes).to(device)), tail_mask(*sizes).to(device)
        states, behind = torch.cat([text, rows.to(text.dtype)]), []
        for index in range(blocks):
            kept = store.keys[index, 0, :, :end], store.values[index, 0, :, :end]
            states = self._blocks.tail_block(index, states, kept, rotary, seen)
            behind.append(states)
        return torch.stack(behind)
