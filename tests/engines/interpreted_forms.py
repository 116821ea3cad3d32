"""The kernels of a GPU on every form of a block that they take, in Triton's interpreter beside float64: a line of JSON.

Run with TRITON_INTERPRET=1, which has to be set before Triton is imported.
"""

import json
from dataclasses import replace
from typing import Any

import torch

from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.expert_trace import ExpertRecord
from experiment_core_utils.engines.gpu.decode import shape_unsupported_reason
from experiment_core_utils.engines.gpu.triton import prefill_forward, tuning
from experiment_core_utils.engines.gpu.triton.decode_forward import DecodeStep, StepBuffers
from experiment_core_utils.engines.gpu.triton.tuning import StepTiles, Tile
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.engines.reference.decoder import ReferenceDecode, ReferencePrefill
from experiment_core_utils.engines.weights import DecoderWeights, RotaryTable
from tests.engines.cpu import block_forms
from tests.engines.cpu.block_forms import EXPERTS, FORMS, decoder_of_form, in_float64

# Few programs, each of which takes long here; the positions are in two parts.
TILES = StepTiles(
    qkv=Tile(128, 4, 2),
    attention=Tile(4, 4),
    splits=2,
    output=Tile(64, 4),
    gate_up=Tile(16, 4, 2),
    dense_gate_up=Tile(8, 4),
    down=Tile(64, 4),
    head=Tile(64, 4),
)
# More steps than a window is wide.
STEPS, TOKENS, PADDED = 7, 11, 16
# What a prompt's products take.
block_forms.WIDTH, block_forms.INNER = 80, 48
# Dense layers are 45 wide: three parts, the last of which is not full; experts of 48 are cut, too.
tuning.TUNINGS[tuning.DEFAULT] = replace(
    tuning.TUNINGS[tuning.DEFAULT], whole_columns=32, dense_columns=16, elementwise=Tile(rows=16, warps=4)
)
# Forms at other sizes: heads and rows that fill no power of two, rows longer than 4,096, more than 128 experts.
SHAPES: dict[str, tuple[str, int, dict[str, int]]] = {
    "5_heads_of_80": ("norms_of_each_head", 2, {"HEADS": 5, "KV_HEADS": 1, "HEAD_WIDTH": 80}),
    "14_heads_of_112": ("norms_of_all_heads", 2, {"HEADS": 14, "KV_HEADS": 2, "HEAD_WIDTH": 112}),
    "3_heads_of_208": ("no_rope_in_one", 2, {"HEADS": 3, "KV_HEADS": 3, "HEAD_WIDTH": 208}),
    "heads_of_18": ("window_of_5_in_two", 2, {"HEAD_WIDTH": 18}),
    "rows_of_5120": ("gated_shared", 2, {"WIDTH": 5120, "HEADS": 2, "KV_HEADS": 1, "HEAD_WIDTH": 16}),
    "heads_of_4160_in_all": ("norms_of_all_heads", 1, {"HEADS": 26, "KV_HEADS": 2, "HEAD_WIDTH": 160}),
    "260_experts": ("dense_first_then_shared", 10, {"EXPERTS": 260}),
}


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def decoded(decoder: DecoderWeights, knobs: EngineKnobs, steps: int = STEPS) -> dict[str, Any]:
    """Steps from an empty cache, which needs no prefill."""
    # Longer columns in fewer programs.
    tile = Tile(64 if decoder.width < 1024 else 1024, 4)
    tiles = replace(TILES, output=tile, down=tile)
    kv_cache = KVCache.allocate(decoder, steps, blocks=len(knobs.blocks))
    kv_cache.set_lengths([0])
    buffers = StepBuffers.allocate(decoder, 1, steps, tiles)
    step = DecodeStep(decoder, kv_cache, buffers, tiles, use_pdl=False)
    tokens, logits, used = [], [], []
    for _ in range(steps):
        tokens.append(kv_cache.next_tokens.clone())
        buffers.used.forget()
        logits.append(step.launch(knobs).clone())
        used.append(buffers.used.of_tokens(1))
    expected = in_float64(decoder, decoder.embedding[torch.cat(tokens)], knobs)
    return {
        "logits": error(torch.cat(logits), expected.logits),
        "keys": error(kv_cache.keys[:, 0], expected.keys),
        "values": error(kv_cache.values[:, 0], expected.values),
        "experts": all(
            torch.equal(torch.cat([each[block] for each in used]), ids) for block, ids in expected.topk_ids.items()
        ),
    }


