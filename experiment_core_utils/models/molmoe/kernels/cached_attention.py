"""In: a block's norms, its queries, keys and values of one token a request, and the store; out: its attention.

Importing this module needs Triton.
"""

from dataclasses import dataclass

import torch
import triton

from experiment_core_utils.models.molmoe.kernels.attention import attention_kernel
from experiment_core_utils.models.molmoe.kernels.launching import launch
from experiment_core_utils.models.molmoe.kernels.tiles import Tile
from experiment_core_utils.models.molmoe.key_value_store import KVCache
from experiment_core_utils.models.molmoe.packed_blocks import BlockWeights, DecoderWeights


@dataclass(frozen=True)
class AttentionBuffers:
    """What the kernels around attention leave for each other: B requests, S splits, T slots; float32 unless said."""

    qkv: torch.Tensor  # [B, (Q + 2 * KV) * D]
    partial: torch.Tensor  # [B, Q, S, D]
    peaks: torch.Tensor  # [B, Q, S]
    totals: torch.Tensor  # [B, Q, S]
    counters: torch.Tensor  # [B * Q] int32, 0 between kernels
    attended: torch.Tensor  # [B, Q * D] in the dtype that was requested
    cosines: torch.Tensor  # [T, D]
    sines: torch.Tensor  # [T, D]

    @classmethod
    @torch.inference_mode(False)
    def allocate(
        cls, decoder: DecoderWeights, batch: int, max_seq_len: int, splits: int, attended: torch.dtype
    ) -> "AttentionBuffers":
        """Beside the decoder's weights, for every block."""
        heads, width = decoder.num_heads, decoder.head_width

        def floats(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device=decoder.device)

        positions = torch.arange(max_seq_len, dtype=torch.float32, device=decoder.device)
        angles = torch.outer(positions, decoder.inverse_frequencies).repeat(1, 2)
        return cls(
            qkv=floats(batch, decoder.blocks[0].qkv.shape[0]),
            partial=floats(batch, heads, splits, width),
            peaks=floats(batch, heads, splits),
            totals=floats(batch, heads, splits),
            counters=torch.zeros(batch * heads, dtype=torch.int32, device=decoder.device),
            attended=floats(batch, heads * width).to(attended),
            cosines=angles.cos(),
            sines=angles.sin(),
        )


def launch_attention(
    decoder: DecoderWeights,
    block: BlockWeights,
    kv_cache: KVCache,
    row: int,
    buffers: AttentionBuffers,
    tile: Tile,
    splits: int,
    use_pdl: bool,
) -> None:
    """`buffers.qkv` -> `buffers.attended`; the token's keys and values go into the store's row of the block."""
    width = decoder.head_width
    launch(
        attention_kernel,
        (decoder.num_heads, splits, kv_cache.batch),
        tile.warps,
        use_pdl,
        (
            buffers.qkv,
            block.query_norm,
            block.key_norm,
            buffers.cosines,
            buffers.sines,
            kv_cache.keys[row],
            kv_cache.values[row],
            kv_cache.device_lengths,
            buffers.partial,
            buffers.peaks,
            buffers.totals,
            buffers.counters,
            buffers.attended,
            kv_cache.max_seq_len,
            decoder.norm_eps,
            width**-0.5,
        ),
        Q=decoder.num_heads,
        KV=decoder.num_kv_heads,
        D=width,
        PADDED_Q=triton.next_power_of_2(decoder.num_heads * width),
        PADDED_KV=triton.next_power_of_2(decoder.num_kv_heads * width),
        SPLITS=splits,
        BLOCK=tile.rows,
        PADDED_SPLITS=triton.next_power_of_2(splits),
    )
