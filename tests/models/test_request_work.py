"""What a request will be at a setting, by formula, before any weight is read."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import OPTConfig

from experiment_core_utils.b_model_loader import find_model
from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import own_target, tier_target
from experiment_core_utils.knobs.visual_token_keep import KeptTokens
from experiment_core_utils.models.hf.request_work import TransformersWork
from experiment_core_utils.models.hf.source import TransformersCheckpoint
from experiment_core_utils.models.molmoe.request_work import MolmoeWork
from experiment_core_utils.models.request_work import RequestWork, mean_flops, of_first_samples
from experiment_core_utils.primitives.errors import ConfigurationError, SampleError
from experiment_core_utils.primitives.files import EMBEDDED_MODEL
from experiment_core_utils.records.requests import StageFlops
from experiment_core_utils.tasks.datasets.files.data_file import DataFileTask
from experiment_core_utils.tasks.interface import Sample
from experiment_core_utils.tasks.registry import load_task
from tests.models.tiny_checkpoints import write_checkpoint

TASK = load_task("reference_vqa", "validation")
LOW, MEDIUM = tier_target("low"), tier_target("medium")
LIMIT = 5


class Unreadable:
    """A task of which no sample can be read."""

    name, split = "broken", "validation"

    def __getitem__(self, index: int) -> Sample:
        raise SampleError(f"picture {index} is torn")


def test_means_count_a_missing_picture_as_none_and_a_missing_step_as_nothing() -> None:
    with_picture, without = StageFlops(100, 50, 8.0), StageFlops(None, 31, None)
    assert mean_flops([with_picture, without]) == StageFlops(50, 40, 8.0)
    assert mean_flops([without]) == StageFlops(None, 31, None)


def test_only_the_first_samples_are_looked_at_and_one_must_be_readable() -> None:
    assert of_first_samples(TASK, range(100), lambda sample: sample.sample_id) == list(range(8))
    with pytest.raises(ConfigurationError, match="none of the 3 samples .* because: picture 9 is torn; give others"):
        of_first_samples(Unreadable(), (4, 5, 9), lambda sample: sample)  # type: ignore[arg-type]


def without_weights(family: str, folder: Path) -> Path:
    write_checkpoint(family, folder / "whole")
    pattern = shutil.ignore_patterns("*.safetensors")
    return Path(shutil.copytree(folder / "whole", folder / "bare", ignore=pattern))


def test_a_mixture_of_transformers_is_planned_from_its_config(tmp_path: Path) -> None:
    work = find_model(str(without_weights("qwen3_vl_moe", tmp_path))).planned_requests(TASK, (3, 4), LIMIT)
    assert isinstance(work, TransformersWork) and work.num_samples == 2
    full = work.at(Setting.of(vision=LOW, top_k=2, num_active_blocks=RunningBlocks.of((0, 1, 2))))
    # One expert of the last two blocks: three products of 32 x 16, two operations a number and token.
    fewer = work.at(Setting.of(vision=LOW, top_k=1, num_active_blocks=RunningBlocks.of((0, 1, 2))))
    expert = 2 * 2 * 3 * 32 * 16
    assert full.flops is not None and fewer.flops is not None
    assert full.flops.prefill_flops - fewer.flops.prefill_flops == pytest.approx(expert * full.prompt_tokens)
    assert full.flops.decode_flops_per_token is not None and fewer.flops.decode_flops_per_token is not None
    assert full.flops.decode_flops_per_token - fewer.flops.decode_flops_per_token == pytest.approx(expert)
    assert full.prompt_tokens == fewer.prompt_tokens
    # Keys and values of 2 heads of 8 in each block, for the longest prompt and its answer.
    per_token = 3 * 2 * 2 * 8
    assert full.elements is not None and full.elements % per_token == 0
    assert full.elements >= per_token * (full.prompt_tokens + LIMIT)
    assert (
        work.at(Setting.of(vision=LOW, top_k=2, num_active_blocks=RunningBlocks.of((0, 2)))).elements
        == full.elements * 2 / 3
    )
    assert (
        work.at(Setting.of(vision=MEDIUM, top_k=2, num_active_blocks=RunningBlocks.of((0, 1, 2)))).prompt_tokens
        > full.prompt_tokens
    )


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "molmoe"])
def test_dropped_image_tokens_are_not_planned(tiny_checkpoint: Path, tmp_path: Path, family: str) -> None:
    folder = tiny_checkpoint if family == "molmoe" else without_weights(family, tmp_path)
    work = find_model(str(folder)).planned_requests(TASK, (0,), LIMIT)
    whole = Setting.of(vision=LOW, top_k=2, num_active_blocks=RunningBlocks.of((0, 1, 2)))
    every, half, quarter = (
        work.at(whole.replaced(visual_token_keep=KeptTokens(fraction))) for fraction in (1.0, 0.5, 0.25)
    )
    assert every == work.at(whole)
    # A quarter of the image tokens lies between a half and a quarter of them, up to the rounding.
    assert every.prompt_tokens - half.prompt_tokens == pytest.approx(
        2 * (half.prompt_tokens - quarter.prompt_tokens), abs=2
    )
    assert every.flops is not None and half.flops is not None
    assert every.flops.prefill_flops > half.flops.prefill_flops
    assert every.flops.vision_flops == half.flops.vision_flops
    assert every.elements is not None and half.elements is not None and every.elements > half.elements


def test_the_weights_of_a_text_model_are_counted_by_hand(tmp_path: Path) -> None:
    source = find_model(str(without_weights("olmoe", tmp_path)))
    work = source.planned_requests(TASK, (0,), LIMIT)
    attention = 2 * 32 * 32 + 2 * 32 * 16 + (32 + 16)
    block = attention + 2 * 32 + 4 * 32 + 4 * 3 * 32 * 24
    assert work.weight_elements == 2 * source.config.vocab_size * 32 + 3 * block + 32
    flops = work.at(Setting.of(vision=LOW, top_k=2, num_active_blocks=RunningBlocks.of((0, 1, 2)))).flops
    assert flops is not None and flops.vision_flops is None


def test_an_architecture_without_formula_has_tokens_alone(tmp_path: Path) -> None:
    found = find_model(str(without_weights("olmoe", tmp_path)))
    assert isinstance(found, TransformersCheckpoint)
    work = replace(found, hf=replace(found.hf, config=OPTConfig())).planned_requests(TASK, (0, 1), LIMIT)
    assert (work.no_formula or "").startswith("no formula is known for 'opt'")
    known = found.planned_requests(TASK, (0, 1), LIMIT)
    assert known.no_formula is None
    setting = Setting.of(vision=LOW, top_k=2, num_active_blocks=RunningBlocks.of((0, 1, 2)))
    assert work.at(setting) == RequestWork(known.at(setting).prompt_tokens, None, None)


def test_molmoe_is_planned_by_its_own_formulas(tiny_checkpoint: Path) -> None:
    work = find_model(str(tiny_checkpoint)).planned_requests(TASK, (0, 1), LIMIT)
    assert isinstance(work, MolmoeWork) and work.num_samples == 2
    low, medium = (
        work.at(Setting.of(vision=target, top_k=4, num_active_blocks=RunningBlocks.of((0, 1, 2, 3))))
        for target in (LOW, MEDIUM)
    )
    assert low.prompt_tokens < medium.prompt_tokens
    assert low.elements is not None and medium.elements is not None and low.elements < medium.elements
    assert low.flops is not None and medium.flops is not None
    assert low.flops.vision_flops is not None and medium.flops.vision_flops is not None
    assert low.flops.vision_flops < medium.flops.vision_flops


def test_a_question_beyond_molmoes_context_is_no_part_of_its_plan(tiny_checkpoint: Path, tmp_path: Path) -> None:
    rows = [{"question": "which?" * 1_000_000, "answer": "red"}, {"question": "which?", "answer": "red"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    work = find_model(str(tiny_checkpoint)).planned_requests(DataFileTask(path), (0, 1), LIMIT)
    assert isinstance(work, MolmoeWork) and work.num_samples == 1


def test_a_picture_that_is_too_large_as_it_is_leaves_the_rest_of_the_plan(tmp_path: Path) -> None:
    """With nothing bounded, a picture of 761 * 457 pixels is 95 * 57 tokens of 8 * 8: more than a context of 4096."""
    work = find_model(str(without_weights("qwen3_vl_moe", tmp_path))).planned_requests(TASK, (0, 1), LIMIT)
    assert (
        work.at(Setting.of(vision=LOW, top_k=2, num_active_blocks=RunningBlocks.of((0, 1, 2)))).unusable_reason is None
    )
    own = work.at(Setting.of(vision=own_target(), top_k=2, num_active_blocks=RunningBlocks.of((0, 1, 2))))
    assert (own.prompt_tokens, own.flops, own.elements) == (None, None, None)
    assert "tokens is longer than the model's context of 4096" in (own.unusable_reason or "")


def test_the_embedded_model_by_itself_takes_fewer_tokens_than_two_of_the_tiers() -> None:
    """Molmo's official rule with at most 12 crops; means over the first 16 prompts of `reference_vqa`."""
    source = find_model(str(EMBEDDED_MODEL))
    halves = [source.planned_requests(TASK, ids, LIMIT) for ids in (range(8), range(8, 16))]
    targets = (own_target(), *map(tier_target, ("low", "medium", "high")))
    blocks = tuple(range(source.limits.num_total_blocks))
    found = {
        target.value: sum(
            work.at(Setting.of(vision=target, top_k=8, num_active_blocks=RunningBlocks.of(blocks))).prompt_tokens or 0
            for work in halves
        )
        / 2
        for target in targets
    }
    assert found == {"own": 800.125, "low": 456.125, "medium": 840.125, "high": 1296.125}
    # Of at most 12 crops and the overview the memory is less than of the 15 that tier high may take.
    own, high = (
        halves[0].at(Setting.of(vision=target, top_k=8, num_active_blocks=RunningBlocks.of(blocks))).elements
        for target in (own_target(), tier_target("high"))
    )
    assert own is not None and high is not None and own < high
