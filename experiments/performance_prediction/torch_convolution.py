"""In: a precision; out: torch's own convolution held to it, the baseline beside the named algorithms."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from experiments.performance_prediction.convolution import Precision


@contextmanager
def torch_precision(precision: Precision) -> Iterator[None]:
    """Inside, torch's own convolutions and matrix products on a GPU use TF32 for `tf32` only; for the whole process."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    _allow_tf32(precision == "tf32", precision == "tf32")
    try:
        yield
    finally:
        _allow_tf32(*before)


def _allow_tf32(convolutions: bool, products: bool) -> None:
    torch.backends.cudnn.allow_tf32 = convolutions
    torch.backends.cuda.matmul.allow_tf32 = products
