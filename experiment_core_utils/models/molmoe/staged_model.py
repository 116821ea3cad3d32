"""The staged interface of MolmoE, by engines or by its modules."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from experiment_core_utils.config.parts import ExecutionMode
from experiment_core_utils.engines.answer_ends import AnswerEnds, HasEnds, eos_sources, with_stops
from experiment_core_utils.engines.batch_runner import BatchedExecution, stages_of_batches
from experiment_core_utils.engines.cuda_graphs import engine_refused, refusal_of
from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.greedy import generate_async, generate_greedily
from experiment_core_utils.engines.likelihood import (
    ScoredRequest,
    continuation_tensors,
    follow_by_steps,
    score_timed,
    split_request,
)
from experiment_core_utils.engines.paused_runner import (
    EnginePausedPrefill,
    PausedPrefillShape,
)
from experiment_core_utils.engines.request_slot import PrefilledRequest
from experiment_core_utils.engines.runner import EngineStages, engine_stages, modules_run
from experiment_core_utils.knobs.active_blocks import blocks_of
from experiment_core_utils.knobs.batch_size import batch_size_of
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.token_units import tokens_of_crops
from experiment_core_utils.knobs.top_k import experts_of
from experiment_core_utils.knobs.vision_tokens import CropRange
from experiment_core_utils.models.common.block_modules import decoder_components
from experiment_core_utils.models.common.continuations import continuation_ids, split_context, whole_text_request
from experiment_core_utils.models.common.describe import implementations, stored_bytes
from experiment_core_utils.models.common.judging import judging
from experiment_core_utils.models.common.preferences import decoding_in_force, preferences_of, values_of
from experiment_core_utils.models.common.turned_knobs import TurnedKnobs
from experiment_core_utils.models.costs.architecture import Architecture, shapes_of
from experiment_core_utils.models.costs.memory import ModelBytes, step_weights
from experiment_core_utils.models.hf.requests import check_prompt, refuse_longer_prompt, unusable_named
from experiment_core_utils.models.molmoe.eager.paused_stages import EagerPausedPrefill
from experiment_core_utils.models.molmoe.eager.stages import EagerStages
from experiment_core_utils.models.molmoe.engine_model import MolmoeEngineModel
from experiment_core_utils.models.molmoe.knobs import adapters_of
from experiment_core_utils.models.molmoe.modeling_molmoe import (
    DecodeState,
    MolmoeForConditionalGeneration,
    MolmoeImageFeatures,
)
from experiment_core_utils.models.molmoe.prefix_traces import PromptTraces
from experiment_core_utils.models.molmoe.processing_molmoe import MolmoeProcessor, refuse_several_pictures
from experiment_core_utils.models.molmoe.visual_token_keep import PlacedTokens
from experiment_core_utils.primitives.clock import HostClock
from experiment_core_utils.primitives.device import Marks, NoMarks, release_cached_memory
from experiment_core_utils.primitives.errors import ConfigurationError, EngineRefused
from experiment_core_utils.records.requests import (
    FollowedAnswer,
    KnobProof,
    PreparedRequest,
    RequestShape,
    RequestSize,
    StageFlops,
    TimedBatch,
    TimedTokens,
    VisionGeometry,
)
from experiment_core_utils.records.stages import Component
from experiment_core_utils.tasks.interface import PromptFamily, Sample

T = TypeVar("T")


def refuse_inductor(execution: ExecutionMode) -> None:
    """Raises ConfigurationError where Inductor is requested."""
    if execution == "inductor":
        raise ConfigurationError(
            "--execution inductor is for models of transformers, and Molmo has own kernels; give --execution auto"
        )


class MolmoeStagedModel(HasEnds):
    """The staged interface of MolmoE; one request at a time.

    Args:
        name: path or hub id that the model came from.
        model: on its device, in its dtype, in evaluation mode.
        processor: of the same checkpoint.
        execution: `graph` runs the stages by engines where the model allows it, `auto` where all stages are faster for
            it, both else eagerly; `describe` reports it.
        eager_reason: why `auto` leaves the modules in place, whatever engines there are; None where it may choose.

    Raises:
        ConfigurationError: `inductor` is requested.

    Attributes:
        split: the stages with a paused prefill, run by the same modules or engines as the whole stages.
    """

    prompt_family: PromptFamily = "molmo"

    def __init__(
        self,
        name: str,
        model: MolmoeForConditionalGeneration,
        processor: MolmoeProcessor,
        execution: ExecutionMode = "eager",
        eager_reason: str | None = None,
    ) -> None:
        refuse_inductor(execution)
        self.name = name
        self.model = model
        self.processor = processor
        self.device = next(model.parameters()).device
        self.num_total_blocks = model.num_total_blocks
        self.num_experts = model.num_experts
        self.default_top_k = model.default_top_k
        # Of the whole model: knobs change what its config says.
        self._architecture = Architecture("molmoe", *shapes_of(model.config))
        self._eos = eos_sources(model.generation_config, model.config, processor.tokenizer, None)
        self.ends = AnswerEnds(frozenset(self._eos.token_ids), text_of=processor.decode)
        self._requested = execution
        self._placed_tokens = PlacedTokens()
        self._eager = EagerStages(model, self._placed_tokens)
        self.turned_knobs = TurnedKnobs(model, adapters_of(model, self._placed_tokens))
        self._engine_stages, self._executed = engine_stages(
            MolmoeEngineModel(model, self._placed_tokens), execution, eager_reason
        )
        self._batched = None if self._engine_stages is None else BatchedExecution(self._engine_stages)
        self.split: EagerPausedPrefill | EnginePausedPrefill = (
            EagerPausedPrefill(model, self._eager)
            if self._engine_stages is None
            else EnginePausedPrefill(self._engine_stages)
        )

    @property
    def active_setting(self) -> EngineKnobs:
        return self.model.active_setting

    @property
    def decoder_blocks(self) -> tuple[nn.Module, ...]:
        return self.model.all_blocks

    def prepare(self, sample: Sample, prompt: str, crops: CropRange | None) -> PreparedRequest:
        refuse_several_pictures(sample)
        clock = HostClock()
        started_s = clock.now_s()
        with unusable_named(sample.sample_id, "its picture or prompt"):
            if sample.continuations == ():
                prefix = self.processor.image_tokens.bos
                return whole_text_request(self._encoded, prompt, prefix, self.model.config, started_s)
            self.check_prompt(prompt)
            text, given = prompt, dict[str, torch.Tensor]()
            if sample.continuations is not None:
                text = split_context(prompt)[0]
                given = continuation_tensors(continuation_ids(self._encoded, prompt, sample.continuations))
            inputs = self.processor(text, sample.image, crops)
        preprocess_s = clock.now_s() - started_s
        tokens = inputs["input_ids"].shape[1]
        refuse_longer_prompt(sample.sample_id, tokens, self.model.config, given)
        if sample.image is None:
            return PreparedRequest({**inputs, **given}, RequestShape(None, None, 0, 0, tokens, preprocess_s), text)
        images = self.processor.image_processor
        width, height = sample.image.size
        rows, columns = images.tiling_for(height, width, crops)
        target = images.target_features(height, width, crops)
        theoretical = self._geometry((rows, columns), rows * columns)
        places = inputs["image_input_idx"]
        vision_tokens = int((places >= 0).sum())
        ids = self.processor.image_tokens
        markers = sum(int((inputs["input_ids"] == marker).sum()) for marker in (ids.start, ids.end, ids.column))
        actual = self._counted_geometry(inputs)
        text_tokens = tokens - vision_tokens - markers
        shape = RequestShape(theoretical, actual, vision_tokens, markers, text_tokens, preprocess_s, target)
        return PreparedRequest({**inputs, **given}, shape, text)

    def refuse_longer_prompt(self, sample_id: int, tokens: int) -> None:
        """Raises SampleError for a prompt that is longer than the model's context."""
        refuse_longer_prompt(sample_id, tokens, self.model.config)

    def _geometry(self, tiling: tuple[int, int], crops: int) -> VisionGeometry:
        features = tokens_of_crops(crops, self.model.config.features_per_crop)
        return VisionGeometry(crops, tiling, self.processor.image_processor.canvas_size(tiling), features)

    def _counted_geometry(self, inputs: Mapping[str, Any]) -> VisionGeometry:
        """Geometry counted from the tensors: crops from the pixels, tiling from the columns of the second image
        part.
        """
        ids = inputs["input_ids"][0]
        tokens = self.processor.image_tokens
        second_start = int((ids == tokens.start).nonzero()[1])
        second_part = ids[second_start:]
        columns = int((second_part == tokens.column).nonzero()[0]) - 1
        rows = int((second_part == tokens.column).sum())
        images = self.processor.image_processor
        step = images.window_size // images.patch_size // images.pooling_size
        margin = images.margin_size // images.patch_size // images.pooling_size
        tiling = ((rows - margin) // step, (columns - margin) // step)
        return self._geometry(tiling, inputs["pixel_values"].shape[1] - 1)

    def to_device(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        inputs, given = split_request(inputs)
        sent = {
            name: tensor.to(self.device, self.model.dtype if tensor.is_floating_point() else None)
            for name, tensor in inputs.items()
        }
        self._placed_tokens.note(inputs, sent)
        return ScoredRequest(sent, given) if given else sent

    def apply(self, setting: Setting) -> AbstractContextManager[object]:
        return self.turned_knobs.apply(setting)

    def restored_afterwards(self) -> AbstractContextManager[object]:
        return self.turned_knobs.restored_afterwards()

    def components(self) -> Mapping[Component, Sequence[nn.Module]]:
        """Engines call no modules."""
        if isinstance(self._stages, EngineStages):
            return {}
        decoder = self.model.get_decoder()
        return decoder_components(list(decoder.layers), decoder.norm, self.model.lm_head)

    @property
    def _knobs(self) -> EngineKnobs:
        self.refuse_setting()
        return self.model.active_setting

    @property
    def _stages(self) -> EagerStages | EngineStages:
        return self._eager if self._engine_stages is None else self._engine_stages

    def warm_up(self, inputs: Mapping[str, Any], max_new_tokens: int) -> None:
        stages, knobs = self._engine_stages, self._knobs
        if stages is None:
            return
        if isinstance(inputs, ScoredRequest):
            for window in inputs.windows:
                self.warm_up(window.inputs, inputs.longest)
            return
        tokens = self._placed_tokens.length(inputs)
        reason = refusal_of(lambda: stages.warm_up(knobs, inputs, max_new_tokens), tokens, max_new_tokens)
        if reason is not None:
            stages.give_up(knobs)
            release_cached_memory(self.device)
            raise engine_refused(reason)

    def refuse_setting(self) -> None:
        reason, on_modules = self.turned_knobs.engines_unsupported_reason, self.turned_knobs.on_modules
        if on_modules:
            reason = f"{', '.join(on_modules)} acts on modules, and engines call none"
        if self._engine_stages is not None and reason is not None:
            raise engine_refused(reason)

    @property
    def has_next_way(self) -> bool:
        return self._requested == "auto" and self._engine_stages is not None

    def run_next_way(self, reason: str) -> None:
        self._engine_stages, self._executed = None, modules_run(reason)
        self._batched, self.split = None, EagerPausedPrefill(self.model, self._eager)
        # Traces of before are by the engines.
        vars(self).pop("prompt_traces", None)
        release_cached_memory(self.device)

    def fix_execution(self) -> None:
        """Engines are chosen when the model is loaded."""

    @cached_property
    def host_embeddings(self) -> np.ndarray:
        """Token embeddings [V, H] as float32 on the host; a copy where the model is not there in float32."""
        return self.input_embeddings.to("cpu").float().numpy()

    @property
    def input_embeddings(self) -> torch.Tensor:
        return self.model.get_input_embeddings().weight.detach()

    def _encoded(self, text: str) -> list[int]:
        ids: list[int] = self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def prompt_ids(self, prompt: str) -> torch.Tensor:
        return torch.tensor(self._encoded(prompt), dtype=torch.long)

    def check_prompt(self, prompt: str) -> None:
        check_prompt(prompt, self.processor.tokenizer, self.model.config)

    def warm_up_paused_prefill(self, shapes: Sequence[PausedPrefillShape]) -> None:
        """Prepare everything that such requests need.

        Raises:
            EngineRefused: engines cannot run them.
        """
        stages = self._engine_stages
        if stages is None:
            return
        largest = max((shape.tokens, shape.max_new_tokens) for shape in shapes)
        reason = refusal_of(lambda: self.split.warm_up(shapes), *largest)
        if reason is not None:
            stages.release_unused()
            release_cached_memory(self.device)
            raise engine_refused(f"requests with a pause: {reason}")

    @cached_property
    def prompt_traces(self) -> PromptTraces:
        """Traces of the first blocks, by the same modules or engines as the whole requests."""
        return PromptTraces(self.model, self._engine_stages)

    def samples_per_round(self, num_settings: int) -> int:
        """All settings share one cache, and their graphs are small."""
        return 1

    def release_prepared(self) -> None:
        if self._engine_stages is not None:
            self._engine_stages.release_prepared()
        if self._batched is not None:
            self._batched.release()
        release_cached_memory(self.device)

    def encode_image(self, inputs: Mapping[str, Any]) -> MolmoeImageFeatures | None:
        return self._stages.encode_image(inputs)

    def prefill(
        self, inputs: Mapping[str, Any], features: MolmoeImageFeatures | None
    ) -> tuple[torch.Tensor, DecodeState | PrefilledRequest[EngineKnobs]]:
        return self._stages.prefill(self._knobs, inputs, features)

    def decoding(self) -> AbstractContextManager[None]:
        """Engines switch nothing."""
        return self._eager.decoding() if self._stages is self._eager else nullcontext()

    def decode_step(self, token: torch.Tensor, state: DecodeState | PrefilledRequest[EngineKnobs]) -> torch.Tensor:
        return self._stages_of(state).decode_step(token, state)

    def generate_timed(self, inputs: Mapping[str, Any], max_new_tokens: int, marks: Marks) -> TimedTokens:
        if isinstance(inputs, ScoredRequest):
            self.warm_up(inputs, max_new_tokens)
            return score_timed(self, inputs, marks)
        stages, limit = self._stages, self.turned_knobs.limited(max_new_tokens)
        if isinstance(stages, EngineStages) and stages.is_graphed:
            self.warm_up(inputs, max_new_tokens)
            return generate_async(stages.async_stages(self._knobs), inputs, limit, self.ends, marks)
        return generate_greedily(self, inputs, limit, marks)

    def follow_tokens(self, tokens: torch.Tensor, state: DecodeState | PrefilledRequest[EngineKnobs]) -> torch.Tensor:
        """Logits [k, V] after each given token [1, k]; engines take them one by one."""
        if not isinstance(state, PrefilledRequest):
            return self._eager.follow_tokens(tokens, state)
        return follow_by_steps(lambda token: self.decode_step(token, state), tokens)

    def rewind(self, state: DecodeState | PrefilledRequest[EngineKnobs], steps: int) -> None:
        self._stages_of(state).rewind(state, steps)

    def _stages_of(self, state: DecodeState | PrefilledRequest[EngineKnobs]) -> Any:
        return self._engine_stages if isinstance(state, PrefilledRequest) else self._eager

    def batch_kind(self, inputs: Mapping[str, Any]) -> Hashable:
        """All requests can be together, with a picture or without."""
        return None

    def warm_up_batch(self, inputs_list: Sequence[Mapping[str, Any]], max_new_tokens: int) -> None:
        knobs, batched = self._knobs, self._batched
        if batched is None:
            return
        tokens = max(map(self._placed_tokens.length, inputs_list))
        warm_up = partial(batched.warm_up, knobs, inputs_list, max_new_tokens)
        batched.warm_up_or_refuse(warm_up, len(inputs_list), tokens, max_new_tokens)

    def generate_batch_timed(
        self, inputs_list: Sequence[Mapping[str, Any]], max_new_tokens: int, marks: Marks
    ) -> TimedBatch:
        knobs, ends, limit = self._knobs, self.ends, self.turned_knobs.limited(max_new_tokens)
        return self._together(lambda stages: stages.answer_batch(knobs, inputs_list, limit, ends, marks))

    def answer_batch(self, inputs_list: Sequence[Mapping[str, Any]], max_new_tokens: int) -> list[tuple[int, ...]]:
        return list(self.generate_batch_timed(inputs_list, max_new_tokens, NoMarks()).token_ids)

    def follow_batch(
        self, inputs_list: Sequence[Mapping[str, Any]], answers: Sequence[tuple[int, ...]]
    ) -> list[FollowedAnswer]:
        knobs = self._knobs
        return self._together(lambda stages: stages.follow_batch(knobs, inputs_list, answers))

    def follow_exactly(self, inputs: Mapping[str, Any], answer: tuple[int, ...]) -> FollowedAnswer:
        with judging(self.model, self.model.dtype):
            return self._eager.follow_batch(self._knobs, [inputs], [answer])[0]

    def _together(self, run: Callable[[EagerStages | BatchedExecution], T]) -> T:
        """What `run` makes of a batch by engines, or by the modules where these run the model."""
        if self._batched is None:
            return run(self._eager)
        try:
            return run(self._batched)
        except ConfigurationError as error:
            raise engine_refused(f"answers in batches: {error}") from error

    def decode_text(self, token_ids: tuple[int, ...]) -> str:
        return self.ends.text(token_ids)

    def end_answers_at(self, stop: Sequence[str], ignore_eos: bool) -> None:
        self.ends, self._eos = with_stops(self.ends, self._eos, stop, ignore_eos, self.processor.tokenizer)

    def expected_experts(self, setting: Setting) -> tuple[int | None, ...]:
        """Block 0 keeps the model's own number; a dense model has none."""
        return tuple(self.default_top_k if block == 0 else experts_of(setting) for block in blocks_of(setting))

    def prove(self, setting: Setting, inputs: Mapping[str, Any]) -> KnobProof:
        """See `StagedModel.prove`; by the stages that run.

        Dense blocks leave no ids of experts in engines. Which of them run is counted in the modules, beside which the
        keys and values of each are judged at these very knobs.

        Raises:
            KnobDidNotAct: see `EngineStages.prove`.
        """
        self.apply(setting)
        self.refuse_setting()
        try:
            proof = self._stages.prove(self._knobs, inputs)
        except EngineRefused as error:
            raise engine_refused(str(error)) from error
        if self.num_experts is None and self._stages is not self._eager:
            of_engines = {name: getattr(proof, name) for name in ("cache_layers", "engine_error", "modules_error")}
            proof = replace(self._eager.prove(self._knobs, inputs), **of_engines)
        executed = self._executed
        return replace(
            proof,
            execution=executed.mode,
            execution_reason=executed.reason,
            execution_stages=stages_of_batches(executed.stages, self.turned_knobs.batch_size),
            counted=self.turned_knobs.counted(setting, self, inputs),
        )

    def count_flops(self, setting: Setting, shape: RequestShape, output_tokens: int) -> StageFlops | None:
        crops = 0 if shape.actual is None else shape.actual.num_crops + 1
        size = RequestSize(shape.prompt_tokens, output_tokens, crops=crops)
        return self.turned_knobs.flops(setting, lambda at: self._architecture.at(at).request_flops(size).stages)

    def count_bytes(self, setting: Setting) -> ModelBytes | None:
        step_bytes = self.turned_knobs.step_bytes(setting, self._step_bytes)
        if step_bytes is None:
            return None
        decoder = self._architecture.at(setting).decoder
        with self.model.knobs():
            stored = stored_bytes(self.model)
        return ModelBytes(
            weights_bytes=stored,
            step_weights_bytes=step_bytes,
            blocks=decoder.blocks,
            element_bytes=self.model.dtype.itemsize,
            hidden=decoder.hidden,
        )

    def _step_bytes(self, setting: Setting) -> float:
        """Bytes of weights that a decode step of the setting's requests reads together."""
        every = self.model.all_blocks
        blocks = [every[index] for index in blocks_of(setting)]
        experts = [
            None if self.num_experts is None or top_k is None else (self.num_experts, top_k)
            for top_k in self.expected_experts(setting)
        ]
        return step_weights(blocks, self.model.lm_head, experts).read(batch_size_of(setting))

    def describe(self) -> Mapping[str, Any]:
        return {
            "model_class": type(self.model).__name__,
            "total_parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            **implementations(self.model),
            "first_block_top_k": self.default_top_k,
            "num_experts": self.num_experts,
            "num_total_blocks": self.num_total_blocks,
            "cache": "dynamic" if self._engine_stages is None else "static",
            "execution_asked": self._requested,
            "execution": self._executed.mode,
            "execution_reason": self._executed.reason,
            "execution_stages": dict(self._executed.stages),
            "execution_untuned": self._executed.untuned,
            "runs_unused_vision_blocks": self.model.config.keep_unused_vision_blocks,
            "decoding": decoding_in_force(
                preferences_of(values_of(self.model.generation_config), None, self.name).nothing_kept(),
                self.model.generation_config,
                self.ends,
                self._eos,
                template=None,
            ),
        }
