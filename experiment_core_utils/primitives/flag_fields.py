"""What flags are made of: the base of the parts of a configuration, and the types of values."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.grids import distinct
from experiment_core_utils.primitives.units import MOST_TIMES

T = TypeVar("T")


def not_empty(value: T) -> T:
    """A path as it was given: an empty one would be the current folder."""
    if value == "":
        raise ValueError("a path is missing; write . for the current folder")
    return value


@dataclass(frozen=True)
class Metavar:
    """What the help of a flag writes for a value: what is expected. Completion goes by it, too."""

    name: str


def metavar_of(field: FieldInfo) -> str | None:
    """The metavar that the type of a field has; None where it has none."""
    return next((each.name for each in _inside(field.annotation, *field.metadata) if isinstance(each, Metavar)), None)


def _inside(*annotations: Any) -> Iterator[Any]:
    for each in annotations:
        yield each
        yield from _inside(*get_args(each))


Listed = Annotated[tuple[T, ...], Field(strict=False, min_length=1), AfterValidator(distinct)]
FilePath = Annotated[Path, Field(strict=False), BeforeValidator(not_empty)]
FolderPath = Annotated[FilePath, Metavar("DIR")]
Fraction = Annotated[float, Field(gt=0, le=1), Metavar("FRACTION")]
ProperFraction = Annotated[float, Field(gt=0, lt=1), Metavar("FRACTION")]
Text = Annotated[str, Metavar("TEXT")]
Count = Annotated[int, Field(ge=1, le=MOST_TIMES)]
LargeNumber = Annotated[int, Field(le=10**12)]
CountOrZero = Annotated[int, Field(ge=0, le=MOST_TIMES)]
# Room for as many of them is taken before they are made.
CountInMemory = Annotated[int, Field(ge=1, le=1_000_000)]


class Part(BaseModel):
    """Frozen; unknown keys are errors; None stands for the default."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, protected_namespaces=(), allow_inf_nan=False, defer_build=True
    )
    alternatives: ClassVar[tuple[tuple[str, str], ...]] = ()  #: pairs of fields of which one at most is given
    repeated: ClassVar[tuple[str, ...]] = ()  #: lists whose flag may be given several times

    @model_validator(mode="before")
    @classmethod
    def _none_is_absent(cls, given: Any) -> Any:
        if isinstance(given, Mapping):
            return {key: value for key, value in given.items() if value is not None}
        return given

    @model_validator(mode="after")
    def _check_alternatives(self) -> Self:
        for one, other in self.alternatives:
            if getattr(self, one) is not None and getattr(self, other) is not None:
                raise ConfigurationError(f"--{one} and --{other} are both given; drop one")
        return self
