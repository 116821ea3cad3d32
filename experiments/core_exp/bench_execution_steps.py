"""What each step towards the floor gains: MolmoE-1B's stages by modules, by own kernels, in graphs, overlapping.

    python -m experiments.core_exp.bench_execution_steps

Random weights in bfloat16, one request, on a GPU: a prompt of 1053 tokens, 13 crops, decode steps behind that prompt.
Each row is the median device time of one run after the other, gaps between kernels among it, and how many times shorter
that is than the row before. Host's work that no kernel waits for is not in it.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from experiment_core_utils.config.command import run_command
from experiment_core_utils.models.graph_capture import CudaGraphs, Recorder, Reruns
from experiment_core_utils.models.molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.models.molmoe.captured_decode import FIRST_OVERLAPPING
from experiment_core_utils.models.molmoe.captured_graphs import CapturedGraphs
from experiment_core_utils.models.molmoe.captured_prefill import CapturedPrefill
from experiment_core_utils.models.molmoe.captured_vision import CapturedVision
from experiment_core_utils.models.molmoe.engines import DecoderKnobs
from experiment_core_utils.models.molmoe.kernels.decode_step import DecodeStep, StepBuffers
from experiment_core_utils.models.molmoe.kernels.tiles import tiles_for
from experiment_core_utils.models.molmoe.key_value_store import KeyValueStore
from experiment_core_utils.models.molmoe.packed_blocks import PackedDecoder, pack_decoder
from experiment_core_utils.models.molmoe.packed_vision import pack_vision
from experiments.core_exp.bench_decode_kernels import POSITIONS, SLOTS, filled_store
from experiments.core_exp.bench_prefill_parts import built, crops_of, milliseconds

CROPS, DECODE_STEPS, LIMIT = 13, 20, 4
Step = tuple[str, Callable[[], Any]]


def recorders() -> Iterator[tuple[str, Recorder]]:
    """The same work launched kernel by kernel, and as one graph."""
    yield "own kernels, launched one by one", Reruns()
    yield "own kernels, one graph", CudaGraphs(torch.device("cuda", torch.cuda.current_device()), warm_ups=2)


def vision_steps(model: MolmoeForConditionalGeneration) -> Iterator[Step]:
    """The tower and the connector."""
    pixels, masks = crops_of(model, CROPS)
    places = torch.arange(CROPS * model.config.features_per_crop, device="cuda").view(1, CROPS, -1)
    yield "modules", lambda: model.encode_image(pixels[None], masks[None], places)
    for name, recorder in recorders():
        engine = CapturedVision(pack_vision(model), CapturedGraphs(LIMIT, recorder))
        yield name, lambda engine=engine: engine.encode(pixels, masks)  # type: ignore[misc]


def prefill_steps(model: MolmoeForConditionalGeneration, decoder: PackedDecoder, knobs: DecoderKnobs) -> Iterator[Step]:
    """Prompt to the logits of its last token."""
    ids = torch.randint(6, 50000, (1, POSITIONS), device="cuda")
    yield "modules", lambda: model.prefill(ids, top_k=knobs.top_k, active_blocks=knobs.blocks)
    store, embeddings = KeyValueStore.allocate(decoder, SLOTS), decoder.embedding[ids[0]]
    for name, recorder in recorders():
        engine = CapturedPrefill(decoder, CapturedGraphs(LIMIT, recorder))
        yield name, lambda engine=engine: engine.prefill(embeddings, knobs, store)  # type: ignore[misc]


def decode_steps(model: MolmoeForConditionalGeneration, decoder: PackedDecoder, knobs: DecoderKnobs) -> Iterator[Step]:
    """So many tokens behind the prompt, each feeding the next."""
    ids = torch.randint(6, 50000, (1, POSITIONS), device="cuda")
    logits, state = model.prefill(ids, top_k=knobs.top_k, active_blocks=knobs.blocks)
    token = logits.argmax(dim=-1, keepdim=True)

    def by_modules() -> None:
        chosen = token
        for _ in range(DECODE_STEPS):
            chosen = model.decode_step(chosen, state).argmax(dim=-1, keepdim=True)
        state.past_key_values.crop(POSITIONS)

    yield "modules", by_modules
    store, tiles = filled_store(decoder, 1), tiles_for(decoder, knobs.top_k, SLOTS)
    buffers = StepBuffers.allocate(decoder, 1, SLOTS, tiles)
    for name, recorder in recorders():
        yield name, _replayed(recorder, DecodeStep(decoder, store, buffers, tiles, overlap=False), store, knobs)
    if torch.cuda.get_device_capability()[0] >= FIRST_OVERLAPPING:
        step = DecodeStep(decoder, store, buffers, tiles, overlap=True)
        yield "the same, kernels overlapping", _replayed(recorder, step, store, knobs)


def _replayed(recorder: Recorder, step: DecodeStep, store: KeyValueStore, knobs: DecoderKnobs) -> Callable[[], None]:
    replay = recorder.record(lambda: step.launch(knobs))

    def steps() -> None:
        store.set_lengths([POSITIONS])
        for _ in range(DECODE_STEPS):
            replay()

    return steps


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--top_k", type=int, default=8)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU, and nothing here runs without one")
    model = built(16, 23, torch.bfloat16)
    decoder = pack_decoder(model)
    knobs = DecoderKnobs(given.top_k, tuple(range(16)))
    stages = {
        f"vision, {CROPS} crops": (vision_steps(model), 1),
        f"prefill, {POSITIONS} tokens": (prefill_steps(model, decoder, knobs), 1),
        "decode, one token": (decode_steps(model, decoder, knobs), DECODE_STEPS),
    }
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, top-k {given.top_k}\n")
    print("| stage | step | ms | times shorter |\n| --- | --- | --- | --- |")
    for stage, (steps, share) in stages.items():
        before: float | None = None
        for name, run in steps:
            ms = milliseconds(run) / share
            gained = "" if before is None else f"{before / ms:.2f}"
            print(f"| {stage} | {name} | {ms:.3f} | {gained} |", flush=True)
            before = ms


if __name__ == "__main__":
    sys.exit(run_command(main))
