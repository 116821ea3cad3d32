"""The base of what a result's JSON file is made of, and the kinds of its fields."""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from experiment_core_utils.primitives.errors import ResultsError, ResultsRefused
from experiment_core_utils.primitives.files import FILE_NAME_PART
from experiment_core_utils.records.result_files import field_fault


def _as_it_is(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    check(value)
    return value


def _text(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError("Input should be a text")
    return value


def _text_or_number(value: Any) -> Any:
    return value if value is None or type(value) is int else _text(value)


# A whole number among floats stays one.
AS_IT_IS = WrapValidator(_as_it_is)
Name = Annotated[str, StringConstraints(pattern=f"^{FILE_NAME_PART}$")]
Count = Annotated[int, Field(ge=0, le=2**53)]
Flops = Annotated[int, Field(ge=0, le=10**30)]
Knob = Annotated[int, Field(ge=1, le=10**6)]
Number = Annotated[float, Field(ge=-1e30, le=1e30), AS_IT_IS]
Positive = Annotated[float, Field(ge=0, le=1e30)]
Amount = Annotated[Positive, AS_IT_IS]
Peak = Annotated[float, Field(gt=0, le=1e30), AS_IT_IS]
Ratio = Annotated[float, Field(gt=0, le=1e9), AS_IT_IS]
Share = Annotated[float, Field(ge=0, le=1), AS_IT_IS]
# Milliseconds: of a stage, and of what may take none.
Time = Annotated[float, Field(ge=1e-9, le=1e12)]
Delay = Annotated[float, Field(ge=0, le=1e12)]
# Answers may contain half a surrogate pair, which pydantic's own type refuses.
Text = Annotated[Any, AfterValidator(_text)]
TextOrNumber = Annotated[Any, AfterValidator(_text_or_number)]


class Record(BaseModel):
    """A part of a result; keys that it does not know are kept."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)

    def content(self) -> dict[str, Any]:
        """The keys as a JSON file has them: those that were read or made, no defaults."""
        return self.model_dump(exclude_unset=True)

    @classmethod
    def read(cls, content: Any, where: str, advice: str) -> Self:
        """The record of what a file contains.

        Args:
            where: names the file, and the place in it, in an error.

        Raises:
            ResultsRefused: a field is missing or cannot be.
        """
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            raise ResultsRefused(f"{where} {field_fault(error)}; {advice}") from error

    @classmethod
    def of(cls, *parts: "Record", **own: Any) -> Self:
        """The record of these parts and further keys.

        Raises:
            TypeError: a key is given twice.
            ResultsError: a field is missing or cannot be.
        """
        given: dict[str, Any] = {}
        for part in parts:
            if twice := sorted(part.model_fields_set & given.keys()):
                raise TypeError(f"{cls.__name__} got {', '.join(twice)} from two parts")
            given |= part.set_keys()
        return cls._checked({**given, **own})

    def set_keys(self) -> dict[str, Any]:
        """The keys that were read or made, with their records."""
        return {name: getattr(self, name) for name in self.model_fields_set}

    def with_keys(self, **keys: Any) -> Self:
        """This record with these keys in place of its own; raises ResultsError for one that cannot be."""
        return self._checked(self.set_keys() | keys)

    @classmethod
    def _checked(cls, keys: Mapping[str, Any]) -> Self:
        try:
            return cls(**keys)
        except ValidationError as error:
            advice = "the program made it, so report this as its fault"
            raise ResultsError(f"{cls.__name__} {field_fault(error)}; {advice}") from error
