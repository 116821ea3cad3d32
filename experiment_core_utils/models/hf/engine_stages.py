"""The stages of a transformers model by the engines of its decoder and, where there is one, of its vision tower.

The modules make embeddings, with the features of pictures at their places, and positions; the engine takes the place of
the decoder's `forward`, and the modules' head makes the prompt's logits. Decode steps run in the engine alone. For
pictures see `engine_tower`.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from experiment_core_utils.engines.cuda_graphs import NO_GRAPHS, GraphCapturer
from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.gpu.triton.tuning import untuned_reason
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.engines.select import Engines, decoder_engines
from experiment_core_utils.engines.weights import DecoderWeights, RotaryTable
from experiment_core_utils.models.hf.decoder_description import fused_decoder
from experiment_core_utils.models.hf.engine_tower import EngineTower, ProvenTower
from experiment_core_utils.models.hf.generate import GenerationState, vision_entry
from experiment_core_utils.models.hf.graphed_stages import StageParts
from experiment_core_utils.models.hf.knobs.patches import replaced_method
from experiment_core_utils.primitives.device import release_cached_memory
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.records.requests import StageName
from experiment_core_utils.records.stages import CPU_BLOCKS, CUDA_GRAPH, KERNEL_GRAPH, MODULES, PLAIN, REFERENCE

STAGES_OF_DECODER: tuple[StageName, ...] = ("prefill", "decode")
# What a decoder is given that does not change what it computes, or that an engine computes with.
_KNOWN = frozenset(
    "input_ids inputs_embeds attention_mask position_ids past_key_values use_cache return_dict visual_pos_masks "
    "deepstack_visual_embeds cache_position logits_to_keep".split()
)


class EngineParts(StageParts):
    """The engines of a model's decoder, with one KV cache for all settings.

    Args:
        model: on the CPU in float32, or with `new_capturer` on a GPU.
        in_force: top-k (None for the model's own) and the active blocks.
        takes_plain: whether plain torch may run decode steps, in which it gains little over the modules.
        new_capturer: gives what makes graphs of a GPU's kernels, another one each time; None for the CPU's own kernels.
        graphed_tower: encodes pictures by graphs on a GPU; None where the modules do.

    Raises:
        ConfigurationError: its decoder is not of the form that engines compute, or no kernel runs it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        in_force: Callable[[], tuple[int | None, tuple[int, ...]]],
        takes_plain: bool = False,
        new_capturer: Callable[[], GraphCapturer] | None = None,
        graphed_tower: ProvenTower | None = None,
    ) -> None:
        on_cpu = new_capturer is None
        if on_cpu and (model.device.type != "cpu" or model.dtype != torch.float32):
            found = f"{str(model.dtype).removeprefix('torch.')} on {model.device}"
            raise ConfigurationError(f"engines run models of transformers in float32 on the CPU, not in {found}")
        self.model: Any = model
        self._in_force, self._new_capturer = in_force, new_capturer
        self.decoder: DecoderWeights = fused_decoder(model)
        # Weights that are views now lay there before.
        release_cached_memory(model.device)
        self.engines: Engines = self.new_engines()
        # Where graphs of the modules are the other choice, plain torch is none.
        for stage in ("decode",) if on_cpu else STAGES_OF_DECODER:
            if self.engines.ways[stage] in PLAIN and not (takes_plain and on_cpu):
                raise ConfigurationError(self.engines.reasons[stage])
        self.kv_cache = KVCache.allocate(self.decoder, max_seq_len=0)
        way, reason = MODULES if graphed_tower is None else CUDA_GRAPH, dict[StageName, str]()
        self.tower: ProvenTower | None = graphed_tower
        if on_cpu:
            self.tower, way, reason = _tower(model)
        found_ways = self.engines.ways if on_cpu else dict.fromkeys(STAGES_OF_DECODER, KERNEL_GRAPH)
        self.ways: Mapping[StageName, str] = {"vision": way, **found_ways}
        self.reasons: Mapping[StageName, str] = {**reason, **self.engines.reasons}
        self.is_captured = not on_cpu
        self.mode = ("reference" if self.ways["decode"] == REFERENCE else "cpu") if on_cpu else "kernels"
        self.names = self._name("prefill"), self._name("decode")
        is_on_card = model.device.type == "cuda"
        self.untuned = untuned_reason(torch.cuda.get_device_name(model.device)) if is_on_card else None

    def _name(self, stage: StageName) -> str:
        return f"{self.ways[stage]} engine of the {stage}"

    def knobs_in_force(self) -> EngineKnobs:
        """The setting in force as engines have it."""
        top_k, blocks = self._in_force()
        return EngineKnobs(self.decoder.default_top_k if top_k is None else top_k, blocks)

    def of_routed(self, topk_ids: Mapping[int, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The ids of blocks with experts alone, in the order in which the blocks ran."""
        routed = self.decoder.routed_blocks
        return tuple(ids for index, ids in topk_ids.items() if index in routed)

    def reserve(self, tokens: int) -> None:
        if not self.is_captured:
            self.engines.prefill.warm_up(self.knobs_in_force(), self.kv_cache, tokens)

    def forget_experts(self) -> None:
        """What is chosen from now on is not mixed with what other settings chose."""
        self.engines.prefill.forget_experts()
        self.engines.decode.forget_experts()

    @property
    def graphs_of(self) -> tuple[Hashable, ...]:  # type: ignore[override]
        """The KV cache's size decides; without graphs it is ()."""
        return () if self._new_capturer is None else (self.kv_cache.max_seq_len,)

    def new_engines(self) -> Engines:
        """Engines of the decoder, with their own graphs."""
        return decoder_engines(self.decoder, None if self._new_capturer is None else self._new_capturer())

    def release(self) -> None:
        self.kv_cache = KVCache.allocate(self.decoder, max_seq_len=0)
        if self._new_capturer is not None:
            # Their graphs hold the KV cache of before.
            self.engines = self.new_engines()

    def new_decode(self, max_seq_len: int) -> "EngineDecode":
        if self.kv_cache.max_seq_len < max_seq_len:
            self.release()
            self.kv_cache = KVCache.allocate(self.decoder, max_seq_len)
        return EngineDecode(self, self.knobs_in_force())

    def new_prefill(self) -> "EnginePrefill":
        # What an earlier prefill chose is not that of one that falls to the modules.
        self.engines.prefill.forget_experts()
        return EnginePrefill(self, self.knobs_in_force())


def _tower(model: PreTrainedModel) -> tuple[EngineTower | None, str, dict[StageName, str]]:
    """The kernels of the tower, the name of what runs pictures, and why that is not a CUDA graph."""
    if vision_entry(model) is None:
        return None, MODULES, {}
    try:
        return EngineTower(model), CPU_BLOCKS, {"vision": NO_GRAPHS}
    except ConfigurationError as error:
        return None, MODULES, {"vision": str(error)}


class EnginePrefill:
    """The prefill engine in the place of a decoder's `forward`, at one setting; see `DecoderInPlace`."""

    is_engine = True

    def __init__(self, parts: EngineParts, knobs: EngineKnobs) -> None:
        self._parts, self._knobs = parts, knobs
        self._decoder: Any = parts.model.get_decoder()

    @property
    def chosen_experts(self) -> tuple[torch.Tensor, ...]:
        """Ids [T, k] of each block with experts that ran, of the last prompt."""
        return self._parts.of_routed(self._parts.engines.prefill.topk_expert_ids)

    def has_graphs(self, names: Iterable[Hashable]) -> bool:
        """Whether what was captured, if anything, is for the KV cache that there is."""
        return tuple(names) == self._parts.graphs_of

    @contextmanager
    def in_place(self, captures_new: bool = False) -> Iterator[Sequence[Hashable]]:
        """A context in which the engine runs the decoder's prompts.

        Raises:
            ConfigurationError: the decoder is given something that no engine computes with.
        """
        with replaced_method(self._decoder, "forward", self._forward):
            yield self._parts.graphs_of

    def _forward(self, input_ids: Any = None, **given: Any) -> MoeModelOutputWithPast:
        parts, mask = self._parts, given.get("attention_mask")
        unknown = sorted(
            name for name, value in given.items() if name not in _KNOWN and value is not None and value is not False
        )
        if unknown:
            raise ConfigurationError(f"its decoder is given {', '.join(unknown)}, which engines do not know")
        if mask is not None and not bool(torch.as_tensor(mask == 1).all()):
            raise ConfigurationError("a prompt is padded or masked")
        embeddings = given.get("inputs_embeds")
        if embeddings is None:
            embeddings = F.embedding(input_ids, parts.decoder.embedding)
        if len(embeddings) > 1:
            raise ConfigurationError(f"an engine runs one prompt at a time, not {len(embeddings)}")
        parts.reserve(embeddings.shape[1])
        state = parts.engines.prefill.last_state(
            embeddings[0].contiguous(),
            self._knobs,
            parts.kv_cache,
            self._rotary(embeddings, given.get("position_ids")),
            _added(embeddings, given.get("visual_pos_masks"), given.get("deepstack_visual_embeds")),
        )
        # The caller need not be in inference mode, in which the state was made.
        cache = given.get("past_key_values")
        return MoeModelOutputWithPast(last_hidden_state=state[None].clone(), past_key_values=cache)

    def _rotary(self, embeddings: torch.Tensor, positions: torch.Tensor | None) -> RotaryTable | None:
        """The factors of positions [1, T] or [3 or 4, 1, T], whose last three rows count; None without any."""
        if positions is None:
            return None
        cosines, sines = self._decoder.rotary_emb(embeddings, positions if positions.dim() == 2 else positions[-3:])
        return RotaryTable.given(cosines[0], sines[0])


def _added(embeddings: torch.Tensor, places: torch.Tensor | None, features: Any) -> list[torch.Tensor]:
    """States [T, H] to add after each of the first blocks: features [N, H] at their places [1, T], else 0."""
    if not features:
        return []
    if places is None:
        raise ConfigurationError("its decoder is given features of pictures without places")
    # Without boolean indices, whose number the host would wait for.
    has_feature = places[0, :, None]
    which = (places[0].cumsum(0) - 1).clamp(min=0)
    return [torch.where(has_feature, each.to(embeddings.dtype).index_select(0, which), 0) for each in features]


class EngineDecode:
    """The decode engine at one setting, on the KV cache of `parts`; see `FixedDecode`."""

    compile_s = None  #: what its kernels took to be built is not of a setting
    mask_reason = None

    def __init__(self, parts: EngineParts, knobs: EngineKnobs) -> None:
        self._parts, self._knobs = parts, knobs

    @property
    def max_seq_len(self) -> int:
        """Tokens that fit into the cache, prompt and answer together."""
        return self._parts.kv_cache.max_seq_len

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self._parts.kv_cache.lengths[0]

    @property
    def chosen_experts(self) -> tuple[torch.Tensor, ...]:
        """Ids [1, k] of each block with experts that ran, of the last step."""
        return self._parts.of_routed(self._parts.engines.decode.topk_expert_ids)

    @property
    def cached(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of each active block without a window, each [KV, tokens so far, D]."""
        cache, length, blocks = self._parts.kv_cache, self.length, self._parts.decoder.blocks
        return [
            (cache.keys[row, 0, :, :length], cache.values[row, 0, :, :length])
            for row, index in enumerate(self._knobs.blocks)
            if blocks[index].window is None
        ]

    @property
    def checked_token(self) -> torch.Tensor:
        """The last token that was chosen [1], as `checked_tokens` gives it."""
        return self._parts.kv_cache.checked_tokens

    def prepare(self, state: GenerationState, logits: torch.Tensor, steps: int) -> int:
        """Take over a request; gives the tokens, prompt and answer together, up to which others are ready."""
        self.begin(state, logits)
        return self.max_seq_len

    def begin(self, state: GenerationState, logits: torch.Tensor) -> None:
        """Take over a request after its prefill, also after one by the modules, whose keys and values are copied.

        Args:
            logits: [1, V] of the prompt's last position.
        """
        ids, kwargs = state.steps[-1]
        cache, tokens = self._parts.kv_cache, ids.shape[1]
        self._parts.engines.decode.warm_up(self._knobs, cache)
        if state.filled_layers:
            self._take(state)
        cache.set_lengths([tokens])
        cache.put_likeliest(logits)
        positions = kwargs.get("position_ids")
        cache.set_rotary_offset(0 if positions is None else positions.flatten()[-1:] - tokens)

    def _take(self, state: GenerationState) -> None:
        """Copy keys and values of the modules' prefill; a block with a window has kept its last positions alone."""
        cache = self._parts.kv_cache
        tokens = state.steps[-1][0].shape[1]
        for row, layer in enumerate(layer for layer in state.cache.layers if layer.is_initialized):
            first = tokens - layer.keys.shape[2]
            cache.keys[row, 0, :, first:tokens] = layer.keys[0]
            cache.values[row, 0, :, first:tokens] = layer.values[0]

    def put_token(self, token: torch.Tensor) -> None:
        """Replace the last token [1, 1], which is the likeliest one otherwise."""
        self._parts.kv_cache.next_tokens.copy_(token.flatten())

    def step(self) -> torch.Tensor:
        """Logits [1, V] after the last token; the likeliest becomes the last token."""
        cache = self._parts.kv_cache
        if self.length == cache.max_seq_len:
            raise ConfigurationError(
                f"the cache has {cache.max_seq_len} slots and all are in use: make it ready for more"
            )
        logits = self._parts.engines.decode.step(self._knobs, cache)
        cache.note_step()
        return logits

    def rewind(self, steps: int) -> None:
        """Forget the last so many tokens of the cache; the caller must put the last token."""
        self._parts.kv_cache.rewind(steps)
