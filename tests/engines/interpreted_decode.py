"""The decode step's kernels against the modules in Triton's interpreter, printed as one line of JSON.

Run with TRITON_INTERPRET=1, which has to be set before Triton is imported.
"""

import json
from dataclasses import replace
from typing import Any

import torch

from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.expert_trace import ExpertRecord
from experiment_core_utils.engines.gpu.triton.batched_decode_forward import BatchBuffers, BatchedStep
from experiment_core_utils.engines.gpu.triton.decode_forward import DecodeStep, StepBuffers
from experiment_core_utils.engines.gpu.triton.gemv import small_batch_gemm
from experiment_core_utils.engines.gpu.triton.tuning import (
    BatchTiles,
    ProductTile,
    SmallBatchTile,
    StepTiles,
    Tile,
)
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.engines.weights import DecoderWeights
from experiment_core_utils.models.molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.models.molmoe.fused_weights import fuse_decoder_weights
from tests.conftest import tiny_config
from tests.models.molmoe.routers import router_logits

# Several blocks of rows, steps and parts of positions; the parts of the longer prompt need two turns.
TILES = StepTiles(
    qkv=Tile(8, 4, 3),
    attention=Tile(2, 4),
    splits=3,
    output=Tile(8, 4),
    gate_up=Tile(4, 4, 2),
    dense_gate_up=Tile(4, 4),
    down=Tile(16, 4),
    head=Tile(64, 4),
)
# The largest row block of an expert has two parts, and popular experts need several row blocks.
EXPERTS = ProductTile(16, 16, head=2, tail=1, warps=4, stages=2)
SHARED = SmallBatchTile(32, 16, warps=4, stages=2)
BATCH_TILES = BatchTiles(SHARED, TILES.attention, 3, SHARED, (EXPERTS, EXPERTS), SHARED)
MAX_SEQ_LEN = 12


