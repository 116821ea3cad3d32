"""Parts of a captured prefill and of the captured vision tower, with their variants, at MolmoE-1B's shape.

python -m experiments.core_exp.bench_prefill_parts --check --parts --whole

Random weights in bfloat16, one request, device time of CUDA graphs: a part runs once in each of the 16 blocks, so that
every block's weights come from memory. `--check` compares logits, stored keys and features with the modules' first.
"""

import argparse
import copy
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from experiment_core_utils.models.molmoe import MolmoeConfig, MolmoeForConditionalGeneration
from experiment_core_utils.models.molmoe.captured_graphs import CapturedGraphs
from experiment_core_utils.models.molmoe.captured_prefill import CapturedPrefill
from experiment_core_utils.models.molmoe.captured_vision import CapturedVision
from experiment_core_utils.models.molmoe.engines import DecoderKnobs
from experiment_core_utils.models.molmoe.flops import vision_flops
from experiment_core_utils.models.molmoe.key_value_store import KeyValueStore
from experiment_core_utils.models.molmoe.packed_blocks import PackedDecoder, pack_decoder
from experiment_core_utils.models.molmoe.packed_vision import pack_vision
from experiment_core_utils.models.molmoe.prefill_kernels.grouped_product import Tile, grouped_product
from experiment_core_utils.models.molmoe.prefill_kernels.norms import combine_norm, norm, turn_and_store
from experiment_core_utils.models.molmoe.prefill_kernels.prefill import rotary_table
from experiment_core_utils.models.molmoe.prefill_kernels.routing import norm_route, plan_chunks

# Dense bfloat16 products per second that the card attains, as the project's other floors take it.
PEAK_FLOPS = 790e12
TOKENS, ROWS, TOP_K = 1053, 1088, 8
GATED_TILES = (
    Tile(128, 64, 128, 32, warps=8, stages=3),
    Tile(128, 64, 128, 32, warps=8, stages=3, bulk=True),
    Tile(128, 64, 128, 32, warps=8, stages=4, bulk=True),
    Tile(64, 64, 128, 32, warps=4, stages=3, bulk=True),
    Tile(128, 64, 64, 32, warps=8, stages=4, bulk=True),
    Tile(64, 64, 128, 32, warps=8, stages=3, bulk=True),
)
DOWN_TILES = (
    Tile(128, 64, 128, 32, warps=8, stages=3),
    Tile(128, 64, 128, 32, warps=8, stages=3, bulk=True),
    Tile(256, 64, 128, 32, warps=8, stages=3, bulk=True),
    Tile(128, 64, 128, 32, warps=4, stages=3, bulk=True),
    Tile(64, 64, 128, 32, warps=4, stages=4, bulk=True),
)


@dataclass(frozen=True)
class Part:
    """One row of the table: work on block `index`, and the products that it does."""

    name: str
    run: Callable[[int], Any]
    flops: float = 0.0


def built(blocks: int, vision_blocks: int, dtype: torch.dtype) -> MolmoeForConditionalGeneration:
    """Random weights made on the GPU; norms and biases too, so that nothing is multiplied by one or added as zero."""
    config = MolmoeConfig()
    config.text_config.num_hidden_layers = blocks
    config.vision_config.num_hidden_layers = vision_blocks
    torch.manual_seed(5)
    torch.set_default_dtype(dtype)
    with torch.device("cuda"):
        model = MolmoeForConditionalGeneration(config).eval()
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight) * 0.02)
    return model


