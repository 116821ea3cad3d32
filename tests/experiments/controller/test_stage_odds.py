"""What stage 1 reads of a prompt, by hand, and where a running model's odds are computed."""

from pathlib import Path

import pytest
import torch

from experiment_core_utils.primitives.block_choice import BlockChoice
from experiments.controller.knob_choices import KnobSpace
from experiments.controller.stage_odds import HostOdds, mean_embedding, odds_for
from experiments.controller.two_stage_networks import TwoStageNetworks, action_space
from tests.models.molmoe.executions import eager_and_graph

KNOBS = KnobSpace(("low", "medium"), (1, 2, 4), (2, 3, 4), num_total_blocks=4, first_top_k=4)


def test_a_prompt_is_the_mean_of_its_embeddings() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, -4.0], [8.0, 0.5]])
    # (1 + 3 + 3) / 3 and (2 - 4 - 4) / 3.
    assert mean_embedding(rows.numpy(), torch.tensor([0, 1, 1])).tolist() == pytest.approx([7 / 3, -2.0])
    # A prompt without a text says nothing.
    assert mean_embedding(rows.numpy(), torch.tensor([], dtype=torch.long)).tolist() == [0.0, 0.0]


def test_on_a_cpu_the_host_is_asked(tiny_checkpoint: Path) -> None:
    model = eager_and_graph(tiny_checkpoint)["eager"]
    networks = TwoStageNetworks(action_space(KNOBS, BlockChoice(), pauses=(1, 2)), 32, embedding_rms=0.2, seed=1)
    odds = odds_for(model, networks)
    assert isinstance(odds, HostOdds) and odds.reason is None
    prompt = model.model.get_input_embeddings()(torch.tensor([7, 9, 9, 30])).mean(dim=0).detach()
    odds.first(torch.tensor([7, 9, 9, 30]), 0.5)
    torch.testing.assert_close(odds.seen()[0], prompt, rtol=1e-6, atol=1e-7)
