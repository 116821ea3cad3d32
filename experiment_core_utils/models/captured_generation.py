"""In: a model of transformers and a request; out: its stages with decode steps, and where it can be prefills, replayed.

There is one request at a time: a state can be decoded from until another request is prefilled. What is recorded is made
by `make_ready`, outside of what is measured, for each setting of the knobs by itself.
"""

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from experiment_core_utils.models.fixed_cache_decode import FixedCacheDecode, cache_refusal
from experiment_core_utils.models.generate_marks import vision_entry
from experiment_core_utils.models.generate_stages import GenerateStages, GenerationState
from experiment_core_utils.models.graph_capture import Recorder, refused_without_memory
from experiment_core_utils.models.held_request import HeldRequest, RequestHolder
from experiment_core_utils.models.recorded_decoder import RecordedDecoder
from experiment_core_utils.primitives.device import release_cached_memory
from experiment_core_utils.primitives.errors import ConfigurationError

# Slots of a cache are a multiple of this, so that requests of similar length share a recording.
SLOT_STEP = 256
# Settings whose recordings are kept; each has a cache of its own.
MOST_SETTINGS = 8


@dataclass
class _Recorded:
    """What is recorded at one setting.

    Attributes:
        prefill_refusal: why prompts run as ever; None where they are replayed.
        ready: shapes of inputs that were made ready, and the names of the recordings that serve each.
    """

    decode: FixedCacheDecode
    prefill: RecordedDecoder
    prefill_refusal: str | None = None
    ready: dict[Hashable, tuple[Hashable, ...]] = field(default_factory=dict)

    def serves(self, shape: Hashable, slots: int) -> bool:
        """Whether inputs of the shape, with that many slots, find everything made."""
        names = self.ready.get(shape)
        return names is not None and slots <= self.decode.slots and self.prefill.holds(names)


