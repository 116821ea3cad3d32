"""In: a device; out: matrix products of known work, to see whether energies of parts add up to that of the whole."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from experiment_core_utils.primitives.device import synchronize


@dataclass(frozen=True)
class KnownLoad:
    """Two acts that do known work and return when it is done.

    Attributes:
        name: sizes and dtype, for a reader.
        first_flops: operations of the first act, one multiply-add as 2.
    """

    name: str
    first: Callable[[], None]
    second: Callable[[], None]
    first_flops: int

    def both(self) -> None:
        """One after the other."""
        self.first()
        self.second()


def matrix_products(device: torch.device) -> KnownLoad:
    """Some large products, and many small ones that leave the device waiting; warmed up.

    Numbers are random: products of equal ones draw less power.
    """
    is_cuda = device.type == "cuda"
    dtype = torch.bfloat16 if is_cuda else torch.float32
    large_side, small_side, small_times = (8192, 1024, 64) if is_cuda else (1024, 128, 256)
    large, small = (torch.randn(side, side, dtype=dtype, device=device) for side in (large_side, small_side))

    @torch.inference_mode()
    def products(factor: torch.Tensor, times: int) -> None:
        for _ in range(times):
            factor @ factor
        synchronize(device)

    load = KnownLoad(
        f"{large_side} x {large_side} {str(dtype).removeprefix('torch.')}",
        lambda: products(large, 4),
        lambda: products(small, small_times),
        4 * 2 * large_side**3,
    )
    load.both()
    return load
