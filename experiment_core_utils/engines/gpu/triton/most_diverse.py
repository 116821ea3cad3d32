"""The greedy choice of diverse image tokens as one kernel. Importing this module needs Triton."""

from functools import cache

import torch
import triton
import triton.language as tl

from experiment_core_utils.engines.gpu.triton.tuning import DIVERSE_WARPS


# The number of features must not decide by its divisors which kernel runs: that would be built amid a measurement.
@triton.jit(do_not_specialize=["features", "kept"])
def most_diverse_kernel(distances, chosen, features, kept, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Choose features one after the other in one program, which keeps each one's distance to its nearest chosen one.

    A feature's distance to itself is minus infinity, so that none is chosen twice; of equal ones the first is chosen.
    """
    feature = tl.arange(0, BLOCK)
    inside = feature < features
    nearest = tl.where(inside, float("inf"), float("-inf"))
    place = tl.load(chosen)
    for step in range(1, kept):
        row = tl.load(distances + place * features + feature, mask=inside, other=float("-inf"))
        nearest = tl.minimum(nearest, row)
        # Where distances are not numbers, whatever is chosen must be a feature.
        place = tl.minimum(tl.argmax(nearest, axis=0), features - 1).to(tl.int64)
        tl.store(chosen + step, place)


def choose_most_diverse(distances: torch.Tensor, chosen: torch.Tensor) -> None:
    """Fill `chosen` [K] int64, whose first place is given, from distances [N, N] float32 with minus infinity on the
    diagonal. The first call on a device builds the kernels for every N up to 65,536.
    """
    if distances.is_cuda:
        _build_all(distances.device)
    _launch(distances, chosen)


@cache
def _build_all(device: torch.device) -> None:
    for block in (1024, 4096, 16384, 65536):
        _launch(torch.empty(1, 1, device=device), torch.zeros(1, dtype=torch.long, device=device), block)


def _launch(distances: torch.Tensor, chosen: torch.Tensor, block: int = 1024) -> None:
    features = distances.shape[0]
    while block < features:
        block *= 4
    with torch.cuda.device_of(distances):
        most_diverse_kernel[(1,)](distances, chosen, features, len(chosen), BLOCK=block, num_warps=DIVERSE_WARPS)
