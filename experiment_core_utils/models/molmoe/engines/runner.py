"""The three stages of a MolmoE model run by engines, on a KV cache of fixed size.

There is one cache, and so one state at a time: a state can be decoded from until another request is prefilled. The
cache, CUDA graphs and rotary factors are made by `warm_up`, outside of what is measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch.nn import functional as F

from experiment_core_utils.config.parts import ExecutionMode
from experiment_core_utils.models.common.cuda_graphs import refuse_other_logits
from experiment_core_utils.models.common.finite_logits import refuse_not_finite
from experiment_core_utils.models.common.greedy import AsyncStages
from experiment_core_utils.models.common.request_slot import PrefilledRequest, RequestSlot
from experiment_core_utils.models.interface import CUDA_GRAPH, MODULES, PLAIN, REFERENCE
from experiment_core_utils.models.molmoe.engines.api import EngineKnobs
from experiment_core_utils.models.molmoe.engines.expert_trace import (
    count_experts,
    last_experts_agree,
    refuse_other_experts,
)
from experiment_core_utils.models.molmoe.engines.gpu.triton.tuning import untuned_reason
from experiment_core_utils.models.molmoe.engines.kv_cache import KVCache
from experiment_core_utils.models.molmoe.engines.reference.decoder import ReferenceDecode, ReferencePrefill
from experiment_core_utils.models.molmoe.engines.select import choose_engines, decoder_engines
from experiment_core_utils.models.molmoe.engines.weights import fuse_decoder_weights
from experiment_core_utils.models.molmoe.modeling_molmoe import MolmoeForConditionalGeneration, MolmoeImageFeatures
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.records.requests import KnobProof, StageName

# The KV cache grows in these steps, so that longer requests seldom need a new one; graphs are lost with the old one.
SLOT_STEP = 512
# Room for answers to a request that was not warmed up.
UNANNOUNCED_TOKENS = 64


@dataclass(frozen=True)
class Executed:
    """How a model's stages run."""

    #: `eager`, by the modules; else by what runs decode steps: `graph`, `cpu` (C++) or `reference` (plain torch on
    #: fused weights)
    mode: str
    #: why it is not `graph` in all stages though that was requested; None where it is, or was not requested
    reason: str | None
    stages: Mapping[StageName, str]  #: the name of the engine of each stage; names are in `models.interface`
    #: a note that kernels run on another card than the one that they were tuned on; None where they do not
    untuned: str | None = None


def engine_stages(
    model: MolmoeForConditionalGeneration, requested: ExecutionMode, eager_reason: str | None = None
) -> tuple["EngineStages | None", Executed]:
    """The stages by engines, and how they run, for the record; None where the modules run.

    `auto` takes engines where every stage has one that is more than plain torch, or weights so large that plain torch
    is as fast.
    """
    eagerly = dict.fromkeys(get_args(StageName), MODULES)
    if requested == "eager" or eager_reason is not None:
        return None, Executed("eager", eager_reason, eagerly)
    try:
        stages = EngineStages(model)
    except ConfigurationError as error:
        return None, Executed("eager", str(error), eagerly)
    ways, reasons = stages.engines.ways, stages.engines.reasons
    by_reason: dict[str, list[str]] = {}
    for stage, reason in reasons.items():
        by_reason.setdefault(reason, []).append(stage)
    message = "; ".join(f"{', '.join(named)}: {reason}" for reason, named in by_reason.items())
    if requested == "auto" and any(way in PLAIN and stage not in stages.engines.large for stage, way in ways.items()):
        return None, Executed("eager", message, eagerly)
    mode = {CUDA_GRAPH: "graph", REFERENCE: "reference"}.get(ways["decode"], "cpu")
    untuned = untuned_reason(torch.cuda.get_device_name(stages.decoder.device)) if stages.is_graphed else None
    return stages, Executed(mode, message or None, ways, untuned)


