"""The published shapes have the published numbers of parameters, and read by hand what a decode step reads."""

import pytest
import torch

from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.benchmarks.kernels.shapes import SOURCES, config_of, random_weights
from experiments.benchmarks.kernels.work import Shape, work_of


@pytest.mark.parametrize(
    ("model", "parameters"),
    # As the hub counts them in the published weights.
    [("llama_3_2_1b", 1_235_814_400), ("olmoe_1b_7b", 6_919_161_856), ("qwen3_30b_a3b", 30_532_122_624)],
)
def test_a_published_shape_has_the_published_parameters(model: str, parameters: int) -> None:
    made = random_weights(config_of(model, "published"), torch.device("meta"), torch.bfloat16)
    assert sum(weight.numel() for weight in made.parameters()) == parameters


@pytest.mark.parametrize(
    ("model", "blocks", "block", "head", "kv_width"),
    [
        ("llama_3_2_1b", 16, 2 * 2048 * (2048 + 512) + 3 * 2048 * 8192, 128256, 512),
        ("olmoe_1b_7b", 16, 4 * 2048 * 2048 + 64 * 2048 + 8 * 3 * 2048 * 1024, 50304, 2048),
        ("molmoe_1b", 16, 4 * 2048 * 2048 + 64 * 2048 + 8 * 3 * 2048 * 1024, 50304, 2048),
        ("qwen3_30b_a3b", 48, 2 * 2048 * (4096 + 512) + 128 * 2048 + 8 * 3 * 2048 * 768, 151936, 512),
        ("qwen3_30b_a3b:12", 12, 2 * 2048 * (4096 + 512) + 128 * 2048 + 8 * 3 * 2048 * 768, 151936, 512),
    ],
)
def test_a_decode_step_reads_weights_once_and_the_cache(
    model: str, blocks: int, block: int, head: int, kv_width: int
) -> None:
    """In bfloat16, 8 experts of a token, 1054 positions."""
    work = work_of(config_of(model, "published"), Shape(0, 1053, (8,) * blocks), 2)["decode"]
    # Experts that are not hit are a difference of numbers of up to 4e11, right to 1e-15 of those.
    assert work.bytes == pytest.approx(2 * (blocks * block + head * 2048 + 1054 * blocks * 2 * kv_width), rel=1e-12)


def test_a_prefill_of_a_dense_model_reads_all_weights() -> None:
    config = config_of("llama_3_2_1b", "published")
    work = work_of(config, Shape(0, 1000, (1,) * 16), 2)["prefill"]
    weights = 16 * (2 * 2048 * (2048 + 512) + 3 * 2048 * 8192)
    assert work.bytes == 2 * (weights + 128256 * 2048 + 1000 * 16 * 2 * 512)
    # Scores and values of the half of 1000 x 1000 pairs, 4 operations for each of 2048 query channels.
    assert work.flops == 2 * 1000 * weights + 2 * 128256 * 2048 + 16 * 2 * 1000 * 1000 * 2048


@pytest.mark.parametrize("model", sorted(SOURCES))
def test_tiny_shapes_are_of_the_same_family(model: str) -> None:
    tiny, published = config_of(model, "tiny"), config_of(model, "published")
    assert type(tiny) is type(published)
    text, own = tiny.get_text_config(decoder=True), published.get_text_config(decoder=True)
    assert text.num_hidden_layers == 3 and text.hidden_size == 128
    assert text.rope_parameters == own.rope_parameters and hasattr(text, "num_experts") == hasattr(own, "num_experts")


def test_other_names_and_numbers_of_blocks_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="--model gpt is unknown; give one of molmoe_1b, "):
        config_of("gpt", "tiny")
    for blocks in ("0", "4", "all"):
        with pytest.raises(ConfigurationError, match="give 1 to 3 blocks after the colon"):
            config_of(f"olmoe_1b_7b:{blocks}", "tiny")
