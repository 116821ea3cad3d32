"""Builds the kernels of decode and prefill for a GPU that need not be there: a line of JSON with what each form took.

Run with the two digits of a compute capability, such as 90. Nothing is launched: every launch builds its kernel alone,
so that what torch computes between launches is of no meaning.
"""

import json
import sys
from dataclasses import replace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.expert_trace import ExpertRecord
from experiment_core_utils.engines.gpu.decode import shape_unsupported_reason
from experiment_core_utils.engines.gpu.triton import prefill_forward, tuning
from experiment_core_utils.engines.gpu.triton.decode_forward import DecodeStep, StepBuffers
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.engines.weights import DecoderWeights
from tests.engines.cpu import block_forms
from tests.engines.cpu.block_forms import FORMS, decoder_of_form

TOKENS, SLOTS = 128, 256
# By the first digit: the card that is played, and bytes of shared memory that a program may have there.
CARDS = {8: ("NVIDIA A100", 163 * 1024), 9: ("NVIDIA H200", 227 * 1024)}


class AbsentDevice:
    """What Triton asks of a driver while it builds."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def in_bfloat16(decoder: DecoderWeights) -> DecoderWeights:
    def cast(part: Any, names: Any) -> Any:
        return replace(part, **{name: getattr(part, name).to(torch.bfloat16) for name in names})

    blocks = tuple(cast(block, block.tensors) for block in decoder.blocks)
    return replace(cast(decoder, ("embedding", "final_norm", "head")), blocks=blocks)


def launched(decoder: DecoderWeights, use_pdl: bool) -> None:
    knobs, top_k = EngineKnobs(2, (0, 1, 2)), 2
    kv_cache, tiles = KVCache.allocate(decoder, SLOTS), tuning.tiles_for(decoder, top_k, SLOTS)
    DecodeStep(decoder, kv_cache, StepBuffers.allocate(decoder, 1, SLOTS, tiles), tiles, use_pdl).launch(knobs)
    places = prefill_forward.PromptPlaces(
        torch.tensor([TOKENS - 3]),
        kv_cache.keys[:, 0],
        kv_cache.values[:, 0],
        prefill_forward.rotary_table(decoder, TOKENS),
        ExpertRecord.allocate(decoder, TOKENS * block_forms.EXPERTS).ids,
    )
    prefill_forward.prefill(decoder, torch.zeros(TOKENS, decoder.width).bfloat16(), knobs.blocks, top_k, places)


@torch.inference_mode()
def main() -> None:
    capability = int(sys.argv[1])
    name, memory = CARDS[capability // 10]
    driver.set_active(AbsentDevice(capability))
    run, built = jit.JITFunction.run, list[dict[str, Any]]()

    def built_alone(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        built.append({"kernel": self.__name__, "shared": kernel.metadata.shared})
        return kernel

    jit.JITFunction.run = built_alone
    card = tuning.Card(name, capability // 10, memory)
    tuning.Card.of = classmethod(lambda cls, device: card)  # type: ignore[method-assign, assignment]
    prefill_forward._cudnn_is_faster = lambda *_: False  # type: ignore[assignment]
    # Widths of a common model, for the tiles that it gets; two query heads for each key head.
    block_forms.WIDTH, block_forms.HEADS, block_forms.KV_HEADS, block_forms.HEAD_WIDTH = 2048, 16, 8, 64
    block_forms.INNER, block_forms.ROWS = 1024, 4096
    found = {}
    for form in FORMS:
        decoder = in_bfloat16(decoder_of_form(form))
        if shape_unsupported_reason(decoder) is None:
            built.clear()
            launched(decoder, card.is_hopper)
            found[form] = list(built)
    print(json.dumps({"memory": memory, "forms": found}))


if __name__ == "__main__":
    main()
