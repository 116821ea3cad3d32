"""The declaration of a quantity, which stands at the field of the record that publishes it.

Key, kind and meaning are the field's. Spreads, columns, the schema page and checks are made from the declarations.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from experiment_core_utils.primitives.units import milliseconds
from experiment_core_utils.records.json_record import Record

Unit = Literal["ms", "J", "FLOPs", "tokens", "features", "answers"]


@dataclass(frozen=True)
class Quantity:
    """What a published field of a sample is in memory, and what becomes of it over samples and in tables."""

    name: str  #: in memory, where times are in seconds
    unit: Unit  #: as published
    of: Literal["run", "sample"] = "sample"  #: what has one value
    in_table: bool = True  #: whether it is a column of samples
    is_everywhere: bool = True  #: whether every sample has the key; otherwise key and column are where it was measured
    figures: tuple[str, ...] | None = ("mean",)  #: over samples, in the table of settings; None to have no spread
    typical: tuple[str, ...] = ()  #: the same of each sample's median run alone
    #: what requests may be without, and then spend nothing on, while it is a part of what others spend
    is_part: bool = False
    may_take_none: bool = False  #: whether what it measures may be no work at all
    key: str = ""  #: the field's, which `quantities_of` fills in

    @property
    def may_be_zero(self) -> bool:
        """Whether a figure of it may be 0; a request takes time."""
        return self.is_part or self.may_take_none

    @property
    def is_whole(self) -> bool:
        """Whether its values are whole numbers."""
        return self.unit in ("tokens", "features", "answers")

    @property
    def spread(self) -> str:
        """What its spread is called in `aggregate_stats`, before the figure."""
        return self.key if self.unit == "ms" else self.name

    @property
    def column(self) -> str:
        """Name of its column, with the unit of a time."""
        return f"{self.key}_ms" if self.unit == "ms" else self.key

    def published(self, value: float | None) -> float | None:
        """A value in memory in the published unit."""
        return milliseconds(value) if self.unit == "ms" else value

    def with_absent_parts(self, values: Sequence[float | None]) -> Sequence[float | None]:
        """The values with 0 for each that is absent, if it is a part of others and some have it."""
        if not self.is_part or all(value is None for value in values):
            return values
        return [value or 0.0 for value in values]


def quantities_of(*records: type[Record]) -> Mapping[str, Quantity]:
    """The quantities that these records publish, by the key of each, in the order of their fields."""
    return {
        key: replace(quantity, key=key)
        for record in records
        for key, field in record.model_fields.items()
        for quantity in field.metadata
        if isinstance(quantity, Quantity)
    }
