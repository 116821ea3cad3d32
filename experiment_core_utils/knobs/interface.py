"""What a knob says about itself, and what a model, a run and a proof tell it."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from experiment_core_utils.knobs.token_units import MOLMOE_TOKENS, TokenUnit
from experiment_core_utils.primitives.errors import ImpossibleCombination
from experiment_core_utils.primitives.files import read_given
from experiment_core_utils.primitives.flag_fields import Part
from experiment_core_utils.primitives.grids import possible
from experiment_core_utils.primitives.texts import short_digest

V = TypeVar("V")
#: a value of a knob as results, tables and analyses have it
Level = str | int | float


@dataclass(frozen=True)
class KnobLimits:
    """What can be set in a model."""

    num_total_blocks: int | None  #: transformer blocks of the decoder; None where a server shows none
    num_experts: int | None  #: that a router chooses from; None in a model without experts
    #: experts per token that the model was trained with, the most of a block where blocks differ; None without experts
    default_top_k: int | None
    #: why a knob cannot be turned here, by the knob's name
    unsupported: Mapping[str, str] = field(default_factory=dict)
    #: why it is known only of the loaded model whether its knobs can be turned; None where it is known before
    untried_reason: str | None = None
    token_unit: TokenUnit = MOLMOE_TOKENS  #: of numbers of vision tokens
    #: why a picture cannot take fewer, and why not more, vision tokens than it does by itself; None where it can
    fraction_reasons: tuple[str | None, str | None] = (None, None)
    #: the largest top-k, and why not all experts can be chosen; None where they can
    top_k_limit: tuple[int, str] | None = None
    variants: tuple[str, ...] = ()  #: names of the servers that answer for it; none for a model in this process


def unsupported_knobs(**reasons: str | None) -> dict[str, str]:
    """`KnobLimits.unsupported` of the reasons by the knobs' names, None where a knob can be turned."""
    return {name: reason for name, reason in reasons.items() if reason is not None}


@dataclass(frozen=True)
class KnobRequest:
    """What a knob sees of a run that was requested."""

    flags: Any  #: the values of the flags of all knobs, by name
    limits: KnobLimits
    model: str  #: the name of the model as it was given
    folder: Path | None  #: of the model, or its file; None where it lies elsewhere
    random_weights: bool
    seed: int = 0  #: of the run
    #: what the run's own flags load the model with, by the names of the loading knobs, as far as it is known
    loaded_with: Mapping[str, Level] = field(default_factory=dict)


@dataclass(frozen=True)
class RequestedValues(Generic[V]):
    """The requested values of one knob, as far as they are possible."""

    values: tuple[V, ...]  #: empty in a model that lacks the knob
    impossible: tuple[str, ...] = ()  #: why given values are left out, a sentence each
    is_given: bool = False  #: whether flags name them


@dataclass(frozen=True)
class CannotBeSeen:
    """Nothing that was counted shows whether a knob acted."""

    reason: str


class Turned(Protocol):
    """A setting that is in force, as a proof sees it."""

    @property
    def key(self) -> str:
        """The name of the setting."""

    def value(self, name: str) -> Any:
        """The value of a knob, None in a model that lacks it."""