class EngineStages:
    """A MolmoE model's stages without its modules.

    Attributes:
        decoder: its weights.
        engines: the engine of each stage.
        kv_cache: that the next call uses; a longer request makes another one.
        slot: which request it contains.

    Raises:
        ConfigurationError: the decoder's weights cannot be fused, or on a GPU its steps cannot be captured.
    """

    def __init__(self, model: MolmoeForConditionalGeneration) -> None:
        self._model = model
        self.decoder = fuse_decoder_weights(model)
        self.engines = choose_engines(model, self.decoder)
        self.kv_cache = KVCache.allocate(self.decoder, max_seq_len=0)
        self.slot = RequestSlot[EngineKnobs]("the KV cache")
        self._warmed_up: set[EngineKnobs] = set()

    @property
    def is_graphed(self) -> bool:
        """Whether decode steps are graphed, so that the host need not wait for each."""
        return self.engines.ways["decode"] == CUDA_GRAPH

    def warm_up(self, knobs: EngineKnobs, inputs: Mapping[str, Any], max_new_tokens: int) -> None:
        """Prepare everything that a request of this shape needs at these knobs; earlier states become invalid."""
        tokens = inputs["input_ids"].shape[1]
        self._free_memory(tokens + max_new_tokens)
        if "pixel_values" in inputs and self.engines.vision is not None:
            self.engines.vision.warm_up(inputs["pixel_values"].shape[1])
        self.engines.prefill.warm_up(knobs, self.kv_cache, tokens)
        self.engines.decode.warm_up(knobs, self.kv_cache)
        self.slot.release()
        self._warmed_up.add(knobs)

    def give_up(self, knobs: EngineKnobs) -> None:
        """Note that the knobs cannot run here; release the KV cache with its graphs where no others were warmed up."""
        self._warmed_up.discard(knobs)
        self.release_unused()

    def release_unused(self) -> None:
        """Invalidate all states; release the KV cache with all graphs where no knobs were warmed up."""
        self.slot.release()
        if not self._warmed_up:
            self._replace_kv_cache(KVCache.allocate(self.decoder, max_seq_len=0))

    def reserve(self, max_seq_len: int) -> None:
        """Make room for a request of `max_seq_len` tokens; earlier states become invalid."""
        self._free_memory(max_seq_len)
        self.slot.release()

    def _free_memory(self, max_seq_len: int) -> None:
        """Enlarge the KV cache where it is too short; keys and values of the current state are copied."""
        if max_seq_len <= self.kv_cache.max_seq_len:
            return
        old, wanted = self.kv_cache, -(-max_seq_len // SLOT_STEP) * SLOT_STEP
        kv_cache = KVCache.allocate(self.decoder, wanted)
        if self.slot.has_prefilled_request:
            kv_cache.keys[:, :, :, : old.max_seq_len] = old.keys
            kv_cache.values[:, :, :, : old.max_seq_len] = old.values
            kv_cache.set_lengths(old.lengths)
        self._replace_kv_cache(kv_cache)

    def _replace_kv_cache(self, kv_cache: KVCache) -> None:
        self.kv_cache = kv_cache
        if self.is_graphed:
            # Their graphs contain the addresses of the old KV cache.
            made = decoder_engines(self.decoder)
            self.engines = replace(self.engines, prefill=made.prefill, split=made.split, decode=made.decode)

    def encode_image(self, inputs: Mapping[str, Any]) -> MolmoeImageFeatures | None:
        """See `StagedModel.encode_image`."""
        if "pixel_values" not in inputs:
            return None
        if self.engines.vision is None:
            return self._model.encode_image(inputs["pixel_values"], inputs["image_masks"], inputs["image_input_idx"])
        features = self.engines.vision.encode(inputs["pixel_values"][0], inputs["image_masks"][0])
        if self.engines.ways["vision"] == CUDA_GRAPH:
            # The next graph that runs may overwrite what this one left.
            features = features.clone()
        return MolmoeImageFeatures(pooler_output=features[None], image_input_idx=inputs["image_input_idx"].flatten(1))

    @torch.inference_mode()
    def prefill(
        self, knobs: EngineKnobs, inputs: Mapping[str, Any], features: MolmoeImageFeatures | None
    ) -> tuple[torch.Tensor, PrefilledRequest[EngineKnobs]]:
        """See `StagedModel.prefill`."""
        prompt = inputs["input_ids"]
        tokens = prompt.shape[1]
        self.slot.release()
        if tokens > self.kv_cache.max_seq_len:
            self._free_memory(tokens + UNANNOUNCED_TOKENS)
        logits = self.engines.prefill.prefill(self.embedded(prompt, features), knobs, self.kv_cache)
        return logits, self.occupy(knobs, prompt)

    def occupy(self, knobs: EngineKnobs, prompt: torch.Tensor, pause: int = 0) -> PrefilledRequest[EngineKnobs]:
        """The state of a prompt [1, T] that fills the first positions of the KV cache, and ran with such a pause."""
        tokens = prompt.shape[1]
        self.kv_cache.set_lengths([tokens])
        return self.slot.occupy(knobs, prompt, pause)

    def embedded(self, prompt: torch.Tensor, features: MolmoeImageFeatures | None) -> torch.Tensor:
        """Token embeddings [T, H] of a prompt [1, T], with the image features added at their places."""
        tokens = prompt.shape[1]
        embeddings = F.embedding(prompt[0], self.decoder.embedding)
        if features is None:
            return embeddings
        places = features.image_input_idx[0]
        # One row more, for the features that are dropped.
        roomy = F.pad(embeddings, (0, 0, 0, 1))
        roomy.index_add_(0, torch.where(places < 0, tokens, places), features.pooler_output[0].to(roomy.dtype))
        return roomy[:tokens]

    @torch.inference_mode()
    def decode_step(self, token: torch.Tensor, state: PrefilledRequest[EngineKnobs]) -> torch.Tensor:
        """See `StagedModel.decode_step`.

        Raises:
            SettingError: another request was prefilled in the meantime.
        """
        self._resume(state)
        if state.length == self.kv_cache.max_seq_len:
            self._free_memory(state.length + 1)
        self.kv_cache.next_tokens.copy_(token.flatten())
        return self.step(state)

    def _resume(self, state: PrefilledRequest[EngineKnobs]) -> None:
        self.slot.resume(state)
        if self.kv_cache.lengths[0] != state.length:
            self.kv_cache.set_lengths([state.length])

    def step(self, state: PrefilledRequest[EngineKnobs]) -> torch.Tensor:
        """Logits of a decode step of the current request, from the token that the last step chose."""
        logits = self.engines.decode.step(state.setting, self.kv_cache)
        self.kv_cache.note_step()
        state.length += 1
        return logits

    def rewind(self, state: PrefilledRequest[EngineKnobs], steps: int) -> None:
        """See `StagedModel.rewind`."""
        self._resume(state)
        state.length -= steps
        self.kv_cache.rewind(steps)

    def async_stages(self, knobs: EngineKnobs) -> "AsyncRequest":
        """The stages for `generate_async`: steps that feed themselves on the device."""
        return AsyncRequest(self, self.kv_cache, knobs)

    def place_in(self, kv_cache: KVCache, row: int, state: PrefilledRequest[EngineKnobs]) -> None:
        """Copy the keys and values of the current request into a row of a KV cache of several requests."""
        self._resume(state)
        kv_cache.keys[:, row, :, : state.length] = self.kv_cache.keys[:, 0, :, : state.length]
        kv_cache.values[:, row, :, : state.length] = self.kv_cache.values[:, 0, :, : state.length]

    @torch.inference_mode()
    def prove(self, knobs: EngineKnobs, inputs: Mapping[str, Any]) -> KnobProof:
        """See `StagedModel.prove`; blocks and experts as the engines record them, and the positions that were filled.

        Every engine that is more than plain torch is compared with it as well: the tower's features against those of
        the modules, the decoder's logits and, in float32, its experts against the reference.

        Raises:
            KnobDidNotAct: a block used more or fewer experts than it should, or the two are not the same.
            GenerationFailed: logits are not finite.
        """
        self.warm_up(knobs, inputs, 2)
        prefill, decode = self.engines.prefill, self.engines.decode
        prefill.forget_experts()
        decode.forget_experts()
        features = self.encode_image(inputs)
        logits, state = self.prefill(knobs, inputs, features)
        token = logits.argmax(dim=-1)
        self.kv_cache.keys[:, :, :, state.length] = torch.nan
        found = [logits.clone(), self.decode_step(token, state).clone()]
        refuse_not_finite(*found)
        filled = self.kv_cache.keys[:, 0, :, state.length - 1].isfinite().flatten(1).all(dim=1)
        used, used_decode = prefill.topk_expert_ids, decode.topk_expert_ids
        experts_per_token = count_experts("prefill", used, self.decoder, knobs)
        count_experts("decode", used_decode, self.decoder, knobs)
        ways = self.engines.ways
        if features is not None and ways["vision"] not in PLAIN:
            self._refuse_other_features(inputs, features)
        if not PLAIN.issuperset((ways["prefill"], ways["decode"])):
            plain, plain_decode = self._compared(knobs, inputs, features, token, found, (used, used_decode))
            if self.decoder.dtype == torch.float32:
                refuse_other_experts(self._named("prefill"), used, plain.topk_expert_ids, self.decoder)
                refuse_other_experts(self._named("decode"), used_decode, plain_decode.topk_expert_ids, self.decoder)
        return KnobProof(
            experts_per_token=experts_per_token,
            blocks_run=tuple(used),
            blocks_run_decode=tuple(used_decode),
            cache_layers=int(filled.sum()),
        )

    def _compared(
        self,
        knobs: EngineKnobs,
        inputs: Mapping[str, Any],
        features: MolmoeImageFeatures | None,
        token: torch.Tensor,
        found: Sequence[torch.Tensor],
        used: Sequence[Mapping[int, torch.Tensor]],
    ) -> tuple[ReferencePrefill, ReferenceDecode]:
        """The reference's results on its own KV cache, once its logits are found to agree with `found`."""
        prefill, decode = ReferencePrefill(self.decoder), ReferenceDecode(self.decoder)
        tokens = inputs["input_ids"].shape[1]
        kv_cache = KVCache.allocate(self.decoder, tokens + 1)
        expected = [prefill.prefill(self.embedded(inputs["input_ids"], features), knobs, kv_cache)]
        experts = prefill.topk_expert_ids
        kv_cache.set_lengths([tokens])
        kv_cache.next_tokens.copy_(token)
        expected.append(decode.step(knobs, kv_cache))
        refuse_not_finite(*expected)
        named = dict(zip((self._named("prefill"), self._named("decode")), found, strict=True))
        same = [
            last_experts_agree(mine, theirs)
            for mine, theirs in zip(used, (experts, decode.topk_expert_ids), strict=True)
        ]
        refuse_other_logits(named, expected, "the same setting in plain torch", self.decoder.dtype, same)
        return prefill, decode

    def _refuse_other_features(self, inputs: Mapping[str, Any], features: MolmoeImageFeatures) -> None:
        """Raises KnobDidNotAct for features that differ from the modules' own; features without a place are ignored."""
        modules = self._model.encode_image(inputs["pixel_values"], inputs["image_masks"], inputs["image_input_idx"])
        taken = features.image_input_idx >= 0
        found, expected = features.pooler_output[taken], modules.pooler_output[taken]
        # Products of float32 on a GPU may be rounded as lower precision is: 4e-4 of the norm at MolmoE-1B's shape.
        dtype = self.decoder.dtype if found.device.type == "cpu" else torch.bfloat16
        refuse_other_logits({self._named("vision"): found}, [expected], "the modules", dtype)

    def _named(self, stage: StageName) -> str:
        """The name of a stage's engine, for a message."""
        return f"{self.engines.ways[stage]} engine of the {stage}"


class AsyncRequest(AsyncStages):
    """The `AsyncStages` of requests whose shape was warmed up, one request after the other."""

    def __init__(self, stages: EngineStages, kv_cache: KVCache, knobs: EngineKnobs) -> None:
        self._stages = stages
        self._kv_cache = kv_cache
        self._knobs = knobs
        self._state: PrefilledRequest[EngineKnobs] | None = None

    @property
    def device(self) -> torch.device:
        return self._kv_cache.next_tokens.device

    @property
    def last_token(self) -> torch.Tensor:
        return self._kv_cache.checked_tokens

    def encode_image(self, inputs: Mapping[str, Any]) -> MolmoeImageFeatures | None:
        return self._stages.encode_image(inputs)

    def begin(self, inputs: Mapping[str, Any], features: Any) -> None:
        logits, self._state = self._stages.prefill(self._knobs, inputs, features)
        self._kv_cache.put_likeliest(logits)

    def advance(self) -> None:
        assert self._state is not None
        self._stages.step(self._state)
