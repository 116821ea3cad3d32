"""A budget that a stream of requests shares: the price of what is scarce, by which every request chooses."""

from dataclasses import dataclass

import numpy as np

STEPS = 60


@dataclass(frozen=True)
class Price:
    """What a unit of cost is worth, in units of gain.

    Part of the requests choose by `low`, at which the stream costs more than its limit, the others by `high`, at which
    it costs at most that: together they cost the limit.
    """

    low: float
    high: float
    fraction_low: float  #: of the requests that choose by `low`

    def shares(self, gains: np.ndarray, costs: np.ndarray) -> dict[int, float]:
        """Places of the settings that are best for gains and costs [S] -> fraction of such requests that get each."""
        found: dict[int, float] = {}
        for price, fraction in ((self.low, self.fraction_low), (self.high, 1 - self.fraction_low)):
            if fraction > 0:
                place = int(np.argmax(gains - price * costs))
                found[place] = found.get(place, 0.0) + fraction
        return found


def price_of(gains: np.ndarray, costs: np.ndarray, measured: np.ndarray, limit: float) -> Price:
    """The price at which requests cost the limit in the mean.

    This is the Lagrange multiplier of the stream's one constraint, found by bisection.

    Args:
        gains: [N, S], expected of each setting for each of the requests that the price is found on.
        costs: [N, S], expected; a request takes the setting with the highest gain - price x cost.
        measured: [N, S], what they really cost.
        limit: of the mean of `measured`; where no price keeps it, every request takes what it expects to cost least.
    """
    places = np.arange(len(gains))
    # Above this price nothing is worth more than the least difference in cost.
    scale = np.ptp(gains) / max(np.ptp(costs), 1e-12) or 1.0

    def mean_at(price: float) -> float:
        return float(measured[places, np.argmax(gains - price * costs, axis=1)].mean())

    low, high = 1e-9 * scale, 1e9 * scale
    if mean_at(low) <= limit:
        return Price(low, low, 0.0)
    if mean_at(high) > limit:
        return Price(high, high, 0.0)
    for _ in range(STEPS):
        middle = float(np.sqrt(low * high))
        low, high = (middle, high) if mean_at(middle) > limit else (low, middle)
    above, below = mean_at(low), mean_at(high)
    return Price(low, high, (limit - below) / (above - below))
