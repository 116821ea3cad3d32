"""Numbers at their bounds, beyond them, and those that are no number."""

import math

import pytest

from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.units import check_above, check_at_least, check_fraction, shown


@pytest.mark.parametrize("number", [2.0, 2, 1e300])
def test_what_is_at_least_the_least_passes(number: float) -> None:
    check_at_least("--weight", number, 2.0)


@pytest.mark.parametrize("number", [1.999, -math.inf, math.inf, math.nan])
def test_what_is_less_or_not_finite_is_refused(number: float) -> None:
    with pytest.raises(ConfigurationError, match=f"^--weight {number:g} is not possible; give a finite .* at least 2$"):
        check_at_least("--weight", number, 2.0)


def test_a_limit_is_not_above_itself() -> None:
    check_above("--rate", 1e-300, 0.0)
    for number in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigurationError, match=f"^--rate {number:g} is not possible; give a finite .* above 0$"):
            check_above("--rate", number, 0.0)


def test_a_share_lies_between_0_and_1() -> None:
    check_fraction("--part", 0.001)
    for number in (0.0, 1.0, -0.5, math.inf, math.nan):
        with pytest.raises(ConfigurationError, match=f"^--part {number:g} is not possible; give a fraction between 0"):
            check_fraction("--part", number)


@pytest.mark.parametrize(
    ("number", "text"),
    [(10**15 - 1, "9" * 15), (10**15, "10^15"), (10**20 - 1, "10^20"), (-(10**20), "-10^20"), (317 * 10**18, "3*10^20"),
     (10**5000 - 1, "10^5000"), (0.5, "0.5")],
    ids=lambda each: each if isinstance(each, str) else "",
)  # fmt: skip
def test_a_long_number_is_shown_by_its_nearest_power_of_ten(number: float, text: str) -> None:
    assert shown(number) == text
