"""A staged model whose parts accelerate dispatched: the same answers, proofs and bytes as on one device, by modules."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from experiment_core_utils.b_model_loader import find_model
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.engines.cuda_graphs import Reruns
from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import tier_target
from experiment_core_utils.measuring.staged_runs import run_staged
from experiment_core_utils.models.common.quantisation import RequestedQuantisation
from experiment_core_utils.models.hf.adapter import TransformersModel
from experiment_core_utils.models.hf.loader import LoadOptions, load_hf_model
from experiment_core_utils.models.hf.source import TransformersCheckpoint
from experiment_core_utils.models.interface import devices_of
from experiment_core_utils.planning.plan import requested_run
from experiment_core_utils.primitives.errors import EngineRefused, OutOfMemory
from experiment_core_utils.records.ledger import Ledger
from tests.models.dispatched import dispatched
from tests.models.hf.test_adapter import inputs_of
from tests.models.tiny_checkpoints import write_checkpoint
from tests.processes.one_process import run_alone
from tests.same_floats import assert_same_floats

CPU = torch.device("cpu")
# What has no storage but while it is used: where requests enter, an encoder of pictures, and a block.
FROM_DISK = {
    "olmoe": ["model.embed_tokens", "model.layers.1"],
    "qwen3_vl_moe": [
        "model.visual.patch_embed",
        "model.visual.blocks.0",
        "model.language_model.embed_tokens",
        "model.language_model.layers.1",
    ],
}


def loaded(folder: Path, device_map: Any = None, *, random_weights: bool = False) -> Any:
    source = find_model(str(folder))
    assert isinstance(source, TransformersCheckpoint)
    config = parse_config(["--model_path", str(folder), "--device", "cpu"])
    quantisation = RequestedQuantisation.of(config.model)
    return load_hf_model(
        source.hf, LoadOptions(torch.float32, CPU, None, None, quantisation, device_map), random_weights
    )


def staged(folder: Path, model: Any, **more: Any) -> TransformersModel:
    source = find_model(str(folder))
    assert isinstance(source, TransformersCheckpoint)
    return TransformersModel(str(folder), model, source.hf.requests, **more)


@pytest.fixture(scope="module", params=list(FROM_DISK))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[TransformersModel, ...]:
    """The same model on one device, and dispatched."""
    folder = write_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    spread = dispatched(loaded(folder), tmp_path_factory.mktemp("parts"), FROM_DISK[request.param])
    return staged(folder, loaded(folder)), staged(folder, spread)


@pytest.mark.parametrize(("top_k", "blocks"), [(2, (0, 1, 2)), (1, (0, 2)), (4, (1, 2)), (1, (0, 1, 2))])
def test_settings_are_proven_and_answered_as_on_one_device(
    pair: tuple[TransformersModel, ...], top_k: int, blocks: tuple[int, ...]
) -> None:
    setting = Setting.of(vision=tier_target("low"), top_k=top_k, num_active_blocks=RunningBlocks.of(blocks))
    proofs, answers, step_bytes, logits = [], [], [], []
    for model in pair:
        inputs = inputs_of(model, setting)
        proofs.append(model.prove(setting, inputs))
        run = run_staged(model, inputs, 5)
        answers.append((run.token_ids, len(run.inter_token_s), run.vision_s is None, model.answer_batch([inputs], 5)))
        step_bytes.append(model.count_bytes(setting))
        with torch.inference_mode():
            logits.append(model.prefill(inputs, model.encode_image(inputs))[0])
    # A first weight without storage is no weight on a CPU, so that transformers takes a GPU's kernels.
    assert replace(proofs[1], experts_implementation_decode="grouped_mm") == proofs[0]
    assert proofs[0].blocks_run == blocks
    assert answers[0] == answers[1]
    assert step_bytes[0] == step_bytes[1]
    assert_same_floats(logits[1], logits[0])


def test_what_each_part_is_on_is_reported(pair: tuple[TransformersModel, ...]) -> None:
    one, spread = pair
    assert one.describe()["device_map"] is None
    places = spread.describe()["device_map"]
    assert set(places.values()) == {"cpu", "disk"}
    other = {"device_map": places, "experts_implementation_decode": "batched_mm"}
    assert spread.describe() == one.describe() | other
    assert devices_of(spread) == spread.devices == (CPU,)


def test_no_judge_computes_with_weights_that_come_when_they_are_used(pair: tuple[TransformersModel, ...]) -> None:
    _, spread = pair
    setting = Setting.of(vision=tier_target("low"), top_k=2, num_active_blocks=RunningBlocks.of((0, 1, 2)))
    with pytest.raises(EngineRefused, match="whether it is right cannot be judged: weights that come to their device"):
        spread.follow_exactly(inputs_of(spread, setting), (3, 4))


@pytest.fixture(scope="module")
def olmoe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("olmoe", tmp_path_factory.mktemp("olmoe"))


@pytest.mark.parametrize("execution", ["graph", "kernels"])
def test_graphs_and_engines_leave_it_to_the_modules_with_the_reason(
    olmoe: Path, tmp_path: Path, execution: str
) -> None:
    spread = dispatched(loaded(olmoe), tmp_path, ["model.layers.0"])
    found = staged(olmoe, spread, execution=execution, graph_capturer=Reruns()).describe()
    reason = "its weights are on several devices (cpu, disk)"
    assert (found["execution"], found["execution_reason"]) == ("eager", reason)


def test_a_map_is_followed_while_loading_and_the_disk_is_refused(olmoe: Path) -> None:
    everywhere = {"model": "cpu", "lm_head": "cpu"}
    ids = torch.tensor([[3, 4, 5]])
    with torch.inference_mode():
        assert torch.equal(loaded(olmoe, everywhere)(ids).logits, loaded(olmoe)(ids).logits)
        made = [loaded(olmoe, given, random_weights=True)(ids).logits for given in (everywhere, None)]
    assert torch.equal(*made)
    for random_weights in (False, True):
        with pytest.raises(OutOfMemory, match="does not fit on the GPUs and the host together"):
            loaded(olmoe, {**everywhere, "lm_head": "disk"}, random_weights=random_weights)


def test_a_run_records_the_map(olmoe: Path, tmp_path: Path) -> None:
    flags = ["--model_path", str(olmoe), "--device", "cpu", "--num_samples", "2", "--output_dir", str(tmp_path)]
    model = staged(olmoe, dispatched(loaded(olmoe), tmp_path / "parts", ["model.layers.1"]))
    ledger = Ledger(tmp_path, "f00d")
    run = run_alone(requested_run(parse_config(flags)), ledger, "0001", model=model)
    recorded = run.provenance.content()["model"]
    assert recorded["device_map"]["model.layers.1"] == "disk" and recorded["execution"] == "eager"
