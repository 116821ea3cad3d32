"""A MolmoE prefill in two parts, with a pause after a chosen block.

Appended rows come after the prompt: they see all of it and, because attention is causal, no token of the prompt sees
them. Their keys and values are dropped at the pause. So the prompt's states, positions and cache are those of a plain
prefill, whatever the rows are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask

from experiment_core_utils.engines.description import check_pause, check_rest
from experiment_core_utils.engines.kv_cache import suffix_mask, suffix_positions
from experiment_core_utils.engines.paused_runner import TracedPrefill
from experiment_core_utils.models.molmoe.modeling_molmoe import (
    DecodeState,
    MolmoeForConditionalGeneration,
    MolmoeImageFeatures,
)
from experiment_core_utils.primitives.private_apis import attention_implementation


@dataclass
class PausedPrefill:
    """A prefill of which the first blocks have run."""

    states: torch.Tensor  #: [B, T, H] of the prompt after the last block that ran, not normalised
    appended: torch.Tensor  #: [B, R, H] of the rows that were appended, at the same place; R may be 0
    cache: Cache  #: of the prompt alone, in the blocks that ran
    blocks_run: int  #: how many did: block 0 to `blocks_run` - 1


def begin_prefill(
    model: MolmoeForConditionalGeneration,
    input_ids: torch.Tensor,
    features: MolmoeImageFeatures | None,
    blocks_run: int,
    appended: torch.Tensor | None = None,
) -> PausedPrefill:
    """Run the first blocks, every one of them with the model's own number of experts.

    Puts the whole model in force (`reset_knobs`).

    Args:
        input_ids: [B, T], no padding.
        blocks_run: 1 to the number of blocks.
        appended: embeddings [B, R, H] of the rows after the prompt; None for none.

    Raises:
        ConfigurationError: `blocks_run` is not possible.
    """
    check_pause(blocks_run, model.num_total_blocks)
    model.reset_knobs()
    embedded = model.model.embed(input_ids, features)
    length = embedded.shape[1]
    if appended is not None:
        embedded = torch.cat([embedded, appended.to(embedded.dtype)], dim=1)
    cache = DynamicCache(config=model.config.text_config)
    states = run_blocks(model, range(blocks_run), embedded, cache)
    for layer in cache.layers[:blocks_run]:
        assert layer.keys is not None and layer.values is not None
        layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]
    return PausedPrefill(states[:, :length], states[:, length:], cache, blocks_run)


def finish_prefill(
    model: MolmoeForConditionalGeneration, paused: PausedPrefill, top_k: int, active_blocks: Sequence[int]
) -> tuple[torch.Tensor, DecodeState]:
    """Run the active blocks that have not run yet; logits [B, V] of the last position, and the decode's state.

    Decode steps run every block of the setting with `top_k`, also those that the prefill ran before the pause; block 0
    keeps the model's own number in both.

    Raises:
        ConfigurationError: a setting that is not possible, or that leaves out a block that has run.
    """
    ran, blocks = paused.blocks_run, tuple(active_blocks)
    check_rest(blocks, ran)
    model.set_knobs(top_k, blocks)
    # One layer for each block that runs, as in a plain prefill.
    del paused.cache.layers[len(blocks) :]
    states = run_blocks(model, blocks[ran:], paused.states, paused.cache)
    normed = model.model.language_model.norm(states[:, -1])
    return model.lm_head(normed), DecodeState(paused.cache, model.active_setting)


def trace_prefill(
    model: MolmoeForConditionalGeneration,
    input_ids: torch.Tensor,
    features: MolmoeImageFeatures | None,
    blocks: int,
    rows: torch.Tensor,
) -> TracedPrefill:
    """The states that `begin_prefill` would give after 1, 2, … `blocks` blocks with each of the rows, in one pass.

    Args:
        input_ids: [1, T].
        rows: embeddings [R, H].
    """
    model.reset_knobs()
    states = model.model.embed(input_ids, features)
    appended = rows.to(states.dtype)[:, None]
    cache = DynamicCache(config=model.config.text_config)
    last, suffix = [], []
    for block in range(blocks):
        states = run_blocks(model, [block], states, cache)
        appended = run_blocks(model, [block], appended, SuffixedPrompt(cache, len(rows)), start=states.shape[1])
        last.append(states[0, -1])
        suffix.append(appended[:, 0])
    return TracedPrefill(torch.stack(last), torch.stack(suffix))


class SuffixedPrompt:
    """A cache for a suffix of a prompt; the suffix is not kept.

    Args:
        rows: so many are appended, each alone; they are a batch.
    """

    def __init__(self, prompt: Cache, rows: int) -> None:
        self._prompt = prompt
        self._rows = rows

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add keys and values for one call, in the interface of transformers' caches."""
        stored = self._prompt.layers[layer]
        assert stored.keys is not None and stored.values is not None
        return (
            torch.cat([stored.keys.expand(self._rows, -1, -1, -1), keys], dim=-2),
            torch.cat([stored.values.expand(self._rows, -1, -1, -1), values], dim=-2),
        )


def run_blocks(
    model: MolmoeForConditionalGeneration,
    blocks: Sequence[int],
    states: torch.Tensor,
    cache: Cache | SuffixedPrompt,
    start: int = 0,
) -> torch.Tensor:
    """States [B, T, H] after these blocks, as one prompt from position `start`; for T = 1 all of the cache is seen."""
    positions = torch.arange(start, start + states.shape[1], device=states.device)[None]
    config = model.model.language_model.config
    # Without the cache and positions: it is as long as the prompt already, and positions are searched for packed ones.
    mask = create_causal_mask(
        config=config, inputs_embeds=states, attention_mask=None, past_key_values=None, position_ids=None
    )
    return run_placed(model, blocks, states, cache, positions, mask)


def run_placed(
    model: MolmoeForConditionalGeneration,
    blocks: Sequence[int],
    states: torch.Tensor,
    cache: Cache | SuffixedPrompt,
    positions: torch.Tensor,
    mask: Any,
) -> torch.Tensor:
    """States at positions [1, T] after these blocks: [B, T, H], with whatever mask the attention takes."""
    rotations = model.model.language_model.rotary_emb(states, positions)
    for block in blocks:
        states = model.all_blocks[block](
            states,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=rotations,
            past_key_values=cache,
            use_cache=True,
        )
    return states


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
    """The result of `trace_prefill` for each prompt; where the attention takes no mask of ours, by `trace_prefill`
    itself.

    Args:
        shared: [1, T], their first tokens, at least one; the features' places are among them.
        texts: [S] of each, the tokens after them; S may be 0.
        blocks: P, from the first on.
        rows: embeddings [R, H].
    """
    before = shared.shape[1] - 1
    if not before or attention_implementation(model.config.text_config) not in TAKE_ANY_MASK:
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
    """Embeddings [1, S, H] of a text and its rows, as a suffix of what the cache contains and keeps."""
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
