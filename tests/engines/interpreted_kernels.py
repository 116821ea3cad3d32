"""Triton's kernels against the modules in its interpreter: a line for each check with the largest relative error.

Run as `python -m tests.engines.interpreted_kernels` with TRITON_INTERPRET=1, which Triton reads when imported.
"""

from dataclasses import replace
from typing import Any

import torch

from experiment_core_utils.engines.expert_trace import ExpertRecord
from experiment_core_utils.engines.gpu.triton import prefill_forward as prefill_kernels
from experiment_core_utils.engines.gpu.triton import tuning
from experiment_core_utils.engines.gpu.triton import vision_forward as vision_kernels
from experiment_core_utils.engines.gpu.triton.grouped_gemm import align_blocks, expert_rows
from experiment_core_utils.engines.gpu.triton.most_diverse import choose_most_diverse
from experiment_core_utils.engines.gpu.triton.norms import gated, norm
from experiment_core_utils.engines.gpu.triton.routing import route
from experiment_core_utils.engines.gpu.triton.tuning import ProductTile, Tile
from experiment_core_utils.engines.gpu.vision import cut_patches, real_crops
from experiment_core_utils.engines.kept_tokens import choose_one_by_one
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.models.molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.models.molmoe.eager.paused_prefill import begin_prefill, finish_prefill
from experiment_core_utils.models.molmoe.fused_weights import fuse_decoder_weights, fuse_vision_weights
from tests.conftest import tiny_config
from tests.models.molmoe.routers import router_logits


