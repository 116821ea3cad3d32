"""In: a number that was given, what is allowed; out: nothing, or one error that says both."""

import math

from experiment_core_utils.primitives.errors import ConfigurationError


def check_at_least(named: str, number: float, least: float) -> None:
    """Raises ConfigurationError unless the number is finite and at least `least`."""
    if not least <= number < math.inf:
        raise ConfigurationError(f"{named} {number:g} is not possible; give a finite number of at least {least:g}")


def check_above(named: str, number: float, limit: float) -> None:
    """Raises ConfigurationError unless the number is finite and above `limit`."""
    if not limit < number < math.inf:
        raise ConfigurationError(f"{named} {number:g} is not possible; give a finite number above {limit:g}")


def check_share(named: str, number: float) -> None:
    """Raises ConfigurationError unless the number lies between 0 and 1, neither of them included."""
    if not 0.0 < number < 1.0:
        raise ConfigurationError(f"{named} {number:g} is not possible; give a share between 0 and 1")