class Knob(ABC, Generic[V]):
    """A run-time knob: what it is called, what it can be set to, and what shows that it acted."""

    name: ClassVar[str]  #: in JSON, frames and analyses, such as `top_k`
    title: ClassVar[str]  #: on screens and in pictures, such as `top-k`
    meaning: ClassVar[str] = ""  #: what its values are, in a table's heading
    plural: ClassVar[str]  #: of its values in sentences, such as `top-k values`
    page: ClassVar[str] = ""  #: of the documentation that says more, below docs/
    flags: ClassVar[type[Part]]  #: its flags and their help
    #: the value at which a model that has the knob is as it is, which names and `Setting` leave out; None where every
    #: value is named
    neutral: V | None = None
    #: fields of results and columns of tables that have its value by names of their own; without any, a table has a
    #: column of its name where one of the settings turns it
    published: ClassVar[tuple[str, ...]] = ()
    is_sorted_in_plans: ClassVar[bool] = True  #: False: the plan of `balanced` keeps the order given
    #: whether it changes how many tokens enter the decoder: analyses of times know it by the tokens that were counted
    changes_tokens: ClassVar[bool] = False
    #: whether `applied` leaves the operations of a request and the bytes of its weights as they are; else they are null
    #: unless `flops` and `step_bytes` give them
    keeps_costs: ClassVar[bool] = False
    turned_by_run: ClassVar[bool] = False  #: whether what runs a model turns it, so that nothing in the model has to
    #: stages by their columns, such as `T_vision_total`, whose time it cannot change: controls of a run in rounds
    untouched_stages: ClassVar[tuple[str, ...]] = ()

    # --- values -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def own(self, limits: KnobLimits) -> V | None:
        """The value of the model as it is; None in a model that lacks the knob."""

    @abstractmethod
    def requested(self, request: KnobRequest) -> RequestedValues[V]:
        """The values that the flags name, or the default ones; raises ConfigurationError where none is possible."""

    def fixed(self, request: KnobRequest, flag: str, reason: str) -> RequestedValues[V]:
        """The model's own value, where the knob cannot be turned, and why others that are given are left out.

        Args:
            flag: that lists levels, without dashes.

        Raises:
            ConfigurationError: levels are given, and the model's own is not among them.
        """
        own = self.own(request.limits)
        accepted = self.neutral if own is None else own
        level = None if accepted is None else self.level(accepted)

        def own_alone(given: Level) -> Level:
            if given != level:
                raise ImpossibleCombination(f"--{flag} {given} cannot be set in {request.model}: {reason}")
            return given

        given = getattr(request.flags, flag)
        return RequestedValues(() if own is None else (own,), possible(given, own_alone)[1] if given else ())

    def flags_beside_values(self, flags: Any) -> Iterator[tuple[str, Any]]:
        """Name and value of the flags that are not lists of values and not at their default.

        Args:
            flags: the values of the flags of all knobs, by name.
        """
        for name, of_flag in self.flags.model_fields.items():
            value = getattr(flags, name)
            if not isinstance(value, tuple | None) and value != of_flag.get_default():
                yield name, value

    def fingerprint(self, request: KnobRequest) -> tuple[object, ...]:
        """What figures depend on beside the values; empty where that is nothing.

        Here `flags_beside_values`; of a file its content.
        """
        return tuple(
            (name, short_digest(read_given(value, f"--{name}")) if isinstance(value, Path) else value)
            for name, value in self.flags_beside_values(request.flags)
        )

    def order(self, value: V) -> tuple[float, ...]:
        """A sort key of values, the cheapest first."""
        return (float(self.level(value)),)

    def cell(self, value: V) -> Level:
        """The value in a table under the knob's title."""
        return self.level(value)

    def listed(self, value: V) -> str:
        """The value in a list of values that a sentence gives."""
        return str(self.level(value))

    def full_grid(self, limits: KnobLimits) -> Mapping[str, Sequence[Level]]:
        """The flag whose values cover the knob's range in a model that has it; nothing where the default ones do."""
        return {}

    # --- names --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def label(self, value: V) -> str:
        """Part of keys and file names, such as `topk8`; of letters, digits, `-` and `.`."""

    @abstractmethod
    def parsed(self, label: str) -> V | None:
        """The value that `label` names; None for a label of another knob."""

    @abstractmethod
    def level(self, value: V) -> Level:
        """The value as results have it."""

    @abstractmethod
    def of_level(self, level: Level) -> V:
        """The value that a level stands for; raises ConfigurationError for one that is impossible."""

    def published_fields(self, value: V | None) -> dict[str, Level | None]:
        """The `published` fields with a value, None in a model that lacks the knob; the inverse of `read`."""
        return dict.fromkeys(self.published, None if value is None else self.level(value))

    def read(self, result: Any) -> V | None:
        """The value of a stored result; None in a model that lacks the knob.

        Args:
            result: a `SettingResult`.
        """
        level = result.knobs.get(self.name)
        return self.neutral if level is None else self.of_level(level)

    # --- in a model ---------------------------------------------------------------------------------------------------

    def applied(self, model: Any, value: V) -> AbstractContextManager[object]:
        """A context in which the value is in force, for a knob that no adapter of the model turns.

        Args:
            model: a torch module.
        """
        return nullcontext()

    def request_fields(self, value: V) -> Mapping[str, Any]:
        """What a request to a server has of the value, a JSON value by field, beside what all requests have.

        Nothing by default: a server is refused settings of a knob of which its requests have nothing.
        """
        return {}

    def shape(self, shape: Any, value: V) -> Any:
        """The sizes of a request as the decoder gets it at the value.

        Args:
            shape: the `RequestShape` of the request as it was prepared.
        """
        return shape

    def flops(self, flops: Any, value: V) -> Any | None:
        """The operations of a request at the value; None where they are not known, as by default those of a knob with
        `applied` that neither has `shape` nor `keeps_costs`.

        Args:
            flops: the `StageFlops` by the model's formulas of the other knobs and of the `shape` at the value.
        """
        is_known = self.keeps_costs or type(self).applied is Knob.applied or type(self).shape is not Knob.shape
        return flops if is_known else None

    def step_bytes(self, num_bytes: float, value: V) -> float | None:
        """Bytes of weights that a decode step reads at the value; None where they are not known, as by default those of
        a knob with `applied` that does not keep its costs.

        Args:
            num_bytes: by the model's formulas, of the other knobs.
        """
        return num_bytes if self.keeps_costs or type(self).applied is Knob.applied else None

    def prove(self, proof: Any, setting: Turned, model: Any) -> CannotBeSeen | None:
        """Whether what was counted is what the setting requests; None where it is.

        Args:
            proof: the `KnobProof` of the setting.
            model: the `StagedModel`.

        Raises:
            KnobDidNotAct: something else was counted.
        """
        return CannotBeSeen(f"nothing that is counted shows {self.title}")


def number_after(prefix: str, label: str) -> int | None:
    """The whole number behind a prefix, such as 8 of `topk8`; None for a label of another form."""
    number = label.removeprefix(prefix)
    return int(number) if number != label and number.isdecimal() else None
