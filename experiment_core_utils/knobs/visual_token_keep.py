"""The knob of kept image tokens: the fraction of a picture's features that enters the decoder behind the connector.

Of N features, all pictures of a request together in the order of the prompt, max(1, N x fraction rounded half up) are
kept, in their order; the others leave the prompt: ids, embeddings, mask and positions. Their number is known before the
run, so that nothing waits for the device. Marks around and between features (starts, ends, column marks) stay; row ends
that are features themselves, as LLaVA-NeXT's, are kept or dropped like others. Where positions are one number, those of
the kept sequence are consecutive. Where they are three (Qwen-VL), each token keeps its own, and what follows has the
position that it has in the whole prompt. The rules see features only, no attention; their time is part of the prefill.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from experiment_core_utils.knobs.interface import (
    CannotBeSeen,
    Knob,
    KnobLimits,
    KnobRequest,
    Level,
    RequestedValues,
    Turned,
)
from experiment_core_utils.primitives.errors import ConfigurationError, KnobDidNotAct
from experiment_core_utils.primitives.flag_fields import Fraction, Listed, Part

Rule = Literal["uniform", "random", "norm", "divprune"]
_LABEL = "keep"


@dataclass(frozen=True)
class KeptTokens:
    """The fraction that is kept, and how a run chooses the tokens, which no name says."""

    fraction: float
    rule: Rule = field(default="uniform", compare=False)
    seed: int = field(default=0, compare=False)  #: of `random`

    def count(self, features: int) -> int:
        """How many of so many features are kept."""
        return min(features, max(1, math.floor(features * self.fraction + 0.5)))


class KeepFlags(Part):
    """The flags of kept image tokens."""

    visual_token_keep_list: Listed[Fraction] | None = Field(
        default=None, description="fractions of the image tokens that enter the decoder (default: 1, all of them)"
    )
    visual_token_keep_rule: Rule = Field(
        default="uniform",
        description="which ones: evenly spaced; drawn by --seed; of the largest norm; or the most diverse (DivPrune)",
    )

    @model_validator(mode="after")
    def _check_rule(self) -> Self:
        if self.visual_token_keep_rule != "uniform" and min(self.visual_token_keep_list or (1.0,)) == 1:
            raise ConfigurationError(
                f"--visual_token_keep_rule {self.visual_token_keep_rule} chooses nothing where all image tokens are "
                "kept; give --visual_token_keep_list with a fraction below 1, or drop it"
            )
        return self


class VisualTokenKeep(Knob[KeptTokens]):
    """The fraction of the image tokens that enter the decoder."""

    name, title, plural, flags = "visual_token_keep", "kept image tokens", "fractions of image tokens", KeepFlags
    neutral = KeptTokens(1.0)

    def own(self, limits: KnobLimits) -> KeptTokens:
        return self.neutral

    def requested(self, request: KnobRequest) -> RequestedValues[KeptTokens]:
        given, flags = request.flags.visual_token_keep_list, request.flags
        if self.name in request.limits.unsupported:
            return self.fixed(request, "visual_token_keep_list", request.limits.unsupported[self.name])
        made = (KeptTokens(each, flags.visual_token_keep_rule, request.seed) for each in given or (1.0,))
        return RequestedValues(tuple(made), is_given=bool(given))

    def fingerprint(self, request: KnobRequest) -> tuple[object, ...]:
        """It has the rule where that is not the default one, so that fractions can be added later."""
        rule = request.flags.visual_token_keep_rule
        return () if rule == "uniform" else (rule, request.seed) if rule == "random" else (rule,)

    def label(self, value: KeptTokens) -> str:
        return f"{_LABEL}{value.fraction!r}"

    def parsed(self, label: str) -> KeptTokens | None:
        try:
            value = KeptTokens(float(label.removeprefix(_LABEL)))
        except ValueError:
            return None
        return value if 0 < value.fraction <= 1 and label == self.label(value) else None

    def level(self, value: KeptTokens) -> Level:
        return value.fraction

    def of_level(self, level: Level) -> KeptTokens:
        if not isinstance(level, int | float) or not 0 < level <= 1:
            raise ConfigurationError(f"{level!r} is no fraction of image tokens; give a number above 0, at most 1")
        return KeptTokens(float(level))

    def shape(self, shape: Any, value: KeptTokens) -> Any:
        """Fewer image features enter the language model, and the vision stage gives as many."""
        return replace(shape, vision_tokens=value.count(shape.vision_tokens))

    def prove(self, proof: Any, setting: Turned, model: Any) -> CannotBeSeen | None:
        """The tokens that the prefill computed are counted."""
        counted, value = proof.prefill_tokens, setting.value(self.name)
        if counted is None:
            return None if value == self.neutral else CannotBeSeen("the tokens of its prefill were not counted")
        dropped = proof.vision_tokens - value.count(proof.vision_tokens)
        if counted != proof.prompt_tokens - dropped:
            raise KnobDidNotAct(
                f"{setting.key}: the prefill computed {counted} tokens instead of {proof.prompt_tokens} without "
                f"{dropped} of its {proof.vision_tokens} image tokens"
            )
        return None


VISUAL_TOKEN_KEEP = VisualTokenKeep()
