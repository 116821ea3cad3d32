"""In: a prompt's embeddings with a row behind them; out: the prefill in two parts, as kernels that ask nothing.

Importing this module needs Triton.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import linear

from experiment_core_utils.models.molmoe.packed_blocks import DecoderWeights
from experiment_core_utils.models.molmoe.prefill_kernels.norms import norm_last
from experiment_core_utils.models.molmoe.prefill_kernels.prefill import prefill, rotary_table, through

__all__ = ["begin", "finish", "rotary_table"]


def begin(
    decoder: DecoderWeights,
    hidden: torch.Tensor,
    length: torch.Tensor,
    pause: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    used: torch.Tensor,
) -> torch.Tensor:
    """[T, H] -> [T, H] behind the first `pause` blocks, each with the model's own number of experts.

    Args:
        length: one int64, tokens of the prompt and the row behind it.
        keys, values, rotary, used: as for `prefill`.
    """
    blocks, top_k = range(pause), decoder.default_top_k
    # Whatever norm comes next, it is not known yet: the states alone are of use.
    states, _ = through(decoder, hidden, length, blocks, top_k, keys, values, rotary, used, decoder.final_norm)
    return states


def finish(
    decoder: DecoderWeights,
    hidden: torch.Tensor,
    length: torch.Tensor,
    blocks: Sequence[int],
    top_k: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    used: torch.Tensor,
) -> torch.Tensor:
    """What `begin` left [T, H] through the blocks that have not run -> logits [1, V] of the prompt's last token.

    Args:
        length: one int64, tokens of the prompt alone: on the row behind it no expert is spent any more.
        blocks: none, where all have run.
        keys, values: their rows are those of `blocks`.
    """
    if not blocks:
        return linear(norm_last(hidden, decoder.final_norm, length, decoder.norm_eps), decoder.head)
    return prefill(decoder, hidden, length, blocks, top_k, keys, values, rotary, used)
