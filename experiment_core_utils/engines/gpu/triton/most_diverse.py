"""The greedy choice of diverse image tokens as one kernel. Importing this module needs Triton."""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl


@triton.jit
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
    diagonal.
    """
    features = distances.shape[0]
    block = triton.next_power_of_2(features)
    # A thread keeps up to 16 distances, of the largest pictures more.
    warps = min(max(block // 512, 1), 32)
    with torch.cuda.device(distances.device) if distances.is_cuda else nullcontext():
        most_diverse_kernel[(1,)](distances, chosen, features, len(chosen), BLOCK=block, num_warps=warps)
