"""What stage 1 reads of a prompt, by hand, and where a running model's logits are computed."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import pytest
import torch

from experiment_core_utils.knobs.block_choice import BlockChoice
from experiment_core_utils.primitives.errors import ConfigurationError, OutOfMemory
from experiments.controller.knob_choices import KnobSpace
from experiments.controller.networks.action_logits import HostActionLogits, action_logits_for, mean_embedding
from experiments.controller.networks.two_stage import TwoStageNetworks, action_space
from tests.models.molmoe.executions import eager_and_graph

T = TypeVar("T")
KNOBS = KnobSpace(("low", "medium"), (1, 2, 4), (2, 3, 4), num_total_blocks=4, first_top_k=4)


class Full:
    """A recorder on a device without memory: what is recorded does not fit."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def capture(self, work: Callable[[], T]) -> Callable[[], T]:
        raise self.error


def test_a_prompt_is_the_mean_of_its_embeddings() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, -4.0], [8.0, 0.5]])
    # (1 + 3 + 3) / 3 and (2 - 4 - 4) / 3.
    assert mean_embedding(rows.numpy(), torch.tensor([0, 1, 1])).tolist() == pytest.approx([7 / 3, -2.0])
    # A prompt without a text says nothing.
    assert mean_embedding(rows.numpy(), torch.tensor([], dtype=torch.long)).tolist() == [0.0, 0.0]


def test_on_a_cpu_the_host_decides(tiny_checkpoint: Path) -> None:
    model = eager_and_graph(tiny_checkpoint)["eager"]
    networks = TwoStageNetworks(action_space(KNOBS, BlockChoice(), pauses=(1, 2)), 32, embedding_rms=0.2, seed=1)
    logits = action_logits_for(model, networks)
    assert isinstance(logits, HostActionLogits) and logits.reason is None
    prompt = model.model.get_input_embeddings()(torch.tensor([7, 9, 9, 30])).mean(dim=0).detach()
    logits.first(torch.tensor([7, 9, 9, 30]), 0.5)
    torch.testing.assert_close(logits.seen()[0], prompt, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "error", [OutOfMemory("no room"), torch.OutOfMemoryError("no room"), ConfigurationError("no room")]
)
def test_a_gpu_without_memory_for_them_leaves_them_to_the_host(error: Exception) -> None:
    """A model that claims to be on a GPU; its embeddings are here, where nothing is launched before it is captured."""
    pytest.importorskip("triton")
    networks = TwoStageNetworks(action_space(KNOBS, BlockChoice(), pauses=(1, 2)), 32, embedding_rms=0.2, seed=1)
    embeddings = torch.nn.Embedding(50, 32)
    model = SimpleNamespace(
        device=torch.device("cuda"),
        model=SimpleNamespace(get_input_embeddings=lambda: embeddings),
        host_embeddings=embeddings.weight.detach().numpy(),
    )
    logits = action_logits_for(model, networks, Full(error))  # type: ignore[arg-type]
    assert isinstance(logits, HostActionLogits) and logits.reason == "no room"
