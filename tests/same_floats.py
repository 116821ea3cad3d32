"""One comparison for floats that were computed twice."""

import torch


def assert_same_floats(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Two computations of the same float32 values agree, up to the order of their sums.

    The order of a sum follows the processor's vectors, the library that multiplies and where the tensors lie in memory,
    so that even the same module run twice may differ in its last bits. One rounding is 6e-8 of a value; sums of some
    hundred terms through a few layers, with logits of up to about 10, stay below 1e-5. What the tests would find, such
    as another weight, block or expert, changes logits by 1e-2 and more: 1e-4 lies a factor of ten from the one and a
    hundred from the other.
    """
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
