"""Least squares with coefficients of 0 and more, relative or robust."""

import numpy as np
from scipy.optimize import nnls

_REWEIGHTINGS = 8
_HUBER = 1.345

# The largest x over the smallest that a slope takes: over a shorter span it is the scatter of y, magnified.
LEAST_SPAN = 1.5


def relative_nonnegative(columns: np.ndarray, target: np.ndarray, *, scaled: bool = False) -> np.ndarray:
    """[P] coefficients >= 0 of `columns` [S, P] with the least sum of squared errors relative to `target` [S] > 0.

    Args:
        scaled: each column is divided by its mean, so that none loses digits; otherwise they keep their magnitudes, and
            of collinear ones the largest comes first.
    """
    mean = columns.mean(axis=0)
    scale = np.where(mean > 0, mean, 1.0) if scaled else np.ones(columns.shape[1])
    found, _ = nnls(columns / scale / target[:, None], np.ones(len(target)))
    return np.asarray(found / scale)


def robust_nonnegative(columns: np.ndarray, target: np.ndarray) -> np.ndarray:
    """[P] coefficients >= 0 of Huber's regression of `target` [S] on `columns` [S, P], by reweighted least squares.

    The tuning constant 1.345 is in units of the residuals' scale (1.4826 times their median size): P. Huber and
    E. Ronchetti, "Robust Statistics", 2nd ed. 2009, 7.8.
    """
    weights = np.ones(len(target))
    found = np.zeros(columns.shape[1])
    for _ in range(_REWEIGHTINGS):
        root = np.sqrt(weights)
        # The triangle of QR has the same solution as all S rows, and is small.
        triangle = np.asarray(np.linalg.qr(np.column_stack([columns, target]) * root[:, None], mode="r"))
        previous, found = found, nnls(triangle[:, :-1], triangle[:, -1])[0]
        residuals = np.abs(columns @ found - target)
        spread = 1.4826 * float(np.median(residuals))
        if spread < 1e-12 or (np.abs(previous - found) <= 1e-4 * found).all():
            break
        weights = np.minimum(1.0, _HUBER * spread / np.maximum(residuals, 1e-300))
    return found
