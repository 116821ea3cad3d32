"""In: prompts that begin alike and rows; out: what is behind each of the first blocks, by the model's modules.

What the prompts share runs once. A text and all rows behind it then pass a block together, as one request.
"""

from collections.abc import Sequence

import torch
from transformers import DynamicCache

from experiment_core_utils.models.molmoe.modeling_molmoe import MolmoeForConditionalGeneration, MolmoeImageFeatures
from experiment_core_utils.models.molmoe.prompt_tail import suffix_mask, suffix_positions
from experiment_core_utils.models.molmoe.split_prefill import (
    SuffixedPrompt,
    TracedPrefill,
    run_blocks,
    run_placed,
    trace_prefill,
)

# Implementations of transformers that add a mask to their scores, whatever it hides.
TAKE_ANY_MASK = ("eager", "sdpa")


def trace_prompts(
    model: MolmoeForConditionalGeneration,
    shared: torch.Tensor,
    features: MolmoeImageFeatures | None,
    texts: Sequence[torch.Tensor],
    blocks: int,
    rows: torch.Tensor,
) -> list[TracedPrefill]:
    """What `trace_prefill` gives for each of the prompts; where the attention takes no mask of ours, by that itself.

    Args:
        shared: [1, T], their first tokens, at least one; the features' places are among them.
        texts: [S] of each, the tokens behind them; S may be 0.
        blocks: P, from the first on.
        rows: embeddings [R, H].
    """
    before = shared.shape[1] - 1
    if not before or model.config.text_config._attn_implementation not in TAKE_ANY_MASK:
        prompts = (torch.cat([shared, text[None]], dim=1) for text in texts)
        return [trace_prefill(model, prompt, features, blocks, rows) for prompt in prompts]
    model.reset_knobs()
    embedded = model.model.embed(shared, features)
    cache = DynamicCache(config=model.config.text_config)
    run_blocks(model, range(blocks), embedded[:, :before], cache)
    return [
        _suffix_states(
            model, cache, torch.cat([embedded[:, before:], model.model.embed(text[None], None)], dim=1), blocks, rows
        )
        for text in texts
    ]


def _suffix_states(
    model: MolmoeForConditionalGeneration, cache: DynamicCache, text: torch.Tensor, blocks: int, rows: torch.Tensor
) -> TracedPrefill:
    """Embeddings [1, S, H] of a text and its rows, behind what the cache holds and goes on holding."""
    shared, length = cache.get_seq_length(), text.shape[1]
    states = torch.cat([text, rows.to(text.dtype)[None]], dim=1)
    hidden = ~suffix_mask(shared, length, len(rows)).to(text.device)
    mask = torch.zeros(hidden.shape, dtype=text.dtype, device=text.device)
    mask = mask.masked_fill_(hidden, torch.finfo(text.dtype).min)[None, None]
    positions = suffix_positions(shared, length, len(rows)).to(text.device)[None]
    suffix = []
    for block in range(blocks):
        states = run_placed(model, [block], states, SuffixedPrompt(cache, 1), positions, mask)
        suffix.append(states[0])
    found = torch.stack(suffix)
    return TracedPrefill(found[:, length - 1], found[:, length:])
