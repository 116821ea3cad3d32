"""Pictures by the kernels of a tower, against its modules."""

from pathlib import Path
from typing import Any

import pytest
import torch

from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.visual_token_keep import KeptTokens
from experiment_core_utils.models.hf.adapter import TransformersModel
from experiment_core_utils.models.hf.engine_stages import EngineParts
from experiment_core_utils.models.hf.engine_tower import EngineTower
from experiment_core_utils.models.hf.generate import GenerateStages
from experiment_core_utils.models.hf.graphed_stages import GraphedGeneration
from experiment_core_utils.primitives.errors import EngineRefused
from tests.engines.cpu_compiler import needs_compiler
from tests.models.described_towers import TOWERS, pictures, towered
from tests.models.hf.test_graphed_stages import LOW, inputs_of, read
from tests.models.tiny_checkpoints import write_checkpoint
from tests.same_floats import assert_same_floats

pytestmark = needs_compiler


def rows(features: Any) -> torch.Tensor:
    return torch.cat([each.flatten(0, -2) for each in features.pooler_output])


@pytest.mark.parametrize("name", TOWERS)
@torch.inference_mode()
def test_features_and_states_are_those_of_the_modules(name: str) -> None:
    """Pictures of several sizes one after the other, in the same memory; what came out before stays as it was."""
    model = towered(name)
    tower, stages = EngineTower(model), GenerateStages(model)
    made = []
    for crops in (3, 2, 5):
        inputs = pictures(name, crops)
        expected = stages.encode_image(inputs)
        with tower.in_place():
            made.append((stages.encode_image(inputs), expected))
    for found, expected in made:
        assert type(found) is type(expected)
        assert_same_floats(rows(found), rows(expected))
        assert_same_floats(found.last_hidden_state, expected.last_hidden_state)
        of_modules = expected.hidden_states or ()
        assert len(found.hidden_states or ()) == len(of_modules)
        for mine, theirs in zip(found.hidden_states or (), of_modules, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert_same_floats(mine, theirs)
    # Nothing is left behind.
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.inference_mode()
def test_masked_patches_are_hidden(attention: str) -> None:
    """Idefics 3: 9 patches of 8 x 8 pixels; in the second crop the last two rows of them are padding."""
    model = towered("idefics3")
    model.set_attn_implementation(attention)
    tower, stages = EngineTower(model), GenerateStages(model)
    inputs = pictures("idefics3", 2) | {"pixel_attention_mask": torch.ones(1, 2, 24, 24, dtype=torch.long)}
    for _ in range(2):
        expected = rows(stages.encode_image(inputs))
        with tower.in_place():
            assert_same_floats(rows(stages.encode_image(inputs)), expected)
        inputs["pixel_attention_mask"][0, 1, 8:] = 0
    # What is hidden is not of no effect.
    whole = pictures("idefics3", 2)
    assert not torch.allclose(rows(stages.encode_image(whole)), expected, atol=1e-2)


@pytest.mark.parametrize("is_fixed", [False, True])
@torch.inference_mode()
def test_what_kernels_lack_is_left_to_the_modules_unless_others_were_measured(is_fixed: bool) -> None:
    """The first block is told something new."""
    model = towered("idefics3")
    inputs = pictures("idefics3", 2)
    stages, parts = GenerateStages(model), EngineParts(model, lambda: (None, (0, 1, 2, 3)), takes_plain=True)
    generation = GraphedGeneration(model.device, stages, parts)
    assert generation.ways["vision"] == "cpu blocks"
    assert generation.reasons["vision"] == "there are no CUDA graphs on the CPU"
    generation.is_fixed = is_fixed
    first = model.model.vision_model.encoder.layers[0]
    first.register_forward_pre_hook(lambda _, args, given: (args, {**given, "tiles": 2}), with_kwargs=True)
    lacks = "blocks of the vision tower are given tiles, which engines lack"
    if is_fixed:
        with pytest.raises(EngineRefused, match=f"{lacks}; run all settings with --exec"):
            generation.encode_image(inputs)
        return
    assert_same_floats(rows(generation.encode_image(inputs)), rows(stages.encode_image(inputs)))
    assert generation.ways["vision"] == "modules"
    assert generation.reasons["vision"] == lacks


SETTINGS = [
    Setting.of(vision=LOW, top_k=None, num_active_blocks=RunningBlocks.of((0, 1, 2))),
    Setting.of(vision=LOW, top_k=None, num_active_blocks=RunningBlocks.of((0, 2)), visual_token_keep=KeptTokens(0.5)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llava_next", tmp_path_factory.mktemp("llava_next"), hidden_size=64)


def with_another_weight(model: TransformersModel) -> TransformersModel:
    """One of the modules that engines have no longer in common with them."""
    model.apply(SETTINGS[0])
    layer: Any = model.model.model.vision_tower.encoder.layers[0].mlp.fc1  # type: ignore[union-attr, operator]
    layer.weight = torch.nn.Parameter(layer.weight * 1.001)
    return model


@pytest.mark.parametrize("setting", SETTINGS)
def test_logits_at_a_setting_are_those_of_the_modules(folder: Path, setting: Setting) -> None:
    """With half of the image tokens too."""
    logits = []
    for model in (read(folder), read(folder, "auto")):
        model.apply(setting)
        inputs = inputs_of(model, setting)
        with torch.inference_mode():
            logits.append(model.prefill(inputs, model.encode_image(inputs))[0].clone())
    assert_same_floats(*logits)
    ways = {"vision": "cpu blocks", "decode": "cpu step"}
    assert model.describe()["execution_stages"].items() >= ways.items()
    assert (model.prove(setting, inputs).execution_stages or {}).items() >= ways.items()


def test_features_are_judged_once_for_pictures_of_a_size(folder: Path) -> None:
    model = read(folder, "auto")
    model.apply(SETTINGS[0])
    inputs = inputs_of(model, SETTINGS[0])
    model.prove(SETTINGS[0], inputs)
    with_another_weight(model).prove(SETTINGS[0], inputs)


def test_other_features_are_refused(folder: Path) -> None:
    model = with_another_weight(read(folder, "auto"))
    with pytest.raises(EngineRefused, match="cpu blocks engine of the vision is off by .* --execution eager"):
        model.prove(SETTINGS[0], inputs_of(model, SETTINGS[0]))
    model.run_next_way("it is off")
    assert set(model.describe()["execution_stages"].values()) == {"modules"}