def randomised(change: Any = lambda config: None) -> MolmoeForConditionalGeneration:
    """A tiny model none of whose weights is zero or one."""
    config = tiny_config()
    change(config)
    torch.manual_seed(11)
    model = MolmoeForConditionalGeneration(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return model


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def with_one_kv_head(config: Any) -> None:
    config.text_config.num_key_value_heads = 1
    config.text_config.norm_topk_prob = True


def with_small_pictures(config: Any) -> None:
    config.vision_config.image_size = 56
    config.vision_config.num_hidden_layers = 3
    config.vision_feature_layers = (-2, -3, -2)


def check_prefill(model: MolmoeForConditionalGeneration, tokens: int, padded: int, top_k: int, blocks: Any) -> None:
    """Logits, keys and values of a padded prompt against the modules'."""
    decoder = fuse_decoder_weights(model)
    ids = torch.randint(0, 100, (1, tokens))
    with router_logits(model) as routed:
        logits, state = model.prefill(ids, top_k=top_k, active_blocks=blocks)
    kv_cache = KVCache.allocate(decoder, padded + 3)
    hidden = torch.randn(padded, decoder.width)
    hidden[:tokens] = decoder.embedding[ids[0]]
    rotary = prefill_kernels.rotary_table(decoder, padded)
    length = torch.tensor([tokens])
    keys, values = kv_cache.keys[: len(blocks), 0], kv_cache.values[: len(blocks), 0]
    record = ExpertRecord.allocate(decoder, padded * 4 + 5)
    places = prefill_kernels.PromptPlaces(length, keys, values, rotary, record.ids)
    ours = prefill_kernels.prefill(decoder, hidden, blocks, top_k, places)
    print("logits", error(ours, logits))
    used = record.of_tokens(padded, blocks[-1])
    assert set(used) == set(routed) == set(blocks)
    for block, theirs in routed.items():
        likeliest = theirs.topk(top_k if block else 4).indices
        assert torch.equal(used[block][:tokens], likeliest[-1:] if block == blocks[-1] else likeliest)
        assert bool((used[block][tokens:] == decoder.num_experts).all())
    for position, layer in enumerate(state.past_key_values.layers):
        print(f"keys {position}", error(keys[position, :, :tokens], layer.keys[0]))
        print(f"values {position}", error(values[position, :, :tokens], layer.values[0]))
    print("slots behind the padding", float(keys[:, :, padded:].abs().max()))


def check_split(model: MolmoeForConditionalGeneration, pause: int, top_k: int, blocks: Any) -> None:
    """A prompt of 11 tokens with a row behind it, padded to 16: states at the pause, logits, and what is stored."""
    decoder = fuse_decoder_weights(model)
    tokens, padded, rest = 11, 16, blocks[pause:]
    ids, row = torch.randint(0, 100, (1, tokens)), torch.randn(1, 1, decoder.width)
    paused = begin_prefill(model, ids, None, pause, row)
    logits, state = finish_prefill(model, paused, top_k, blocks)
    kv_cache = KVCache.allocate(decoder, padded + 3)
    hidden = torch.randn(padded, decoder.width)
    hidden[:tokens], hidden[tokens] = decoder.embedding[ids[0]], row[0, 0]
    rotary = prefill_kernels.rotary_table(decoder, padded)
    keys, values = kv_cache.keys[:, 0], kv_cache.values[:, 0]
    used = ExpertRecord.allocate(decoder, padded * 4).ids
    places = prefill_kernels.PromptPlaces(torch.tensor([tokens + 1]), keys, values, rotary, used)
    ours = prefill_kernels.begin(decoder, hidden, pause, places)
    print("states", error(ours[: tokens + 1], torch.cat([paused.states, paused.appended], dim=1)[0]))
    places = prefill_kernels.PromptPlaces(torch.tensor([tokens]), keys[pause:], values[pause:], rotary, used)
    print("logits", error(prefill_kernels.finish(decoder, ours, rest, top_k, places), logits))
    for position, layer in enumerate(state.past_key_values.layers):
        print(f"keys {position}", error(keys[position, :, :tokens], layer.keys[0]))
        print(f"values {position}", error(values[position, :, :tokens], layer.values[0]))


def check_gated(columns: int) -> None:
    """37 rows of 176 gated units, so many of them a program, beside float64."""
    usual = tuning.TUNINGS[tuning.DEFAULT]
    tuning.TUNINGS[tuning.DEFAULT] = replace(usual, elementwise=Tile(columns, 4))
    # Of the last place: one where it is rounded once, a few where the parts are as exact as the result.
    for dtype, units in ((torch.float32, 8), (torch.bfloat16, 1)):
        gate_up = (3 * torch.randn(37, 352)).to(dtype)
        gate, up = gate_up.double().chunk(2, dim=1)
        exact = gate / (1 + (-gate).exp()) * up
        found = gated(gate_up)
        assert found.shape == exact.shape and found.dtype == dtype
        assert bool(((found - exact).abs() <= units * torch.finfo(dtype).eps * exact.abs()).all())
    tuning.TUNINGS[tuning.DEFAULT] = usual


def check_experts(model: MolmoeForConditionalGeneration, tile: ProductTile, tokens: int, top_k: int) -> None:
    """Chunks of every kind: with a second part, with one part, with a small one."""
    decoder = fuse_decoder_weights(model)
    block = decoder.blocks[1]
    hidden = torch.randn(tokens, decoder.width)
    mixture = model.all_blocks[1]
    theirs = mixture.post_attention_layernorm(hidden)
    length = torch.tensor([tokens - 2])
    normed = norm(hidden, block.ffn_norm, length, decoder.norm_eps)
    topk_ids = torch.empty(tokens, top_k, dtype=torch.int32)
    topk_weights = route(normed, block.router, length, topk_ids, decoder.normalise_top_k)
    print("norm", error(normed, theirs))
    mixture.mlp.gate.top_k = top_k
    _, their_shares, their_choice = mixture.mlp.gate(theirs)
    assert torch.equal(topk_ids[:-2].long(), their_choice[:-2])
    assert bool((topk_ids[-2:] == decoder.num_experts).all())
    print("topk_weights", error(topk_weights, their_shares))
    order, row_blocks = align_blocks(topk_ids, decoder.num_experts, tile.row_block)
    expected = topk_ids.flatten().sort(stable=True).indices[: (tokens - 2) * top_k]
    assert torch.equal(order[: len(expected)].long(), expected)
    total = int(row_blocks[0])
    assert int(row_blocks[1 : 1 + 3 * total].view(total, 3)[:, 2].sum()) == len(expected)
    rows = expert_rows(normed, block.gate_up, block.down, topk_ids, (tile, tile))
    summed = (rows.view(tokens, top_k, -1) * topk_weights[..., None]).sum(1)
    print("experts", error(summed[:-2], mixture.mlp.experts(theirs, their_choice, their_shares)[:-2]))


def check_most_diverse(features: int, chosen: int) -> None:
    """Some features stand twice and have the same distances; the first one counts, in plain torch, too."""
    rows = torch.randn(features, 3).round(decimals=1)
    rows[features // 2 :: 3] = rows[0].clone()
    distances = torch.cdist(rows, rows).fill_diagonal_(-torch.inf)
    places, expected = torch.full((2, chosen), -1)
    places[0] = expected[0] = features // 3
    choose_most_diverse(distances, places)
    choose_one_by_one(distances, expected)
    assert torch.equal(places, expected) and len(set(places.tolist())) == chosen


def check_vision(model: MolmoeForConditionalGeneration) -> None:
    """Three crops, one of them padding, with patches that are padding wholly and in part."""
    vision = fuse_vision_weights(model)
    side = model.config.vision_config.image_size
    patches = model.config.patches_per_side**2
    pixels = torch.randn(3, 3, side, side)
    pixels[1] = -1.0
    masks = torch.ones(3, patches)
    masks[0, ::3], masks[2, ::2], masks[1] = 0.0, 0.4, 0.0
    places = torch.zeros(1, 3, model.config.features_per_crop, dtype=torch.long)
    theirs = model.encode_image(pixels[None], masks[None], places).pooler_output[0]
    cut = cut_patches(pixels, vision.patch_side)
    inputs = torch.zeros(3 * patches, vision.patch_weight.shape[1])
    length = cut[0, 0, 0].numel()
    inputs[:, :length].view(cut.shape).copy_(cut)
    real = real_crops(inputs, 3, length, vision.pad_value)
    assert real.tolist() == [True, False, True]
    ours = vision_kernels.encode(vision, inputs, real, masks)
    print("features", error(ours, theirs))


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    check_prefill(randomised(), tokens=11, padded=16, top_k=2, blocks=(0, 2, 3))
    check_prefill(randomised(with_one_kv_head), tokens=16, padded=16, top_k=3, blocks=(0, 1, 2, 3))
    check_split(randomised(), pause=2, top_k=1, blocks=(0, 1, 3))
    check_split(randomised(with_one_kv_head), pause=1, top_k=2, blocks=(0,))
    for tile in (
        ProductTile(16, 16, 16, 16, 4, 2),
        ProductTile(8, 16, 4, 2, 4, 2),
        ProductTile(16, 16, 4, 2, 4, 2, bulk=True),
    ):
        check_experts(randomised(with_one_kv_head), tile, tokens=21, top_k=3)
    for features, chosen in ((37, 37), (64, 20), (1, 1), (130, 41)):
        check_most_diverse(features, chosen)
    for columns in (64, 4096):
        check_gated(columns)
    check_vision(randomised(with_small_pictures))


if __name__ == "__main__":
    main()
