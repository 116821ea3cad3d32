"""A measured grid of three choices and four requests with round numbers, for tests of the controller."""

import numpy as np

from experiments.controller.knob_choices import choice_of
from experiments.controller.measured_grid import MeasuredGrid
from experiments.controller.policies.interface import PictureShape, RequestFeatures

FAST, MIDDLE, SLOW = choice_of("low", 4, 12), choice_of("medium", 4, 12), choice_of("high", 8, 16)
SHAPES = {"low": PictureShape(2, 400), "medium": PictureShape(6, 800), "high": PictureShape(12, 1600)}


def request(sample_id: int = 0, task: str = "signs", output_tokens: float | None = None) -> RequestFeatures:
    """Ten tokens of text."""
    return RequestFeatures(task, sample_id, 10, SHAPES, output_tokens)


def grid() -> MeasuredGrid:
    """Seconds ascend with the choice; request 0 needs none of the knobs, request 1 the middle, request 2 the slow one.

    Request 3 is right only at the fast choice.
    """
    return MeasuredGrid(
        choices=(FAST, MIDDLE, SLOW),
        tasks=("signs",) * 4,
        sample_ids=(0, 1, 2, 3),
        pictures=("signs a", "signs b", "signs c", "signs d"),
        scores=np.array([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]]),
        best=np.ones(4),
        total_s=np.array([[0.1, 0.1, 0.1, 0.2], [0.2, 0.2, 0.3, 0.4], [0.4, 0.5, 0.6, 0.7]]),
        requests=tuple(request(sample_id) for sample_id in range(4)),
        metrics={"signs": "em"},
        left_out=(),
        source={"model": "hand-made"},
        setup=("hand-made",),
    )
