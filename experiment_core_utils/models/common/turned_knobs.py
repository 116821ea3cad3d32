"""The knobs of a model, turned by its adapters or by themselves, and what is in force.

turned = TurnedKnobs(model, {TOP_K.name: routers, ACTIVE_BLOCKS.name: blocks})
with turned.apply(setting):
    ...                     # what was in force before comes back
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

from torch import nn

from experiment_core_utils.knobs.answer_limit import ANSWER_LIMIT, limited_answer
from experiment_core_utils.knobs.batch_size import BATCH_SIZE
from experiment_core_utils.knobs.interface import Knob
from experiment_core_utils.knobs.registry import all_knobs
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.models.interface import Stages
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.records.requests import StageFlops


class KnobAdapter(Protocol):
    """What turns a knob in a model."""

    @property
    def unsupported_reason(self) -> str | None:
        """Why the knob cannot be turned; None where it can."""

    @property
    def value(self) -> Any:
        """The value in force; None for the model's own where the knob has no neutral one."""

    def put(self, value: Any) -> None:
        """Put a value in force, in place of the one before; raises ConfigurationError for one that cannot be."""


class RequestKnob:
    """A `KnobAdapter` of a knob that requests are prepared by: nothing in the model follows it."""

    unsupported_reason: str | None = None  #: see `KnobAdapter.unsupported_reason`
    value: Any = None  #: see `KnobAdapter.value`

    def put(self, value: Any) -> None:
        self.value = value


class CountingAdapter(ABC):
    """A `KnobAdapter` of a knob whose cost differs between tokens, and is counted in the proof."""

    unsupported_reason: str | None = None  #: see `KnobAdapter.unsupported_reason`
    value: Any  #: see `KnobAdapter.value`

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
    """The knobs of a model.

    Args:
        model: whose modules knobs without an adapter act on.
        adapters: what turns the others, by the knob's name.
    """

    def __init__(self, model: nn.Module, adapters: Mapping[str, KnobAdapter]) -> None:
        self._model, self.adapters = model, adapters
        self._applied = ExitStack()
        self._others: dict[str, Any] = {}  # in force of the knobs without an adapter, by name

    @property
    def in_force(self) -> dict[str, Any]:
        """The values in force, by the knob's name."""
        return {name: adapter.value for name, adapter in self.adapters.items()} | self._others

    @property
    def on_modules(self) -> dict[str, Any]:
        """The values in force, by name, of the knobs that act on the model's modules; a placebo acts on nothing."""
        acting = {knob.name for knob in all_knobs() if type(knob).applied is not Knob.applied}
        return {name: value for name, value in self._others.items() if name in acting}

    def limited(self, max_new_tokens: int) -> int:
        """How many tokens an answer may have at the setting in force, of the limit of all answers."""
        return limited_answer(self._others.get(ANSWER_LIMIT.name), max_new_tokens)

    @property
    def batch_size(self) -> int:
        """How many requests run together at the setting in force."""
        return int(self._others.get(BATCH_SIZE.name, BATCH_SIZE.at_rest))

    def apply(self, setting: Setting) -> ExitStack:
        """Put a setting in force; a knob that it has no value of is as in the model itself.

        Returns:
            a context at whose end what was in force before is in force again; without it the setting stays.

        Raises:
            ConfigurationError: a value that cannot be; what was in force stays so.
        """
        with self.restored_afterwards() as before:
            self.put(setting.values)
            return before.pop_all()

    def restored_afterwards(self) -> ExitStack:
        """A context at whose end what is in force now is in force again."""
        before = ExitStack()
        before.callback(self.put, self.in_force)
        return before

    def put(self, values: Mapping[str, Any]) -> None:
        """Put values in force, by the knob's name, until others are."""
        self._applied.close()
        self._others = {}
        for knob in all_knobs():
            value = values.get(knob.name, knob.neutral)
            if knob.name in self.adapters:
                self.adapters[knob.name].put(value)
            elif knob.name in values:
                if type(knob).applied is Knob.applied and not knob.turned_by_run:
                    raise ConfigurationError(
                        f"{knob.title} cannot be turned in this model: {type(knob).__name__} has no method `applied` "
                        "that acts on its modules; write one, or leave the knob at rest"
                    )
                self._applied.enter_context(knob.applied(self._model, value))
                self._others[knob.name] = value

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
        return setting.flops(flops_at(setting))

    def step_bytes(self, setting: Setting, bytes_at: Callable[[Setting], float | None]) -> float | None:
        """Bytes of weights that a decode step reads at a setting; None where they are not known."""
        for adapter in self._counting.values():
            bytes_at = partial(adapter.step_bytes, bytes_at=bytes_at)
        return setting.step_bytes(bytes_at(setting))
