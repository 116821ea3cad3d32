"""Several loaded models as one, whose loading knobs say which of them answers: all in memory, or one at a time."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partialmethod
from operator import attrgetter
from typing import Any

import torch

from experiment_core_utils.knobs.loading import LOADING_KNOBS, Loading, loading_of
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.models.costs.memory import ModelBytes
from experiment_core_utils.models.interface import StagedModel, devices_of
from experiment_core_utils.primitives.device import release_cached_memory
from experiment_core_utils.primitives.errors import EngineRefused, KnobDidNotAct
from experiment_core_utils.records.requests import (
    KnobProof,
    RequestShape,
    StageFlops,
)


class SentRequest(dict[str, Any]):
    """A request's tensors on the device, in the number format of each model that needed them so far.

    Args:
        host: the tensors on the host.
    """

    def __init__(self, host: Mapping[str, Any]) -> None:
        super().__init__(host)
        self.by_loading: dict[Loading, Mapping[str, Any]] = {}


def _without_loading(setting: Setting) -> Setting:
    """The setting as the model of its loading has it."""
    return setting.replaced(**{knob.name: None for knob in LOADING_KNOBS})


class ModelsSideBySide:
    """Implements `StagedModel`, `Spread` among it: what is asked goes to the model of the setting in force.

    Args:
        models: by their loading; the empty one is the model as it is, which is in force first.
    """

    def __init__(self, models: Mapping[Loading, StagedModel]) -> None:
        self._models = dict(models)
        self._loading: Loading = ()
        self._described: dict[Loading, Mapping[str, Any]] = {}

    @property
    def in_force(self) -> StagedModel:
        """The model that answers now."""
        return self._model_of(self._loading)

    def _model_of(self, loading: Loading) -> StagedModel:
        return self._models[loading]

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices of all models, the one that requests are sent to first."""
        return tuple(dict.fromkeys(device for model in self._models.values() for device in devices_of(model)))

    def to_device(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """For the model in force; another one's format is made when it needs the request, which `warm_up` does."""
        request = SentRequest(inputs)
        self.sent(request)
        return request

    def sent(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The tensors of a request for the model in force."""
        if not isinstance(inputs, SentRequest):
            return inputs
        if self._loading not in inputs.by_loading:
            inputs.by_loading[self._loading] = self.in_force.to_device(dict(inputs))
        return inputs.by_loading[self._loading]

    def _on_sent(self, call: str, inputs: Any, *arguments: Any) -> Any:
        """A call of the model in force, with the tensors of a request or of several."""
        sent = self.sent(inputs) if isinstance(inputs, Mapping) else [self.sent(each) for each in inputs]
        return getattr(self.in_force, call)(sent, *arguments)

    def warm_up_batch(self, inputs_list: Sequence[Mapping[str, Any]], max_new_tokens: int) -> None:
        with self._failing_alone():
            self.in_force.warm_up_batch([self.sent(each) for each in inputs_list], max_new_tokens)

    def apply(self, setting: Setting) -> AbstractContextManager[object]:
        loading, before = loading_of(setting), self._loading
        own = self._model_of(loading).apply(_without_loading(setting))
        self._loading = loading
        restoring = ExitStack()
        restoring.callback(setattr, self, "_loading", before)
        # First what the model itself restores.
        restoring.enter_context(own)
        return restoring

    def restored_afterwards(self) -> AbstractContextManager[object]:
        restoring = ExitStack()
        restoring.callback(setattr, self, "_loading", self._loading)
        for model in self._models.values():
            restoring.enter_context(model.restored_afterwards())
        return restoring

    @contextmanager
    def _failing_alone(self) -> Iterator[None]:
        """A context in which a model that has no other way to run refuses its own settings, and not those of others."""
        try:
            yield
        except EngineRefused as error:
            if self.in_force.has_next_way:
                raise
            raise KnobDidNotAct(str(error)) from error

    def refuse_setting(self) -> None:
        with self._failing_alone():
            self.in_force.refuse_setting()

    def warm_up(self, inputs: Mapping[str, Any], max_new_tokens: int) -> None:
        with self._failing_alone():
            self.in_force.warm_up(self.sent(inputs), max_new_tokens)

    def prove(self, setting: Setting, inputs: Mapping[str, Any]) -> KnobProof:
        """See `StagedModel.prove`; beside what the model counts, `loading` has its weights' bytes, how far its
        logits are from those of the model as it is, and what runs the stages of that.
        """
        without = _without_loading(setting)
        with self._failing_alone():
            proof = self.in_force.prove(without, self.sent(inputs))
        if not self._loading:
            return proof
        logits, memory = self._first_logits(inputs), self.count_bytes(setting)
        reference, reference_memory = self._of_reference(without, inputs)
        counted = {
            "weights_bytes": None if memory is None else memory.weights_bytes,
            "own_weights_bytes": None if reference_memory is None else reference_memory.weights_bytes,
            "logits_distance": None if reference is None else float((logits - reference).norm() / reference.norm()),
            "own_execution_stages": self.describe().get("execution_stages"),
        }
        return replace(proof, counted={**proof.counted, "loading": counted})

    def _of_reference(
        self, setting: Setting, inputs: Mapping[str, Any]
    ) -> tuple[torch.Tensor | None, ModelBytes | None]:
        """The first logits and the memory of the model as it is, at a setting without a loading."""
        with self.apply(setting):
            return self._first_logits(inputs), self.count_bytes(setting)

    def _first_logits(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """[1, V] float32 on the host, from which the model in force would choose the first token of its answer."""
        answer = (next(iter(self.in_force.ends.token_ids), 0),)
        logits: torch.Tensor = self.in_force.follow_batch([self.sent(inputs)], [answer])[0].logits
        return logits.cpu()

    def count_flops(self, setting: Setting, shape: RequestShape, output_tokens: int) -> StageFlops | None:
        return self._model_of(loading_of(setting)).count_flops(_without_loading(setting), shape, output_tokens)

    def count_bytes(self, setting: Setting) -> ModelBytes | None:
        return self._model_of(loading_of(setting)).count_bytes(_without_loading(setting))

    def expected_experts(self, setting: Setting) -> tuple[int | None, ...]:
        return self._model_of(loading_of(setting)).expected_experts(_without_loading(setting))

    def describe(self) -> Mapping[str, Any]:
        """What the model as it is says of itself."""
        return self._models[()].describe()

    def described_at(self, setting: Setting) -> Mapping[str, Any]:
        """What the model of a setting said of itself when its execution was settled; now where it is not."""
        loading = loading_of(setting)
        return self._described.get(loading) or self._models[loading].describe()

    @property
    def has_next_way(self) -> bool:
        return any(model.has_next_way for model in self._models.values())

    def run_next_way(self, reason: str) -> None:
        """The model that refused runs otherwise; another way of loading is another way to run."""
        self.in_force.run_next_way(reason)

    def fix_execution(self) -> None:
        for loading, model in self._models.items():
            model.fix_execution()
            # Later a setting is in force, of which blocks may be left out.
            self._described[loading] = model.describe()

    def end_answers_at(self, stop: Sequence[str], ignore_eos: bool) -> None:
        for model in self._models.values():
            model.end_answers_at(stop, ignore_eos)

    def release_prepared(self) -> None:
        for model in self._models.values():
            model.release_prepared()

    def samples_per_round(self, num_settings: int) -> int:
        return max(model.samples_per_round(num_settings) for model in self._models.values())


class ModelsInTurn(ModelsSideBySide):
    """The same of models that memory does not hold together: the one of the setting in force is loaded, and dropped
    when another one is needed.

    Args:
        load: gives the model of a loading; the empty one is the model as it is, which is loaded first.
        prepare: makes requests without a model; None where the model in memory does.
    """

    def __init__(self, load: Callable[[Loading], StagedModel], prepare: Callable[..., Any] | None = None) -> None:
        super().__init__({})
        self._load = load
        self._refusals: dict[Loading, list[str]] = {}
        self._ends: tuple[Sequence[str], bool] = ((), False)
        self._is_fixed = False
        self._references: dict[object, tuple[torch.Tensor, ModelBytes | None]] = {}
        self._memory: dict[str, ModelBytes | None] = {}
        first = self.in_force
        self._device, self._name, self._prompt_family = first.device, first.name, first.prompt_family
        self._prepare = prepare

    def _model_of(self, loading: Loading) -> StagedModel:
        if loading not in self._models:
            self.drop()
            model = self._models[loading] = self._load(loading)
            # What was decided of it when it was in memory before.
            for reason in self._refusals.get(loading, ()):
                model.run_next_way(reason)
            model.end_answers_at(*self._ends)
            if self._is_fixed:
                model.fix_execution()
            self._described[loading] = model.describe()
        return self._models[loading]

    def drop(self) -> None:
        """Take the model in memory out of it; the next that is needed is loaded anew."""
        if not self._models:
            return
        ((loading, model),) = self._models.items()
        # A trial may have settled how it runs; the rest is of a model that no knob has turned.
        execution = {name: value for name, value in model.describe().items() if name.startswith("execution")}
        self._described[loading] = {**self._described[loading], **execution}
        del model
        self._models.clear()
        gc.collect()
        release_cached_memory(self._device)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        return devices_of(self.in_force)

    # Those of the model as it is, which may be in memory no more.
    device, name = property(attrgetter("_device")), property(attrgetter("_name"))
    prompt_family = property(attrgetter("_prompt_family"))

    @property
    def prepare(self) -> Callable[..., Any]:
        """What makes requests, which are the same for all models."""
        return self.in_force.prepare if self._prepare is None else self._prepare

    def sent(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        if isinstance(inputs, SentRequest):
            # What was sent for a model that is gone.
            for loading in inputs.by_loading.keys() - {self._loading}:
                del inputs.by_loading[loading]
        return super().sent(inputs)

    def restored_afterwards(self) -> AbstractContextManager[object]:
        restoring = ExitStack()
        restoring.callback(setattr, self, "_loading", self._loading)
        return restoring

    def prove(self, setting: Setting, inputs: Mapping[str, Any]) -> KnobProof:
        proof, memory = super().prove(setting, inputs), self.count_bytes(setting)
        if not self._loading:
            self._references[self._request_at(setting, inputs)] = self._first_logits(inputs), memory
        return proof

    @staticmethod
    def _request_at(setting: Setting, inputs: Mapping[str, Any]) -> object:
        return setting.key, tuple(inputs["input_ids"].flatten().tolist())

    def _of_reference(
        self, setting: Setting, inputs: Mapping[str, Any]
    ) -> tuple[torch.Tensor | None, ModelBytes | None]:
        """What was noted while the model as it is was in memory."""
        return self._references.get(self._request_at(setting, inputs), (None, None))

    def count_bytes(self, setting: Setting) -> ModelBytes | None:
        if setting.key not in self._memory:
            self._memory[setting.key] = super().count_bytes(setting)
        return self._memory[setting.key]

    def describe(self) -> Mapping[str, Any]:
        return self._described_now(())

    def described_at(self, setting: Setting) -> Mapping[str, Any]:
        return self._described_now(loading_of(setting))

    def _described_now(self, loading: Loading) -> Mapping[str, Any]:
        if loading in self._models and not self._is_fixed:
            return self._models[loading].describe()
        return self._described[loading] if loading in self._described else self._model_of(loading).describe()

    def run_next_way(self, reason: str) -> None:
        super().run_next_way(reason)
        self._refusals.setdefault(self._loading, []).append(reason)

    def fix_execution(self) -> None:
        super().fix_execution()
        self._is_fixed = True

    def end_answers_at(self, stop: Sequence[str], ignore_eos: bool) -> None:
        super().end_answers_at(stop, ignore_eos)
        self._ends = stop, ignore_eos


# What the model in force does by itself; `isinstance` of the interface finds members of the class alone.
for _name in (
    "batch_kind", "components", "decode_step", "decode_text", "decoder_blocks", "decoding", "default_top_k", "device",
    "ends", "follow_tokens", "num_experts", "num_total_blocks", "rewind",
):  # fmt: skip
    setattr(ModelsSideBySide, _name, property(attrgetter(f"in_force.{_name}")))
for _name in (
    "answer_batch", "encode_image", "follow_batch", "follow_exactly", "generate_batch_timed", "generate_timed",
    "prefill",
):  # fmt: skip
    setattr(ModelsSideBySide, _name, partialmethod(ModelsSideBySide._on_sent, _name))
# Requests are the same for all, whichever of them is in force while they are prepared.
for _name in ("name", "prepare", "prompt_family"):
    _delegated = property(lambda self, name=_name: getattr(self._models[()], name))  # type: ignore[misc]
    setattr(ModelsSideBySide, _name, _delegated)
