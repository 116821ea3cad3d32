"""What turns each knob in MolmoE."""

import pytest

from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.answer_limit import AnswerLimit
from experiment_core_utils.knobs.batch_size import BatchSize
from experiment_core_utils.knobs.loading import LoadingKnob
from experiment_core_utils.knobs.placebo import Placebo
from experiment_core_utils.knobs.registry import all_knobs
from experiment_core_utils.knobs.request_knobs import ServerKnob
from experiment_core_utils.knobs.thinking_budget import ThinkingBudget
from experiment_core_utils.knobs.variant import Variant
from experiment_core_utils.models.molmoe.knobs import adapters_of
from experiment_core_utils.models.molmoe.modeling_molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.models.molmoe.visual_token_keep import PlacedTokens
from experiment_core_utils.primitives.errors import ConfigurationError
from tests.conftest import tiny_config


def test_there_is_one_for_every_knob_and_each_turns_its_own() -> None:
    """4 blocks, 4 experts a token of 8; the first block keeps its number."""
    model = MolmoeForConditionalGeneration(tiny_config())
    adapters = adapters_of(model, PlacedTokens())
    # All but those of a request to a server, of the run itself or of another load, the placebo, which acts on nothing,
    # and thinking, whose marks it lacks.
    others = ServerKnob | Variant | Placebo | LoadingKnob | AnswerLimit | ThinkingBudget | BatchSize
    in_process = {knob.name for knob in all_knobs() if not isinstance(knob, others)}
    assert set(adapters) == in_process and len(in_process) == 5
    assert not any(adapter.unsupported_reason for adapter in adapters.values())
    top_k, blocks = adapters["top_k"], adapters["num_active_blocks"]
    assert (top_k.value, blocks.value) == (4, RunningBlocks.of((0, 1, 2, 3)))
    top_k.put(2)
    blocks.put(RunningBlocks.of((0, 2)))
    assert [block.mlp.gate.top_k for block in model.all_blocks] == [4, 2, 2, 2]
    assert list(model.get_decoder().layers) == [model.all_blocks[0], model.all_blocks[2]]
    for adapter, value in ((top_k, 9), (blocks, RunningBlocks.of((1, 2)))):
        with pytest.raises(ConfigurationError, match="not possible"):
            adapter.put(value)
    assert (top_k.value, blocks.value, model.active_setting) == (2, RunningBlocks.of((0, 2)), (2, (0, 2)))
    # What the model's own stages turn shows, too.
    model.set_knobs(3, (0, 1, 3))
    assert (top_k.value, blocks.value) == (3, RunningBlocks.of((0, 1, 3)))
    top_k.put(2)
    assert model.active_setting == (2, (0, 1, 3))
    blocks.put(None)
    assert model.active_setting == (2, (0, 1, 2, 3))
    top_k.put(None)
    assert model.active_setting == (4, (0, 1, 2, 3))
