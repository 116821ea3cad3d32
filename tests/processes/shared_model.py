"""One of two processes that share a model: the first compares what both make of each call with the whole model."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from experiment_core_utils.b_model_loader import find_model
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.engines.cuda_graphs import Reruns
from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.measuring.staged_runs import run_staged
from experiment_core_utils.models.common.quantisation import RequestedQuantisation
from experiment_core_utils.models.hf.adapter import TransformersModel
from experiment_core_utils.models.hf.loader import LoadOptions, load_hf_model
from experiment_core_utils.models.hf.source import TransformersCheckpoint
from experiment_core_utils.models.hf.tensor_parallel import END, LeadingModel, follow
from experiment_core_utils.models.interface import Concurrent, Inspectable, Served, Shared, Stepwise
from experiment_core_utils.primitives.errors import EngineRefused
from experiment_core_utils.primitives.in_step import as_launched, join_crew
from tests.same_floats import assert_same_floats

CPU = torch.device("cpu")


def staged(folder: Path, tensor_parallel: int) -> TransformersModel:
    source = find_model(str(folder))
    assert isinstance(source, TransformersCheckpoint)
    quantisation = RequestedQuantisation.of(parse_config(["--model_path", str(folder)]).model)
    options = LoadOptions(torch.float32, CPU, None, None, quantisation, tensor_parallel=tensor_parallel)
    model = load_hf_model(source.hf, options, False)
    return TransformersModel(str(folder), model, source.hf.requests, "graph", Reruns())


def compare(shared: LeadingModel, whole: TransformersModel) -> None:
    """What both say of requests of other lengths at several settings."""
    assert isinstance(shared, Inspectable) and not isinstance(shared, Stepwise)
    assert isinstance(shared, Served) and not isinstance(shared, Concurrent)
    assert isinstance(shared, Shared) and shared.num_sharing == 2 and not isinstance(whole, Shared)
    for experts, blocks in ((2, (0, 1, 2)), (1, (0, 2)), (4, (1, 2))):
        setting = Setting.of(top_k=experts, num_active_blocks=RunningBlocks.of(blocks))
        requests = [{"input_ids": torch.arange(3, 3 + length)[None]} for length in (5, 9)]
        for model in (shared, whole):
            model.apply(setting)
        proofs = [model.prove(setting, model.to_device(requests[0])) for model in (shared, whole)]
        proofs[1] = replace(proofs[1], execution_reason="several processes share its weights")
        assert proofs[0] == proofs[1] and proofs[0].blocks_run == blocks
        runs = [run_staged(model, model.to_device(requests[1]), 4) for model in (shared, whole)]
        assert runs[0].token_ids == runs[1].token_ids
        assert shared.answer_batch(requests[:1], 3) == whole.answer_batch(requests[:1], 3)
        followed = [model.follow_batch(requests[1:], [(7, 8)])[0] for model in (shared, whole)]
        assert followed[0].likeliest == followed[1].likeliest
        assert_same_floats(followed[0].logits, followed[1].logits)
        assert shared.count_bytes(setting) == whole.count_bytes(setting)


def main(folder: Path, done: Path) -> None:
    crew = join_crew(2, CPU, 60.0, "launch two")
    assert crew is join_crew(2, CPU, 60.0, "launch two")
    # Libraries take the first process for one that runs alone, but not while they spread the model.
    assert ("LOCAL_RANK" in os.environ) == (crew.rank > 0)
    with as_launched():
        assert os.environ["LOCAL_RANK"] == str(crew.rank)
    assert ("LOCAL_RANK" in os.environ) == (crew.rank > 0)
    model = staged(folder, tensor_parallel=2)
    own = model.model.model.layers[0].self_attn.q_proj.weight.to_local()
    assert own.shape == (16, 32)  # half of the 32 rows
    if crew.rank:
        follow(model, crew)
        return
    shared, whole = LeadingModel(model, crew), staged(folder, tensor_parallel=1)
    whole.run_next_way("beside the shared one")
    compare(shared, whole)
    found = shared.describe()
    assert (found["tensor_parallel"], found["execution"]) == (2, "eager")
    assert found["execution_reason"] == "several processes share its weights"
    assert found["total_parameters"] == whole.describe()["total_parameters"]
    try:
        shared.follow_exactly({}, (1,))
    except EngineRefused:
        done.write_text("done")
    crew.tell(END)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
