"""The stages of a transformers model with graphed decode steps, and graphed prefills where they are possible.

There is one request at a time: a state can be decoded from until another request is prefilled. Graphs are captured by
`warm_up`, outside of what is measured, for each setting of the knobs separately.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from experiment_core_utils.engines.batch_runner import BatchedExecution
from experiment_core_utils.engines.cuda_graphs import GraphCapturer, engine_refused, refused_without_memory
from experiment_core_utils.engines.greedy import AsyncStages
from experiment_core_utils.engines.request_slot import PrefilledRequest, RequestSlot
from experiment_core_utils.models.common.placement import spread_reason
from experiment_core_utils.models.common.preferences import KEPT
from experiment_core_utils.models.hf.engine_tower import ProvenTower
from experiment_core_utils.models.hf.generate import GenerateStages, GenerationState, vision_entry
from experiment_core_utils.models.hf.graphed_prefill import GraphedDecoder
from experiment_core_utils.models.hf.length_decode import LengthDecode
from experiment_core_utils.models.hf.static_cache_decode import FixedCacheDecode, cache_unsupported_reason
from experiment_core_utils.primitives.device import release_cached_memory
from experiment_core_utils.primitives.errors import ConfigurationError, OutOfMemory
from experiment_core_utils.records.requests import StageName
from experiment_core_utils.records.stages import CUDA_GRAPH, INDUCTOR_GRAPH, MODULES

# The length of a cache is a multiple of this, so that requests of similar length use the same graph.
SLOT_STEP = 256
# Settings whose graphs are kept where no more are requested; each has its own cache.
MOST_SETTINGS = 8
# Samples of a round where not all settings' graphs can be kept, so that each capture serves several runs.
SAMPLES_WITHOUT_MEMORY = 8


class FixedDecode(Protocol):
    """The decode steps of a setting on a cache of fixed size; see `FixedCacheDecode`, which is one."""

    @property
    def max_seq_len(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def chosen_experts(self) -> tuple[torch.Tensor, ...]: ...
    @property
    def cached(self) -> list[tuple[torch.Tensor, torch.Tensor]]: ...
    @property
    def checked_token(self) -> torch.Tensor: ...
    @property
    def compile_s(self) -> float | None: ...
    @property
    def mask_reason(self) -> str | None: ...
    def prepare(self, state: GenerationState, logits: torch.Tensor, steps: int) -> int: ...
    def begin(self, state: GenerationState, logits: torch.Tensor) -> None: ...
    def step(self) -> torch.Tensor: ...
    def put_token(self, token: torch.Tensor) -> None: ...
    def rewind(self, steps: int) -> None: ...


class DecoderInPlace(Protocol):
    """What runs a prompt in place of the decoder's modules; see `GraphedDecoder`, which is one."""

    is_engine: bool  #: as `by_engine` of `GenerateStages.prefill`

    @property
    def chosen_experts(self) -> tuple[torch.Tensor, ...]: ...
    def has_graphs(self, names: Iterable[Hashable]) -> bool: ...
    def in_place(self, captures_new: bool = False) -> AbstractContextManager[Sequence[Hashable]]: ...


class StageParts(Protocol):
    """Makes what runs the stages of the setting in force."""

    ways: Mapping[StageName, str]  #: the name of what runs each stage where it is not refused
    reasons: Mapping[StageName, str]  #: why a stage that has one is not a CUDA graph
    #: as `Executed.mode`; `kernels` for graphs of own kernels in place of a transformers decoder, `inductor` for decode
    #: steps that Inductor compiled
    mode: str
    names: tuple[str, str]  #: of prefill and decode step, for messages
    untuned: str | None  #: what is to be said of own kernels on an unknown card
    #: whether stages are graphs: each shape of inputs is prepared by itself, and calls return before a step has run
    is_captured: bool
    tower: ProvenTower | None = None  #: None where the modules run pictures
    #: what graphs are captured for beside setting and shape, while that is the same for all; () where it is not known
    graphs_of: tuple[Hashable, ...] = ()

    def reserve(self, tokens: int) -> None:
        """Make room for a prompt of so many tokens, where the setting in force is ready but for that."""

    def release(self) -> None:
        """Give back what settings share; nothing by default."""
        return

    def new_decode(self, max_seq_len: int) -> FixedDecode: ...
    def new_prefill(self) -> DecoderInPlace: ...


