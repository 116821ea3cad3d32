"""The knobs that a model's own adapters, or the knobs themselves, turn in its modules, and what is in force."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Protocol

from torch import nn

from experiment_core_utils.knobs.registry import all_knobs
from experiment_core_utils.knobs.setting import Setting


class KnobAdapter(Protocol):
    """What turns a knob in a model."""

    def put(self, value: Any) -> None:
        """Put a value in force, in place of the one before; raises ConfigurationError for one that cannot be."""


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
