"""Pareto dominance in two quantities: a cost, of which less is better, and an accuracy."""

import numpy as np


def on_front(cost: np.ndarray, accuracy: np.ndarray, allowance: float = 0.0) -> np.ndarray:
    """[..., S] bool from [..., S] and [..., S].

    Args:
        allowance: share by which every other setting's cost is taken as higher.
    """
    if not cost.size:
        return np.zeros(cost.shape, dtype=bool)
    size = cost.shape[-1]
    costs, accuracies = cost.reshape(-1, size), accuracy.reshape(-1, size)
    rows = [_on_front_of_one(*row, allowance) for row in zip(costs, accuracies, strict=True)]
    return np.array(rows, dtype=bool).reshape(cost.shape)


def _on_front_of_one(cost: np.ndarray, accuracy: np.ndarray, allowance: float) -> np.ndarray:
    """[S]; by the highest accuracy up to each cost, so that the time grows with S log S."""
    order = np.argsort(cost, kind="stable")
    others = cost[order] * (1 + allowance)
    # What costs less, and what costs no more; the highest accuracy of none is below all.
    highest = np.concatenate([[-np.inf], np.fmax.accumulate(accuracy[order])])
    less, no_more = (highest[np.searchsorted(others, cost, side=side)] for side in ("left", "right"))
    dominated = (less >= accuracy) | (no_more > accuracy)
    return np.asarray(~dominated | np.isnan(cost))
