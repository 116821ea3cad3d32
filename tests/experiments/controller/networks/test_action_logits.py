"""What stage 1 reads of a prompt, by hand and by a running model."""

from pathlib import Path

import pytest
import torch

from experiment_core_utils.knobs.block_choice import BlockChoice
from experiments.controller.knob_choices import KnobSpace
from experiments.controller.networks.action_logits import ActionLogits, mean_embedding
from experiments.controller.networks.two_stage import TwoStageNetworks, action_space
from tests.models.molmoe.executions import eager_and_graph

KNOBS = KnobSpace(("low", "medium"), (1, 2, 4), (2, 3, 4), num_total_blocks=4, first_top_k=4)


def test_a_prompt_is_the_mean_of_its_embeddings() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, -4.0], [8.0, 0.5]])
    # (1 + 3 + 3) / 3 and (2 - 4 - 4) / 3.
    assert mean_embedding(rows.numpy(), torch.tensor([0, 1, 1])).tolist() == pytest.approx([7 / 3, -2.0])
    # A prompt without a text says nothing.
    assert mean_embedding(rows.numpy(), torch.tensor([], dtype=torch.long)).tolist() == [0.0, 0.0]


def test_stage_1_reads_the_embeddings_of_the_model(tiny_checkpoint: Path) -> None:
    model = eager_and_graph(tiny_checkpoint)["eager"]
    networks = TwoStageNetworks(action_space(KNOBS, BlockChoice(), pauses=(1, 2)), 32, embedding_rms=0.2, seed=1)
    logits = ActionLogits.for_model(model, networks)
    prompt = model.model.get_input_embeddings()(torch.tensor([7, 9, 9, 30])).mean(dim=0).detach()
    logits.first(torch.tensor([7, 9, 9, 30]), 0.5)
    torch.testing.assert_close(logits.seen()[0], prompt, rtol=1e-6, atol=1e-7)
