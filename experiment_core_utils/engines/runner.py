"""The three stages of a model run by engines, on a KV cache of fixed size.

There is one cache, and so one state at a time: a state can be decoded from until another request is prefilled. The
cache, CUDA graphs and rotary factors are made by `warm_up`, outside of what is measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch

from experiment_core_utils.config.parts import ExecutionMode
from experiment_core_utils.engines.api import DecodeEngine
from experiment_core_utils.engines.batch_runner import SLOT_STEP
from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.engine_model import EngineModel
from experiment_core_utils.engines.engine_proof import (
    Computed,
    EngineErrors,
    EngineRun,
    TracedPasses,
    judged_by_modules,
    refuse_other_features,
)
from experiment_core_utils.engines.expert_trace import count_experts
from experiment_core_utils.engines.gpu.triton.tuning import untuned_reason
from experiment_core_utils.engines.greedy import AsyncStages
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.engines.request_slot import PrefilledRequest, RequestSlot
from experiment_core_utils.engines.select import choose_engines, decode_engine, decoder_engines
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.finite_logits import refuse_not_finite
from experiment_core_utils.records.requests import KnobProof, StageName
from experiment_core_utils.records.stages import CUDA_GRAPH, MODULES, PLAIN, REFERENCE

# Room for answers to a request that was not warmed up.
UNANNOUNCED_TOKENS = 64
# Decode steps of a proof, which make 32 positions with the prompt's last one. Over 368 proofs of right engines of an
# H100 the mean error was at most 0.96 times that of the modules, and of keys or values of a block 1.35 times.
PROOF_STEPS = 31


@dataclass(frozen=True)
class Executed:
    """How a model's stages run."""

    #: `eager`, by the modules; else by what runs decode steps: `graph`, `cpu` (C++) or `reference` (plain torch on
    #: fused weights)
    mode: str
    #: why it is not `graph` in all stages though that was requested; None where it is, or was not requested
    reason: str | None
    stages: Mapping[StageName, str]  #: the name of the engine of each stage; names are in `engines.api`
    #: a note that kernels run on another card than the one that they were tuned on; None where they do not
    untuned: str | None = None


def modules_run(reason: str | None) -> Executed:
    """All stages by the modules; the reason why not by engines, None where those were not requested."""
    return Executed("eager", reason, dict.fromkeys(get_args(StageName), MODULES))


def engine_stages(
    model: EngineModel, requested: ExecutionMode, eager_reason: str | None = None
) -> tuple["EngineStages | None", Executed]:
    """The stages by engines, and how they run, for the record; None where the modules run.

    `auto` takes engines where every stage has one that is more than plain torch.
    """
    if requested == "eager" or eager_reason is not None:
        return None, modules_run(eager_reason)
    try:
        stages = EngineStages(model)
    except ConfigurationError as error:
        return None, modules_run(str(error))
    ways, message = stages.engines.ways, reasons_named(stages.engines.reasons)
    if requested == "auto" and not PLAIN.isdisjoint(ways.values()):
        return None, modules_run(message)
    mode = {CUDA_GRAPH: "graph", REFERENCE: "reference"}.get(ways["decode"], "cpu")
    untuned = untuned_reason(torch.cuda.get_device_name(stages.decoder.device)) if stages.is_graphed else None
    return stages, Executed(mode, message or None, ways, untuned)


def reasons_named(reasons: Mapping[StageName, str]) -> str:
    """The reasons of stages in one line, each once with its stages."""
    by_reason: dict[str, list[str]] = {}
    for stage, reason in reasons.items():
        by_reason.setdefault(reason, []).append(stage)
    return "; ".join(f"{', '.join(named)}: {reason}" for reason, named in by_reason.items())