class GraphParts(StageParts):
    """CUDA graphs of the modules.

    Args:
        num_experts: that routers choose from; None without experts.
        tower: encodes pictures by graphs; None where the modules do.
    """

    ways: Mapping[StageName, str] = {"vision": CUDA_GRAPH, "prefill": CUDA_GRAPH, "decode": CUDA_GRAPH}
    reasons: Mapping[StageName, str] = {}
    mode, names, untuned = "graph", ("graphed prefill", "graphed decode step"), None
    is_captured = True
    is_compiled = False

    def __init__(
        self,
        model: PreTrainedModel,
        graph_capturer: GraphCapturer,
        num_experts: int | None,
        tower: ProvenTower | None = None,
    ) -> None:
        self._model, self.graph_capturer, self._num_experts = model, graph_capturer, num_experts
        self.tower = tower
        if tower is None:
            self.ways = {**self.ways, "vision": MODULES}

    def reserve(self, tokens: int) -> None:
        """Graphs have their own memory."""

    def new_decode(self, max_seq_len: int) -> FixedCacheDecode:
        return FixedCacheDecode(self._model, max_seq_len, self.graph_capturer, self._num_experts, self.is_compiled)

    def new_prefill(self) -> GraphedDecoder:
        return GraphedDecoder(self._model, self.graph_capturer, self._num_experts)


class LengthParts(GraphParts):
    """CUDA graphs of the modules, of each length of a decode step by itself."""

    names = ("graphed prefill", "decode step graphed for each length")

    def new_decode(self, max_seq_len: int) -> LengthDecode:  # type: ignore[override]
        return LengthDecode(self._model, max_seq_len, self.graph_capturer, self._num_experts)


class InductorParts(GraphParts):
    """CUDA graphs of the modules, in decode steps as Inductor compiles them at each setting."""

    ways: Mapping[StageName, str] = {**GraphParts.ways, "decode": INDUCTOR_GRAPH}
    reasons: Mapping[StageName, str] = {"prefill": "Inductor would compile each length of a prompt by itself"}
    mode, names = "inductor", ("graphed prefill", "decode step of Inductor")
    is_compiled = True


@dataclass
class _Graphed:
    """The graphs of one setting."""

    decode: FixedDecode
    prefill: DecoderInPlace
    #: kinds of inputs that were warmed up, the names of the graphs for each, and up to how many tokens
    warmed_up: dict[Hashable, tuple[tuple[Hashable, ...], int]] = field(default_factory=dict)

    def can_replay(self, kind: Hashable, max_seq_len: int) -> bool:
        """Whether all graphs exist for inputs of the kind with this `max_seq_len`."""
        names, longest = self.warmed_up.get(kind, ((), 0))
        return max_seq_len <= min(longest, self.decode.max_seq_len) and self.prefill.has_graphs(names)


