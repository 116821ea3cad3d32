"""Answers in a batch against the stages one request at a time, in float32: tokens must be the same."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from experiment_core_utils.b_model_loader import find_model
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import CropRange, tier_target
from experiment_core_utils.measuring.staged_runs import run_staged
from experiment_core_utils.models.interface import StagedModel
from experiment_core_utils.primitives.files import EMBEDDED_MODEL
from experiment_core_utils.tasks.registry import load_task

ONE, LOW, MEDIUM = CropRange(1, 1), CropRange(1, 3), CropRange(4, 8)


def staged(checkpoint: Path) -> StagedModel:
    config = parse_config(["--model_path", str(checkpoint), "--device", "cpu", "--precision", "float32"])
    return find_model(config.model.model_path).load(config.model, torch.device("cpu"))


def requests(model: StagedModel, wanted: Sequence[tuple[int, CropRange]]) -> list[Mapping[str, Any]]:
    task = load_task("reference_vqa", "validation")
    samples = [(task[sample_id], crops) for sample_id, crops in wanted]
    return [model.to_device(model.prepare(each, task.prompt(each), crops).inputs) for each, crops in samples]


def one_by_one(model: StagedModel, inputs: Sequence[Mapping[str, Any]], steps: int) -> list[tuple[int, ...]]:
    return [run_staged(model, each, steps).token_ids for each in inputs]


@pytest.fixture(scope="module")
def tiny(tiny_checkpoint: Path) -> StagedModel:
    return staged(tiny_checkpoint)


@pytest.mark.parametrize(("top_k", "blocks"), [(4, (0, 1, 2, 3)), (2, (0, 3))])
def test_prompts_and_crops_of_any_size_and_none(tiny: StagedModel, top_k: int, blocks: tuple[int, ...]) -> None:
    inputs = requests(tiny, [(0, ONE), (4, LOW), (9, MEDIUM)])
    inputs.insert(1, {"input_ids": torch.tensor([[7, 20, 33, 46, 59]])})
    assert len({each["input_ids"].shape[1] for each in inputs}) == 4
    tiny.apply(Setting.of(vision=tier_target("low"), top_k=top_k, num_active_blocks=RunningBlocks.of(blocks)))
    alone = one_by_one(tiny, inputs, 6)
    assert tiny.answer_batch(inputs, 6) == alone
    assert tiny.answer_batch(inputs[::-1], 6) == alone[::-1]
    assert tiny.answer_batch(inputs[:1], 6) == alone[:1]
    assert tiny.model.active_setting == (top_k, blocks)


def test_requests_without_any_picture(tiny: StagedModel) -> None:
    inputs = [{"input_ids": torch.tensor([row])} for row in ([7, 20, 33], [46, 59, 72, 85, 98], [11])]
    assert tiny.answer_batch(inputs, 5) == one_by_one(tiny, inputs, 5)


def test_every_answer_ends_where_it_ends_alone(tiny: StagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each says third, or first, is made an end-of-sequence: the answers get different lengths."""
    inputs = [{"input_ids": torch.tensor([row])} for row in ([7, 20, 33], [46, 59, 72, 85, 98], [11, 80])]
    whole = one_by_one(tiny, inputs, 6)
    monkeypatch.setattr(tiny, "eos_token_ids", frozenset({whole[0][2], whole[1][0]}))
    alone = one_by_one(tiny, inputs, 6)
    assert len(alone[1]) == 1
    assert len({len(each) for each in alone}) >= 2
    assert tiny.answer_batch(inputs, 6) == alone
    assert tiny.answer_batch(inputs, 1) == [each[:1] for each in alone]


def test_the_embedded_model_answers_the_same_together() -> None:
    model = staged(EMBEDDED_MODEL)
    inputs = requests(model, [(3, LOW), (353, ONE), (7, MEDIUM), (1333, LOW), (1860, LOW), (10, LOW)])
    for top_k, blocks in ((8, tuple(range(16))), (4, tuple(range(12)))):
        model.apply(Setting.of(vision=tier_target("low"), top_k=top_k, num_active_blocks=RunningBlocks.of(blocks)))
        alone = one_by_one(model, inputs, 16)
        assert len({len(each) for each in alone}) > 1
        assert model.answer_batch(inputs, 16) == alone
