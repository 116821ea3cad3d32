"""Lists of a config that are about blocks are told from others by how they are read, whatever their names."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import OlmoeConfig, OlmoeForCausalLM

from experiment_core_utils.models.hf.knobs.controller import DecoderKnobs
from experiment_core_utils.models.hf.knobs.list_reads import reads_of
from tests.models.knob_families import ALL_BLOCKS, TEXT_FAMILIES

IDS = torch.tensor([[10, 11, 12, 13, 14, 15, 16]])


class Reading(OlmoeConfig):
    """With lists of 4 entries for 4 blocks that the base class knows nothing of."""


def reading(value: Any, before: Callable[[Any], None], block: Callable[[Any, int], None]) -> Any:
    """A model whose decoder reads `config.surprise` before its blocks, and each block for its number."""
    config = Reading(**TEXT_FAMILIES["olmoe"].make(ALL_BLOCKS, 3).to_dict())
    config.surprise = value
    model = OlmoeForCausalLM(config).eval()

    def before_blocks(*_: Any) -> None:
        before(model.config.surprise)

    def in_block(layer: Any, *_: Any) -> None:
        block(model.config.surprise, layer.self_attn.layer_idx)

    model.model.embed_tokens.register_forward_hook(before_blocks)
    for layer in model.model.layers:
        layer.register_forward_hook(in_block)
    return model


def nothing(*_: Any) -> None:
    return None


NOT_TOLD = (
    "its config has surprise with as many entries as blocks, and how its decoder reads them does not tell whether they "
    "are about blocks"
)


@pytest.mark.parametrize(
    ("value", "before", "block", "reason", "shortened"),
    [
        ([7, 5, 5, 9], nothing, lambda values, index: values[index], None, [7, 5, 9]),
        ((7, 5, 5, 9), nothing, lambda values, index: values[index], None, (7, 5, 9)),
        ([7, 5, 5, 9], nothing, nothing, None, [7, 5, 5, 9]),
        ([7, 5, 5, 9], list, nothing, NOT_TOLD, None),
        ([7, 5, 5, 9], nothing, lambda values, _: sum(values), NOT_TOLD, None),
        ([7, 5, 5, 9], lambda values: values[0], nothing, NOT_TOLD, None),
        ([7, 5, 5], list, lambda values, _: values[2], None, [7, 5, 5]),
        ([1, 3], nothing, lambda values, i: i in values, "its config names blocks by their indices in surprise", None),
        ([1, 3], lambda values: 1 in values, nothing, None, [1, 3]),
    ],
    ids=[
        "by block",
        "by block, tuple",
        "not read",
        "read whole",
        "read whole in blocks",
        "first only",
        "shorter",
        "indices",
        "membership of one",
    ],
)
def test_a_list_is_shortened_refused_or_left_by_what_reads_it(
    value: Any, before: Any, block: Any, reason: str | None, shortened: Any
) -> None:
    model = reading(value, before, block)
    knobs = DecoderKnobs(model)
    assert knobs.blocks_unsupported_reason == reason
    assert model.config.surprise == value and type(model.config.surprise) is type(value)
    if reason is None:
        with knobs.applied(None, (0, 1, 3)):
            assert model.config.surprise == shortened and type(model.config.surprise) is type(value)


def test_a_list_about_blocks_inside_an_object_is_refused() -> None:
    for block, reason in (
        (
            lambda values, index: values["by block"][index],
            "its config has surprise.by block with an entry for each block",
        ),
        (lambda values, _: values["by block"][1], None),
    ):
        model = reading({"by block": [7, 5, 5, 9], "other": [1, 2]}, nothing, block)
        found = DecoderKnobs(model).blocks_unsupported_reason
        assert found == (None if reason is None else f"{reason} inside an object")
        assert model.config.surprise == {"by block": [7, 5, 5, 9], "other": [1, 2]}
        assert type(model.config.surprise["by block"]) is list


@pytest.mark.parametrize("kind", ["parameter", "buffer", "list"])
def test_a_decoders_tensor_with_a_row_for_each_block_is_refused(kind: str) -> None:
    model = TEXT_FAMILIES["olmoe"].built()
    if kind == "parameter":
        model.model.scales = torch.nn.Parameter(torch.ones(4))
    elif kind == "buffer":
        model.model.register_buffer("scales", torch.ones(4, 2))
    else:
        model.model.scales = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(1)) for _ in range(4)])
    reason = DecoderKnobs(model).blocks_unsupported_reason
    assert reason is not None and reason.startswith("its decoder has a ") and reason.endswith("(scales)")


def test_reads_are_noted_with_the_last_block_that_started() -> None:
    model = reading([7, 5, 5, 9], lambda values: values[1:3], lambda values, index: values[-1] if index == 2 else 7)
    with reads_of({"surprise": (model.config, "surprise")}, model.model.layers) as seen, torch.inference_mode():
        model(input_ids=IDS)
    assert seen["surprise"].entries == [(1, -1), (2, -1), (3, 2)]
    assert not seen["surprise"].is_by_block and not seen["surprise"].names_blocks
