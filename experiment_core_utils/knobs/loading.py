"""The knobs that say how the weights are loaded and run: each value is a model in memory, and all take turns.

At rest each is as the flag of the run has it: `--precision`, `--quantization`, `--execution`, `--attn_implementation`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints

from experiment_core_utils.knobs.interface import CannotBeSeen, Knob, KnobRequest, Level, RequestedValues, Turned
from experiment_core_utils.knobs.listed_knob import ListedKnob
from experiment_core_utils.knobs.variant import OWN, VARIANT
from experiment_core_utils.primitives.errors import KnobDidNotAct
from experiment_core_utils.primitives.flag_fields import Listed, Metavar, Part

_SERVED = "the server of --endpoint has loaded its model already; start one for each value, and give several --endpoint"


class LoadingKnob(ListedKnob):
    """A knob that is turned by loading the model once more."""

    config_field: ClassVar[str]  #: of `ModelConfig`, which has its value
    words: ClassVar[tuple[str, ...]]  #: its values, the cheapest first; none where every word may be one
    at_rest = OWN
    page = "how_to/two_precisions.md"

    def no_knob_reason(self, request: KnobRequest) -> str | None:
        return _SERVED if request.limits.variants else None

    def requested(self, request: KnobRequest) -> RequestedValues[Level]:
        """A value that the run's own flags load the model with is the model as it is, and is not loaded twice."""
        found, own = super().requested(request), request.loaded_with.get(self.name)
        if own not in found.values:
            return found
        values = tuple(dict.fromkeys(OWN if value == own else value for value in found.values))
        same = f"--{self.flag} {own} is how the model as it is, {OWN}, is loaded, and is measured once"
        return replace(found, values=values, impossible=(*found.impossible, same))

    def read_level(self, text: str) -> Level | None:
        is_word = text in self.words if self.words else re.fullmatch("[A-Za-z0-9.-]+", text) is not None
        return text if is_word else None

    def order(self, value: Level) -> tuple[float, ...]:
        """Usual words ascend, others follow, the run's own comes last."""
        known: list[Level] = [*self.words, value]
        return (float("inf"),) if value == OWN else (float(known.index(value)),)

    def prove(self, proof: Any, setting: Turned, model: Any) -> CannotBeSeen | None:
        """The model that ran has what was requested, and the model as it is has not."""
        if setting.value(self.name) == OWN:
            return None
        seen, own = (self.seen(each) for each in (model.described_at(setting), model.describe()))
        if seen == own:
            raise KnobDidNotAct(f"{setting.key}: {self.title} is {seen}, as in the model as it is; leave the value out")
        return None

    def seen(self, described: Mapping[str, Any]) -> Any:
        """What a loaded model says of it.

        Args:
            described: by `describe` of the model.
        """
        return described.get(self.config_field)


class NumberFormatFlags(Part):
    """The flags of the number format."""

    precision_list: Listed[Literal["own", "float32", "bfloat16", "float16"]] | None = Field(
        default=None,
        description="number formats of the weights, each a copy in memory; own: as --precision (default: own)",
    )


class NumberFormat(LoadingKnob):
    """The number format of weights and products."""

    meaning = "number format of the weights"
    name, title, plural, flags = "number_format", "number format", "number formats", NumberFormatFlags
    flag, prefix, config_field = "precision_list", "format-", "precision"
    words = ("float16", "bfloat16", "float32")

    def seen(self, described: Mapping[str, Any]) -> Any:
        return described.get("dtype")


class QuantizedFlags(Part):
    """The flags of quantisation as a knob."""

    quantization_list: Listed[Literal["own", "none", "8bit", "fp8", "4bit"]] | None = Field(
        default=None,
        description="quantisations while loading, each a copy in memory; own: as --quantization (default: own)",
    )


