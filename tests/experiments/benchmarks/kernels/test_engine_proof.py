"""Right engines pass their proof at every setting, and each planted fault is found, in the precisions they run in."""

from pathlib import Path

import pytest
import torch

from experiment_core_utils.engines.cuda_graphs import Reruns
from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import tier_target
from experiment_core_utils.models.hf.adapter import TransformersModel
from experiment_core_utils.models.interface import StagedModel
from experiments.benchmarks.kernels.engine_proof import found, planted, proved
from tests.conftest import save_tiny, tiny_config
from tests.models.hf.test_graphed_stages import SETTINGS, inputs_of, read
from tests.models.molmoe.executions import eager_and_graph
from tests.models.tiny_checkpoints import write_checkpoint

LOW = tier_target("low")


def missed(model: StagedModel, setting: Setting) -> list[tuple[str, str]]:
    """Faults that the proof of a setting did not find, once it was right without them."""
    model.apply(setting)
    inputs = inputs_of(model, setting)
    proof = proved(model, setting, inputs)
    assert proof.engine_error is not None
    return [fault for fault in planted(model) if not found(model, setting, inputs, fault)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["olmoe", "llava", "qwen2_5_vl"])
def test_faults_of_graphs_are_found(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    plain = read(write_checkpoint(family, tmp_path))
    # Every block, whatever is active.
    plain.model.to(dtype)
    model = TransformersModel(plain.name, plain.model, plain.requests, "graph", Reruns())
    model.eos_token_ids = frozenset()
    for setting in SETTINGS[family][1:]:
        assert missed(model, setting) == []


def test_faults_of_compiled_kernels_are_found(tmp_path: Path) -> None:
    """Heads of 32, which they take."""
    config = tiny_config()
    config.text_config.hidden_size = config.vision_config.hidden_size = 64
    model = eager_and_graph(save_tiny(config, tmp_path))["graph"]
    assert model.describe()["execution_stages"]["prefill"] == "cpu blocks"
    for setting in (
        Setting.of(vision=LOW, top_k=3, num_active_blocks=RunningBlocks.of((0, 1, 3))),
        Setting.of(vision=LOW, top_k=2, num_active_blocks=RunningBlocks.of((0, 1, 2, 3))),
    ):
        assert missed(model, setting) == []
    # They are right again.
    assert proved(model, setting, inputs_of(model, setting)).engine_error is not None
