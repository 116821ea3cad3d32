"""Parts of tiny decoders, by name."""

import pytest

from experiment_core_utils.models.common.block_modules import decoder_components
from tests.models.knob_families import NUM_BLOCKS, TEXT_FAMILIES, VISION_FAMILIES

# Norms of a block beside the last one of the decoder.
EXPECTED = {
    "llama": {"attention": 1, "ffn": 1, "norm": 2},
    "olmoe": {"attention": 1, "ffn": 1, "routing": 1, "experts": 1, "norm": 2},
    "mixtral": {"attention": 1, "ffn": 1, "routing": 1, "experts": 1, "norm": 2},
    "gpt_oss": {"attention": 1, "ffn": 1, "routing": 1, "experts": 1, "norm": 2},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_parts_of_a_text_decoder(name: str) -> None:
    model = TEXT_FAMILIES[name].built()
    decoder = model.get_decoder()
    found = decoder_components(decoder.layers, decoder.norm, model.get_output_embeddings())
    counts = {part: len(modules) for part, modules in found.items()}
    assert counts == {part: NUM_BLOCKS * each for part, each in EXPECTED[name].items()} | {
        "norm": NUM_BLOCKS * EXPECTED[name]["norm"] + 1,
        "head": 1,
    }


@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_every_vision_decoder_shows_attention_and_feed_forward(name: str) -> None:
    decoder = VISION_FAMILIES[name].built().get_decoder()
    found = decoder_components(decoder.layers[1:], None, None)
    assert len(found["attention"]) == len(found["ffn"]) == NUM_BLOCKS - 1
    assert "head" not in found


def test_only_the_blocks_that_run_are_named() -> None:
    decoder = TEXT_FAMILIES["olmoe"].built().get_decoder()
    found = decoder_components(decoder.layers[:1], decoder.norm, None)
    assert found["experts"] == [decoder.layers[0].mlp.experts]
