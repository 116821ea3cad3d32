"""The parts of a transformers model's own `generate()`: its stages one by one, and marks set inside a run of it."""

import functools
import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from experiment_core_utils.engines.answer_ends import NO_ENDS, AnswerEnds, EosSources
from experiment_core_utils.engines.likelihood import follow_by_steps
from experiment_core_utils.models.common.decode_kernels import DecodeKernels
from experiment_core_utils.models.common.preferences import NO_PREFERENCES, Preferences
from experiment_core_utils.models.costs.counted import tensors_of
from experiment_core_utils.models.hf.knobs.patches import hooks_removed, replaced_method
from experiment_core_utils.models.hf.requests import has_pixels
from experiment_core_utils.models.hf.thinking import closed_thinking
from experiment_core_utils.models.hf.visual_token_keep import ENCODER, PictureEncoder, VisualTokens
from experiment_core_utils.primitives.device import Marks
from experiment_core_utils.primitives.errors import SettingError
from experiment_core_utils.primitives.private_apis import carried_kwargs, position_ids
from experiment_core_utils.records.requests import StageName


def greedy_config(model: PreTrainedModel, eos: EosSources | None = None) -> GenerationConfig:
    """A config of greedy decoding only, with the checkpoint's special tokens; its preferences are applied beside it
    (`Preferences.processors`).

    Args:
        eos: of the checkpoint; None for those of its generation config alone.
    """
    own = model.generation_config
    ids = own.eos_token_id if eos is None and own is not None else None if eos is None else eos.eos_token_id
    pad = own.pad_token_id if own is not None else None
    first_eos = ids[0] if isinstance(ids, list) else ids
    return GenerationConfig(
        do_sample=False,
        num_beams=1,
        use_cache=True,
        bos_token_id=own.bos_token_id if own is not None else None,
        eos_token_id=ids,
        pad_token_id=pad if pad is not None else first_eos if first_eos is not None else 0,
    )


class StageMarks:
    """Sets marks and names the intervals between them."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self.spans: list[StageName] = []

    def begin(self) -> None:
        """The request is handed over."""
        self._marks.mark()

    def end(self, stage: StageName) -> None:
        """A stage ends, or a part of it."""
        self._marks.mark()
        self.spans.append(stage)


def processors_for(
    model: PreTrainedModel, inputs: Mapping[str, Any], preferences: Preferences, ends: AnswerEnds = NO_ENDS
) -> LogitsProcessorList:
    """What the preferences apply to the logits of a request or of a batch, padded on the left.

    Args:
        ends: with the end-of-sequence tokens; without any, those of the model's generation config.
    """
    eos: Any = model.generation_config.eos_token_id
    own = [] if eos is None else eos if isinstance(eos, list) else [eos]
    ids = inputs["input_ids"]
    processors = preferences.processors(ids, inputs.get("attention_mask"), ends.token_ids or own)
    return LogitsProcessorList([*processors, *closed_thinking(ends, ids.shape[1])])


def encoder_of(model: PreTrainedModel) -> nn.Module | str | None:
    """The name of the base model's method that encodes pictures, else the encoder; None where there is neither."""
    if hasattr(model.base_model, ENCODER):
        return ENCODER
    encoder = model.get_encoder(modality="image")
    return None if encoder is model or encoder is model.base_model else encoder


def vision_entry(model: PreTrainedModel) -> nn.Module | str | None:
    """The place where pictures are encoded: as `encoder_of`, else the outermost module that runs with pictures only;
    None in a text model.
    """
    found = encoder_of(model)
    if found is not None or getattr(model.config, "vision_config", None) is None:
        return found
    return next((module for module in model.modules() if _needs_pictures(module)), None)


def _needs_pictures(module: nn.Module) -> bool:
    taken = inspect.signature(module.forward).parameters.items()
    return any(has_pixels(name) and each.default is inspect.Parameter.empty for name, each in taken)


@contextmanager
def vision_marked(model: PreTrainedModel, stages: StageMarks) -> Iterator[None]:
    """A context with marks around every call of the vision entry, which is restored afterwards."""
    entry = vision_entry(model)
    with ExitStack() as stack:
        if isinstance(entry, nn.Module):
            begin = entry.register_forward_pre_hook(lambda *_: stages.end("prefill"))
            done = entry.register_forward_hook(lambda *_: stages.end("vision"))
            stack.enter_context(hooks_removed([begin, done]))
        elif entry is not None:
            plain = getattr(model.base_model, entry)

            # `generate()` reads which arguments it takes.
            @functools.wraps(plain)
            def marked(*args: Any, **kwargs: Any) -> Any:
                stages.end("prefill")
                features = plain(*args, **kwargs)
                stages.end("vision")
                return features

            stack.enter_context(replaced_method(model.base_model, entry, marked))
        yield


