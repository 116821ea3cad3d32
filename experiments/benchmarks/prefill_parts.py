"""Parts of a graphed prefill and of the graphed vision tower, with their variants, at MolmoE-1B's shape.

python -m experiments.benchmarks.prefill_parts --check --parts --whole

Random weights in bfloat16, one request, device time of CUDA graphs: a part runs once in each of the 16 blocks, so that
every block's weights come from memory. `--check` compares logits, stored keys and features with the modules' first.
"""

import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from experiment_core_utils.config.command import run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.engine_model import EngineModel
from experiment_core_utils.engines.gpu.prefill import GraphedPrefill
from experiment_core_utils.engines.gpu.vision import GraphedVision
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.engines.weights import DecoderWeights
from experiment_core_utils.models.common.cuda_graphs import CudaGraphPool
from experiment_core_utils.models.costs.vision_table import molmoe_vision
from experiment_core_utils.primitives.errors import ProfilerError
from experiments.benchmarks.molmoe_1b import (
    H200_FLOPS_PER_S,
    POSITIONS,
    built,
    crops_of,
    in_float32,
    milliseconds,
    relative,
)


@torch.inference_mode()
def check() -> None:
    """Compare graphed stages with the modules, in float32 and bfloat16; errors in bfloat16 beside the modules' own."""
    torch.backends.cudnn.allow_tf32 = False
    half = built(3, 10, torch.bfloat16)
    full = in_float32(half)
    for tokens, knobs in (
        (333, EngineKnobs(8, (0, 1, 2))),
        (1053, EngineKnobs(3, (0, 2))),
        (7, EngineKnobs(1, (0, 1))),
    ):
        ids = torch.randint(0, 50000, (1, tokens), device="cuda")
        (wanted, state), (theirs, _) = (model.modules.prefill(ids, **knobs.arguments) for model in (full, half))
        for name, model in (("float32", full), ("bfloat16", half)):
            decoder = model.fused_decoder()
            kv_cache = KVCache.allocate(decoder, 1100)
            engine = GraphedPrefill(decoder)
            embeddings = model.embedded(ids, None, decoder.embedding)
            engine.warm_up(knobs, kv_cache, tokens)
            ours = engine.prefill(embeddings, knobs, kv_cache)
            stored = kv_cache.values[len(knobs.blocks) - 1, 0, :, :tokens]
            values = relative(stored, state.past_key_values.layers[-1].values[0])
            same = bool(ours.argmax() == wanted.argmax()) and bool(kv_cache.next_tokens[0] == ours.argmax())
            print(
                f"check prefill {tokens} {knobs} {name}: logits {relative(ours, wanted):.1e} (modules in bfloat16 "
                f"{relative(theirs, wanted):.1e}), values {values:.1e}, same token {same}"
            )
    pixels, masks = crops_of(half.modules, 3)
    pixels[1] = -1.0
    places = torch.zeros(1, 3, 144, dtype=torch.long, device="cuda")
    wanted = full.modules.encode_image(pixels[None].float(), masks[None], places).pooler_output[0]
    theirs = half.modules.encode_image(pixels[None], masks[None], places).pooler_output[0]
    for name, model in (("float32", full), ("bfloat16", half)):
        ours = GraphedVision(model.fused_vision()).encode(pixels, masks)
        print(f"check vision {name}: {relative(ours, wanted):.1e} (modules in bfloat16 {relative(theirs, wanted):.1e})")


@torch.inference_mode()
def parts(title: str, wanted: Iterator[Any], blocks: int) -> None:
    """Print microseconds a block of each `PrefillPart`."""
    print(title)
    graphs = CudaGraphPool(limit=1)
    placeholder = torch.zeros(1, device="cuda")
    for part in wanted:

        def every_block(part: Any = part) -> torch.Tensor:
            for index in range(blocks):
                part.run(index)
            return placeholder

        try:
            graphs.capture(part.name, every_block)
        except (RuntimeError, ProfilerError) as error:
            print(f"{part.name:100s} {str(error).splitlines()[0][:100]}", flush=True)
            continue
        ms = milliseconds(lambda part=part: graphs.replay(part.name)) / blocks  # type: ignore[misc]
        print(f"{part.name:100s} {ms * 1e3:7.1f} us {part.flops / ms / 1e9:6.0f} TFLOP/s", flush=True)


@torch.inference_mode()
def whole(model: EngineModel, decoder: DecoderWeights) -> None:
    """Print milliseconds of whole stages, the copy of their inputs and the launch among them."""
    kv_cache = KVCache.allocate(decoder, 1152)
    engine = GraphedPrefill(decoder)
    every = tuple(range(len(decoder.blocks)))
    # What building the model left unused would otherwise be released between captures.
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    for tokens in (1053, 300):
        embeddings = decoder.embedding[torch.randint(0, 50000, (tokens,), device="cuda")]
        for top_k in (8, 4, 1):
            knobs = EngineKnobs(top_k, every)
            engine.warm_up(knobs, kv_cache, tokens)
            ms = milliseconds(lambda: engine.prefill(embeddings, knobs, kv_cache))  # noqa: B023
            print(f"prefill {tokens} tokens, top-k {top_k}: {ms:.2f} ms", flush=True)
    taken = free - torch.cuda.mem_get_info()[0]
    started = time.perf_counter()
    for count in range(1, len(every)):
        engine.warm_up(EngineKnobs(8, every[:count]), kv_cache, POSITIONS)
    seconds = (time.perf_counter() - started) / (len(every) - 1)
    more = (free - taken - torch.cuda.mem_get_info()[0]) / (len(every) - 1)
    print(f"memory: {taken / 2**20:.0f} MiB for six settings, {more / 2**20:.1f} MiB and {seconds:.2f} s for one more")
    vision = GraphedVision(model.fused_vision())
    for crops in (2, 7, 13):
        pixels, masks = crops_of(model.modules, crops)
        ms = milliseconds(lambda: vision.encode(pixels, masks))  # noqa: B023
        floor = crops * molmoe_vision(model.modules.config).flops_per_crop / H200_FLOPS_PER_S * 1e3
        print(f"vision {crops} crops: {ms:.2f} ms, {ms / floor:.2f} x its floor of {floor:.2f}", flush=True)


def main() -> None:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--whole", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU, and nothing here runs without one")
    if arguments.check:
        check()
    if arguments.parts or arguments.whole:
        model = built(16, 23, torch.bfloat16)
        decoder = model.fused_decoder()
        if arguments.whole:
            whole(model, decoder)
        if arguments.parts:
            from experiments.benchmarks.prefill_variants import decoder_parts, vision_parts

            parts("prefill", decoder_parts(decoder), len(decoder.blocks))
            vision = model.fused_vision()
            parts("vision, 13 crops", vision_parts(vision, 13), len(vision.blocks))


if __name__ == "__main__":
    sys.exit(run_command(main))