def prefilled(decoder: DecoderWeights, knobs: EngineKnobs) -> dict[str, Any]:
    """A padded prompt."""
    torch.manual_seed(5)
    hidden = torch.randn(PADDED, decoder.width)
    kv_cache = KVCache.allocate(decoder, PADDED + 3, blocks=len(knobs.blocks))
    record = ExpertRecord.allocate(decoder, PADDED * decoder.num_experts)
    places = prefill_forward.PromptPlaces(
        torch.tensor([TOKENS]),
        kv_cache.keys[:, 0],
        kv_cache.values[:, 0],
        prefill_forward.rotary_table(decoder, PADDED),
        record.ids,
    )
    logits = prefill_forward.prefill(decoder, hidden.clone(), knobs.blocks, knobs.top_k, places)
    expected = in_float64(decoder, hidden[:TOKENS], knobs)
    last = knobs.blocks[-1]
    used = record.of_tokens(PADDED, last if decoder.blocks[last].router is not None else None)
    exact = {block: ids[-1:] if block == last else ids for block, ids in expected.topk_ids.items()}
    return {
        "logits": error(logits[0], expected.logits[-1]),
        "keys": error(kv_cache.keys[:, 0, :, :TOKENS], expected.keys),
        "values": error(kv_cache.values[:, 0, :, :TOKENS], expected.values),
        "experts": all(torch.equal(used[block][: len(ids)], ids) for block, ids in exact.items()),
    }


def with_pictures(decoder: DecoderWeights) -> dict[str, float]:
    """A prompt whose positions repeat, with states to add after its first two blocks; then steps behind it. Beside
    plain torch.
    """
    torch.manual_seed(6)
    knobs, hidden = EngineKnobs(1, (0, 2)), torch.randn(PADDED, decoder.width)
    added = [torch.randn(PADDED, decoder.width) for _ in range(2)]
    whole = RotaryTable.of(decoder, PADDED)
    table = whole.rows(torch.tensor([0, 1, 2, 2, 2, 3, 3, 4, 5, 6, 7]))
    half = decoder.head_width // 2
    halves = torch.zeros(2, PADDED, half)
    halves[0, :TOKENS], halves[1, :TOKENS] = table.cosine[:, 0, half:], table.sine[:, 0, half:]
    caches = [KVCache.allocate(decoder, PADDED + 3, blocks=2) for _ in range(2)]
    keys, values = caches[0].keys[:, 0], caches[0].values[:, 0]
    used = ExpertRecord.allocate(decoder, PADDED * EXPERTS).ids
    places = prefill_forward.PromptPlaces(torch.tensor([TOKENS]), keys, values, (halves[0], halves[1]), used, added)
    state = prefill_forward.last_state(decoder, hidden, knobs.blocks, 1, places)
    short = [each[:TOKENS] for each in added]
    exact = ReferencePrefill(decoder).last_state(hidden[:TOKENS], knobs, caches[1], table, short)
    step = DecodeStep(decoder, caches[0], StepBuffers.allocate(decoder, 1, PADDED + 3, TILES), TILES, use_pdl=False)
    reference, logits = ReferenceDecode(decoder), []
    for kv_cache in caches:
        kv_cache.set_lengths([TOKENS])
        kv_cache.set_rotary_offset(-3)
    for _ in range(2):
        logits.append((step.launch(knobs).clone(), reference.step(knobs, caches[1])))
        caches[1].note_step()
    found, expected = map(torch.cat, zip(*logits, strict=True))
    keys = error(caches[0].keys, caches[1].keys)
    return {"state": error(state, exact), "steps": error(found, expected), "keys": keys}


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {
        f"{form} with pictures": with_pictures(decoder_of_form(form)) for form in ("dense", "norms_of_each_head")
    }
    for form in FORMS:
        decoder = decoder_of_form(form)
        # Of some forms a block is left out.
        knobs = EngineKnobs(4, (0, 2)) if form in ("bias", "dense") else EngineKnobs(2, (0, 1, 2))
        found[form] = shape_unsupported_reason(decoder) or {
            "decode": decoded(decoder, knobs),
            "prefill": prefilled(decoder, knobs),
        }
    for shape, (form, top_k, sizes) in SHAPES.items():
        usual = {name: getattr(block_forms, name) for name in sizes}
        vars(block_forms).update(sizes)
        decoder, knobs = decoder_of_form(form), EngineKnobs(top_k, (0, 2))
        assert shape_unsupported_reason(decoder) is None
        found[shape] = {"decode": decoded(decoder, knobs, steps=3), "prefill": prefilled(decoder, knobs)}
        vars(block_forms).update(usual)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