_TAKE_SEVERAL = (DynamicLayer, DynamicSlidingWindowLayer)
# What `forward` calls its cache; the second name is that of the Mamba models.
_CACHE_NAMES = ("past_key_values", "cache_params")


def cache_argument(model: PreTrainedModel) -> str:
    """The name under which the model's `forward` takes its cache."""
    taken = inspect.signature(model.forward).parameters
    return next((name for name in _CACHE_NAMES if name in taken), _CACHE_NAMES[0])


@dataclass
class GenerationState:
    """The state between two tokens."""

    #: ids so far and what `generate()` would carry on with, after the prefill and after each step since
    steps: list[tuple[torch.Tensor, dict[str, Any]]]
    #: applied to the logits of each step, as the checkpoint prefers
    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)

    @property
    def cache(self) -> Any:
        """Keys and values, and the states of recurrent blocks; None where an engine keeps them."""
        carried = self.steps[-1][1]
        return next((carried[name] for name in _CACHE_NAMES if carried.get(name) is not None), None)

    @property
    def filled_layers(self) -> int:
        """Layers of the cache that contain keys or a recurrent state."""
        return 0 if self.cache is None else sum(map(is_filled, self.cache.layers))


class GenerateStages:
    """The three stages of one model; one request or a batch of them, padded on the left.

    Args:
        preferences: of the checkpoint, applied to the logits that stages give. The model's generation config must have
            the end of sequence by then.
        visual_tokens: drops image tokens between vision and prefill; None drops none.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        preferences: Preferences = NO_PREFERENCES,
        visual_tokens: VisualTokens | None = None,
    ) -> None:
        self._model: Any = model
        self.preferences = preferences
        #: with the end-of-sequence tokens; without any, those of the model's generation config count
        self.end_tokens = NO_ENDS
        self._kernels = DecodeKernels(model)
        taken = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in taken
        self._cache_name = cache_argument(model)
        #: whether steps keep anything of those before
        self.takes_cache = self._cache_name in taken
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}
        self.visual_tokens = visual_tokens
        self._host_copies: Any = WeakIdKeyDictionary()
        self._encoder = PictureEncoder(model)

    @property
    def can_encode_alone(self) -> bool:
        """Whether pictures can be encoded by themselves and not only inside the prefill."""
        return self._encoder.arguments is not None

    def note(self, host_inputs: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
        """Remember the host's copies of a request's ids, masks and sizes, so that no prefill by an engine waits for the
        device to learn them.
        """
        for name, tensor in inputs.items():
            if tensor is not host_inputs[name] and not tensor.is_floating_point():
                self._host_copies[tensor] = host_inputs[name]

    def host_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """The host's copy of a request's tensor that was noted, else the tensor itself."""
        found: torch.Tensor = self._host_copies.get(tensor, tensor)
        return found

    def encode_image(self, inputs: Mapping[str, Any]) -> Any:
        """The base model's features of the pictures; None without one, or where they are encoded in the prefill."""
        return self._encoder.encode(inputs)

    def prefill(
        self, inputs: Mapping[str, Any], features: Any, by_engine: bool = False
    ) -> tuple[torch.Tensor, GenerationState]:
        """Logits [B, V] of the last position, and the state for `decode_step`.

        Args:
            by_engine: what runs the decoder in place of its modules has a cache of its own, so that the state has none,
                and counts positions from 0 where it is given none.
        """
        model, ids = self._model, inputs["input_ids"]
        with ExitStack() as stack:
            if features is not None:
                stack.enter_context(replaced_method(model.base_model, ENCODER, lambda *_, **__: features))
            shortened = None
            if self.visual_tokens is not None:
                shortened = stack.enter_context(self.visual_tokens.shortening(ids))
            kwargs = self._prompt_kwargs(inputs, by_engine, is_shortened=shortened is not None)
            prepared = model.prepare_inputs_for_generation(ids, is_first_iteration=True, **kwargs)
            outputs = model(**prepared, return_dict=True)
        if shortened is not None:
            ids, kwargs = shortened.prompt(ids, kwargs)
            inputs = {"input_ids": ids, "attention_mask": kwargs["attention_mask"]}
        state = GenerationState([(ids, self._next_kwargs(outputs, kwargs))])
        if self.preferences.change_logits or self.end_tokens.thinking is not None:
            state.processors = processors_for(model, inputs, self.preferences, self.end_tokens)
        return _processed(ids, outputs.logits[:, -1], state), state

    def _prompt_kwargs(self, inputs: Mapping[str, Any], by_engine: bool, is_shortened: bool) -> dict[str, Any]:
        """What `generate()` gives to the first step beside the ids; for `by_engine` see `prefill`."""
        known = dict(inputs)
        if by_engine:
            known = {name: self.host_copy(tensor) for name, tensor in inputs.items()}
        kwargs, ids = {name: inputs[name] for name in inputs if name != "input_ids"}, known.pop("input_ids")
        if self._takes_positions:
            positions = position_ids(self._model, ids, known)
            # In three dimensions there are gaps where tokens are left out.
            is_counted = by_engine and (positions.dim() == 2 or not is_shortened) and _count_from_0(positions)
            if not is_counted:
                kwargs["position_ids"] = positions.to(inputs["input_ids"].device) if by_engine else positions
        if "attention_mask" in kwargs and bool((known["attention_mask"] == 1).all()):
            kwargs["attention_mask"] = None
        kwargs |= {**self._last_only, "use_cache": True}
        if not by_engine:
            kwargs[self._cache_name] = DynamicCache(config=self._model.config.get_text_config(decoder=True))
        return kwargs

    def decoding(self) -> AbstractContextManager[None]:
        return self._kernels.switched()

    def decode_step(self, token: torch.Tensor, state: GenerationState) -> torch.Tensor:
        """The decode stage: token [B, 1] -> logits [B, V]."""
        if self._kernels.needs_switch:
            with self.decoding():
                return self.decode_step(token, state)
        ids, kwargs = state.steps[-1]
        ids = torch.cat([ids, token], dim=-1)
        prepared = self._model.prepare_inputs_for_generation(ids, next_sequence_length=1, **kwargs)
        outputs = self._model(**prepared, return_dict=True)
        state.steps.append((ids, self._next_kwargs(outputs, kwargs)))
        return _processed(ids, outputs.logits[:, -1], state)

    def follow_tokens(self, tokens: torch.Tensor, state: GenerationState) -> torch.Tensor:
        """Logits [k, V] after each of the next tokens [1, k], which are given; only all of them can be rewound.

        It is one pass where every layer of the cache is transformers' own of keys and values; recurrent ones take a
        token at a time.
        """
        count = tokens.shape[1]
        if count == 1 or state.cache is None or not all(type(each) in _TAKE_SEVERAL for each in state.cache.layers):
            return follow_by_steps(lambda token: self.decode_step(token, state), tokens)
        ids, kwargs = state.steps[-1]
        ids = torch.cat([ids, tokens], dim=-1)
        # They are of one token so far.
        kwargs = carried_kwargs(self._model, {}, kwargs, count - 1) | (
            {"logits_to_keep": count} if self._last_only else {}
        )
        prepared = self._model.prepare_inputs_for_generation(ids, next_sequence_length=count, **kwargs)
        outputs = self._model(**prepared, return_dict=True)
        state.steps += [(ids, self._next_kwargs(outputs, kwargs | self._last_only))] * count
        found: torch.Tensor = outputs.logits[0, -count:]
        return found

    def rewind(self, state: GenerationState, steps: int) -> None:
        """Undo the last so many decode steps of the state.

        Raises:
            SettingError: the cache forgets what it would have to be taken back to (a sliding window, a recurrence).
        """
        if not steps:
            return
        try:
            state.cache.crop(-steps)
        except (RuntimeError, ValueError, AttributeError) as error:
            raise SettingError(
                f"the cache of this {self._model.config.model_type} cannot be taken back by {steps} steps, so that its "
                "stages cannot be repeated; measure it without energy by stages"
            ) from error
        del state.steps[-steps:]

    def _next_kwargs(self, outputs: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return carried_kwargs(self._model, outputs, kwargs)


def _count_from_0(positions: torch.Tensor) -> bool:
    """Whether positions [..., T] are 0 to T - 1, in all rows."""
    return bool((positions == torch.arange(positions.shape[-1], device=positions.device)).all())


def _processed(ids: torch.Tensor, logits: torch.Tensor, state: GenerationState) -> torch.Tensor:
    """The logits by which `generate()` chooses after these ids: its own float32 copies where anything is applied."""
    processors: Any = state.processors
    return processors(ids, logits.to(copy=True, dtype=torch.float32)) if processors else logits


def is_filled(layer: Any) -> bool:
    """Whether a layer of a cache contains anything."""
    return bool(getattr(layer, "is_initialized", False)) or any(True for _ in tensors_of(layer))
