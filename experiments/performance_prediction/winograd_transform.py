"""In: outputs per tile m and kernel taps r; out: the matrices of the Cook-Toom (Winograd) algorithm F(m, r). Exact.

Y = A^T [(G g) * (B^T d)] gives the m outputs of a cross-correlation of r taps g with m + r - 1 samples d in as many
products instead of m·r; in two dimensions each matrix acts on rows and columns (Lavin and Gray, "Fast Algorithms for
Convolutional Neural Networks", 2015).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import prod

# Interpolation points in the order of their use; the point at infinity comes last. Small values lose least precision.
POINTS = (Fraction(0), Fraction(1), Fraction(-1), Fraction(2), Fraction(-2), Fraction(1, 2), Fraction(-1, 2))

Matrix = tuple[tuple[Fraction, ...], ...]


@dataclass(frozen=True)
class WinogradTransform:
    """Matrices of F(m, r), with n = m + r - 1.

    Attributes:
        output: A^T [m, n].
        kernel: G [n, r].
        given: B^T [n, n].
    """

    output: Matrix
    kernel: Matrix
    given: Matrix


@cache
def winograd_transform(outputs: int, taps: int) -> WinogradTransform:
    """F(outputs, taps); raises ValueError where it needs more points than there are."""
    samples = outputs + taps - 1
    if samples - 1 > len(POINTS):
        raise ValueError(f"F({outputs}, {taps}) needs {samples - 1} points, {len(POINTS)} are known")
    points = POINTS[: samples - 1]
    others = [tuple(other for other in points if other != point) for point in points]
    scales = [
        prod((point - other for other in rest), start=Fraction(1)) for point, rest in zip(points, others, strict=True)
    ]
    return WinogradTransform(
        output=tuple((*(point**power for point in points), Fraction(power == outputs - 1)) for power in range(outputs)),
        kernel=(
            *(
                tuple(point**power / scale for power in range(taps))
                for point, scale in zip(points, scales, strict=True)
            ),
            tuple(Fraction(power == taps - 1) for power in range(taps)),
        ),
        given=(*((*_polynomial(rest), Fraction(0)) for rest in others), _polynomial(points)),
    )


def _polynomial(roots: Sequence[Fraction]) -> tuple[Fraction, ...]:
    """Coefficients of the product of (x - root), constant first."""
    coefficients = [Fraction(1)]
    for root in roots:
        higher = [Fraction(0), *coefficients]
        coefficients = [above - root * own for above, own in zip(higher, [*coefficients, Fraction(0)], strict=True)]
    return tuple(coefficients)
