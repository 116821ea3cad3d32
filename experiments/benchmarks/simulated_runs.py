"""Simulated runs of a grid of settings on a machine whose speed changes: their times in rounds."""

from dataclasses import dataclass
from itertools import product

import numpy as np

STEP = 0.05  # what one number of blocks takes more than the one before
TIERS = {"low": 0.0, "medium": 0.75, "high": 1.15}  # logarithms of times
NUM_RUNS = 2


@dataclass(frozen=True)
class World:
    """A machine, and requests on it; spreads are standard deviations of logarithms."""

    name: str
    noise: float = 0.04  #: of a run
    drift: tuple[float, float] | None = None  #: spread of the machine's speed, and seconds over which it changes
    bursts: tuple[float, float] | None = None  #: how many times as long, and seconds it lasts; a quarter of the time
    heavy: bool = False  #: noise by Student's t of 3 degrees
    slow: tuple[float, float] | None = None  #: the fraction of runs that are slow, and how many times as long they take
    per_picture: int = 1  #: questions, of which settings' peculiarities are shared
    resolution: float = 0.0  #: seconds to which times are rounded


WORLDS = (
    World("steady"),
    World("drift 5 %, 20 s", drift=(0.05, 20.0)),
    World("drift 5 %, 120 s", drift=(0.05, 120.0)),
    World("bursts x 1.35, 15 s", bursts=(1.35, 15.0)),
    World("heavy tails, drift", heavy=True, slow=(0.02, 2.0), drift=(0.05, 60.0)),
    World("3 questions a picture", per_picture=3),
    World("ties (20 ms clock)", resolution=0.02),
)


# The grid of twelve settings, and the truth of their times [12].
_ROWS = list(product(TIERS, range(2), range(2)))
LEVELS: dict[str, list[str | int]] = {
    name: [row[at] for row in _ROWS] for at, name in enumerate(("vision", "top_k", "blocks"))
}
LOG_TIMES = np.array([TIERS[tier] + STEP * block for tier, _, block in _ROWS])


def speed(world: World, seconds: float, generator: np.random.Generator) -> np.ndarray:
    """The logarithm of how slow the machine is at each half second."""
    size = int(2 * seconds) + 2
    slow = np.zeros(size)
    if world.drift is not None:
        spread, scale = world.drift
        keep = np.exp(-0.5 / scale)
        steps = generator.normal(0, spread * np.sqrt(1 - keep**2), size)
        slow[0] = generator.normal(0, spread)
        for at in range(1, size):
            slow[at] = keep * slow[at - 1] + steps[at]
    if world.bursts is not None:
        factor, lasts = world.bursts
        begin = 0.0
        while begin < seconds:
            begin += generator.exponential(3 * lasts)
            end = begin + generator.exponential(lasts)
            slow[int(2 * begin) : int(2 * end)] = np.log(factor)
            begin = end
    return slow


def measured(world: World, num_samples: int, generator: np.random.Generator) -> np.ndarray:
    """Logarithms of times [12, N], mean over the runs, measured in rounds."""
    size, number = len(LOG_TIMES), np.arange(num_samples) // world.per_picture
    pictures = number.max() + 1
    tiers = np.unique(np.array(LEVELS["vision"]), return_inverse=True)[1]
    log_times = LOG_TIMES[:, None] + np.log(0.055) + generator.normal(0, 0.2, pictures)[number]
    log_times = log_times + generator.normal(0, 0.15, (3, pictures))[tiers][:, number]
    log_times = log_times + generator.normal(0, 0.02, (size, pictures))[:, number]
    noise = generator.normal(0, world.noise, (NUM_RUNS, size, num_samples))
    if world.heavy:
        noise = world.noise * generator.standard_t(3, noise.shape)
    if world.slow is not None:
        noise += np.log(world.slow[1]) * (generator.random(noise.shape) < world.slow[0])
    times = log_times + noise
    slow = speed(world, float(np.exp(times).sum()) * 1.5, generator)
    # Drawn for an order that is no more, so that the published table can be made again.
    generator.permutation(size)
    # [R, S, N]: each run's place in the order of time.
    orders = np.argsort(generator.random((NUM_RUNS, num_samples, size)), axis=-1)
    places = np.argsort(orders, axis=-1).transpose(0, 2, 1)
    places = places + size * (np.arange(num_samples) + num_samples * np.arange(NUM_RUNS)[:, None])[:, None]
    in_time = np.empty(places.size)
    in_time[places.ravel()] = np.exp(times).ravel()
    begins = np.concatenate([[0.0], in_time.cumsum()[:-1]])[places]
    found = times + slow[np.minimum((2 * begins).astype(int), len(slow) - 1)]
    if world.resolution:
        found = np.log(np.maximum(np.round(np.exp(found) / world.resolution), 1) * world.resolution)
    return np.asarray(found.mean(axis=0))
