"""What a setting's samples say of crops and vision tokens, as its result has it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from experiment_core_utils.primitives.knobs import VisionTarget
from experiment_core_utils.primitives.records import MeasuredSample, VisionGeometry
from experiment_core_utils.setting_result import VisionPart


def vision_part(target: VisionTarget, samples: Sequence[MeasuredSample]) -> VisionPart:
    """The vision knob, and crops and tokens of the samples.

    Crops are counted over the pictures that are cut, target tokens over all pictures, actual tokens over all samples; a
    mean over none of them is None.
    """
    geometries, tiles, typical = _geometries(samples), _tiles(samples), typical_geometry(samples)
    return VisionPart.model_construct(
        tier=target.tier,
        tier_range=asdict(target.crops),
        vision_tokens_target=target.tokens,
        selected_crops_mean=_mean(tiles),
        selected_crops_distribution={str(number): count for number, count in sorted(Counter(tiles).items())},
        target_vision_tokens_mean=target.tokens or _mean([each.pooled_features for each in geometries]),
        actual_vision_tokens_mean=_mean([sample.shape.vision_tokens for sample in samples]),
        max_crops=target.crops.max_crops,
        theoretical_num_crops=typical.tiles if typical else None,
        theoretical_tiling=listed(typical.tiling) if typical else None,
        theoretical_image_size=listed(typical.image_size) if typical else None,
        theoretical_vision_tokens=typical.pooled_features if typical else None,
    )


def listed(pair: tuple[int, int] | None) -> list[int] | None:
    """A pair as JSON holds it."""
    return None if pair is None else list(pair)


def mean_crops(samples: Sequence[MeasuredSample]) -> float | None:
    """Of the pictures that are cut; None where there are none."""
    return _mean(_tiles(samples))


def typical_geometry(samples: Sequence[MeasuredSample]) -> VisionGeometry | None:
    """The geometry that most samples have; of several, the one met first."""
    geometries = _geometries(samples)
    return Counter(geometries).most_common(1)[0][0] if geometries else None


def _tiles(samples: Sequence[MeasuredSample]) -> list[int]:
    return [geometry.tiles for geometry in _geometries(samples) if geometry.tiles is not None]


def _geometries(samples: Sequence[MeasuredSample]) -> list[VisionGeometry]:
    return [sample.shape.theoretical for sample in samples if sample.shape.theoretical is not None]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
