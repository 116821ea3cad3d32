"""The run-time knobs as values: crop ranges behind the vision tiers, and one setting of all knobs."""

from dataclasses import dataclass

from experiment_core_utils.primitives.errors import ConfigurationError


@dataclass(frozen=True)
class CropRange:
    """How many tiles (crops without the one of the whole picture) a picture may be cut into, both ends included."""

    min_crops: int
    max_crops: int

    def __post_init__(self) -> None:
        if not 1 <= self.min_crops <= self.max_crops:
            raise ConfigurationError(
                f"crop range {self.min_crops}-{self.max_crops} is empty or starts below 1; give 1 <= min <= max"
            )


TIERS = {"low": CropRange(1, 3), "medium": CropRange(4, 8), "high": CropRange(9, 15)}
