"""The knob of several servers side by side, or of several checkpoints of one model, such as its quantised files."""

import re
from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from experiment_core_utils.knobs.interface import (
    CannotBeSeen,
    KnobLimits,
    KnobRequest,
    Level,
    RequestedValues,
    Turned,
)
from experiment_core_utils.knobs.listed_knob import ListedKnob
from experiment_core_utils.primitives.errors import ConfigurationError, KnobDidNotAct
from experiment_core_utils.primitives.flag_fields import Listed, Metavar, Part

VARIANT_NAME = "[A-Za-z0-9][A-Za-z0-9.-]*"
#: the name of the model of --model_path
OWN = "own"


class VariantFlags(Part):
    """The flag of other checkpoints; each server of `--endpoint` is a value by itself."""

    variant: Annotated[Listed[str], Metavar("NAME=MODEL")] | None = Field(
        default=None,
        description="other checkpoints of the model of --model_path, such as q4=model-Q4_1.gguf, each a copy in memory "
        "(default: none)",
    )

    @cached_property
    def variant_paths(self) -> dict[str, str]:
        """The path or hub id of each checkpoint, by its name."""
        return dict(each.split("=", 1) for each in self.variant or ())

    @model_validator(mode="after")
    def _check_variants(self) -> Self:
        for each in self.variant or ():
            name, _, path = each.partition("=")
            if not re.fullmatch(VARIANT_NAME, name) or name == OWN or not path:
                raise ConfigurationError(
                    f"--variant {each} is not NAME=MODEL; give a name of letters, digits, - and ., other than {OWN}, "
                    "and a folder, GGUF file or hub id"
                )
        if len(self.variant_paths) < len(self.variant or ()):
            raise ConfigurationError("--variant gives two checkpoints one name; give each a name of its own")
        return self


class Variant(ListedKnob):
    """The server or the checkpoint that answers, by its name; with one of them alone it is at rest."""

    meaning = "name of the server, or of the checkpoint, that answers"
    name, flags, flag, prefix, at_rest = "variant", VariantFlags, "variant", "variant-", OWN
    is_sorted_in_plans = False
    page = "how_to/two_precisions.md"

    def own(self, limits: KnobLimits) -> Level | None:
        """It is the first server that is given."""
        return limits.variants[0] if len(limits.variants) > 1 else None if limits.variants else OWN

    def requested(self, request: KnobRequest) -> RequestedValues[Level]:
        servers, checkpoints = request.limits.variants, request.flags.variant_paths
        if servers and checkpoints:
            raise ConfigurationError(
                "--variant loads checkpoints here, and the server of --endpoint has loaded its model; start one for "
                "each, and give --endpoint several NAME=URL"
            )
        if checkpoints and request.random_weights:
            raise ConfigurationError("--random_weights makes all variants one model; drop it or --variant")
        values: tuple[str, ...] = servers if len(servers) > 1 else (OWN, *checkpoints) if checkpoints else ()
        return RequestedValues(values, is_given=bool(values))

    def flags_beside_values(self, flags: Any) -> Iterator[tuple[str, Any]]:
        """Where the checkpoints lie, which their names do not say."""
        if flags.variant:
            yield "variant", list(flags.variant)

    def fingerprint(self, request: KnobRequest) -> tuple[object, ...]:
        """The names; content counts as that of the model itself does."""
        return tuple(request.flags.variant_paths)

    def read_level(self, text: str) -> Level | None:
        return text if re.fullmatch(VARIANT_NAME, text) else None

    def order(self, value: Level) -> tuple[float, ...]:
        """The model of --model_path comes last."""
        return (float("inf"),) if value == OWN else tuple(map(float, str(value).encode()))

    def prove(self, proof: Any, setting: Turned, model: Any) -> CannotBeSeen | None:
        """The request went to that server; or a checkpoint's logits are others than those of the model as it is."""
        counted = proof.counted.get("loading") if setting.value(self.name) != OWN else None
        if counted is None:
            return None
        if counted["logits_distance"] is None:
            return CannotBeSeen("the model as it is was not in memory when the checkpoint answered")
        if not counted["logits_distance"]:
            raise KnobDidNotAct(
                f"{setting.key}: the checkpoint answers with the logits of the model as it is, to the last bit; leave "
                "the variant out"
            )
        return None


VARIANT = Variant()


def reference_meaning(key: str) -> str:
    """What the reference setting of this key is, in words: of several servers no one is the model as it is."""
    return "the first variant" if any(map(VARIANT.parsed, key.split("_"))) else "the model as it is"
