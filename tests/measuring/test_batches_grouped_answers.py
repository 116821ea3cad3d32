"""Questions that want different settings, in groups against one by one: the same tokens in float32, in order."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiment_core_utils.b_model_loader import find_model
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import CropRange, VisionTarget, tier_target, vision_of
from experiment_core_utils.knobs.visual_token_keep import KeptTokens
from experiment_core_utils.measuring.batches import PreparedQuestion, answer_prepared, batches_of
from experiment_core_utils.measuring.staged_runs import run_staged
from experiment_core_utils.models.interface import StagedModel
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import EMBEDDED_MODEL
from experiment_core_utils.records.requests import PreparedRequest, RequestShape
from experiment_core_utils.tasks.interface import Sample
from experiment_core_utils.tasks.registry import load_task
from tests.models.tiny_checkpoints import write_checkpoint

ONE, TWO = (VisionTarget(f"tiles{n}", None, None, CropRange(n, n)) for n in (1, 2))
TASK = load_task("reference_vqa", "validation")


class SettingQuestion(NamedTuple):
    """A question about a sample, and the setting that it is to be answered at."""

    sample: Sample
    prompt: str
    setting: Setting


def answer_grouped(
    model: StagedModel, requested: Sequence[SettingQuestion], max_new_tokens: int, max_batch_size: int
) -> list[tuple[int, ...]]:
    prepared = [
        PreparedQuestion(model.prepare(each.sample, each.prompt, vision_of(each.setting).crops), each.setting)
        for each in requested
    ]
    return answer_prepared(model, prepared, max_new_tokens, max_batch_size)


def text_question(words: str) -> tuple[Sample, str]:
    return Sample(0, "none", words, ("yes",), None, "yes_no"), f" User: {words} Assistant:"


def picture_question(sample_id: int) -> tuple[Sample, str]:
    sample = TASK[sample_id]
    return sample, TASK.prompt(sample)


def staged(checkpoint: Path) -> StagedModel:
    config = parse_config(["--model_path", str(checkpoint), "--device", "cpu", "--precision", "float32"])
    return find_model(config.model.model_path).load(config.model, torch.device("cpu"))


def alone(model: StagedModel, requested: SettingQuestion, steps: int) -> tuple[int, ...]:
    model.apply(requested.setting)
    inputs = model.prepare(requested.sample, requested.prompt, vision_of(requested.setting).crops).inputs
    return run_staged(model, model.to_device(inputs), steps).token_ids


def place_holder(tokens: int, setting: Setting) -> PreparedQuestion:
    return PreparedQuestion(PreparedRequest({}, RequestShape(None, None, 0, 0, tokens, 0.0)), setting)


def test_groups_share_crops_top_k_and_blocks_and_shorter_prompts_come_first() -> None:
    a = Setting.of(vision=tier_target("low"), top_k=4, num_active_blocks=RunningBlocks.of((0, 1)))
    b = Setting.of(vision=tier_target("high"), top_k=4, num_active_blocks=RunningBlocks.of((0, 1)))
    c = Setting.of(vision=tier_target("low"), top_k=2, num_active_blocks=RunningBlocks.of((0, 1)))
    d = Setting.of(vision=tier_target("low"), top_k=4, num_active_blocks=RunningBlocks.of((0, 2)))
    also_a = Setting.of(
        vision=VisionTarget("tiles1-3", None, None, CropRange(1, 3)),
        top_k=4,
        num_active_blocks=RunningBlocks.of((0, 1)),
    )
    requested = [(9, a), (5, b), (7, a), (3, c), (8, also_a), (1, d), (2, b)]
    questions = [place_holder(tokens, setting) for tokens, setting in requested]
    assert batches_of(questions, 8) == [(2, 4, 0), (6, 1), (3,), (5,)]
    assert batches_of(questions, 2) == [(2, 4), (0,), (6, 1), (3,), (5,)]
    kept = [place_holder(9, a), place_holder(8, a.replaced(visual_token_keep=KeptTokens(0.5))), place_holder(7, a)]
    assert batches_of(kept, 8) == [(2, 0), (1,)]
    assert batches_of([], 2) == []
    with pytest.raises(ConfigurationError, match="at least 1"):
        batches_of(questions, 0)


@pytest.fixture(scope="module")
def tiny(tiny_checkpoint: Path) -> StagedModel:
    return staged(tiny_checkpoint)


SETTINGS = [
    Setting.of(vision=ONE, top_k=4, num_active_blocks=RunningBlocks.of((0, 1, 2, 3))),
    Setting.of(vision=ONE, top_k=2, num_active_blocks=RunningBlocks.of((0, 3))),
    Setting.of(vision=TWO, top_k=2, num_active_blocks=RunningBlocks.of((0, 3))),
]
QUESTIONS = [text_question("is it so?"), text_question("how many?"), picture_question(0), picture_question(9)]


@given(
    st.lists(st.tuples(st.integers(0, len(QUESTIONS) - 1), st.integers(0, len(SETTINGS) - 1)), max_size=7),
    st.integers(1, 5),
)
@settings(max_examples=25, deadline=None)
def test_any_grouping_gives_the_answers_of_one_by_one(
    tiny: StagedModel, chosen: list[tuple[int, int]], max_batch_size: int
) -> None:
    before = Setting.of(vision=ONE, top_k=3, num_active_blocks=RunningBlocks.of((0, 2, 3)))
    expected = [_alone_once(tiny, question, setting) for question, setting in chosen]
    tiny.apply(before)
    requested = [SettingQuestion(*QUESTIONS[question], SETTINGS[setting]) for question, setting in chosen]
    assert answer_grouped(tiny, requested, 4, max_batch_size) == expected
    assert tiny.active_setting == (3, (0, 2, 3))


@cache
def _alone_once(model: StagedModel, question: int, setting: int) -> tuple[int, ...]:
    return alone(model, SettingQuestion(*QUESTIONS[question], SETTINGS[setting]), 4)


def test_the_settings_of_the_questions_differ_in_what_they_answer(tiny: StagedModel) -> None:
    """Else the property above would hold for answers at the wrong setting."""
    for question in range(len(QUESTIONS)):
        assert len({_alone_once(tiny, question, setting) for setting in (0, 1)}) == 2
    assert _alone_once(tiny, 2, 1) != _alone_once(tiny, 2, 2) or _alone_once(tiny, 3, 1) != _alone_once(tiny, 3, 2)


def test_the_setting_before_comes_back_after_an_error(tiny: StagedModel) -> None:
    tiny.apply(Setting.of(vision=ONE, top_k=3, num_active_blocks=RunningBlocks.of((0, 2))))
    questions = [place_holder(3, SETTINGS[0])]
    with pytest.raises(KeyError):
        answer_prepared(tiny, questions, 4, 8)
    assert tiny.active_setting == (3, (0, 2))
    requested = [
        SettingQuestion(*QUESTIONS[0], Setting.of(vision=ONE, top_k=99, num_active_blocks=RunningBlocks.of((0, 1))))
    ]
    with pytest.raises(ConfigurationError, match="99"):
        answer_grouped(tiny, requested, 4, 8)
    assert tiny.active_setting == (3, (0, 2))


def test_the_embedded_model_answers_the_same_in_groups() -> None:
    model = staged(EMBEDDED_MODEL)
    low = tier_target("low")
    all_blocks = tuple(range(16))
    requested = [
        (picture_question(3), Setting.of(vision=low, top_k=8, num_active_blocks=RunningBlocks.of(all_blocks))),
        (
            text_question("what is it?"),
            Setting.of(vision=low, top_k=4, num_active_blocks=RunningBlocks.of(all_blocks[:12])),
        ),
        (picture_question(353), Setting.of(vision=low, top_k=4, num_active_blocks=RunningBlocks.of(all_blocks[:12]))),
        (picture_question(10), Setting.of(vision=low, top_k=8, num_active_blocks=RunningBlocks.of(all_blocks))),
        (picture_question(7), Setting.of(vision=ONE, top_k=8, num_active_blocks=RunningBlocks.of(all_blocks))),
    ]
    requested = [SettingQuestion(*question, setting) for question, setting in requested]
    expected = [alone(model, each, 16) for each in requested]
    assert answer_grouped(model, requested, 16, 8) == expected


def test_what_the_crops_ask_of_the_model_comes_back_too(tmp_path: Path) -> None:
    # LLaVA-NeXT reads from its config into which grids a picture may be cut.
    model = staged(write_checkpoint("llava_next", tmp_path))
    blocks = tuple(range(model.num_total_blocks))
    before = Setting.of(vision=tier_target("medium"), top_k=None, num_active_blocks=RunningBlocks.of(blocks))
    sample, prompt = picture_question(0)
    model.apply(before)
    inputs = model.to_device(model.prepare(sample, prompt, vision_of(before).bounds).inputs)
    (expected,) = model.answer_batch([inputs], 3)
    other = Setting.of(vision=tier_target("low"), top_k=None, num_active_blocks=RunningBlocks.of(blocks[:2]))
    answer_grouped(model, [SettingQuestion(sample, prompt, other)], 3, 2)
    assert model.answer_batch([inputs], 3) == [expected]
