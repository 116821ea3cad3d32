"""The knob of several servers side by side, such as two quantisations of a model."""

import re
from typing import Any

from experiment_core_utils.knobs.interface import (
    CannotBeSeen,
    Knob,
    KnobLimits,
    KnobRequest,
    Level,
    RequestedValues,
    Turned,
)
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.flag_fields import Part

VARIANT_NAME = "[A-Za-z0-9][A-Za-z0-9.-]*"
_LABEL = "variant-"


class VariantFlags(Part):
    """The knob has no flag of its own: each server of `--endpoint` is a value."""


class Variant(Knob[str]):
    """The server that answers, by its name; a model with one server alone lacks the knob."""

    meaning = "name of the server that answers"
    name, title, plural, flags = "variant", "variant", "variants", VariantFlags
    is_sorted_in_plans = False

    def own(self, limits: KnobLimits) -> str | None:
        """It is the first server that is given."""
        return limits.variants[0] if len(limits.variants) > 1 else None

    def requested(self, request: KnobRequest) -> RequestedValues[str]:
        variants = request.limits.variants
        return RequestedValues(variants if len(variants) > 1 else (), is_given=len(variants) > 1)

    def label(self, value: str) -> str:
        return f"{_LABEL}{value}"

    def parsed(self, label: str) -> str | None:
        name = label.removeprefix(_LABEL)
        return name if name != label and re.fullmatch(VARIANT_NAME, name) else None

    def level(self, value: str) -> Level:
        return value

    def of_level(self, level: Level) -> str:
        if not isinstance(level, str) or not re.fullmatch(VARIANT_NAME, level):
            raise ConfigurationError(f"{level!r} is not a name of a server; give letters, digits, - and .")
        return level

    def order(self, value: str) -> tuple[float, ...]:
        return tuple(map(float, value.encode()))

    def prove(self, proof: Any, setting: Turned, model: Any) -> CannotBeSeen | None:
        """The request went to that server."""
        return None


VARIANT = Variant()


def reference_meaning(key: str) -> str:
    """What the reference setting of this key is, in words: of several servers no one is the model as it is."""
    return "the first variant" if any(map(VARIANT.parsed, key.split("_"))) else "the model as it is"
