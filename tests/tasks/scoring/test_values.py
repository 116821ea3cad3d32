"""Values in texts, worked out by hand: forms that are one value, and forms that are not."""

from fractions import Fraction

import pytest

from experiment_core_utils.tasks.scoring.values import Quantity, is_range, plain, quantities

SAME = [
    ("1 h 30 min", "1.5 hours"),
    ("1½ hours", "one and a half hours"),
    ("3,2 Milliarden Euro", "€3.2 billion"),
    ("3.200.000.000 €", "3,2 Mrd. €"),
    ("$3.2B", "3.2 billion dollars"),
    ("USD 5", "5 dollars"),
    ("68 000 000", "68 millions"),
    ("٣٫٥", "3.5"),
    ("१२", "12"),
    ("大约十四亿人", "1,400,000,000"),
    ("三十五", "35"),
    ("３７７６ｍ", "富士山の高さは3,776メートルです。"),
    ("3e8 m/s", "3 × 10⁸ metres per second"),
    ("3*10^8", "300 000 000"),
    ("10^6", "a million: 1000000"),
    ("1.25 x 10^3", "1,250"),
    ("half past two in the afternoon", "2:30 p.m."),
    ("16h15", "4:15 pm"),
    ("42 square metres", "42 m²"),
    ("\\frac{1}{2}", "0.5"),
    ("$\\dfrac{3}{4}$", "three quarters"),
    ("9{,}500", "9500"),
    ("50 %", "0.5"),
    ("1.200,50", "1200.5"),
    ("12,34,567", "1234567"),
    ("1'000", "1000"),
    ("sechzehn", "16"),
    ("−3", "minus three"),
    ("two hundred and fifty", "250"),
    ("0.333", "1/3"),
    ("20 degrees", "20 °C"),
    ("5 km", "5000 m"),
    ("7", "7 apples"),
    ("July 4, 1776", "1776-07-04"),
    ("am 4. Juli 1776", "4th of July 1776"),
    ("4.7.1776", "1776"),
    ("drei Viertel", "three-quarters"),
]
DIFFERENT = [
    ("5 m", "5 cm"),
    ("42 km²", "42 m²"),
    ("42 m", "42 m²"),
    ("80 m/s", "80 km/h"),
    ("3.2 million", "3.2 billion"),
    ("3,2 Mrd. US-Dollar", "3,2 Mrd. €"),
    ("1.5", "1,500"),
    ("-5", "5"),
    ("2:30 am", "2:30 pm"),
    ("20 °F", "20 °C"),
    ("2008", "2010"),
    ("50%", "49%"),
    ("0.3", "1/3"),
    ("July 5, 1776", "4 July 1776"),
]


def only(text: str) -> Quantity:
    found = quantities(plain(text))
    return found[-1]


@pytest.mark.parametrize(("first", "second"), SAME)
def test_forms_of_one_value(first: str, second: str) -> None:
    assert only(first).is_same(only(second)) and only(second).is_same(only(first))


@pytest.mark.parametrize(("first", "second"), DIFFERENT)
def test_other_values(first: str, second: str) -> None:
    assert not only(first).is_same(only(second)) and not only(second).is_same(only(first))


def test_a_point_before_three_digits_may_be_of_thousands_or_decimals() -> None:
    assert only("1.200").numbers == {Fraction(1200), Fraction("1.2")}
    assert only("1,200").numbers == {Fraction(1200)}
    assert only("3,125").numbers == {Fraction(3125), Fraction("3.125")}
    assert only("0.125").numbers == {Fraction(1, 8)}


def test_digits_within_words_are_no_numbers() -> None:
    assert quantities(plain("H2O, K2 and the 1960s, the 3rd")) == ()


@pytest.mark.parametrize(("text", "expected"), [("10–20", True), ("3 or 4", True), ("3 cats, 4 dogs", False)])
def test_ranges(text: str, expected: bool) -> None:
    assert is_range(plain(text), quantities(plain(text))) == expected
