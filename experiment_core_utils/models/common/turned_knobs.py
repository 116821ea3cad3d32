"""The knobs that a model's own adapters, or the knobs themselves, turn in its modules, and what is in force."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

from torch import nn

from experiment_core_utils.knobs.registry import all_knobs
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.models.interface import Stages
from experiment_core_utils.records.requests import StageFlops


class KnobAdapter(Protocol):
    """What turns a knob in a model."""

    def put(self, value: Any) -> None:
        """Put a value in force, in place of the one before; raises ConfigurationError for one that cannot be."""


class CountingAdapter(ABC):
    """A `KnobAdapter` of a knob whose cost differs between tokens, and is counted in the proof."""

    unsupported_reason: str | None = None  #: why the knob cannot be turned; None where it can

    @property
    @abstractmethod
    def engines_unsupported_reason(self) -> str | None:
        """Why engines and graphs cannot run the value in force; None where they can."""

    @abstractmethod
    def put(self, value: Any) -> None:
        """See `KnobAdapter.put`."""

    @abstractmethod
    def counted(self, setting: Setting, stages: Stages, inputs: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """What a run of the request shows of the value in force; None at the neutral one; never while timing."""

    @abstractmethod
    def flops(self, setting: Setting, flops_at: Callable[[Setting], StageFlops | None]) -> StageFlops | None:
        """FLOPs at a setting, from those by the model's formula; None for a setting that was not counted."""

    @abstractmethod
    def step_bytes(self, setting: Setting, bytes_at: Callable[[Setting], float | None]) -> float | None:
        """Bytes of weights that a decode step reads, likewise."""


class TurnedKnobs:
    """The knobs of a model beside those that its `apply` sets by itself.

    Args:
        model: whose modules knobs without an adapter act on.
        own: names of the knobs that the model's `apply` sets by itself.
        adapters: what turns others, by the knob's name.
    """

    def __init__(self, model: nn.Module, own: frozenset[str], adapters: Mapping[str, KnobAdapter]) -> None:
        self._model, self._own, self.adapters = model, own, adapters
        self._applied = ExitStack()
        self.values: tuple[tuple[str, Any], ...] = ()  #: in force, without those at their neutral value

    @property
    def on_modules(self) -> tuple[str, ...]:
        """The knobs in force that act on modules, for lack of an adapter."""
        return tuple(name for name, _ in self.values if name not in self.adapters)

    def put(self, setting: Setting) -> None:
        """Put these knobs of a setting in force; those before are taken back first, also where one cannot be."""
        self.put_values({name: value for name, value in setting.values.items() if name not in self._own})

    def put_values(self, values: Mapping[str, Any]) -> None:
        """As `put`, of values by name."""
        self._applied.close()
        self.values = ()
        for knob in all_knobs():
            if knob.name in self._own:
                continue
            value = values.get(knob.name, knob.neutral)
            if knob.name in self.adapters:
                self.adapters[knob.name].put(value)
            elif knob.name in values:
                self._applied.enter_context(knob.applied(self._model, value))
        self.values = tuple(values.items())

    @property
    def _counting(self) -> dict[str, CountingAdapter]:
        return {name: each for name, each in self.adapters.items() if isinstance(each, CountingAdapter)}

    @property
    def engines_unsupported_reason(self) -> str | None:
        """Why engines and graphs cannot run what is in force; None where they can."""
        reasons = (adapter.engines_unsupported_reason for adapter in self._counting.values())
        return next((reason for reason in reasons if reason is not None), None)

    def counted(self, setting: Setting, stages: Stages, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """What runs of the request show of the values in force, by knob."""
        found = {name: adapter.counted(setting, stages, inputs) for name, adapter in self._counting.items()}
        return {name: seen for name, seen in found.items() if seen is not None}

    def flops(self, setting: Setting, flops_at: Callable[[Setting], StageFlops | None]) -> StageFlops | None:
        """FLOPs at a setting, from those by the model's formula; None where they are not known."""
        for adapter in self._counting.values():
            flops_at = partial(adapter.flops, flops_at=flops_at)
        return flops_at(setting)

    def step_bytes(self, setting: Setting, bytes_at: Callable[[Setting], float | None]) -> float | None:
        """Bytes of weights that a decode step reads at a setting; None where they are not known."""
        for adapter in self._counting.values():
            bytes_at = partial(adapter.step_bytes, bytes_at=bytes_at)
        return bytes_at(setting)
