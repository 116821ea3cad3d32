"""Lengths on the host and beside the keys go together; what has no slots is refused."""

import pytest
import torch

from experiment_core_utils.models.molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.models.molmoe.key_value_store import KeyValueStore
from experiment_core_utils.models.molmoe.packed_blocks import PackedDecoder, pack_decoder
from experiment_core_utils.primitives.errors import ConfigurationError
from tests.conftest import tiny_config


@pytest.fixture(scope="module")
def decoder() -> PackedDecoder:
    return pack_decoder(MolmoeForConditionalGeneration(tiny_config()).eval())


def test_a_store_has_a_row_for_each_block_and_request(decoder: PackedDecoder) -> None:
    store = KeyValueStore.allocate(decoder, slots=10, batch=3)
    assert store.keys.shape == store.values.shape == (4, 3, 2, 10, 16)
    assert store.keys.data_ptr() != store.values.data_ptr()
    assert (store.slots, store.batch, store.lengths) == (10, 3, [0, 0, 0])
    assert KeyValueStore.allocate(decoder, slots=10, blocks=2).keys.shape[0] == 2


def test_lengths_are_set_on_both_sides_and_rewound(decoder: PackedDecoder) -> None:
    store = KeyValueStore.allocate(decoder, slots=10, batch=2)
    store.set_lengths([5, 8])
    assert store.device_lengths.tolist() == [5, 8]
    store.note_step()
    assert (store.lengths, store.device_lengths.tolist()) == ([6, 9], [5, 8])
    store.rewind(3)
    assert (store.lengths, store.device_lengths.tolist()) == ([3, 6], [3, 6])


def test_the_longest_request_needs_the_slots(decoder: PackedDecoder) -> None:
    store = KeyValueStore.allocate(decoder, slots=10, batch=2)
    store.set_lengths([5, 8])
    store.refuse_overflow(2)
    with pytest.raises(ConfigurationError, match="10 slots, 8 are in use, and 3 more"):
        store.refuse_overflow(3)


def test_a_store_made_under_inference_mode_can_be_written_outside(decoder: PackedDecoder) -> None:
    with torch.inference_mode():
        store = KeyValueStore.allocate(decoder, slots=4)
    store.set_lengths([2])
    assert store.device_lengths.tolist() == [2]
