"""The staged interface of transformers models.

In eager runs, times come from marks inside the model's own `generate()`; the three stages by themselves, which energy
windows and profiles need, do the same steps. In graphed runs (`graphed_stages`), and in those by engines
(`engine_stages`), times come from the stages. A new family needs code only where it differs from the others: how its
number of vision tokens is set (`vision_tokens`), and the formulas of its operations (`costs`).
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, get_args

import torch
from torch import nn
from transformers import PreTrainedModel

from experiment_core_utils.config.parts import ExecutionMode
from experiment_core_utils.engines.answer_ends import AnswerEnds, HasEnds, ThinkingLimit, eos_sources, with_stops
from experiment_core_utils.engines.batch_runner import BatchedExecution, stages_of_batches
from experiment_core_utils.engines.cuda_graphs import (
    ADVICE,
    NO_GRAPHS,
    CudaGraphs,
    GraphCapturer,
    engine_refused,
)
from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.engine_proof import (
    Computed,
    EngineErrors,
    EngineRun,
    RouterTrace,
    TracedPasses,
    judged_by_modules,
    refuse_other_tokens,
)
from experiment_core_utils.engines.greedy import generate_async, generate_greedily
from experiment_core_utils.engines.likelihood import ScoredRequest, follow_by_steps, score_timed, split_request
from experiment_core_utils.engines.request_slot import PrefilledRequest
from experiment_core_utils.engines.runner import reasons_named
from experiment_core_utils.engines.select import OWN_KERNELS
from experiment_core_utils.knobs.batch_size import BATCH_SIZE, batch_size_of
from experiment_core_utils.knobs.interface import unsupported_knobs
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.top_k import TOP_K
from experiment_core_utils.knobs.vision_tokens import VISION_TOKENS, CropRange
from experiment_core_utils.models.common.block_modules import decoder_components, final_norm_of
from experiment_core_utils.models.common.decode_kernels import ExecutedExperts
from experiment_core_utils.models.common.describe import (
    computing_dtype,
    count_parameters,
    device_map_of,
    implementations,
    quantisation_in_force,
    stored_bytes,
)
from experiment_core_utils.models.common.gguf_files import quantised_file_of
from experiment_core_utils.models.common.judging import judging
from experiment_core_utils.models.common.placement import computing_devices
from experiment_core_utils.models.common.preferences import NO_PREFERENCES, decoding_in_force, preferences_of, values_of
from experiment_core_utils.models.common.turned_knobs import TurnedKnobs
from experiment_core_utils.models.costs.architecture import Architecture, architecture_of
from experiment_core_utils.models.costs.memory import ModelBytes, step_weights
from experiment_core_utils.models.hf.batch import alike, follow_together, generate_batch, request_kind
from experiment_core_utils.models.hf.counted_costs import CountedCosts
from experiment_core_utils.models.hf.engine_batch import EngineRequests
from experiment_core_utils.models.hf.engine_stages import EngineParts
from experiment_core_utils.models.hf.generate import (
    GenerateStages,
    GenerationState,
    greedy_config,
    vision_entry,
)
from experiment_core_utils.models.hf.graphed_stages import (
    AsyncRequests,
    GraphedGeneration,
    GraphParts,
    InductorParts,
    LengthParts,
    engines_unsupported_reason,
    graphs_unsupported_reason,
)
from experiment_core_utils.models.hf.graphed_tower import GraphedTower
from experiment_core_utils.models.hf.knobs.adapters import adapters_of
from experiment_core_utils.models.hf.knobs.block_inputs import BlockInputs, inputs_seen, layer_kind, other_inputs
from experiment_core_utils.models.hf.knobs.controller import DecoderKnobs
from experiment_core_utils.models.hf.looped_experts import LoopedExperts
from experiment_core_utils.models.hf.requests import ALONG_THE_PROMPT, HFRequests
from experiment_core_utils.models.hf.slow_functions import slow_functions_of
from experiment_core_utils.models.hf.static_cache_decode import cache_unsupported_reason
from experiment_core_utils.models.hf.thinking import ThinkingCloser
from experiment_core_utils.models.hf.visual_token_keep import VisualTokens
from experiment_core_utils.primitives.device import Marks, NoMarks, out_of_memory_named, release_cached_memory
from experiment_core_utils.primitives.errors import (
    ConfigurationError,
    EngineRefused,
    GenerationFailed,
    KnobDidNotAct,
    OutOfMemory,
)
from experiment_core_utils.primitives.finite_logits import refuse_not_finite
from experiment_core_utils.records.requests import (
    FollowedAnswer,
    KnobProof,
    PreparedRequest,
    RequestShape,
    StageFlops,
    StageName,
    TimedBatch,
    TimedTokens,
)
from experiment_core_utils.records.stages import MODULES, Component
from experiment_core_utils.tasks.interface import PromptFamily, Sample

T = TypeVar("T")
# Room for answers to a request that was not warmed up.
UNANNOUNCED_TOKENS = 64
# Decode steps of a proof, which make eight positions with the prompt's last one.
PROOF_STEPS = 7
_SAME_LOGITS = "the logits of its first prompt are those of the model as it is"


def no_inductor(name: str, reason: str) -> str:
    """The refusal of `--execution inductor` for a model, with the reason."""
    return f"--execution inductor cannot run {name}: {reason}; give --execution auto"


class TransformersModel(HasEnds):
    """The staged interface of an image-text-to-text or causal language model of transformers.

    Args:
        name: path or hub id that the model came from.
        model: on its device, in its dtype, in evaluation mode. Its generation config is replaced by a greedy one.
        requests: of the same checkpoint.
        execution: as requested; `describe` and each setting's proof show how it runs.
        graph_capturer: makes the replays; None for CUDA graphs, and on the CPU for engines.
        eager_reason: why `auto` leaves the modules in place, whatever can be graphed; None where it may choose.

    Raises:
        ConfigurationError: `inductor` is requested, and no setting can be captured.
    """

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        requests: HFRequests,
        execution: ExecutionMode = "eager",
        graph_capturer: GraphCapturer | None = None,
        eager_reason: str | None = None,
    ) -> None:
        self.name = name
        self.model = model
        self.requests = requests
        self._requested = execution
        self.knobs = DecoderKnobs(model)
        self.preferences = preferences_of(values_of(model.generation_config), requests.tokenizer, name)
        self._eos = eos_sources(
            model.generation_config,
            model.config,
            requests.tokenizer,
            requests.chat_template,
            self.preferences.stop_token_ids,
        )
        model.generation_config = greedy_config(model, self._eos)
        self.ends = AnswerEnds(
            frozenset(self._eos.token_ids), text_of=requests.text_of, is_thinking_open=requests.opens_thinking
        )
        self.devices = computing_devices(model)
        self.device = self.devices[0]
        self.num_total_blocks = self.knobs.num_total_blocks
        self.num_experts = self.knobs.num_experts
        self.default_top_k = self.knobs.default_top_k
        self._visual_tokens = VisualTokens(model, requests)
        self._thinking = ThinkingCloser(requests, self._limit_thinking)
        adapters = adapters_of(model.config, requests, self._visual_tokens, self.knobs, self._thinking)
        self._vision = adapters[VISION_TOKENS.name]
        self.turned_knobs = TurnedKnobs(model, adapters)
        self._stages = GenerateStages(model, self.preferences, self._visual_tokens)
        # Why ways that would have been taken before do not run it; as they are named in the record.
        self._refused: list[str] = [] if eager_reason is None else [eager_reason]
        self._looped_experts: LoopedExperts | None = None
        self._graph_capturer = graph_capturer
        self._graphed = None if execution == "eager" or eager_reason is not None else self._first_way()
        self._architecture = architecture_of(model.config)
        #: of a family without formulas
        self._counted = CountedCosts(model, self.knobs.with_all_blocks)
        self._blocks = self.knobs.every_block
        self._judged: dict[Hashable, EngineErrors] = {}

    def _first_way(self) -> GraphedGeneration | None:
        """The fastest of the requested ways that takes the model; None for the modules, with the reasons noted."""
        if self._requested == "inductor":
            return self._compiled_modules()
        if self._graph_capturer is None and self.device.type != "cuda":
            try:
                return self._engines(takes_plain=self._requested == "graph")
            except ConfigurationError as error:
                self._refused = [NO_GRAPHS + ", and " + str(error).removeprefix(OWN_KERNELS.format(""))]
                return None
        if self._requested == "graph":
            return self._captured_modules()
        try:
            # One that is short of memory may still have it for less.
            with out_of_memory_named():
                graphed = self._engines(False, self._new_capturer)
            graphed.is_whole = self._requested == "auto"
            return graphed
        except (ConfigurationError, OutOfMemory) as error:
            reason = str(error)
        # Not in the handler: until its end the error keeps what was half made.
        release_cached_memory(self.device)
        if self._requested == "kernels":
            self._refused = [reason]
            return None
        return self._next_to_kernels(reason)

    def _next_to_kernels(self, reason: str) -> GraphedGeneration | None:
        """What runs where own kernels do not, for this reason; None for the modules."""
        self._refused = [f"own kernels do not run it: {reason}"]
        return self._captured_modules()

    def _captured_modules(self) -> GraphedGeneration | None:
        """The stages as graphs of modules; None, with the reason noted, where no setting can be captured."""
        reason = engines_unsupported_reason(self.model, self._stages)
        if reason is not None:
            self._note_no_graphs(reason)
            return None
        no_fixed_cache = cache_unsupported_reason(self.model)
        if no_fixed_cache is not None:
            return self._captured_lengths(no_fixed_cache)
        return GraphedGeneration(self.device, self._stages, self._graph_parts(GraphParts))

    def _captured_lengths(self, reason: str) -> GraphedGeneration:
        """The stages as graphs of modules, of each length by itself, as none fits all lengths for this reason."""
        self._refused = [*self._refused, f"no graph of a decode step fits all lengths: {reason.removesuffix(ADVICE)}"]
        return GraphedGeneration(self.device, self._stages, self._graph_parts(LengthParts))

    def _graph_parts(self, kind: type[GraphParts]) -> GraphParts:
        self._looped_experts = LoopedExperts(self.model, self._new_capturer())
        return kind(self.model, self._looped_experts, self.num_experts, self._graphed_tower())

    def _compiled_modules(self) -> GraphedGeneration:
        """The stages as graphs of modules, with decode steps by Inductor; no other way takes their place."""
        needs_gpu = self._graph_capturer is None and self.device.type != "cuda"
        reason = "it needs a GPU" if needs_gpu else graphs_unsupported_reason(self.model, self._stages)
        if reason is not None:
            raise ConfigurationError(no_inductor(self.name, reason))
        return GraphedGeneration(self.device, self._stages, self._graph_parts(InductorParts))

    def _note_no_graphs(self, reason: str) -> None:
        """Note why graphs of modules do not run it, beside why kernels do not, where that is something else."""
        is_beside = any(not each.endswith(f": {reason}") for each in self._refused)
        self._refused = [*self._refused, f"graphs of its modules do not: {reason}"] if is_beside else [reason]

    def _limit_thinking(self, limit: ThinkingLimit | None) -> None:
        self.ends = replace(self.ends, thinking=limit)
        self._stages.end_tokens = self.ends

    def _new_capturer(self) -> GraphCapturer:
        return CudaGraphs(self.device) if self._graph_capturer is None else self._graph_capturer

    def _engines(self, takes_plain: bool, new_capturer: Callable[[], GraphCapturer] | None = None) -> GraphedGeneration:
        """The stages by engines; raises ConfigurationError, with the reason, where they cannot run the model."""
        reason = engines_unsupported_reason(self.model, self._stages)
        if reason is not None:
            raise ConfigurationError(reason)
        tower = None if new_capturer is None else self._graphed_tower()
        parts = EngineParts(self.model, lambda: self.knobs.in_force, takes_plain, new_capturer, tower)
        return GraphedGeneration(self.device, self._stages, parts)

    def _graphed_tower(self) -> GraphedTower | None:
        """What encodes pictures by graphs; None for a text model."""
        if vision_entry(self.model) is None:
            return None
        vision = self._vision
        return GraphedTower(self.model, self._new_capturer(), lambda: vision.value, self._stages.host_copy)

    @property
    def active_setting(self) -> tuple[int | None, tuple[int, ...]]:
        return self.knobs.in_force

    @property
    def _has_engines(self) -> bool:
        return self._graphed is not None and isinstance(self._graphed.parts, EngineParts)

    @property
    def _graph_key(self) -> Hashable:
        """What graphs are captured for: the knobs that act behind the vision stage."""
        adapters = self._visual_tokens, *self.knobs.adapters.values()
        return *(adapter.value for adapter in adapters), *self.turned_knobs.on_modules.items()

    @property
    def decoder_blocks(self) -> Sequence[nn.Module]:
        return self._blocks

    @property
    def prompt_family(self) -> PromptFamily:
        return self.requests.prompt_family

    def prepare(self, sample: Sample, prompt: str, crops: CropRange | None) -> PreparedRequest:
        return self.requests.make(sample, prompt, crops)

    def to_device(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        inputs, given = split_request(inputs)
        sent = {
            name: tensor.to(self.device, self.model.dtype if tensor.is_floating_point() else None)
            for name, tensor in inputs.items()
        }
        self._visual_tokens.note(inputs["input_ids"], sent["input_ids"])
        if not isinstance(self._architecture, Architecture):
            self._counted.note(inputs, len(self._visual_tokens.places_in(sent["input_ids"]).places[0]))
        self._stages.note(inputs, sent)
        return ScoredRequest(sent, given, tuple(ALONG_THE_PROMPT)) if given else sent

    def apply(self, setting: Setting) -> AbstractContextManager[object]:
        return self.turned_knobs.apply(setting)

    def restored_afterwards(self) -> AbstractContextManager[object]:
        return self.turned_knobs.restored_afterwards()

    def components(self) -> Mapping[Component, Sequence[nn.Module]]:
        blocks = [self._blocks[index] for index in self.active_setting[1]]
        return decoder_components(blocks, final_norm_of(self.model), self.model.get_output_embeddings())

    def warm_up(self, inputs: Mapping[str, Any], max_new_tokens: int) -> None:
        """In eager runs `generate()` prepares by itself, inside what is measured."""
        if self._graphed is not None:
            self.refuse_setting()
            if isinstance(inputs, ScoredRequest):
                for window in inputs.windows:
                    self._graphed.warm_up(self._graph_key, window.inputs, inputs.longest)
            else:
                self._graphed.warm_up(self._graph_key, inputs, max_new_tokens)

    def refuse_setting(self) -> None:
        if self._graphed is None:
            return
        reason, on_modules = self.turned_knobs.engines_unsupported_reason, self.turned_knobs.on_modules
        if on_modules and self._has_engines:
            reason = f"{', '.join(on_modules)} acts on modules, which engines do not run"
        if reason is None and self.turned_knobs.batch_size > 1 and not self._has_engines:
            reason = f"graphs of its modules run one request at a time, and not {self.turned_knobs.batch_size}"
        if reason is not None:
            raise engine_refused(reason)

    @property
    def has_next_way(self) -> bool:
        return self._requested == "auto" and self._graphed is not None

    def run_next_way(self, reason: str) -> None:
        """Graphs of the modules take the place of a GPU's own kernels, graphs of each length that of graphs for all
        lengths; else the modules run.
        """
        parts = None if self._graphed is None else self._graphed.parts
        is_of_step = self.has_next_way and self.turned_knobs.engines_unsupported_reason is None
        is_of_step &= self.turned_knobs.batch_size == 1
        self._graphed = None
        release_cached_memory(self.device)
        if isinstance(parts, EngineParts) and parts.is_captured:
            self._graphed = self._next_to_kernels(reason)
        elif type(parts) is GraphParts and is_of_step:
            self._graphed = self._captured_lengths(reason)
        else:
            self._note_no_graphs(reason)

    def fix_execution(self) -> None:
        """Until then a prefill that cannot be graphed decides for all settings."""
        if self._graphed is not None:
            self._graphed.is_fixed = True

    def samples_per_round(self, num_settings: int) -> int:
        return 1 if self._graphed is None else self._graphed.samples_per_round(num_settings)

    def release_prepared(self) -> None:
        if self._graphed is not None:
            self._graphed.release_prepared()
        release_cached_memory(self.device)

    def encode_image(self, inputs: Mapping[str, Any]) -> Any:
        """It is None, too, where pictures are encoded inside the prefill."""
        return (self._stages if self._graphed is None else self._graphed).encode_image(inputs)

    def prefill(
        self, inputs: Mapping[str, Any], features: Any
    ) -> tuple[torch.Tensor, GenerationState | PrefilledRequest[Any]]:
        if self._graphed is None:
            return self._stages.prefill(self._thinking.asked(inputs), features)
        if not self._graphed.is_ready(self._graph_key, inputs, inputs["input_ids"].shape[1] + 1):
            self.warm_up(inputs, UNANNOUNCED_TOKENS)
        return self._graphed.prefill(self._graph_key, inputs, features)

    def decoding(self) -> AbstractContextManager[None]:
        """Graphs contain their kernels already."""
        return self._stages.decoding() if self._graphed is None else nullcontext()

    def decode_step(self, token: torch.Tensor, state: GenerationState | PrefilledRequest[Any]) -> torch.Tensor:
        return self._stages_of(state).decode_step(token, state)

    def follow_tokens(self, tokens: torch.Tensor, state: GenerationState | PrefilledRequest[Any]) -> torch.Tensor:
        """Logits [k, V] after each given token [1, k]; graphs and engines take them one by one."""
        if not isinstance(state, PrefilledRequest):
            return self._stages.follow_tokens(tokens, state)
        return follow_by_steps(lambda token: self.decode_step(token, state), tokens)

    def rewind(self, state: GenerationState | PrefilledRequest[Any], steps: int) -> None:
        """A cache that cannot be shortened raises SettingError."""
        self._stages_of(state).rewind(state, steps)

    def _stages_of(self, state: GenerationState | PrefilledRequest[Any]) -> Any:
        return self._graphed if isinstance(state, PrefilledRequest) else self._stages

    @contextmanager
    def raw_logits(self) -> Iterator[None]:
        """A context in which the stages give the model's own logits, without the checkpoint's preferences."""
        before = self._stages.preferences
        try:
            self._stages.preferences = NO_PREFERENCES
            yield
        finally:
            self._stages.preferences = before

    def generate_timed(self, inputs: Mapping[str, Any], max_new_tokens: int, marks: Marks) -> TimedTokens:
        if isinstance(inputs, ScoredRequest):
            self.warm_up(inputs, max_new_tokens)
            with self.raw_logits():
                return score_timed(self, inputs, marks)
        if self._graphed is None:
            return self.generate_batch_timed([inputs], max_new_tokens, marks).first
        self.warm_up(inputs, max_new_tokens)
        max_new_tokens = self.turned_knobs.limited(max_new_tokens)
        if not self._graphed.parts.is_captured:
            return generate_greedily(self, inputs, max_new_tokens, marks)
        requests = AsyncRequests(self._graphed, self._stages, self._graph_key)
        return generate_async(requests, inputs, max_new_tokens, self.ends, marks)

    @property
    def _batched(self) -> BatchedExecution | None:
        """What answers batches at the setting in force by engines; None where the modules do."""
        graphed = self._graphed
        if graphed is None or not isinstance(graphed.parts, EngineParts) or self.turned_knobs.batch_size == 1:
            return None
        if graphed.batched is None:
            graphed.batched = BatchedExecution(EngineRequests(graphed, graphed.parts, lambda: self._graph_key))
        return graphed.batched

    def _by_engines(self, run: Callable[[BatchedExecution, EngineKnobs], T]) -> T | None:
        """What `run` makes of a batch with the knobs in force; None where the modules answer batches."""
        batched = self._batched
        if batched is None or self._graphed is None or not isinstance(self._graphed.parts, EngineParts):
            return None
        try:
            return run(batched, self._graphed.parts.knobs_in_force())
        except ConfigurationError as error:
            raise engine_refused(f"answers in batches: {error}") from error

    def batch_kind(self, inputs: Mapping[str, Any]) -> Hashable:
        """Engines take all requests; modules, in one batch, those whose tensors can be put together."""
        return request_kind(inputs) if self._graphed is None else None

    def warm_up_batch(self, inputs_list: Sequence[Mapping[str, Any]], max_new_tokens: int) -> None:
        """It is `refuse_setting` that refuses where neither engines nor modules run."""
        self.refuse_setting()
        batched = self._batched
        if batched is None:
            return
        tokens = max(inputs["input_ids"].shape[1] for inputs in inputs_list)
        warm_up = partial(self._by_engines, lambda own, knobs: own.warm_up(knobs, inputs_list, max_new_tokens))
        batched.warm_up_or_refuse(warm_up, len(inputs_list), tokens, max_new_tokens)

    def generate_batch_timed(
        self, inputs_list: Sequence[Mapping[str, Any]], max_new_tokens: int, marks: Marks
    ) -> TimedBatch:
        limit = self.turned_knobs.limited(max_new_tokens)
        found = self._by_engines(
            lambda batched, knobs: batched.answer_batch(knobs, inputs_list, limit, self.ends, marks)
        )
        if found is not None:
            return found
        inputs_list = [self._thinking.asked(inputs) for inputs in inputs_list]
        around = self._visual_tokens.shortening
        return generate_batch(self.model, inputs_list, self.ends, limit, marks, self.preferences, around)

    def answer_batch(self, inputs_list: Sequence[Mapping[str, Any]], max_new_tokens: int) -> list[tuple[int, ...]]:
        """Modules answer requests whose tensors cannot be put together in batches of their own."""
        answers: dict[int, tuple[int, ...]] = {}
        for places in [range(len(inputs_list))] if self._batched is not None else alike(inputs_list):
            batch = self.generate_batch_timed([inputs_list[place] for place in places], max_new_tokens, NoMarks())
            answers |= dict(zip(places, batch.token_ids, strict=True))
        return [answers[place] for place in range(len(inputs_list))]

    def follow_batch(
        self, inputs_list: Sequence[Mapping[str, Any]], answers: Sequence[tuple[int, ...]]
    ) -> list[FollowedAnswer]:
        found = self._by_engines(lambda batched, knobs: batched.follow_batch(knobs, inputs_list, answers))
        return self._followed_by_modules(inputs_list, answers) if found is None else found

    def _followed_by_modules(
        self, inputs_list: Sequence[Mapping[str, Any]], answers: Sequence[tuple[int, ...]]
    ) -> list[FollowedAnswer]:
        inputs_list = [self._thinking.asked(inputs) for inputs in inputs_list]
        return follow_together(self.model, inputs_list, answers, self._visual_tokens.shortening)

    def follow_exactly(self, inputs: Mapping[str, Any], answer: tuple[int, ...]) -> FollowedAnswer:
        with judging(self.model, self.model.dtype):
            return self._followed_by_modules([inputs], [answer])[0]

    def decode_text(self, token_ids: tuple[int, ...]) -> str:
        return self.ends.text(token_ids)

    def end_answers_at(self, stop: Sequence[str], ignore_eos: bool) -> None:
        self.ends, self._eos = with_stops(self.ends, self._eos, stop, ignore_eos, self.requests.tokenizer)
        self.model.generation_config.eos_token_id = None if ignore_eos else self._eos.eos_token_id
        self._stages.end_tokens = self.ends

    def expected_experts(self, setting: Setting) -> tuple[int | None, ...]:
        """The first block with experts keeps the model's own number."""
        return tuple(self.knobs.experts_at(setting).values())

    @torch.inference_mode()
    def prove(self, setting: Setting, inputs: Mapping[str, Any]) -> KnobProof:
        """See `StagedModel.prove`; for a graph, also that it gives the logits of the modules, which are counted.

        Raises:
            KnobDidNotAct: a block is given another mask, position or window than in the full model, experts that a
                top-k adds cannot count, or the model as it is does not answer as its own `generate()`.
            EngineRefused: the graph does not give the logits of the modules.
            GenerationFailed: logits are not finite.
        """
        self.apply(setting)
        self.refuse_setting()
        # Of a scored request, too, the answer is looked at.
        inputs = dict(inputs)
        prepared, inputs = inputs, self._thinking.asked(inputs)
        features = self.encode_image(inputs)
        self._prove_blocks_inputs(setting, inputs, features)
        ran, ran_decode = ExecutedExperts(self.model), ExecutedExperts(self.model)
        trace = RouterTrace(self.num_experts, keeps_scores=True)
        with self.knobs.counted() as counted:
            with ran, trace.of_pass():
                logits, state = self._stages.prefill(inputs, features)
            self.knobs.refuse_without_effect(counted, trace.scores)
            experts, blocks, tokens = dict(counted.experts_per_token), tuple(counted.blocks_run), counted.tokens
            counted.clear()
            token = logits.argmax(dim=-1, keepdim=True)
            with ran_decode:
                after = self._stages.decode_step(token, state)
            decode_blocks = tuple(counted.blocks_run)
        refuse_not_finite(logits, after)
        found = self._visual_tokens.places_in(inputs["input_ids"])
        if self._graphed is not None:
            self._graphed.refuse_other_features(inputs, features)
        errors = None if self._graphed is None else self._errors_at_setting(self._graphed, inputs, features)
        without_effect = self._prove_effect(setting, prepared, logits, errors)
        if not isinstance(self._architecture, Architecture):
            self._counted.prepare(setting, inputs["input_ids"].shape[1])
        return KnobProof(
            experts_per_token=tuple(experts.get(block) for block in blocks),
            blocks_run=blocks,
            blocks_run_decode=decode_blocks,
            cache_layers=self._cached_blocks(state),
            execution=self._mode,
            execution_reason=self._execution_reason,
            execution_stages=stages_of_batches(self._execution_stages(), self.turned_knobs.batch_size),
            engine_error=None if errors is None else errors.engine,
            modules_error=None if errors is None else errors.modules,
            compile_s=None if self._graphed is None else self._graphed.compile_s.get(self._graph_key),
            experts_implementation=None if self._has_engines else ran.names,
            experts_implementation_decode=None if self._has_engines else ran_decode.names,
            prefill_tokens=tokens,
            prompt_tokens=inputs["input_ids"].shape[1],
            vision_tokens=len(found.places[0]),
            counted=self.turned_knobs.counted(setting, self, inputs),
            knobs_not_seen=without_effect,
        )

    def _prove_effect(
        self, setting: Setting, inputs: Mapping[str, Any], logits: torch.Tensor, errors: EngineErrors | None
    ) -> dict[str, str]:
        """Compare the setting with the model as no knob has turned it, on the same request.

        Args:
            logits: of the prompt at the setting, by the modules.
            errors: of what runs the setting in place of the modules.

        Returns:
            why nothing is seen of the knobs that are turned, by name, where the prompt's logits are the same.

        Raises:
            KnobDidNotAct: no knob is turned, and the tokens are not those of the model's own `generate()`.
        """
        before, num_tokens = self.turned_knobs.in_force, PROOF_STEPS + 1
        # Of a single request it changes nothing.
        before.pop(BATCH_SIZE.name, None)
        if before[TOP_K.name] == self.default_top_k:
            before[TOP_K.name] = None
        with self.turned_knobs.restored_afterwards():
            # The request was made for its vision tokens.
            self.turned_knobs.put({VISION_TOKENS.name: before[VISION_TOKENS.name]})
            own = self.turned_knobs.in_force
            turned = [name for name, value in before.items() if value != own.get(name)]
            if turned:
                untouched, _ = self._stages.prefill(inputs, self._stages.encode_image(inputs))
                return dict.fromkeys(turned, _SAME_LOGITS) if torch.equal(untouched, logits) else {}
        found = self.generate_timed(inputs, num_tokens, NoMarks()).token_ids
        with self.turned_knobs.restored_afterwards():
            self.turned_knobs.put({VISION_TOKENS.name: before[VISION_TOKENS.name]})
            answered = generate_batch(self.model, [inputs], self.ends, num_tokens, NoMarks(), self.preferences)
            raw = answered.first.token_ids
            if found != raw:
                (followed,) = self.follow_batch([inputs], [raw])
                error = 0.0 if errors is None else errors.engine
                refuse_other_tokens(setting.key, found, raw, followed.logits, error, self.model.dtype)
        return {}

    def _cached_blocks(self, state: GenerationState) -> int | None:
        """Layers of the cache that are filled, those of one block counted as one where all blocks have several; None
        where each step computes the whole text anew, without a cache.
        """
        if not self._stages.takes_cache:
            return None
        config = self.model.config.get_text_config(decoder=True)
        layers, filled = getattr(config, "num_hidden_layers", None) or self.num_total_blocks, state.filled_layers
        shared = getattr(config, "num_kv_shared_layers", None) or 0
        # Blocks that use the keys of others have a layer in some versions of transformers.
        if shared and filled == layers - shared:
            filled = layers
        each, rest = divmod(layers, self.num_total_blocks)
        return filled if each < 2 or rest or filled % each else filled // each

    def _prove_blocks_inputs(self, setting: Setting, inputs: Mapping[str, Any], features: Any) -> None:
        """Check that each active block gets the same inputs as in the full model, except for its hidden states."""
        blocks = self.active_setting[1]
        if len(blocks) == self.num_total_blocks:
            return
        with self.knobs.with_all_blocks():
            whole = self._block_inputs(inputs, features)
        found = self._block_inputs(inputs, features)
        for block in blocks:
            other = other_inputs(found[block], whole[block])
            if other is not None:
                raise KnobDidNotAct(f"{setting.key}: block {block} is given another {other} than in the full model")

    def _block_inputs(self, inputs: Mapping[str, Any], features: Any) -> dict[int, BlockInputs]:
        with inputs_seen(self._blocks) as seen:
            logits, state = self._stages.prefill(inputs, features)
            # One token for every setting: some blocks are given its embedding too.
            self._stages.decode_step(torch.zeros_like(logits[:, :1], dtype=torch.long), state)
        layers = dict(zip(self.active_setting[1], state.cache.layers, strict=False))
        return {block: BlockInputs(given, layer_kind(layers.get(block))) for block, given in seen.items()}

    def _errors_at_setting(self, graphed: GraphedGeneration, inputs: Mapping[str, Any], features: Any) -> EngineErrors:
        """The errors of the graphs at the setting in force beside those of the modules, judged once for each way."""
        key = self._graph_key, *graphed.ways.values()
        if key not in self._judged:
            self._judged[key] = self._judge(graphed, inputs, features)
        return self._judged[key]

    def _judge(self, graphed: GraphedGeneration, inputs: Mapping[str, Any], features: Any) -> EngineErrors:
        setting = self._graph_key
        graphed.warm_up(setting, inputs, PROOF_STEPS + 1)
        if isinstance(graphed.parts, EngineParts):
            graphed.parts.forget_experts()
        trace, tokens = RouterTrace(self.num_experts), list[torch.Tensor]()
        with trace.of_pass():
            logits, state = graphed.prefill(setting, inputs, features)
        chosen = graphed.prefill_at(setting).chosen_experts or tuple(trace.chosen)
        # What a replay leaves is written over by the next one.
        found, experts = [logits.clone()], [tuple(ids.clone() for ids in chosen)]
        for _ in range(PROOF_STEPS):
            tokens.append(found[-1].argmax(dim=-1, keepdim=True))
            found.append(graphed.decode_step(tokens[-1], state).clone())
            experts.append(tuple(ids.clone() for ids in graphed.decode_at(setting).chosen_experts))
        try:
            refuse_not_finite(*found)
        except GenerationFailed as error:
            if not isinstance(graphed.parts, EngineParts):
                raise
            # The modules' were finite.
            raise engine_refused(f"{' or '.join(graphed.parts.names)}: {error}") from error

        def repeat(passes: TracedPasses) -> Computed:
            with passes.next():
                first, after = self._stages.prefill(inputs, features)
            logits = [first]
            for token in tokens:
                with passes.next():
                    logits.append(self._stages.decode_step(token, after))
            # A layer with a window has forgotten what is before it.
            filled = [layer for layer in after.cache.layers if layer.is_initialized and not layer.is_sliding]
            return Computed(logits, [(layer.keys[0], layer.values[0]) for layer in filled])

        computed = Computed(found, graphed.decode_at(setting).cached)
        prompt_tokens = graphed.decode_at(setting).length - PROOF_STEPS
        run = EngineRun(computed, prompt_tokens, experts if any(experts) else ())
        try:
            exact = judging(self.model, dtype := found[0].dtype)
            return judged_by_modules(graphed.parts.names, run, exact, repeat, self.num_experts, dtype)
        except EngineRefused as error:
            raise engine_refused(str(error)) from error

    @property
    def _mode(self) -> str:
        return "eager" if self._graphed is None else self._graphed.parts.mode

    @property
    def _execution_reason(self) -> str | None:
        """Why it does not run wholly as requested, or in the fastest way; None where it does."""
        of_stages = "" if self._graphed is None else reasons_named(self._graphed.reasons)
        of_experts = None if self._graphed is None or self._looped_experts is None else self._looped_experts.reason
        return "; ".join(filter(None, [*self._refused, of_stages, of_experts])) or None

    def count_flops(self, setting: Setting, shape: RequestShape, output_tokens: int) -> StageFlops | None:
        """It is None where there is no formula, and the model cannot be counted either."""
        if not isinstance(self._architecture, Architecture):
            return self.turned_knobs.flops(setting, lambda at: self._counted.stages(at, shape, output_tokens))
        architecture, size = self._architecture, shape.size(output_tokens)
        return self.turned_knobs.flops(setting, lambda at: architecture.at(at).request_flops(size).stages)

    def count_bytes(self, setting: Setting) -> ModelBytes | None:
        step_bytes = self.turned_knobs.step_bytes(setting, self._step_bytes)
        if step_bytes is None:
            return None
        with self.knobs.with_all_blocks():
            stored = stored_bytes(self.model)
        if not isinstance(self._architecture, Architecture):
            return self._counted.bytes_at(setting, stored, step_bytes)
        decoder = self._architecture.at(setting).decoder
        return ModelBytes(
            weights_bytes=stored,
            step_weights_bytes=step_bytes,
            blocks=decoder.blocks,
            element_bytes=self.model.dtype.itemsize,
            hidden=decoder.hidden,
        )

    def _step_bytes(self, setting: Setting) -> float | None:
        """Bytes of weights that a step of the setting's requests reads; None where it is not seen how many experts."""
        chosen, every = self.knobs.experts_at(setting), self.num_experts
        if any(index in self.knobs.routed_blocks and None in (each, every) for index, each in chosen.items()):
            return None
        experts = [None if each is None or every is None else (every, each) for each in chosen.values()]
        kept = [self._blocks[index] for index in chosen]
        return step_weights(kept, self.model.get_output_embeddings(), experts).read(batch_size_of(setting))

    def describe(self) -> Mapping[str, Any]:
        """Values are those in force, whatever was requested."""
        first_routed = self.knobs.routed_blocks[0] if self.knobs.routed_blocks else None
        return {
            "model_class": type(self.model).__name__,
            "model_type": self.model.config.model_type,
            "total_parameters": count_parameters(self.model),
            "dtype": computing_dtype(self.model),
            **implementations(self.model),
            "quantisation": quantisation_in_force(self.model),
            "quantised_file": quantised_file_of(self.model),
            "device_map": device_map_of(self.model),
            "first_block_top_k": self.knobs.first_top_k,
            "first_routed_block": first_routed,
            "num_experts": self.num_experts,
            "num_total_blocks": self.num_total_blocks,
            "knobs_refused": unsupported_knobs(vision_tokens=self.requests.vision_knob_unsupported_reason)
            | self.knobs.refused,
            "vision_options": self.requests.vision_options,
            "flops_reason": None if isinstance(self._architecture, Architecture) else self._counted.reason,
            "cache": "dynamic" if self._graphed is None else "static",
            "execution_asked": self._requested,
            "execution": self._mode,
            "execution_reason": self._execution_reason,
            "execution_stages": self._execution_stages(),
            "execution_untuned": None if self._graphed is None else self._graphed.parts.untuned,
            "slow_functions": slow_functions_of(self.model),
            "timed_inside": "generate" if self._graphed is None else "stages",
            "decoding": decoding_in_force(
                self.preferences, self.model.generation_config, self.ends, self._eos, self.requests.chat_template
            ),
        }

    def _execution_stages(self) -> dict[StageName, str]:
        """How each stage runs; a prefill that cannot be graphed shows only when a setting is tried."""
        if self._graphed is None:
            return dict.fromkeys(get_args(StageName), MODULES)
        return self._graphed.ways
