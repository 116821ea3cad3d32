"""Requests that run together: which they are, what is refused, and that each is answered as alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from experiment_core_utils.b_model_loader import find_model
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import tier_target
from experiment_core_utils.measuring.request_batches import Batch, RequestBatches
from experiment_core_utils.measuring.staged_runs import run_batch, run_staged, warm_up_batch
from experiment_core_utils.models.interface import StagedModel
from experiment_core_utils.primitives.device import HostMarks
from experiment_core_utils.primitives.errors import KnobDidNotAct, SampleError
from experiment_core_utils.records.requests import BatchedRun, PreparedRequest, RequestShape
from tests.measuring.test_batches_proof import Swayed, padded_from
from tests.models.hf.test_batch import SAMPLES, sample
from tests.models.molmoe.executions import eager_and_graph
from tests.models.tiny_checkpoints import write_checkpoint
from tests.scripted.scripted_model import ScriptedModel

LOW = tier_target("low")
IDS = (7, 3, 12, 5)
NEW_TOKENS = 6


def of_size(size: int, top_k: int | None = 2, blocks: tuple[int, ...] = (0, 1)) -> Setting:
    return Setting.of(vision=LOW, top_k=top_k, num_active_blocks=RunningBlocks.of(blocks), batch_size=size)


def take(sample_id: int) -> tuple[PreparedRequest, Mapping[str, Any]]:
    """Prompts as long as their ids; that of 12 has a picture, and 3 cannot be read."""
    if sample_id == 3:
        raise SampleError("no such file")
    inputs: dict[str, Any] = {"input_ids": torch.full((1, sample_id), sample_id)}
    if sample_id == 12:
        inputs["pixel_values"] = torch.zeros(1)
    return PreparedRequest(inputs, RequestShape(None, None, 0, 0, sample_id, 0.0)), inputs


def ids_of(batch: Batch) -> list[int]:
    assert list(batch) == [int(inputs["input_ids"][0, 0]) for inputs in batch.values()]
    return list(batch)


def test_a_batch_is_a_sample_and_those_after_it_and_behind_the_last_comes_the_first() -> None:
    batches = RequestBatches(ScriptedModel(), 4, IDS)
    assert batches.following(12) == (5, 7, 3) and batches.following(7) == (3, 12, 5)
    assert batches.needed([12, 5], 3) == {12, 5, 7, 3} and batches.needed([3], 2) == {3, 12}
    assert ids_of(batches.of(of_size(1), 12, take)) == [12]
    # What cannot be read is left out, and so is a picture beside prompts without one.
    assert ids_of(batches.of(of_size(2), 7, take)) == [7, 5]
    assert ids_of(batches.of(of_size(2), 5, take)) == [5, 7]
    with pytest.raises(SampleError, match="sample 12 is in no batch of 2: of 4 timed samples only 0 can run beside it"):
        batches.of(of_size(2), 12, take)
    with pytest.raises(SampleError, match="no such file"):
        batches.of(of_size(2), 3, take)


class Short(ScriptedModel):
    """Its positions are too few for prompts of 12 tokens and more, as of a table that an index is outside of."""

    def answer_batch(self, inputs_list: Sequence[Mapping[str, Any]], max_new_tokens: int) -> list[tuple[int, ...]]:
        if any(inputs["input_ids"].shape[1] >= 12 for inputs in inputs_list):
            raise IndexError("index out of range in self")
        return super().answer_batch(inputs_list, max_new_tokens)


def prompt_of(sample_id: int) -> tuple[PreparedRequest, Mapping[str, Any]]:
    inputs = {"input_ids": torch.full((1, sample_id), sample_id)}
    return PreparedRequest(inputs, RequestShape(None, None, 0, 0, sample_id, 0.0)), inputs


def test_a_request_that_fails_alone_is_left_out_of_the_batches_of_others() -> None:
    batches = RequestBatches(Short(), 4, (7, 13, 5, 14, 6))
    assert ids_of(batches.of(of_size(2), 7, prompt_of)) == [7, 5]
    assert ids_of(batches.of(of_size(3), 6, prompt_of)) == [6, 7, 5]
    # In its own turn it fails with its own error.
    for own in (13, 14):
        with pytest.raises(SampleError, match=f"^sample {own}: IndexError: index out of range in self"):
            batches.of(of_size(2), own, prompt_of)
    with pytest.raises(SampleError, match="sample 7 is in no batch of 4: of 5 timed samples only 2 can run beside it"):
        batches.of(of_size(4), 7, prompt_of)


def test_what_fails_first_in_a_run_is_left_out_there() -> None:
    """The proof and the warm-up have passed; a fault of no single request stays that of the batch."""
    model = Short()
    batches, seen = RequestBatches(model, 4, (7, 13, 5)), list[list[int]]()

    def work(batch: Batch) -> int:
        seen.append(ids_of(batch))
        return len(model.answer_batch(list(batch.values()), 4))

    unproven = {each: prompt_of(each)[1] for each in (7, 13)}
    batch, number = batches.ran(of_size(2), 7, prompt_of, unproven, work)
    assert (ids_of(batch), number, seen) == ([7, 5], 2, [[7, 13], [7, 5]])

    def refused(batch: Batch) -> int:
        raise RuntimeError("they do not fit together")

    with pytest.raises(SampleError, match="^sample 7: RuntimeError: they do not fit together"):
        batches.ran(of_size(2), 7, prompt_of, batch, refused)


def test_a_model_that_answers_otherwise_in_a_batch_is_refused_with_the_reason() -> None:
    """Prompts of 5 and 7 tokens, of which the shorter is padded."""
    with pytest.raises(KnobDidNotAct, match="cannot run together: in a batch of 2 tokens are others than those of"):
        RequestBatches(Swayed(is_wrong=padded_from(2)), 4, IDS).of(of_size(2), 7, take)

    class Alone:
        """A model that has what a run needs, and no batches."""

        generate_timed = answer_batch = None

    with pytest.raises(KnobDidNotAct, match="this model runs one request at a time; drop --batch_size_list"):
        RequestBatches(Alone(), 4, IDS).of(of_size(2), 7, take)  # type: ignore[arg-type]


def assert_as_alone(model: StagedModel, requests: list[Mapping[str, Any]], setting: Setting) -> None:
    """Each request is run alone, and first in batches of 1, 2 and 3."""
    alone = []
    for inputs in requests:
        model.apply(setting.replaced(batch_size=1))
        model.warm_up(inputs, NEW_TOKENS)
        alone.append(run_staged(model, inputs, NEW_TOKENS))
    tokens = [run.token_ids for run in alone]
    assert len(set(tokens)) > 1 and len({inputs["input_ids"].shape[1] for inputs in requests}) > 1
    for size in (1, 2, 3):
        model.apply(setting.replaced(batch_size=size))
        for place in range(len(requests)):
            chosen = [(place + offset) % len(requests) for offset in range(size)]
            batch = [requests[each] for each in chosen]
            warm_up_batch(model, batch, NEW_TOKENS)
            marks = HostMarks()
            run = run_batch(model, batch, NEW_TOKENS, marks)
            assert run.token_ids == tokens[place]
            assert (run.num_requests, run.all_output_tokens) == (size, sum(len(tokens[each]) for each in chosen))
            longest = max(len(tokens[each]) for each in chosen)
            assert len(run.inter_token_s) == longest - 1
            assert (run.vision_s is None) == all(alone[each].vision_s is None for each in chosen)
            assert run.total_s == pytest.approx(sum(marks.seconds()), rel=1e-9)
            stages = (run.vision_s or 0.0) + (run.prefill_s or 0.0) + (run.decode_s or 0.0)
            assert stages == pytest.approx(run.total_s, rel=1e-9)
            assert run.tpot_s == (None if longest == 1 else pytest.approx((run.decode_s or 0.0) / (longest - 1)))
            assert isinstance(run, BatchedRun) == (size > 1)


@pytest.mark.parametrize("execution", ["eager", "graph"])
@pytest.mark.parametrize(("family", "has_pictures"), [("olmoe", False), ("llava_next", True), ("qwen3_vl_moe", True)])
def test_a_transformers_model_answers_each_request_as_alone(
    family: str, has_pictures: bool, execution: str, tmp_path: Path
) -> None:
    """`graph` is the engines' own on the CPU: prompts one by one, steps together, each at its own positions, and a
    picture beside a prompt without one, which is no batch of the modules.
    """
    folder = write_checkpoint(family, tmp_path)
    config = parse_config(["--model_path", str(folder), "--device", "cpu", "--execution", execution])
    model = find_model(str(folder)).load(config.model, torch.device("cpu"))
    kept = [each for each in enumerate(SAMPLES) if (each[1][0] is None) != has_pictures]
    if has_pictures and execution == "graph":
        kept[1] = (1, SAMPLES[1])
    requests = [
        model.to_device(model.prepare(sample(place, size), words, LOW.crops).inputs) for place, (size, words) in kept
    ]
    if not has_pictures:
        requests.append({name: tensor[:, :5] for name, tensor in requests[0].items()})
    assert_as_alone(model, requests[:3], of_size(1, 1 if model.num_experts else None, (0, 2)))


@pytest.mark.parametrize("execution", ["eager", "graph"])
def test_molmoe_answers_each_request_as_alone(tiny_checkpoint: Path, execution: str) -> None:
    model = eager_and_graph(tiny_checkpoint)[execution]
    prompts = [{"input_ids": torch.arange(5, 5 + length)[None]} for length in (4, 9, 6)]
    assert_as_alone(model, [model.to_device(each) for each in prompts], of_size(1, 2, (0, 1, 3)))