def milliseconds(run: Callable[[], Any], times: int = 15) -> float:
    """Median device time, one run after the other."""
    for _ in range(2):
        run()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(times)]
    for started, ended in events:
        started.record()
        run()
        ended.record()
    torch.cuda.synchronize()
    return statistics.median(started.elapsed_time(ended) for started, ended in events)


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def crops_of(model: MolmoeForConditionalGeneration, crops: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels [K, 3, S, S] and masks [K, P]."""
    side, patches = model.config.vision_config.image_size, model.config.patches_per_side**2
    masks = torch.ones(crops, patches, device="cuda")
    masks[-1, ::3] = 0.0
    return torch.randn(crops, 3, side, side, device="cuda", dtype=model.dtype), masks


@torch.inference_mode()
def check() -> None:
    """Captured against the modules, in float32 and bfloat16; errors in bfloat16 beside the modules' own."""
    torch.backends.cudnn.allow_tf32 = False
    half = built(3, 10, torch.bfloat16)
    full = copy.deepcopy(half).float()
    for tokens, knobs in (
        (333, DecoderKnobs(8, (0, 1, 2))),
        (1053, DecoderKnobs(3, (0, 2))),
        (7, DecoderKnobs(1, (0, 1))),
    ):
        ids = torch.randint(0, 50000, (1, tokens), device="cuda")
        wanted, state = full.prefill(ids, top_k=knobs.top_k, active_blocks=knobs.blocks)
        theirs, _ = half.prefill(ids, top_k=knobs.top_k, active_blocks=knobs.blocks)
        for name, model in (("float32", full), ("bfloat16", half)):
            decoder = pack_decoder(model)
            store = KeyValueStore.allocate(decoder, 1100)
            engine = CapturedPrefill(decoder)
            embeddings = model.model.embed(ids, None)[0]
            engine.make_ready(knobs, store, tokens)
            ours = engine.prefill(embeddings, knobs, store)
            stored = store.values[len(knobs.blocks) - 1, 0, :, :tokens]
            values = relative(stored, state.past_key_values.layers[-1].values[0])
            same = bool(ours.argmax() == wanted.argmax()) and bool(store.next_tokens[0] == ours.argmax())
            print(
                f"check prefill {tokens} {knobs} {name}: logits {relative(ours, wanted):.1e} (modules in bfloat16 "
                f"{relative(theirs, wanted):.1e}), values {values:.1e}, same token {same}"
            )
    pixels, masks = crops_of(half, 3)
    pixels[1] = -1.0
    places = torch.zeros(1, 3, 144, dtype=torch.long, device="cuda")
    wanted = full.encode_image(pixels[None].float(), masks[None], places).pooler_output[0]
    theirs = half.encode_image(pixels[None], masks[None], places).pooler_output[0]
    for name, model in (("float32", full), ("bfloat16", half)):
        ours = CapturedVision(pack_vision(model)).encode(pixels, masks)
        print(f"check vision {name}: {relative(ours, wanted):.1e} (modules in bfloat16 {relative(theirs, wanted):.1e})")


def decoder_parts(decoder: PackedDecoder) -> Iterator[Part]:
    """Everything that a block runs, with variants of what costs most."""
    width, inner, experts = decoder.width, decoder.expert_width, decoder.num_experts
    blocks, eps = decoder.blocks, decoder.norm_eps
    hidden = torch.randn(ROWS, width, device="cuda", dtype=decoder.dtype)
    length = torch.tensor([TOKENS], device="cuda")
    store = KeyValueStore.allocate(decoder, ROWS)
    rotary = rotary_table(decoder.inverse_frequencies, ROWS)
    block = blocks[0]
    normed, chosen, shares = norm_route(hidden, block.ffn_norm, block.router, length, TOP_K, False, eps)
    packed = linear(normed, block.qkv)
    keys, values = store.keys[:, 0], store.values[:, 0]
    heads = decoder.num_heads
    queries = turn_and_store(packed, block.query_norm, block.key_norm, *rotary, keys[0], values[0], heads, eps)
    keys[1:], values[1:] = keys[0], values[0]
    sorted_rows = torch.randn(ROWS * TOP_K, inner, device="cuda", dtype=decoder.dtype)
    rows = torch.randn(ROWS * TOP_K, width, device="cuda", dtype=decoder.dtype)

    yield Part("qkv product", lambda i: linear(normed, blocks[i].qkv), 2.0 * ROWS * width * blocks[0].qkv.shape[0])
    yield Part(
        "norms, rotary, store",
        lambda i: turn_and_store(packed, block.query_norm, block.key_norm, *rotary, keys[i], values[i], heads, eps),
    )
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):

        def attend(i: int, backend: SDPBackend = backend) -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(
                    queries.transpose(0, 1)[None], keys[i][None], values[i][None], is_causal=True
                )

        yield Part(f"attention, {backend.name}", attend, 2.0 * ROWS**2 * width)
    yield Part("output product", lambda i: torch.addmm(hidden, normed, blocks[i].output.t()), 2.0 * ROWS * width**2)
    yield Part("norm alone", lambda i: norm(hidden, blocks[i].ffn_norm, length, eps))
    yield Part(
        "norm and router", lambda i: norm_route(hidden, blocks[i].ffn_norm, blocks[i].router, length, TOP_K, False, eps)
    )
    yield Part("plan", lambda i: plan_chunks(chosen, experts, 160))
    choices = float(TOKENS * TOP_K)
    for tile in GATED_TILES:
        order, chunks = plan_chunks(chosen, experts, tile.chunk)

        def gate_up(i: int, tile: Tile = tile, order: torch.Tensor = order, chunks: torch.Tensor = chunks) -> None:
            grouped_product(normed, blocks[i].gate_up, sorted_rows, order, chunks, TOP_K, True, tile)

        yield Part(f"gate and up, {_said(tile)}", gate_up, 4.0 * choices * width * inner)
    for tile in DOWN_TILES:
        order, chunks = plan_chunks(chosen, experts, tile.chunk)

        def down(i: int, tile: Tile = tile, order: torch.Tensor = order, chunks: torch.Tensor = chunks) -> None:
            grouped_product(sorted_rows, blocks[i].down, rows, order, chunks, TOP_K, False, tile)

        yield Part(f"down, {_said(tile)}", down, 2.0 * choices * width * inner)
    real = chosen[:TOKENS].flatten().long()
    order = real.sort(stable=True).indices
    ends = real.bincount(minlength=experts).cumsum(0).to(torch.int32)
    given = normed[order // TOP_K]
    middle = sorted_rows[: len(order)]
    yield Part("gather rows for torch", lambda i: normed[order // TOP_K])
    yield Part(
        "gate and up, torch",
        lambda i: torch._grouped_mm(given, blocks[i].gate_up.transpose(1, 2), offs=ends),
        4.0 * choices * width * inner,
    )
    both = torch._grouped_mm(given, blocks[0].gate_up.transpose(1, 2), offs=ends)
    yield Part("silu and product for torch", lambda i: silu(both[:, :inner]) * both[:, inner:])
    yield Part(
        "down, torch",
        lambda i: torch._grouped_mm(middle, blocks[i].down.transpose(1, 2), offs=ends),
        2.0 * choices * width * inner,
    )
    yield Part("combine and norm", lambda i: combine_norm(hidden, rows, shares, length, blocks[i].input_norm, eps))


def _said(tile: Tile) -> str:
    bulk = ", bulk" if tile.bulk else ""
    return f"strip {tile.strip}, {tile.head}+{tile.tail} rows, {tile.warps} warps, {tile.stages} stages{bulk}"


@torch.inference_mode()
def parts(decoder: PackedDecoder) -> None:
    """Microseconds a block of each part."""
    graphs = CapturedGraphs(limit=1)
    for part in decoder_parts(decoder):

        def every_block(part: Part = part) -> torch.Tensor:
            for index in range(len(decoder.blocks)):
                part.run(index)
            return decoder.final_norm

        try:
            graphs.capture(part.name, every_block)
        except RuntimeError as error:
            print(f"{part.name:70s} {str(error).splitlines()[0][:100]}", flush=True)
            continue
        ms = milliseconds(lambda part=part: graphs.replay(part.name)) / len(decoder.blocks)  # type: ignore[misc]
        print(f"{part.name:70s} {ms * 1e3:7.1f} us {part.flops / ms / 1e9:6.0f} TFLOP/s", flush=True)


@torch.inference_mode()
def whole(model: MolmoeForConditionalGeneration, decoder: PackedDecoder) -> None:
    """Milliseconds of whole stages, the copy of their inputs and the launch among them."""
    store = KeyValueStore.allocate(decoder, 1152)
    engine = CapturedPrefill(decoder)
    every = tuple(range(len(decoder.blocks)))
    for tokens in (1053, 300):
        embeddings = decoder.embedding[torch.randint(0, 50000, (tokens,), device="cuda")]
        for top_k in (8, 4, 1):
            knobs = DecoderKnobs(top_k, every)
            engine.make_ready(knobs, store, tokens)
            ms = milliseconds(lambda: engine.prefill(embeddings, knobs, store))  # noqa: B023
            print(f"prefill {tokens} tokens, top-k {top_k}: {ms:.2f} ms", flush=True)
    vision = CapturedVision(pack_vision(model))
    for crops in (2, 7, 13):
        pixels, masks = crops_of(model, crops)
        ms = milliseconds(lambda: vision.encode(pixels, masks))  # noqa: B023
        floor = vision_flops(model.config, crops) / PEAK_FLOPS * 1e3
        print(f"vision {crops} crops: {ms:.2f} ms, {ms / floor:.2f} x its floor of {floor:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--whole", action="store_true")
    arguments = parser.parse_args()
    if arguments.check:
        check()
    if arguments.parts or arguments.whole:
        model = built(16, 23, torch.bfloat16)
        decoder = pack_decoder(model)
        if arguments.whole:
            whole(model, decoder)
        if arguments.parts:
            parts(decoder)


if __name__ == "__main__":
    main()
