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


@dataclass(frozen=True)
class Knobs:
    """The grid of settings, and the truth of its times."""

    levels: dict[str, list[str | int]]

    @classmethod
    def of(cls, num_settings: int) -> "Knobs":
        """3 x 2 x 2, or 3 x 4 x 5 settings."""
        top_ks, blocks = {12: (2, 2), 60: (4, 5)}[num_settings]
        rows = list(product(TIERS, range(top_ks), range(blocks)))
        return cls({name: [row[at] for row in rows] for at, name in enumerate(("vision", "top_k", "blocks"))})

    @property
    def log_times(self) -> np.ndarray:
        """[S]."""
        tiers, blocks = self.levels["vision"], self.levels["blocks"]
        return np.array([TIERS[str(tier)] + STEP * int(block) for tier, block in zip(tiers, blocks, strict=True)])


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


def measured(world: World, knobs: Knobs, num_samples: int, generator: np.random.Generator) -> np.ndarray:
    """Logarithms of times [S, N], mean over the runs, measured in rounds."""
    truth = knobs.log_times
    size, number = len(truth), np.arange(num_samples) // world.per_picture
    pictures = number.max() + 1
    tiers = np.unique(np.array(knobs.levels["vision"]), return_inverse=True)[1]
    own = truth[:, None] + np.log(0.055) + generator.normal(0, 0.2, pictures)[number]
    own = own + generator.normal(0, 0.15, (3, pictures))[tiers][:, number]
    own = own + generator.normal(0, 0.02, (size, pictures))[:, number]
    noise = generator.normal(0, world.noise, (NUM_RUNS, size, num_samples))
    if world.heavy:
        noise = world.noise * generator.standard_t(3, noise.shape)
    if world.slow is not None:
        noise += np.log(world.slow[1]) * (generator.random(noise.shape) < world.slow[0])
    times = own + noise
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