def model_with(heads: int, kv_heads: int, width: int, experts: int, normalise: bool) -> MolmoeForConditionalGeneration:
    config = tiny_config()
    text = config.text_config
    text.num_attention_heads, text.num_key_value_heads = heads, kv_heads
    text.hidden_size, text.num_experts, text.norm_topk_prob = width, experts, normalise
    torch.manual_seed(7)
    model = MolmoeForConditionalGeneration(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                # Norms that are all ones could change places.
                weight.add_(torch.randn_like(weight) * 0.2)
    return model


def against_modules(
    model: MolmoeForConditionalGeneration, knobs: EngineKnobs, prompts: list[int], steps: int, together: bool = False
) -> dict:
    """Largest difference of a logit, whether tokens and experts are the modules', and the lengths at the end."""
    decoder = fuse_decoder_weights(model)
    kv_cache = KVCache.allocate(decoder, MAX_SEQ_LEN, len(prompts), len(knobs.blocks))
    states, tokens = [], []
    for request, length in enumerate(prompts):
        ids = torch.randint(6, 500, (1, length))
        logits, state = model.prefill(ids, top_k=knobs.top_k, active_blocks=knobs.blocks)
        for row, layer in enumerate(state.past_key_values.layers):
            kv_cache.keys[row, request, :, :length] = layer.keys[0]
            kv_cache.values[row, request, :, :length] = layer.values[0]
        states.append(state)
        tokens.append(logits.argmax(dim=-1, keepdim=True))
    kv_cache.set_lengths(prompts)
    kv_cache.next_tokens.copy_(torch.cat(tokens)[:, 0])
    step, record = any_step(decoder, kv_cache, together)
    worst, same, used, routed = 0.0, True, [], []
    for _ in range(steps):
        record.forget()
        logits = step.launch(knobs)
        used.append({block: ids.tolist() for block, ids in record.of_tokens(len(prompts)).items()})
        expected, likeliest = modules_step(model, knobs, tokens, states)
        routed.append(likeliest)
        tokens = list(expected.argmax(dim=-1, keepdim=True).split(1))
        worst = max(worst, float((logits - expected).abs().max()))
        same = same and kv_cache.next_tokens.tolist() == expected.argmax(dim=-1).tolist()
    return {
        "worst": worst,
        "same": same,
        "lengths": kv_cache.device_lengths.tolist(),
        "used": used,
        "routed": routed,
    }


def any_step(
    decoder: DecoderWeights, kv_cache: KVCache, together: bool
) -> tuple[DecodeStep | BatchedStep, ExpertRecord]:
    """The step that reads weights once for all requests, or once for each; and where it notes experts."""
    if together:
        shared = BatchBuffers.allocate(decoder, kv_cache.batch, MAX_SEQ_LEN, BATCH_TILES)
        return BatchedStep(decoder, kv_cache, shared, BATCH_TILES, use_pdl=False), shared.used
    buffers = StepBuffers.allocate(decoder, kv_cache.batch, MAX_SEQ_LEN, TILES)
    return DecodeStep(decoder, kv_cache, buffers, TILES, use_pdl=False), buffers.used


def many_rows() -> dict:
    """70 rows, which take two programs, times a weight of 40, which fills no block, added to ones."""
    given, weight = torch.randn(70, 32), torch.randn(40, 32)
    found, best = torch.ones(70, 40), (torch.empty(70, 2), torch.empty(70, 2, dtype=torch.int32))
    small_batch_gemm(given, weight, found, SHARED, use_pdl=False, best=best, added=True)
    expected = given @ weight.t() + 1
    blocks = [expected[:, :32].max(dim=1), expected[:, 32:].max(dim=1)]
    return {
        "worst": float((found - expected).abs().max()),
        "best": float((best[0] - torch.stack([block.values for block in blocks], dim=1)).abs().max()),
        "rows": best[1].tolist() == torch.stack([blocks[0].indices, blocks[1].indices + 32], dim=1).tolist(),
    }


def modules_step(
    model: MolmoeForConditionalGeneration, knobs: EngineKnobs, tokens: list[torch.Tensor], states: list[Any]
) -> tuple[torch.Tensor, dict[int, list[list[int]]]]:
    """Logits [B, V], and by block the B requests' experts with the largest logits, the largest first."""
    logits: list[torch.Tensor] = []
    likeliest: dict[int, list[list[int]]] = {block: [] for block in knobs.blocks}
    for token, state in zip(tokens, states, strict=True):
        with router_logits(model) as routed:
            logits.append(model.decode_step(token, state))
        assert set(routed) == set(knobs.blocks)
        for block, theirs in routed.items():
            likeliest[block].append(theirs[0].topk(knobs.top_k if block else model.default_top_k).indices.tolist())
    return torch.cat(logits), likeliest


def equal_logits(decoder: DecoderWeights) -> dict:
    """What is chosen where router and head are zero: every logit is 0, every expert's weight the same."""
    block = replace(decoder.blocks[0], router=torch.zeros_like(decoder.blocks[0].router))
    decoder = replace(decoder, blocks=(block,), head=torch.zeros_like(decoder.head))
    kv_cache = KVCache.allocate(decoder, MAX_SEQ_LEN)
    kv_cache.next_tokens.fill_(9)
    buffers = StepBuffers.allocate(decoder, 1, MAX_SEQ_LEN, TILES)
    DecodeStep(decoder, kv_cache, buffers, TILES, use_pdl=False).launch(EngineKnobs(4, (0,)))
    topk_weights = buffers.topk_weights[0].tolist()
    several = KVCache.allocate(decoder, MAX_SEQ_LEN, 2)
    several.next_tokens.fill_(9)
    step, record = any_step(decoder, several, together=True)
    step.launch(EngineKnobs(4, (0,)))
    return {
        "topk_ids": buffers.topk_ids[0].tolist(),
        "topk_weights": topk_weights,
        "token": kv_cache.next_tokens.tolist(),
        "together": [record.of_tokens(2)[0].tolist(), several.next_tokens.tolist()],
    }


def checked_tokens(decoder: DecoderWeights) -> dict:
    """The tokens that two requests chose, as the next step reads them and as they are checked."""
    heads = {name: decoder.head.clone() for name in ("finite", "infinite", "nan")}
    # One of the two rows is positive infinity, whatever the sign of what it is multiplied with.
    heads["infinite"][77, 0], heads["infinite"][78, 0] = float("inf"), -float("inf")
    heads["nan"].fill_(float("nan"))
    found = {}
    for name, head in heads.items():
        for together in (False, True):
            kv_cache = KVCache.allocate(decoder, MAX_SEQ_LEN, 2)
            kv_cache.next_tokens.fill_(9)
            any_step(replace(decoder, head=head), kv_cache, together)[0].launch(EngineKnobs(4, (0,)))
            found[f"{name}{' together' * together}"] = [kv_cache.next_tokens.tolist(), kv_cache.checked_tokens.tolist()]
    return {**found, "rows": len(decoder.head)}


@torch.inference_mode()
def main() -> None:
    plain = model_with(heads=2, kv_heads=2, width=32, experts=8, normalise=False)
    # 3 query heads on 1 key head, widths of 144 and 48, which fill no power of two, more experts than are compared in
    # pairs, and more slots than are read at once.
    grouped = model_with(heads=3, kv_heads=1, width=144, experts=150, normalise=True)
    print(
        json.dumps(
            {
                "plain": against_modules(plain, EngineKnobs(3, (0, 1, 3)), [8], 2),
                "grouped": against_modules(grouped, EngineKnobs(10, (0, 2)), [1, 7], 1),
                "together": against_modules(plain, EngineKnobs(3, (0, 1, 3)), [8, 1, 5, 3, 8], 2, together=True),
                "grouped together": against_modules(grouped, EngineKnobs(10, (0, 2)), [1, 7], 1, together=True),
                "many": many_rows(),
                "equal": equal_logits(fuse_decoder_weights(plain)),
                "equal of many": equal_logits(fuse_decoder_weights(grouped)),
                "checked": checked_tokens(fuse_decoder_weights(plain)),
            }
        )
    )


if __name__ == "__main__":
    main()
