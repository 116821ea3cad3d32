"""In: a CPU; out: the rate at which torch multiplies float32 matrices on it just now, with torch's threads."""

import statistics
import time

import torch

# (rows, inner width, columns): a cube that large products come near to, and tall ones as a small tower makes them.
SHAPES = ((1024, 1024, 1024), (6144, 192, 768), (6144, 768, 192))


def product_rate(repeats: int = 5) -> float:
    """Operations per second, one multiply-add as 2, of the fastest shape, the median of its repeats.

    The result's memory is there before. What else the machine does lowers it as it lowers what is measured beside it.
    """
    return max(_rate(*shape, repeats) for shape in SHAPES)


def _rate(rows: int, inner: int, columns: int, repeats: int) -> float:
    left, right, out = torch.rand(rows, inner), torch.rand(columns, inner), torch.empty(rows, columns)
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        torch.mm(left, right.t(), out=out)
        seconds.append(time.perf_counter() - began)
    return 2 * rows * inner * columns / statistics.median(seconds)
