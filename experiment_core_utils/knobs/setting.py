"""One setting of all knobs: a mapping from knob to value, with its key, its order and its equality made of the knobs.

Setting.named("tier-low_topk8_blocks16").levels == {"vision": "low", "top_k": 8, "num_active_blocks": 16}
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from experiment_core_utils.knobs.interface import Knob, KnobLimits, Level
from experiment_core_utils.knobs.registry import all_knobs, is_knob, knob_named
from experiment_core_utils.knobs.request_knobs import field_in_label
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.notebook_html import block, field_table


@dataclass(frozen=True, repr=False)
class Setting:
    """One setting of all knobs, in the order of the registry; a knob that the model lacks has no value.

    A setting that was read from a name or from results knows how many blocks run, not which.
    """

    values: Mapping[str, Any]  #: by the knobs' names, without those at their neutral value

    def __post_init__(self) -> None:
        unknown = {name for name in self.values if not is_knob(name)}
        if unknown:
            raise ConfigurationError(unknown_knobs(unknown))
        kept = {
            knob.name: self.values[knob.name]
            for knob in all_knobs()
            if self.values.get(knob.name) is not None and self.values[knob.name] != knob.neutral
        }
        object.__setattr__(self, "values", kept)

    @classmethod
    def of(cls, **values: Any) -> Self:
        """The setting of these values by name; None for a knob that the model lacks."""
        return cls(values)

    @classmethod
    def named(cls, key: str) -> Self:
        """The setting that a key names; raises ConfigurationError for a text that is no such key."""
        values = parsed_labels(key.split("_"))
        if values is None or "_".join(cls(values).labels) != key:
            raise ConfigurationError(
                f"{key!r} is not a key of a setting; give one such as tier-low_topk8_blocks16 or own_blocks16"
            )
        return cls(values)

    def __repr__(self) -> str:
        return f"Setting({self.key!r})"

    def _repr_html_(self) -> str:
        """As a notebook shows it: the value of each knob."""
        return block(field_table({knob_named(name).title: level for name, level in self.levels.items()}))

    def __hash__(self) -> int:
        return hash(tuple(self.values.items()))

    def value(self, name: str) -> Any:
        """The value of a knob: its neutral one where none is named, None in a model that lacks the knob."""
        return self.values.get(name, knob_named(name).neutral)

    def level(self, name: str) -> Level | None:
        """The value of a knob as results have it; None in a model that lacks the knob."""
        value = self.value(name)
        return None if value is None else knob_named(name).level(value)

    @property
    def levels(self) -> dict[str, Level]:
        """The values as results have them, by knob, without those at their neutral value."""
        return {name: knob_named(name).level(value) for name, value in self.values.items()}

    @property
    def published_fields(self) -> dict[str, Any]:
        """The fields of results that have the values of knobs by names of their own, see `Knob.published`."""
        fields: dict[str, Any] = {}
        for knob in all_knobs():
            fields |= knob.published_fields(self.value(knob.name))
        return fields

    def shape(self, shape: Any) -> Any:
        """The sizes of a request as the decoder gets it at this setting.

        Args:
            shape: the `RequestShape` of the request as it was prepared.
        """
        for name, value in self.values.items():
            shape = knob_named(name).shape(shape, value)
        return shape

    def flops(self, flops: Any) -> Any | None:
        """The operations of a request by the model's formulas, with what each knob says of its cost; None where that of
        one is not known.

        Args:
            flops: a `StageFlops`, or None.
        """
        for name, value in self.values.items():
            flops = None if flops is None else knob_named(name).flops(flops, value)
        return flops

    def step_bytes(self, num_bytes: float | None) -> float | None:
        """Bytes of weights that a decode step reads; as `flops`."""
        for name, value in self.values.items():
            num_bytes = None if num_bytes is None else knob_named(name).step_bytes(num_bytes, value)
        return num_bytes

    @property
    def labels(self) -> tuple[str, ...]:
        """The parts of the key, one a knob."""
        return tuple(knob_named(name).label(value) for name, value in self.values.items())

    @property
    def key(self) -> str:
        """Names the setting within a run, for ledgers, file names and messages: `tier-low_topk8_blocks16`."""
        return "_".join(self.labels)

    @property
    def order(self) -> tuple[tuple[float, ...], ...]:
        """A sort key: by each knob in turn, the cheapest value first, the absence of a knob before its values."""
        values = [(knob, self.value(knob.name)) for knob in all_knobs()]
        return tuple(() if value is None else knob.order(value) for knob, value in values)

    def replaced(self, **values: Any) -> Self:
        """This setting with other values of some knobs."""
        return type(self)({**self.values, **values})


def parsed_labels(labels: list[str]) -> dict[str, Any] | None:
    """The values that the parts of a key name, by knob; None where one of them is no label of any knob."""
    values: dict[str, Any] = {}
    for label in labels:
        if field := field_in_label(label):
            is_knob(field)
        for knob in all_knobs():
            value = knob.parsed(label)
            if value is not None:
                values[knob.name] = value
                break
        else:
            return None
    return values


def check_label(knob: Knob[Any], value: Any) -> None:
    """Raises ConfigurationError for a label that cannot be part of a file name, or that does not name the value."""
    label, level = knob.label(value), knob.level(value)
    named = knob.parsed(label)
    # The ending of a journal's name begins with .rank, that of a result with .json.
    is_part = isinstance(label, str) and re.fullmatch(r"(?!.*\.(?:rank|json))[A-Za-z0-9][A-Za-z0-9.-]*", label)
    if not is_part or named is None or knob.level(named) != level:
        raise ConfigurationError(
            f"knob {knob.name}: its label of {level} is {label!r}; write one of letters, digits, - and ., without "
            ".rank and .json, that `parsed` reads back"
        )
    others = parsed_labels([label]) or {}
    if knob.name not in others:
        raise ConfigurationError(
            f"knob {knob.name}: its label of {level}, {label}, is one of {', '.join(others)}; write another one"
        )


def unknown_knobs(names: Any) -> str:
    """The sentence about knobs that are not registered here."""
    return (
        f"there is no knob {', '.join(sorted(names))} here; known are "
        f"{', '.join(knob.name for knob in all_knobs())}; register it by register_knob, or give --knob_module"
    )


def reference_setting(limits: KnobLimits) -> Setting:
    """The model as it is: its own crops or pixels, its own number of experts, all blocks, every other knob at rest."""
    return Setting({knob.name: knob.own(limits) for knob in all_knobs()})


def setting_of(result: Any) -> Setting:
    """The setting of a stored result; which blocks ran is not in it.

    Args:
        result: a `SettingResult`.

    Raises:
        ConfigurationError: it was measured with a knob that is not registered here.
    """
    unknown = {name for name in result.knobs if not is_knob(name)}
    if unknown:
        raise ConfigurationError(unknown_knobs(unknown))
    return Setting({knob.name: knob.read(result) for knob in all_knobs()})