class CapturedGeneration:
    """The stages of one model; `setting` is the name of what is in force in it, by the caller's word."""

    def __init__(self, model: PreTrainedModel, stages: GenerateStages, recorder: Recorder) -> None:
        self._model: Any = model
        self._stages = stages
        self._recorder = recorder
        self._recorded: OrderedDict[Hashable, _Recorded] = OrderedDict()
        self._refusals: dict[Hashable, str] = {}
        self._holder = RequestHolder[Hashable]("the cache of fixed size")

    @property
    def device(self) -> torch.device:
        """See `AheadStages.device`."""
        device: torch.device = self._model.device
        return device

    def is_ready(self, setting: Hashable) -> bool:
        """Whether decode steps are replayed at the setting; it was made ready, and lately enough."""
        return setting in self._recorded

    def decode_at(self, setting: Hashable) -> FixedCacheDecode:
        """The steps of a setting that is ready."""
        return self._recorded[setting].decode

    def refusal(self, setting: Hashable) -> str | None:
        """Why decode steps are not replayed at a setting that was made ready; None where they are."""
        return self._refusals.get(setting)

    def refuse(self, setting: Hashable, reason: str) -> None:
        """Nothing is replayed at the setting from now on."""
        self._recorded.pop(setting, None)
        self._refusals[setting] = reason

    @property
    def refusals(self) -> Mapping[Any, str]:
        """Setting -> `refusal`, of all that have one."""
        return dict(self._refusals)

    def prefill_refusal(self, setting: Hashable) -> str | None:
        """Why prompts are not replayed at a setting that is ready; None where they are."""
        return self._recorded[setting].prefill_refusal

    @torch.inference_mode()
    def make_ready(self, setting: Hashable, inputs: Mapping[str, Any], max_new_tokens: int) -> None:
        """Everything that a request of this shape needs at the setting in force; held states may be lost.

        For what is ready nothing runs.
        """
        tokens = inputs["input_ids"].shape[1]
        if setting in self._refusals or self._serves(setting, inputs, tokens + max_new_tokens):
            return
        self._holder.release()
        try:
            with refused_without_memory(tokens, max_new_tokens):
                self._make_room(setting, tokens + max_new_tokens)
                self._record(self._recorded[setting], inputs)
        except ConfigurationError as error:
            self._recorded.pop(setting, None)
            self._refusals[setting] = str(error)
        if setting in self._refusals:
            # Not in the handler: until its end the error holds what was half made.
            release_cached_memory(self.device)

    def _serves(self, setting: Hashable, inputs: Mapping[str, Any], slots: int) -> bool:
        recorded = self._recorded.get(setting)
        if recorded is None or not recorded.serves(_shape_of(inputs), slots):
            return False
        self._recorded.move_to_end(setting)
        return True

    def _make_room(self, setting: Hashable, slots: int) -> None:
        recorded = self._recorded.get(setting)
        if recorded is not None and recorded.decode.slots >= slots:
            self._recorded.move_to_end(setting)
            return
        decode = FixedCacheDecode(self._model, -(-slots // SLOT_STEP) * SLOT_STEP, self._recorder)
        prefill = RecordedDecoder(self._model, self._recorder) if recorded is None else recorded.prefill
        self._recorded[setting] = _Recorded(decode, prefill, None if recorded is None else recorded.prefill_refusal)
        self._recorded.move_to_end(setting)
        while len(self._recorded) > MOST_SETTINGS:
            self._recorded.popitem(last=False)

    def _record(self, recorded: _Recorded, inputs: Mapping[str, Any]) -> None:
        """One pass over the prompt, and another only where it turns out that prompts cannot be replayed."""
        names: tuple[Hashable, ...] = ()
        features = self._stages.encode_image(inputs)
        if recorded.prefill_refusal is None:
            try:
                with recorded.prefill.in_place(records_new=True) as served:
                    logits, state = self._stages.prefill(inputs, features)
                names = tuple(served)
            except ConfigurationError as error:
                recorded.prefill_refusal = str(error)
                recorded.prefill = RecordedDecoder(self._model, self._recorder)
        if recorded.prefill_refusal is not None:
            logits, state = self._stages.prefill(inputs, features)
        with self._stages.decoding():
            recorded.decode.begin(state, logits)
        recorded.ready[_shape_of(inputs)] = names

    def _prefilled(
        self, recorded: _Recorded, inputs: Mapping[str, Any], features: Any
    ) -> tuple[torch.Tensor, GenerationState]:
        if recorded.prefill_refusal is not None:
            return self._stages.prefill(inputs, features)
        with recorded.prefill.in_place():
            return self._stages.prefill(inputs, features)

    def prefill(
        self, setting: Hashable, inputs: Mapping[str, Any], features: Any
    ) -> tuple[torch.Tensor, HeldRequest[Hashable]]:
        """Prefill stage: logits [1, V] of the last position; what the next prefill overwrites."""
        recorded = self._recorded[setting]
        self._holder.release()
        logits, state = self._prefilled(recorded, inputs, features)
        recorded.decode.begin(state, logits)
        return logits, self._holder.hold(setting, inputs["input_ids"])

    def decode_step(self, token: torch.Tensor, state: HeldRequest[Hashable]) -> torch.Tensor:
        """Token [1, 1] -> logits [1, V], which the next step overwrites.

        Raises:
            SettingError: another request was prefilled in the meantime.
        """
        decode = self._resumed(state)
        decode.put_token(token)
        state.length += 1
        return decode.step()

    def rewind(self, state: HeldRequest[Hashable], steps: int) -> None:
        """Take the state behind the last so many steps back to where it was before the first of them."""
        decode = self._resumed(state)
        decode.rewind(steps)
        state.length -= steps

    def _resumed(self, state: HeldRequest[Hashable]) -> FixedCacheDecode:
        self._holder.resume(state)
        decode = self._recorded[state.setting].decode
        if decode.length != state.length:
            decode.rewind(decode.length - state.length)
        return decode


def _shape_of(inputs: Mapping[str, torch.Tensor]) -> Hashable:
    """Of the prompt, of its pictures, of whatever comes with them."""
    return frozenset((name, tuple(tensor.shape)) for name, tensor in inputs.items())


def generation_refusal(model: PreTrainedModel, stages: GenerateStages) -> str | None:
    """Why no setting of a model can be replayed; None where one may be.

    Not judged is what shows only when it is tried; `CapturedGeneration.refusal` says it of a setting.
    """
    devices = sorted({str(weight.device) for weight in model.parameters()})
    if len(devices) > 1:
        return f"its weights are on several devices ({', '.join(devices)})"
    if vision_entry(model) is not None and not stages.can_encode_alone:
        return "its pictures are encoded inside the prefill"
    return cache_refusal(model)


class RequestsAhead:
    """`AheadStages` of a model at one setting that was made ready."""

    def __init__(self, generation: CapturedGeneration, stages: GenerateStages, setting: Hashable) -> None:
        self._generation = generation
        self._stages = stages
        self._setting = setting
        self._decode = generation.decode_at(setting)

    @property
    def device(self) -> torch.device:
        """See `AheadStages`."""
        return self._generation.device

    @property
    def last_token(self) -> torch.Tensor:
        """See `AheadStages`."""
        return self._decode.token.view(1)

    def encode_image(self, inputs: Mapping[str, Any]) -> Any:
        """See `AheadStages`."""
        return self._stages.encode_image(inputs)

    def begin(self, inputs: Mapping[str, Any], features: Any) -> None:
        """See `AheadStages`."""
        self._generation.prefill(self._setting, inputs, features)

    def advance(self) -> None:
        """See `AheadStages`."""
        self._decode.step()
