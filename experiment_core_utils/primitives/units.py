"""Conversions of units, the bytes of a window, and checks of numbers against their limits."""

import math
from dataclasses import dataclass
from decimal import Decimal

from experiment_core_utils.primitives.errors import ConfigurationError

JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True)
class MemoryReading:
    """Memory of a window, in bytes."""

    #: most memory that torch had allocated on the GPU between open and close; None without a GPU
    peak_memory_bytes: int | None
    peak_reserved_bytes: int | None  #: the same for what its allocator had reserved
    process_rss_bytes: int  #: resident memory of this process at the close
    reason: str | None  #: why a figure is None
    num_passes: int | None = None  #: passes whose highest peaks these are; None of windows in rounds


def milliseconds(seconds: float | None) -> float | None:
    """Seconds to milliseconds; an absent value stays absent."""
    return None if seconds is None else seconds * 1e3


def joules_of_kwh(kilowatt_hours: float) -> float:
    """Kilowatt-hours to joules."""
    return kilowatt_hours * JOULES_PER_KWH


def span(seconds: float) -> str:
    """A duration for a reader: "42 s", "17 min", "3 h 05 min"."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def time_text(ms: float) -> str:
    """A time in milliseconds for a reader, or a negative one of a slope: `1.24 s`, `522 ms`, `8.4 ms`, `31 ns`."""
    if abs(ms) >= 1000:
        return f"{ms / 1000:.2f} s"
    if 0 < abs(ms) < 1e-3:
        return f"{1e6 * ms:.3g} ns"
    return f"{ms:.0f} ms" if abs(ms) >= 100 else f"{ms:.3g} ms"


def time_change_text(ms: float) -> str:
    """A change of a time in milliseconds for a reader: `+522 ms`, `-8.4 ms`, `+0.031 ms`."""
    return f"{ms:+.0f} ms" if abs(ms) >= 10 else f"{ms:+.2g} ms"


# Longer than any run (116 days), and short enough for every timer of Python, torch and the system.
MOST_SECONDS = 10_000_000
# More repetitions, samples or tokens than any run ends with.
MOST_TIMES = 10_000_000
# What numpy and torch take alike.
LARGEST_SEED = 2**32 - 1


def check_within(named: str, number: float, least: float, most: float) -> None:
    """Raises ConfigurationError unless the number lies between `least` and `most`, both included."""
    if not least <= number <= most:
        raise ConfigurationError(
            f"{named} {shown(number)} is not possible; give at least {shown(least)} and at most {shown(most)}"
        )


def shown(number: float) -> str:
    """A number for a message: whole ones as they are, from 10^15 on rounded to a digit ("10^20", "3*10^17")."""
    if isinstance(number, int):
        if abs(number) < 10**15:
            return str(number)
        digit, _, exponent = f"{Decimal(number):.0e}".partition("e+")
        return f"{digit}*10^{exponent}".replace("1*", "", digit in ("1", "-1"))
    return f"{number:g}"


def check_at_least(named: str, number: float, least: float) -> None:
    """Raises ConfigurationError unless the number is finite and at least `least`."""
    if not least <= number < math.inf:
        raise ConfigurationError(f"{named} {shown(number)} is not possible; give a finite number of at least {least:g}")


def check_above(named: str, number: float, limit: float) -> None:
    """Raises ConfigurationError unless the number is finite and above `limit`."""
    if not limit < number < math.inf:
        raise ConfigurationError(f"{named} {shown(number)} is not possible; give a finite number above {limit:g}")


def check_above_to(named: str, number: float, limit: float, most: float) -> None:
    """Raises ConfigurationError unless the number is above `limit` and at most `most`."""
    if not limit < number <= most:
        raise ConfigurationError(
            f"{named} {shown(number)} is not possible; give a finite number above {limit:g} and at most {most:g}"
        )


def check_fraction(named: str, number: float) -> None:
    """Raises ConfigurationError unless the number lies between 0 and 1, neither of them included."""
    if not 0.0 < number < 1.0:
        raise ConfigurationError(f"{named} {shown(number)} is not possible; give a fraction between 0 and 1")