class GraphedGeneration:
    """The graphed stages of one model, or those of an engine; the caller names the `setting` in force.

    Attributes:
        vision_unsupported_reason: why the modules run all pictures though there is an engine; None where it runs them.
        prefill_unsupported_reason: why the modules run the prefills of all settings; None where these are graphed.
        mask_reason: as of the decode steps of some setting; None while none has one.
        compile_s: seconds that the last compilation at a setting took, by setting; empty where nothing is compiled.
        batched: what answers batches; None where nothing does yet.
        is_fixed: whether a prefill that cannot be graphed is refused and no longer decides for all settings.
        is_whole: whether such a prefill is refused from the first on, because another way may run both stages.
    """

    def __init__(self, device: torch.device, stages: GenerateStages, parts: StageParts) -> None:
        self.device = device
        self._stages = stages
        self.parts = parts
        self._graphed_settings: OrderedDict[Hashable, _Graphed] = OrderedDict()
        self.vision_unsupported_reason: str | None = None
        self.prefill_unsupported_reason: str | None = None
        self.mask_reason: str | None = None
        self.is_fixed = self.is_whole = False
        self.compile_s: dict[Hashable, float] = {}
        self._slot = RequestSlot[Hashable]("the cache of fixed size")
        self.batched: BatchedExecution | None = None
        self._most_settings = MOST_SETTINGS
        self._had_memory = True

    @property
    def ways(self) -> dict[StageName, str]:
        """The name of what runs each stage."""
        return {**self.parts.ways, **dict.fromkeys(self._refused, MODULES)}

    @property
    def reasons(self) -> dict[StageName, str]:
        """Why stages do not run as requested, or not as the modules do."""
        of_mask: dict[StageName, str] = {} if self.mask_reason is None else {"decode": self.mask_reason}
        return {**of_mask, **self.parts.reasons, **self._refused}

    @property
    def _refused(self) -> dict[StageName, str]:
        """Why stages that were to run otherwise are run by the modules."""
        found: dict[StageName, str | None] = {
            "vision": self.vision_unsupported_reason,
            "prefill": self.prefill_unsupported_reason,
        }
        return {stage: reason for stage, reason in found.items() if reason is not None}

    @property
    def _tower(self) -> ProvenTower | None:
        """What encodes pictures in place of the modules; None where these do."""
        return None if self.vision_unsupported_reason is not None else self.parts.tower

    def encode_image(self, inputs: Mapping[str, Any]) -> Any:
        """The vision stage; the first picture that the engine refuses leaves all of them to the modules.

        Raises:
            EngineRefused: the engine refuses it, and others were measured.
        """
        if self._tower is not None:
            try:
                with self._tower.in_place():
                    return self._stages.encode_image(inputs)
            except ConfigurationError as error:
                if self.is_fixed:
                    raise engine_refused(str(error)) from error
                self.vision_unsupported_reason = str(error)
        return self._stages.encode_image(inputs)

    def refuse_other_features(self, inputs: Mapping[str, Any], features: Any) -> None:
        """Raises EngineRefused for features of an engine that are not those of the modules."""
        if self._tower is not None:
            name = f"{self.parts.ways['vision']} engine of the vision"
            self._tower.prove(name, inputs, lambda: self._stages.encode_image(inputs), features)

    def decode_at(self, setting: Hashable) -> FixedDecode:
        """The decode steps of a setting that is ready."""
        return self._graphed_settings[setting].decode

    def prefill_at(self, setting: Hashable) -> DecoderInPlace:
        """The prefills of a setting that is ready."""
        return self._graphed_settings[setting].prefill

    @torch.inference_mode()
    def warm_up(self, setting: Hashable, inputs: Mapping[str, Any], max_new_tokens: int) -> None:
        """Prepare everything that a request of this shape needs at the setting in force; states of requests may be
        lost.

        For what is ready nothing runs.

        Raises:
            EngineRefused: the decode step cannot be graphed, or there is no memory; the message is the reason.
        """
        tokens = inputs["input_ids"].shape[1]
        if self.is_ready(setting, inputs, tokens + max_new_tokens):
            self.parts.reserve(tokens)
            return
        self._slot.release()
        while True:
            try:
                with refused_without_memory(tokens, max_new_tokens):
                    graphed = self._of_size(setting, tokens + max_new_tokens)
                    self._capture(graphed, inputs, max_new_tokens)
                if graphed.decode.compile_s is not None:
                    self.compile_s[setting] = graphed.decode.compile_s
                self.mask_reason = self.mask_reason or graphed.decode.mask_reason
                return
            except ConfigurationError as error:
                reason, lacks_memory = str(error), isinstance(error.__cause__, OutOfMemory)
            # Not in the handler: until its end the error keeps what was half made.
            self._graphed_settings.pop(setting, None)
            release_cached_memory(self.device)
            if not lacks_memory or not self._graphed_settings:
                raise engine_refused(reason)
            # Without the graphs of the settings that were not used for the longest time there may be memory.
            for _ in range(-(-len(self._graphed_settings) // 2)):
                self._graphed_settings.popitem(last=False)
            self._most_settings, self._had_memory = len(self._graphed_settings) + 1, False
            release_cached_memory(self.device)

    def samples_per_round(self, num_settings: int) -> int:
        """Graphs of so many settings are kept from now on, if memory allows it."""
        if self._had_memory:
            self._most_settings = max(self._most_settings, num_settings)
        return 1 if num_settings <= self._most_settings else SAMPLES_WITHOUT_MEMORY

    def release_prepared(self) -> None:
        self._slot.release()
        self._graphed_settings.clear()
        if self.batched is not None:
            self.batched.release()
        if self.parts.tower is not None:
            self.parts.tower.release()
        self.parts.release()

    def is_ready(self, setting: Hashable, inputs: Mapping[str, Any], max_seq_len: int) -> bool:
        """Whether nothing is left to prepare for such a request, prompt and answer of `max_seq_len` tokens together."""
        graphed = self._graphed_settings.get(setting)
        if graphed is None or not graphed.can_replay(self._kind_of(inputs), max_seq_len):
            return False
        if self._tower is not None and not self._tower.is_ready(inputs):
            return False
        self._graphed_settings.move_to_end(setting)
        return True

    def _of_size(self, setting: Hashable, max_seq_len: int) -> _Graphed:
        """The graphs of a setting, with a new cache and step where the cache of before is too short."""
        graphed = self._graphed_settings.get(setting)
        if graphed is None or graphed.decode.max_seq_len < max_seq_len:
            slots = -(-max_seq_len // SLOT_STEP) * SLOT_STEP
            decode = self.parts.new_decode(slots)
            graphed = _Graphed(decode, self.parts.new_prefill() if graphed is None else graphed.prefill)
            self._graphed_settings[setting] = graphed
        self._graphed_settings.move_to_end(setting)
        while len(self._graphed_settings) > self._most_settings:
            self._graphed_settings.popitem(last=False)
        return graphed

    def _capture(self, graphed: _Graphed, inputs: Mapping[str, Any], max_new_tokens: int) -> None:
        """Run one pass over the prompt, and another only where it turns out that prefills cannot be graphed."""
        names: tuple[Hashable, ...] = ()
        features = self.encode_image(inputs)
        # The first request of a setting, by which it is proven, may have had no picture.
        self.refuse_other_features(inputs, features)
        if self.prefill_unsupported_reason is None:
            try:
                with graphed.prefill.in_place(captures_new=True) as served:
                    logits, state = self._stages.prefill(inputs, features, graphed.prefill.is_engine)
                names = tuple(served)
            except ConfigurationError as error:
                if self.is_whole:
                    raise ConfigurationError(f"the {self.parts.names[0]}: {error}") from error
                if self.is_fixed:
                    raise ConfigurationError(f"the prefill, graphed at other settings: {error}") from error
                self.prefill_unsupported_reason = str(error)
                graphed.prefill = self.parts.new_prefill()
        if self.prefill_unsupported_reason is not None:
            logits, state = self._stages.prefill(inputs, features)
        with self._stages.decoding():
            longest = graphed.decode.prepare(state, logits, max_new_tokens)
        # Image tokens may have been left out.
        longest += inputs["input_ids"].shape[1] - graphed.decode.length
        graphed.warmed_up[self._kind_of(inputs)] = names or self.parts.graphs_of, longest

    def _kind_of(self, inputs: Mapping[str, torch.Tensor]) -> Hashable:
        """What requests have in common that are prepared together: the names of their inputs, and where they are
        captured the shapes of the prompt, of its pictures and of all others.
        """
        return frozenset(
            (name, tuple(tensor.shape) if self.parts.is_captured else tensor.dim()) for name, tensor in inputs.items()
        )

    def _prefilled(
        self, graphed: _Graphed, inputs: Mapping[str, Any], features: Any
    ) -> tuple[torch.Tensor, GenerationState]:
        if self.prefill_unsupported_reason is not None:
            return self._stages.prefill(inputs, features)
        with graphed.prefill.in_place():
            return self._stages.prefill(inputs, features, graphed.prefill.is_engine)

    def prefill(
        self, setting: Hashable, inputs: Mapping[str, Any], features: Any
    ) -> tuple[torch.Tensor, PrefilledRequest[Hashable]]:
        """The prefill stage: logits [1, V] of the last position, which the next prefill overwrites."""
        graphed = self._graphed_settings[setting]
        self._slot.release()
        logits, state = self._prefilled(graphed, inputs, features)
        graphed.decode.begin(state, logits)
        prompt = inputs["input_ids"]
        num_dropped = prompt.shape[1] - graphed.decode.length
        return logits, self._slot.occupy(setting, prompt, num_dropped=num_dropped)

    def decode_step(self, token: torch.Tensor, state: PrefilledRequest[Hashable]) -> torch.Tensor:
        """The decode stage: token [1, 1] -> logits [1, V], which the next step overwrites.

        Raises:
            SettingError: another request was prefilled in the meantime.
        """
        decode = self._resumed(state)
        decode.put_token(token)
        state.length += 1
        return decode.step()

    def rewind(self, state: PrefilledRequest[Hashable], steps: int) -> None:
        """Undo the last so many decode steps of the state."""
        decode = self._resumed(state)
        decode.rewind(steps)
        state.length -= steps

    def _resumed(self, state: PrefilledRequest[Hashable]) -> FixedDecode:
        self._slot.resume(state)
        decode = self._graphed_settings[state.setting].decode
        if decode.length != state.length:
            decode.rewind(decode.length - state.length)
        return decode


def graphs_unsupported_reason(model: PreTrainedModel, stages: GenerateStages) -> str | None:
    """The reason why no setting of a model can be graphed; None where one may be.

    What shows only when it is tried is not checked; `GraphedGeneration.warm_up` raises it.
    """
    return engines_unsupported_reason(model, stages) or cache_unsupported_reason(model)


def engines_unsupported_reason(model: PreTrainedModel, stages: GenerateStages) -> str | None:
    """The reason why neither graphs nor engines can run a model, whatever its blocks are; None where they may."""
    if stages.preferences.change_logits:
        applied = ", ".join(name for name in KEPT if name in stages.preferences.kept)
        return f"the checkpoint prefers {applied}, applied between the logits and the choice of a token in a graph"
    if (reason := spread_reason(model)) is not None:
        return reason
    if vision_entry(model) is not None and not stages.can_encode_alone:
        return "its pictures are encoded inside the prefill"
    return None


class AsyncRequests(AsyncStages):
    """The `AsyncStages` of a model at one setting that was warmed up."""

    def __init__(self, generation: GraphedGeneration, stages: GenerateStages, setting: Hashable) -> None:
        self._generation = generation
        self._stages = stages
        self._setting = setting
        self._decode = generation.decode_at(setting)

    @property
    def device(self) -> torch.device:
        return self._generation.device

    @property
    def last_tokens(self) -> torch.Tensor:
        return self._decode.checked_token.view(1)

    def encode_image(self, inputs: Mapping[str, Any]) -> Any:
        return self._generation.encode_image(inputs)

    def begin(self, inputs: Mapping[str, Any], features: Any) -> None:
        self._generation.prefill(self._setting, inputs, features)

    def advance(self) -> None:
        self._decode.step()
