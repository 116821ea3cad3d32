"""What each step towards the floor gains: MolmoE-1B's stages by modules, by own kernels, in graphs, overlapping.

    python -m experiments.benchmarks.execution_steps

Random weights in bfloat16, one request, on a GPU: a prompt of 1053 tokens, 13 crops, decode steps after that prompt.
Each row is the median device time of one run after the other, gaps between kernels among it, and how many times shorter
that is than the row before. Host's work that no kernel waits for is not in it.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from experiment_core_utils.config.command import run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.engine_model import EngineModel
from experiment_core_utils.engines.gpu.prefill import GraphedPrefill
from experiment_core_utils.engines.gpu.triton.decode_forward import DecodeStep, StepBuffers
from experiment_core_utils.engines.gpu.triton.tuning import Card, tiles_for
from experiment_core_utils.engines.gpu.vision import GraphedVision
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.engines.weights import DecoderWeights
from experiment_core_utils.models.common.cuda_graphs import CudaGraphPool, CudaGraphs, GraphCapturer, Reruns
from experiments.benchmarks.molmoe_1b import MAX_SEQ_LEN, POSITIONS, built, crops_of, filled_kv_cache, milliseconds

CROPS, DECODE_STEPS, LIMIT = 13, 20, 4
Step = tuple[str, Callable[[], Any]]


def recorders() -> Iterator[tuple[str, GraphCapturer]]:
    """The two ways to repeat work: launched kernel by kernel, and as one graph."""
    yield "own kernels, launched one by one", Reruns()
    yield "own kernels, one graph", CudaGraphs(torch.device("cuda", torch.cuda.current_device()), warm_ups=2)


def vision_steps(model: EngineModel) -> Iterator[Step]:
    """The steps of the tower and the connector."""
    pixels, masks = crops_of(model.modules, CROPS)
    places = torch.arange(CROPS * model.modules.config.features_per_crop, device="cuda").view(1, CROPS, -1)
    yield "modules", lambda: model.modules.encode_image(pixels[None], masks[None], places)
    for name, graph_capturer in recorders():
        engine = GraphedVision(model.fused_vision(), CudaGraphPool(LIMIT, graph_capturer))
        yield name, lambda engine=engine: engine.encode(pixels, masks)  # type: ignore[misc]


def prefill_steps(model: EngineModel, decoder: DecoderWeights, knobs: EngineKnobs) -> Iterator[Step]:
    """The steps of a prefill, from the prompt to the logits of its last token."""
    ids = torch.randint(6, 50000, (1, POSITIONS), device="cuda")
    yield "modules", lambda: model.modules.prefill(ids, **knobs.arguments)
    kv_cache, embeddings = KVCache.allocate(decoder, MAX_SEQ_LEN), decoder.embedding[ids[0]]
    for name, graph_capturer in recorders():
        engine = GraphedPrefill(decoder, CudaGraphPool(LIMIT, graph_capturer))
        yield name, lambda engine=engine: engine.prefill(embeddings, knobs, kv_cache)  # type: ignore[misc]


def decode_steps(model: EngineModel, decoder: DecoderWeights, knobs: EngineKnobs) -> Iterator[Step]:
    """The steps of decoding so many tokens after the prompt, each feeding the next."""
    ids = torch.randint(6, 50000, (1, POSITIONS), device="cuda")
    logits, state = model.modules.prefill(ids, **knobs.arguments)
    token = logits.argmax(dim=-1, keepdim=True)

    def by_modules() -> None:
        topk_ids = token
        for _ in range(DECODE_STEPS):
            topk_ids = model.modules.decode_step(topk_ids, state).argmax(dim=-1, keepdim=True)
        state.past_key_values.crop(POSITIONS)

    yield "modules", by_modules
    kv_cache, tiles = filled_kv_cache(decoder, 1), tiles_for(decoder, knobs.top_k, MAX_SEQ_LEN)
    buffers = StepBuffers.allocate(decoder, 1, MAX_SEQ_LEN, tiles)
    for name, graph_capturer in recorders():
        yield (
            name,
            _replayed(graph_capturer, DecodeStep(decoder, kv_cache, buffers, tiles, use_pdl=False), kv_cache, knobs),
        )
    if Card.of(decoder.device).is_hopper:
        step = DecodeStep(decoder, kv_cache, buffers, tiles, use_pdl=True)
        yield "the same, kernels overlapping", _replayed(graph_capturer, step, kv_cache, knobs)


def _replayed(
    graph_capturer: GraphCapturer, step: DecodeStep, kv_cache: KVCache, knobs: EngineKnobs
) -> Callable[[], None]:
    replay = graph_capturer.capture(lambda: step.launch(knobs))

    def steps() -> None:
        kv_cache.set_lengths([POSITIONS])
        for _ in range(DECODE_STEPS):
            replay()

    return steps


@torch.inference_mode()
def main() -> None:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--top_k", type=int, default=8)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU, and nothing here runs without one")
    model = built(16, 23, torch.bfloat16)
    decoder = model.fused_decoder()
    knobs = EngineKnobs(given.top_k, tuple(range(16)))
    stages = {
        f"vision, {CROPS} crops": (vision_steps(model), 1),
        f"prefill, {POSITIONS} tokens": (prefill_steps(model, decoder, knobs), 1),
        "decode, one token": (decode_steps(model, decoder, knobs), DECODE_STEPS),
    }
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, top-k {given.top_k}\n")
    print("| stage | step | ms | times shorter |\n| --- | --- | --- | --- |")
    for stage, (steps, prob) in stages.items():
        before: float | None = None
        for name, run in steps:
            ms = milliseconds(run) / prob
            gained = "" if before is None else f"{before / ms:.2f}"
            print(f"| {stage} | {name} | {ms:.3f} | {gained} |", flush=True)
            before = ms


if __name__ == "__main__":
    sys.exit(run_command(main))
