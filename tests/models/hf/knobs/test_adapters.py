"""What turns each knob in a transformers model."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.answer_limit import AnswerLimit
from experiment_core_utils.knobs.batch_size import BatchSize
from experiment_core_utils.knobs.loading import LoadingKnob
from experiment_core_utils.knobs.placebo import Placebo
from experiment_core_utils.knobs.registry import all_knobs
from experiment_core_utils.knobs.request_knobs import ServerKnob
from experiment_core_utils.knobs.variant import Variant
from experiment_core_utils.knobs.vision_tokens import own_target, tier_target
from experiment_core_utils.models.hf.knobs.adapters import VisionFields, adapters_of
from experiment_core_utils.models.hf.knobs.controller import DecoderKnobs
from experiment_core_utils.models.hf.visual_token_keep import VisualTokens
from experiment_core_utils.primitives.errors import ConfigurationError
from tests.models.hf.knobs.test_controller import blocks_of
from tests.models.knob_families import TEXT_FAMILIES

REQUESTS = cast(
    Any,
    SimpleNamespace(
        name="tiny",
        has_vision=False,
        vision_knob_unsupported_reason="it takes no pictures",
        thinking=None,
        config_for=lambda crops: {} if crops is None else {"rows": crops.max_crops},
    ),
)


def adapters(family: str) -> tuple[Any, dict[str, Any]]:
    model = TEXT_FAMILIES[family].built()
    return model, adapters_of(model.config, REQUESTS, VisualTokens(model, REQUESTS), DecoderKnobs(model))


def test_there_is_one_for_every_knob_which_says_why_it_cannot_be_turned() -> None:
    _, of_experts = adapters("olmoe")
    # All but those of a request to a server, of the run itself, and the placebo, which acts on nothing.
    others = ServerKnob | Variant | Placebo | LoadingKnob | AnswerLimit | BatchSize
    in_process = {knob.name for knob in all_knobs() if not isinstance(knob, others)}
    assert set(of_experts) == in_process and len(in_process) == 6
    neither = {
        "vision": "it takes no pictures",
        "visual_token_keep": "tiny is a text model: it has no image tokens",
        "thinking_budget": "its tokenizer and its chat template have no marks of thinking",
    }
    reasons = {name: each.unsupported_reason for name, each in of_experts.items()}
    assert reasons == {**neither, "top_k": None, "expert_mass": None, "num_active_blocks": None}
    dense = {name: each.unsupported_reason for name, each in adapters("llama")[1].items()}
    assert dense == {
        **neither,
        "top_k": "the model is dense",
        "expert_mass": "the model is dense",
        "num_active_blocks": None,
    }


def test_top_k_and_blocks_are_turned_one_without_the_other() -> None:
    """Of 4 blocks with 3 experts a token, the first of which keeps its number."""
    model, by_name = adapters("olmoe")
    top_k, blocks = by_name["top_k"], by_name["num_active_blocks"]
    every = list(blocks_of(model))

    def experts() -> list[int]:
        return [block.mlp.gate.top_k for block in every]

    assert (top_k.value, blocks.value) == (None, RunningBlocks.of(range(4)))
    top_k.put(2)
    blocks.put(RunningBlocks.of((0, 3)))
    assert (experts(), list(blocks_of(model))) == ([3, 2, 2, 2], [every[0], every[3]])
    blocks.put(RunningBlocks.of((0, 1, 3)))
    top_k.put(1)
    assert (experts(), list(blocks_of(model))) == ([3, 1, 1, 1], [every[0], every[1], every[3]])
    for adapter, value in ((top_k, 7), (blocks, RunningBlocks.of((0, 4)))):
        with pytest.raises(ConfigurationError, match="not possible"):
            adapter.put(value)
    assert (top_k.value, blocks.value) == (1, RunningBlocks.of((0, 1, 3)))
    top_k.put(None)
    assert (experts(), top_k.value, len(blocks_of(model))) == ([3, 3, 3, 3], None, 3)
    blocks.put(None)
    assert list(blocks_of(model)) == every


def test_fields_of_the_config_follow_the_crops() -> None:
    config = SimpleNamespace(rows=1)
    fields = VisionFields(config, REQUESTS)
    low, high = tier_target("low"), tier_target("high")
    assert low.crops is not None and high.crops is not None
    for value, rows in ((low, low.crops.max_crops), (high, high.crops.max_crops), (own_target(), 1), (None, 1)):
        fields.put(value)
        assert (fields.value, config.rows) == (value, rows)