class Quantized(LoadingKnob):
    """The quantisation of the weights while they are loaded."""

    meaning = "quantisation of the weights"
    name, title, plural, flags = "quantized", "quantized", "quantisations", QuantizedFlags
    flag, prefix, config_field = "quantization_list", "quant-", "quantization"
    words = ("4bit", "fp8", "8bit", "none")

    def seen(self, described: Mapping[str, Any]) -> Any:
        """Which settings of which method are in force."""
        quantised = described.get("quantisation")
        return "none" if quantised is None else f"{quantised['method']} {quantised['settings']}"


class EngineFlags(Part):
    """The flags of the execution as a knob."""

    execution_list: Listed[Literal["own", "eager", "graph", "kernels", "inductor"]] | None = Field(
        default=None,
        description="ways to run the model, as of --execution, each a copy in memory; own: as --execution "
        "(default: own)",
    )


class Engine(LoadingKnob):
    """What runs the stages."""

    meaning = "what runs the stages"
    name, title, plural, flags = "engine", "engine", "engines", EngineFlags
    flag, prefix, config_field = "execution_list", "run-", "execution"
    words = ("kernels", "inductor", "graph", "eager")

    def seen(self, described: Mapping[str, Any]) -> Any:
        return described.get("execution_stages")


class AttentionFlags(Part):
    """The flags of the attention as a knob."""

    attention_list: (
        Annotated[Listed[Annotated[str, StringConstraints(pattern="^[A-Za-z0-9_.-]+$")]], Metavar("IMPLEMENTATION")]
        | None
    ) = Field(
        default=None,
        description="attentions of transformers, such as sdpa eager, each a copy in memory; own: as "
        "--attn_implementation (default: own)",
    )


class Attention(LoadingKnob):
    """The implementation of attention in the model's modules."""

    meaning = "implementation of attention"
    name, title, plural, flags = "attention", "attention", "attentions", AttentionFlags
    flag, prefix, config_field, words = "attention_list", "attn-", "attn_implementation", ()

    def label(self, value: Level) -> str:
        """Keys are divided at `_`."""
        return f"{self.prefix}{str(value).replace('_', '-')}"

    def read_level(self, text: str) -> Level | None:
        found = super().read_level(text)
        return None if found is None else str(found).replace("-", "_")


NUMBER_FORMAT, QUANTIZED, ENGINE, ATTENTION = NumberFormat(), Quantized(), Engine(), Attention()
LOADING_KNOBS: tuple[Knob[Any], ...] = (VARIANT, NUMBER_FORMAT, QUANTIZED, ENGINE, ATTENTION)
#: the values of the loading knobs that are not at rest, by name, in the order of `LOADING_KNOBS`
Loading = tuple[tuple[str, Level], ...]


def loading_of(setting: Turned) -> Loading:
    """Which of the models in memory a setting needs; empty for the one that the run's flags describe.

    Where servers answer, each variant is one of them.
    """
    values = ((knob.name, setting.value(knob.name)) for knob in LOADING_KNOBS)
    return tuple((name, value) for name, value in values if value != OWN)


def loadings_of(settings: Iterable[Turned]) -> list[Loading]:
    """Each loading that settings need, once, behind the one of the run's flags."""
    return list(dict.fromkeys([(), *map(loading_of, settings)]))


def config_of_loading(loading: Loading) -> dict[str, Level]:
    """The fields of `ModelConfig` that a loading has otherwise than the run, the model's path left out."""
    fields = {knob.name: knob.config_field for knob in LOADING_KNOBS if isinstance(knob, LoadingKnob)}
    return {fields[name]: value for name, value in loading if name in fields}


def variant_of(loading: Loading) -> str:
    """The name of its checkpoint."""
    return str(dict(loading).get(VARIANT.name, OWN))


def loading_flags(loading: Loading) -> str:
    """The flags that ask for it, each with its value."""
    flags = {knob.name: knob.flag for knob in LOADING_KNOBS if isinstance(knob, ListedKnob)}
    return " ".join(f"--{flags[name]} {value}" for name, value in loading)


def loading_name(loading: Loading) -> str:
    """Its values in words."""
    return " ".join(str(value) for _, value in loading) or "as it is"
