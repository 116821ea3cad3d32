"""The bases of knobs whose values a flag lists, and which leave everything as it is at rest."""

import math
from typing import Annotated, Any, ClassVar, cast

from pydantic import Field, create_model

from experiment_core_utils.knobs.interface import Knob, KnobLimits, KnobRequest, Level, RequestedValues
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.flag_fields import Listed, Part


class ListedKnob(Knob[Level]):
    """A knob of whole numbers, or of words, which its flag lists. The default is at rest.

    A class of it has `name` and `at_rest`, and says what turns it: `applied`, `request_fields` or an adapter. What else
    it does not say follows from its name: a `head_scale` has the title "head scale", the flag `--head_scale_list` and
    the labels `headscale2`.
    """

    flag: ClassVar[str]  #: that lists its values
    prefix: ClassVar[str]  #: of its label
    at_rest: ClassVar[Level | None] = None  #: its level there, which is `neutral`; None where every value is named

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if name := vars(cls).get("name"):
            title = name.replace("_", " ")
            by_name = {"title": title, "plural": f"{title}s", "flag": f"{name}_list", "prefix": name.replace("_", "")}
            for member, text in by_name.items():
                if not hasattr(cls, member):
                    setattr(cls, member, text)
            cls.neutral = cls.at_rest

    def own(self, limits: KnobLimits) -> Level | None:
        return self.at_rest

    def requested(self, request: KnobRequest) -> RequestedValues[Level]:
        reason = self.no_knob_reason(request)
        if reason is not None:
            return self.fixed(request, self.flag, reason)
        given = getattr(request.flags, self.flag)
        return RequestedValues(tuple(given or (self.at_rest,)), is_given=bool(given))

    def no_knob_reason(self, request: KnobRequest) -> str | None:
        """Why the model takes it at rest alone; None where it can be turned."""
        return request.limits.unsupported.get(self.name)

    def label(self, value: Level) -> str:
        return f"{self.prefix}{value}"

    def parsed(self, label: str) -> Level | None:
        text = label.removeprefix(self.prefix)
        return None if text == label else self.at_rest if text == self.at_rest else self.read_level(text)

    def read_level(self, text: str) -> Level | None:
        """The value that is written so in a label; here a whole number. None for another text."""
        return int(text) if text.isdecimal() and int(text) > 0 and text == str(int(text)) else None

    def level(self, value: Level) -> Level:
        return value

    def of_level(self, level: Level) -> Level:
        if self.parsed(f"{self.prefix}{level}") != level:
            raise ConfigurationError(f"{level!r} is not a value of {self.name}; give one that {self.flag} takes")
        return level

    def order(self, value: Level) -> tuple[float, ...]:
        """At rest comes last."""
        return (float("inf"),) if isinstance(value, str) else (float(value),)


class NumberKnob(ListedKnob):
    """A knob of numbers above `least` and at most `most`, whole ones where it is at rest at one.

    A class of it has `name`, `at_rest`, the first line of its docstring, which says what a value is, and `applied`. Its
    flag, named and explained by these, is made here.
    """

    at_rest: ClassVar[float | None] = None
    least: ClassVar[float] = 0
    most: ClassVar[float] = math.inf

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" in vars(cls):
            meaning = (cls.__doc__ or cls.title).strip().splitlines()[0].rstrip(".")
            cls.meaning = cls.meaning or meaning[0].lower() + meaning[1:]
            if not hasattr(cls, "flags"):
                help_text = f"values of: {cls.meaning} (default: {cls.at_rest})"
                # As a type checker sees it, these are no types.
                number, listed = cast(Any, Annotated), cast(Any, Listed)
                kind = listed[number[cls._kind(), Field(gt=cls.least, le=cls.most)]] | None
                values: Any = (kind, Field(default=None, description=help_text))
                flags: Any = create_model(f"{cls.__name__}Flags", __base__=Part, **{cls.flag: values})
                flags.__doc__ = f"The flag of {cls.title}."
                cls.flags = flags

    @classmethod
    def _kind(cls) -> type[int] | type[float]:
        return float if isinstance(cls.at_rest, float) else int

    def read_level(self, text: str) -> Level | None:
        try:
            value = self._kind()(text)
        except ValueError:
            return None
        return value if str(value) == text and self.least < value <= self.most else None

    def of_level(self, level: Level) -> Level:
        if isinstance(level, str) or not self.least < level <= self.most or level != self._kind()(level):
            limits = f"above {self.least}" + ("" if math.isinf(self.most) else f", at most {self.most}")
            kind = "number" if self._kind() is float else "whole number"
            raise ConfigurationError(f"{level!r} is not a value of {self.name}; give a {kind} {limits}")
        return self._kind()(level)
