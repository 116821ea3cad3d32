"""In: a CPU; out: the best rate at which torch multiplies float32 matrices on it, with the threads that torch has."""

import time

import torch

# (rows, inner width, columns): a cube that large products come near to, and tall ones as a small tower makes them.
SHAPES = ((1024, 1024, 1024), (6144, 192, 768), (6144, 768, 192))


def product_rate(repeats: int = 5) -> float:
    """Operations per second, one multiply-add as 2, of the fastest of all repeats of all shapes, into memory that is
    there; a busy machine can only lower it."""
    best = 0.0
    for rows, inner, columns in SHAPES:
        left, right, out = torch.rand(rows, inner), torch.rand(columns, inner), torch.empty(rows, columns)
        for _ in range(repeats):
            began = time.perf_counter()
            torch.mm(left, right.t(), out=out)
            best = max(best, 2 * rows * inner * columns / (time.perf_counter() - began))
    return best
