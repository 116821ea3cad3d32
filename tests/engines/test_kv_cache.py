"""Lengths on the host and beside the keys go together; what has no slots is refused."""

import pytest
import torch

from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.engines.weights import DecoderWeights
from experiment_core_utils.models.molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.models.molmoe.fused_weights import fuse_decoder_weights
from tests.conftest import tiny_config


@pytest.fixture(scope="module")
def decoder() -> DecoderWeights:
    return fuse_decoder_weights(MolmoeForConditionalGeneration(tiny_config()).eval())


def test_a_store_has_a_row_for_each_block_and_request(decoder: DecoderWeights) -> None:
    kv_cache = KVCache.allocate(decoder, max_seq_len=10, batch=3)
    assert kv_cache.keys.shape == kv_cache.values.shape == (4, 3, 2, 10, 16)
    assert kv_cache.keys.data_ptr() != kv_cache.values.data_ptr()
    assert (kv_cache.max_seq_len, kv_cache.batch, kv_cache.lengths) == (10, 3, [0, 0, 0])
    assert KVCache.allocate(decoder, max_seq_len=10, blocks=2).keys.shape[0] == 2


def test_lengths_are_set_on_both_sides_and_rewound(decoder: DecoderWeights) -> None:
    kv_cache = KVCache.allocate(decoder, max_seq_len=10, batch=2)
    kv_cache.set_lengths([5, 8])
    assert kv_cache.device_lengths.tolist() == [5, 8]
    kv_cache.note_step()
    assert (kv_cache.lengths, kv_cache.device_lengths.tolist()) == ([6, 9], [5, 8])
    kv_cache.rewind(3)
    assert (kv_cache.lengths, kv_cache.device_lengths.tolist()) == ([3, 6], [3, 6])


def test_a_store_made_under_inference_mode_can_be_written_outside(decoder: DecoderWeights) -> None:
    with torch.inference_mode():
        kv_cache = KVCache.allocate(decoder, max_seq_len=4)
    kv_cache.set_lengths([2])
    assert kv_cache.device_lengths.tolist() == [2]
