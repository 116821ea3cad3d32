"""One checkpoint, loaded for both executions."""

from pathlib import Path

import torch

from experiment_core_utils.b_model_loader import find_model
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.models.molmoe.staged_model import MolmoeStagedModel


def eager_and_graph(checkpoint: Path) -> dict[str, MolmoeStagedModel]:
    """By `--execution`; on the CPU, with answers that end at their limit alone."""
    made = {}
    for execution in ("eager", "graph"):
        config = parse_config(["--model_path", str(checkpoint), "--device", "cpu", "--execution", execution])
        model = find_model(str(checkpoint)).load(config.model, torch.device("cpu"))
        assert isinstance(model, MolmoeStagedModel)
        model.eos_token_ids = frozenset()
        made[execution] = model
    return made
