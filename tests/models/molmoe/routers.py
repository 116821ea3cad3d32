"""The choices of a MolmoE model's routers, recorded while it runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from experiment_core_utils.models.molmoe import MolmoeForConditionalGeneration


@contextmanager
def router_logits(model: MolmoeForConditionalGeneration) -> Iterator[dict[int, torch.Tensor]]:
    """Logits [T, E] of each block's router in the last call, filled while the context is open."""
    found: dict[int, torch.Tensor] = {}

    def note(index: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            found[index] = output[0]

        return hook

    handles = [block.mlp.gate.register_forward_hook(note(index)) for index, block in enumerate(model.all_blocks)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
