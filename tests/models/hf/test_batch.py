"""Requests answered together against one at a time: the same tokens in float32, whatever is in the batch."""

from collections.abc import Callable, Set
from functools import cache

import numpy as np
import pytest
import torch
from PIL import Image

from experiment_core_utils.b_model_loader import find_model
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.engines.greedy import generate_greedily
from experiment_core_utils.knobs.active_blocks import RunningBlocks, blocks_of
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.top_k import experts_of
from experiment_core_utils.knobs.vision_tokens import tier_target
from experiment_core_utils.models.hf.adapter import TransformersModel
from experiment_core_utils.primitives.device import NoMarks
from experiment_core_utils.tasks.interface import Sample
from tests.models.tiny_checkpoints import write_checkpoint

STEPS = 6
LOW = tier_target("low")
Loaded = Callable[[str], TransformersModel]
# Width and height, or no picture; pictures of several shapes are cut into several numbers of crops.
SAMPLES = (
    ((60, 40), "What is it?"),
    (None, "Say something."),
    ((30, 90), "How many are there, and of which colour?"),
    ((40, 40), "Why?"),
    (None, "No"),
    ((200, 40), "What stands in the corner?"),
)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    @cache
    def loaded(family: str) -> TransformersModel:
        try:
            folder = write_checkpoint(family, tmp_path_factory.mktemp(family))
        except ImportError as error:
            # In older versions of transformers this processor needs torchvision.
            if family != "idefics3":
                raise
            pytest.skip(str(error).strip().splitlines()[0])
        config = parse_config(["--model_path", str(folder), "--device", "cpu"])
        model = find_model(str(folder)).load(config.model, torch.device("cpu"))
        assert isinstance(model, TransformersModel)
        return model

    return loaded


def sample(place: int, size: tuple[int, int] | None) -> Sample:
    image = None
    if size is not None:
        pixels = np.random.default_rng(place).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        image = Image.fromarray(pixels)
    return Sample(place, "picture", "", ("a",), image, "what")


@pytest.mark.parametrize(
    "family", ["llava_next", "qwen3_vl_moe", "qwen2_5_vl", "glm4v_moe", "internvl", "idefics3", "llava", "olmoe"]
)
def test_answers_together_are_those_of_one_at_a_time(model_of: Loaded, family: str) -> None:
    model = model_of(family)
    setting = Setting.of(vision=LOW, top_k=1 if model.num_experts else None, num_active_blocks=RunningBlocks.of((0, 2)))
    model.apply(setting)
    requests = [
        model.to_device(model.prepare(sample(place, size), words, LOW.crops).inputs)
        for place, (size, words) in enumerate(SAMPLES)
    ]
    alone = [generate_greedily(model, each, STEPS, NoMarks()).token_ids for each in requests]
    assert model.answer_batch(requests, STEPS) == alone
    assert model.answer_batch(requests[::-1], STEPS) == alone[::-1]
    # Answers differ, or any order would do.
    assert len(set(alone)) > 2
    assert model.active_setting == (experts_of(setting), blocks_of(setting))


def end_at(model: TransformersModel, token_ids: Set[int]) -> None:
    model.eos_token_ids = frozenset(token_ids)
    model.model.generation_config.eos_token_id = sorted(token_ids)


def test_an_answer_ends_with_its_own_end(model_of: Loaded) -> None:
    model = model_of("llama")
    model.apply(Setting.of(vision=LOW, top_k=None, num_active_blocks=RunningBlocks.of((0, 1, 2))))
    requests = [model.prepare(sample(0, None), words, LOW.crops).inputs for words in ("One", "Two and more", "3")]
    whole = [generate_greedily(model, each, STEPS, NoMarks()).token_ids for each in requests]
    # The second token of the first answer ends every answer that has it.
    end = whole[0][1]
    own = model.eos_token_ids
    try:
        end_at(model, {end})
        found = model.answer_batch(requests, STEPS)
    finally:
        end_at(model, own)
    expected = [tokens[: tokens.index(end) + 1] if end in tokens else tokens for tokens in whole]
    assert found == expected
    assert len(found[0]) <= 2 and any(len(each) == STEPS for each in found)


def test_two_ends_are_both_ends(model_of: Loaded) -> None:
    model = model_of("olmoe")
    model.apply(Setting.of(vision=LOW, top_k=2, num_active_blocks=RunningBlocks.of((0, 1, 2))))
    requests = [model.prepare(sample(0, None), words, LOW.crops).inputs for words in ("One", "Two and more")]
    own = model.eos_token_ids
    whole = [generate_greedily(model, each, STEPS, NoMarks()).token_ids for each in requests]
    ends = [whole[0][0], whole[1][0]]
    try:
        end_at(model, set(ends))
        assert model.answer_batch(requests, STEPS) == [(ends[0],), (ends[1],)]
    finally:
        end_at(model, own)