class EngineStages:
    """A model's stages without its modules.

    Attributes:
        model: as it was given.
        decoder: its weights.
        engines: the engine of each stage.
        kv_cache: that the next call uses; a longer request makes another one.
        slot: which request it contains.

    Raises:
        ConfigurationError: the decoder's weights cannot be fused, or on a GPU its steps cannot be captured.
    """

    def __init__(self, model: EngineModel) -> None:
        self.model = model
        self.decoder = model.fused_decoder()
        self.engines = choose_engines(model, self.decoder)
        self.kv_cache = KVCache.allocate(self.decoder, max_seq_len=0)
        self.slot = RequestSlot[EngineKnobs]("the KV cache")
        self._warmed_up: set[EngineKnobs] = set()
        self._judged_crops: set[int] = set()
        self._judged_knobs: dict[EngineKnobs, EngineErrors] = {}

    @property
    def is_graphed(self) -> bool:
        """Whether decode steps are graphed, so that the host need not wait for each."""
        return self.engines.ways["decode"] == CUDA_GRAPH

    def warm_up(self, knobs: EngineKnobs, inputs: Mapping[str, Any], max_new_tokens: int) -> None:
        """Prepare everything that a request of this shape needs at these knobs; earlier states become invalid."""
        tokens = self.model.length(inputs)
        self._free_memory(tokens + max_new_tokens)
        picture = self.model.picture(inputs)
        if picture is not None and self.engines.vision is not None:
            self.engines.vision.warm_up(len(picture[0]))
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

    def release_prepared(self) -> None:
        """Invalidate all states, and release the KV cache with all graphs, and those of pictures."""
        if self.engines.vision is not None:
            self.engines.vision.release()
        self._warmed_up.clear()
        self.release_unused()

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

    def encode_image(self, inputs: Mapping[str, Any]) -> Any:
        picture = self.model.picture(inputs)
        if picture is None:
            return None
        if self.engines.vision is None:
            return self.model.features_by_modules(inputs)
        encoded = self.engines.vision.encode(*picture)
        if self.engines.ways["vision"] == CUDA_GRAPH:
            # The next graph that runs may overwrite what this one left.
            encoded = encoded.clone()
        return self.model.features(encoded, inputs)

    @torch.inference_mode()
    def prefill(
        self, knobs: EngineKnobs, inputs: Mapping[str, Any], features: Any
    ) -> tuple[torch.Tensor, PrefilledRequest[EngineKnobs]]:
        prompt, features = self.model.shortened(inputs, features)
        tokens = prompt.shape[1]
        self.slot.release()
        if tokens > self.kv_cache.max_seq_len:
            self._free_memory(tokens + UNANNOUNCED_TOKENS)
        logits = self.engines.prefill.prefill(self.embedded(prompt, features), knobs, self.kv_cache)
        whole = inputs["input_ids"]
        return logits, self.occupy(knobs, whole, num_dropped=whole.shape[1] - tokens)

    def occupy(
        self, knobs: EngineKnobs, prompt: torch.Tensor, pause: int = 0, num_dropped: int = 0
    ) -> PrefilledRequest[EngineKnobs]:
        """The state of a prompt [1, T] that fills the first positions of the KV cache, and ran with such a pause and
        without so many of its tokens.
        """
        self.kv_cache.set_lengths([prompt.shape[1] - num_dropped])
        return self.slot.occupy(knobs, prompt, pause, num_dropped)

    def embedded(self, prompt: torch.Tensor, features: Any) -> torch.Tensor:
        """Token embeddings [T, H] of a prompt [1, T], with the image features at their places."""
        return self.model.embedded(prompt, features, self.decoder.embedding)

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
        self._resume(state)
        state.length -= steps
        self.kv_cache.rewind(steps)

    def async_stages(self, knobs: EngineKnobs) -> "AsyncRequest":
        """The stages for `generate_async`: steps that feed themselves on the device."""
        return AsyncRequest(self, self.kv_cache, knobs)

    def new_decode_engine(self) -> DecodeEngine:
        return decode_engine(self.decoder)

    def most_positions(self, inputs: Mapping[str, Any]) -> int:
        return self.model.length(inputs)

    def prefill_row(
        self, knobs: EngineKnobs, inputs: Mapping[str, Any], features: Any, kv_cache: KVCache, row: int
    ) -> torch.Tensor:
        logits, state = self.prefill(knobs, inputs, features)
        self._resume(state)
        kv_cache.copy_into_row(row, self.kv_cache)
        return logits

    @torch.inference_mode()
    def prove(self, knobs: EngineKnobs, inputs: Mapping[str, Any]) -> KnobProof:
        """See `StagedModel.prove`; blocks and experts as the engines record them, and the positions that were filled.

        Dense blocks leave nothing that shows that they ran. Their engines, and all that are more than plain torch, are
        judged beside the modules, by the modules in higher precision: the tower's features once for each number of
        crops, the decoder's logits, keys and values, and its choices of experts once for each value of its knobs.

        Raises:
            KnobDidNotAct: a block used more or fewer experts than it should.
            EngineRefused: an engine computes something else than the modules.
            GenerationFailed: logits are not finite.
        """
        self.warm_up(knobs, inputs, PROOF_STEPS + 1)
        self.engines.prefill.forget_experts()
        self.engines.decode.forget_experts()
        features = self.encode_image(inputs)
        logits, state = self.prefill(knobs, inputs, features)
        refuse_not_finite(logits)
        used = self.engines.prefill.topk_expert_ids
        experts_per_token = count_experts("prefill", used, self.decoder, knobs)
        self.kv_cache.keys[:, :, :, state.length] = torch.nan
        tokens, found, experts = [], [logits.clone()], {block: [ids] for block, ids in used.items()}
        for _ in range(PROOF_STEPS):
            tokens.append(found[-1].argmax(dim=-1, keepdim=True))
            found.append(self.decode_step(tokens[-1], state).clone())
            refuse_not_finite(found[-1])
            used_decode = self.engines.decode.topk_expert_ids
            count_experts("decode", used_decode, self.decoder, knobs)
            for block, ids in used_decode.items():
                experts.setdefault(block, []).append(ids)
        first_step = state.length - PROOF_STEPS
        filled = self.kv_cache.keys[:, 0, :, first_step].isfinite().flatten(1).all(dim=1)
        ways = self.engines.ways
        picture = self.model.picture(inputs)
        crops = 0 if picture is None else len(picture[0])
        if picture is not None and ways["vision"] not in PLAIN and crops not in self._judged_crops:
            self._refuse_other_features(inputs, features)
            self._judged_crops.add(crops)
        is_plain = PLAIN.issuperset((ways["prefill"], ways["decode"])) and self.decoder.routed_blocks
        if knobs not in self._judged_knobs and not is_plain:
            prompt, given = self.model.shortened(inputs, features)
            ids = torch.cat([prompt, *tokens], dim=1)
            caches = self.kv_cache.keys[:, 0, :, : state.length], self.kv_cache.values[:, 0, :, : state.length]
            computed = Computed(found, list(zip(*(cache[: len(knobs.blocks)] for cache in caches), strict=True)))
            chosen = [torch.cat(ids) for block, ids in experts.items() if block in self.decoder.routed_blocks]
            run = EngineRun(computed, state.length - PROOF_STEPS, [chosen] if chosen else ())
            self._judged_knobs[knobs] = self._judged(knobs, ids, given, run)
        errors = self._judged_knobs.get(knobs)
        return KnobProof(
            experts_per_token=experts_per_token,
            blocks_run=tuple(used),
            blocks_run_decode=tuple(used_decode),
            cache_layers=int(filled.sum()),
            engine_error=None if errors is None else errors.engine,
            modules_error=None if errors is None else errors.modules,
            # Of the last block the last position alone is computed.
            prefill_tokens=len(next(iter(used.values()))) if len(used) > 1 else None,
            prompt_tokens=inputs["input_ids"].shape[1],
            vision_tokens=self.model.num_features(inputs),
        )

    def _judged(self, knobs: EngineKnobs, ids: torch.Tensor, features: Any, run: EngineRun) -> EngineErrors:
        """The decoder's errors beside those of the modules, on the engines' own features.

        Args:
            ids: [1, T + steps], the prompt and the tokens after it, which the modules compute in one pass.
        """

        def repeat(passes: TracedPasses) -> Computed:
            return self.model.run_modules(knobs, ids, features, len(run.computed.logits), passes)

        names, dtype = (self._named("prefill"), self._named("decode")), self.decoder.dtype
        num_experts = self.decoder.num_experts if self.decoder.routed_blocks else None
        return judged_by_modules(names, run, self.model.judging(dtype), repeat, num_experts, dtype)

    def _refuse_other_features(self, inputs: Mapping[str, Any], features: Any) -> None:
        """Raises EngineRefused for features that are not those of the modules; features without a place are ignored."""

        def by_modules() -> torch.Tensor:
            return self.model.placed(self.model.features_by_modules(inputs))

        dtype = self.decoder.dtype
        modules = by_modules()
        with self.model.judging(dtype):
            exact = by_modules()
        refuse_other_features(self._named("vision"), self.model.placed(features), modules, exact, dtype)

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
    def last_tokens(self) -> torch.Tensor:
        return self._kv_cache.checked_tokens

    def encode_image(self, inputs: Mapping[str, Any]) -> Any:
        return self._stages.encode_image(inputs)

    def begin(self, inputs: Mapping[str, Any], features: Any) -> None:
        logits, self._state = self._stages.prefill(self._knobs, inputs, features)
        self._kv_cache.put_likeliest(logits)

    def advance(self) -> None:
        assert self._state is not None
        self._stages.step(self._state)
