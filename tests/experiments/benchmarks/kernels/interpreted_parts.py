"""Every part of the kernels' benches in Triton's interpreter: their names, and the experts that a decode step chose.

Run as `python -m tests.experiments.benchmarks.kernels.interpreted_parts` with TRITON_INTERPRET=1.
"""

import json

import torch

from experiment_core_utils.engines.gpu.triton.tuning import ProductTile
from experiment_core_utils.models.molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.models.molmoe.fused_weights import fuse_decoder_weights, fuse_vision_weights
from experiments.benchmarks.kernels import stage_parts
from experiments.benchmarks.kernels.launches import KernelWork, filled_kv_cache
from experiments.benchmarks.kernels.stage_parts import decode_parts
from tests.conftest import tiny_config


def run(parts: list[KernelWork], blocks: int) -> list[str]:
    """Names of the parts, each of which has run in every block; kernels of attention are a GPU's own."""
    ran = [part for part in parts if not part.name.startswith("attention, ")]
    for part in ran:
        for index in range(blocks):
            part.run(index)
    return [part.name for part in ran]


@torch.inference_mode()
def main() -> None:
    model = MolmoeForConditionalGeneration(tiny_config(num_hidden_layers=2)).eval()
    # The kernels are what is tested, not the size of a prompt.
    stage_parts.ROWS, stage_parts.POSITIONS = 40, 37
    decoder, vision = fuse_decoder_weights(model), fuse_vision_weights(model)
    found = {
        "decode": run(decode_parts(decoder, 3, filled_kv_cache(decoder, 1)), 2),
        "prefill": run(list(stage_parts.decoder_parts(decoder)), 2),
        "other tiles": run(list(stage_parts.decoder_parts(decoder, ProductTile(16, 16, 32, 16, 4, 2)))[-3:-1], 1),
        "vision": run(list(stage_parts.vision_parts(vision, 1)), 2),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
