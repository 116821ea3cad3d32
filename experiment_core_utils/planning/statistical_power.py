"""Statistical power of a planned sweep: the differences between settings that its samples show, and the reverse.

A difference is shown where the verdict on a pair of settings is `yes` (`primitives/contrasts.py`): better with 95 %
over all pairs of the sweep. It is shown with a probability of 80 % by simulation: requests are drawn as if all settings
were equal, with noise from earlier results of the task in the folder where there are some, else with the assumed one;
from them come the critical value of the whole sweep and the error of a pair. Each sample has a picture of its own;
settings are measured in rounds.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np
from scipy.special import ndtri

from experiment_core_utils.primitives.contrasts import FEWEST_PICTURES, PairedContrasts, ScoreContrasts
from experiment_core_utils.primitives.statistics import SEED
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.records.setting_result import SettingResult

POWER = 0.8
# Where no earlier results say: answers that change from a setting to another, and the spread of a sample's ratio of
# times around their mean ratio.
ASSUMED_CHANGED, ASSUMED_SPREAD = 0.1, 0.1
NUM_SIMULATED = 2000
# More samples are not drawn: from there on errors fall as the root of their number.
MOST_DRAWN = 600
# Earlier settings that are looked at.
_MOST_SETTINGS = 12


@dataclass(frozen=True)
class SweepNoise:
    """How two settings that are equally good differ from sample to sample."""

    changed: float  #: fraction of samples whose score differs
    #: [n] deviations of a setting's logarithm of time from what its mean and the sample's say
    log_times: np.ndarray
    num_settings: int  #: earlier settings of which it is; 0 where any of it is assumed

    @property
    def spread(self) -> float:
        """Standard deviation of the logarithm of a sample's ratio of times."""
        return float(self.log_times.std() * math.sqrt(2))


def assumed_log_times(spread: float) -> np.ndarray:
    """Deviations from a normal distribution, of which two differ by this standard deviation."""
    return np.asarray(ndtri((np.arange(1000) + 0.5) / 1000) * spread / math.sqrt(2))


def sweep_noise(earlier: Mapping[str, SettingResult]) -> SweepNoise:
    """The noise of earlier results of the same task; what they do not say is assumed."""
    sides = [{result.sample_id: result for result in found.per_sample_results} for found in earlier.values()]
    sides = sides[:_MOST_SETTINGS]
    shared = sorted(set.intersection(*map(set, sides))) if len(sides) > 1 else []
    scores = [[side[at].accuracy for at in shared] for side in sides]
    changed = [
        float(np.mean([a != b for a, b in zip(one, other, strict=True)]))
        for one, other in combinations([score for score in scores if score and None not in score], 2)
    ]
    times = [at for at in shared if all(side[at].runs for side in sides)]
    deviations = assumed_log_times(ASSUMED_SPREAD)
    if len(times) >= FEWEST_PICTURES:
        logs = np.array([[np.mean([math.log(run.T_total) for run in side[at].runs]) for at in times] for side in sides])
        logs -= logs.mean(axis=0)
        freedom = (1 - 1 / len(sides)) * (1 - 1 / len(times))
        deviations = ((logs - logs.mean(axis=1, keepdims=True)) / math.sqrt(freedom)).ravel()
    is_known = bool(changed) and len(times) >= FEWEST_PICTURES
    # Answers that never changed among few samples say little about many.
    share = max(float(np.median(changed)), 0.01) if changed else ASSUMED_CHANGED
    return SweepNoise(share, deviations, len(sides) if is_known else 0)


@dataclass(frozen=True)
class SweepPower:
    """What the verdicts on pairs of a sweep's settings show; make one by `of_accuracy` or `of_latency`.

    Differences are in units of what is compared: the mean score, the mean logarithm of time.
    """

    num_settings: int
    #: values [S, N] of S equally good settings
    draw: Callable[[np.random.Generator, int, int], np.ndarray]
    contrasts: type[PairedContrasts] | type[ScoreContrasts]
    largest: float  #: no pair can differ by more

    @classmethod
    def of_accuracy(cls, num_settings: int, changed: float) -> "SweepPower":
        """Of scores that are 0 or 1, of which two settings differ in a fraction `changed`."""
        flipped = (1 - math.sqrt(max(1 - 2 * changed, 0.0))) / 2

        def draw(generator: np.random.Generator, size: int, number: int) -> np.ndarray:
            common = generator.random(number) < 0.5
            return np.asarray(common ^ (generator.random((size, number)) < flipped), dtype=np.float64)

        return cls(num_settings, draw, ScoreContrasts, changed)

    @classmethod
    def of_latency(cls, num_settings: int, log_times: np.ndarray) -> "SweepPower":
        """Of times whose logarithms deviate by these numbers."""
        return cls(
            num_settings, lambda generator, *shape: generator.choice(log_times, shape), PairedContrasts, math.inf
        )

    def power(self, num_samples: int, difference: float) -> float:
        """Probability that a pair that differs by so much is a `yes`."""
        if num_samples < FEWEST_PICTURES or difference > self.largest:
            return 0.0
        return float(np.mean(self._least(num_samples) <= difference))

    def shown(self, num_samples: int) -> float | None:
        """The smallest difference that so many samples show with the probability POWER; None for none."""
        if num_samples < FEWEST_PICTURES:
            return None
        least = float(np.quantile(self._least(num_samples), POWER))
        return least if least <= self.largest else None

    def needed(self, difference: float) -> int | None:
        """Samples that show a difference with the probability POWER; None where no number does."""
        if difference > self.largest:
            return None
        number = MOST_DRAWN
        for _ in range(5):
            least = float(np.quantile(self._least(number), POWER))
            number = max(math.ceil(number * (least / difference) ** 2), FEWEST_PICTURES)
        return number

    def _least(self, num_samples: int) -> np.ndarray:
        """[R], by how much the settings of a pair would have to differ in each simulated sweep to be a `yes`."""
        number = min(num_samples, MOST_DRAWN)
        # Not the numbers that flips of pictures are drawn from, with which they would be correlated.
        generator = np.random.default_rng(SEED + 1)
        critical = self._critical.get(number)
        if critical is None:
            drawn = self.draw(generator, self.num_settings, number)
            critical = self._critical[number] = self.contrasts.of(drawn, range(number)).critical()
        one, other = self.draw(generator, 2, NUM_SIMULATED * number).reshape(2, NUM_SIMULATED, number)
        differences = one - other
        means = differences.mean(axis=1)
        errors = np.sqrt(((differences - means[:, None]) ** 2).sum(axis=1) / (number - 1) / number)
        return np.asarray((critical * errors - means) * math.sqrt(number / num_samples))

    @cached_property
    def _critical(self) -> dict[int, float]:
        return {}


def power_sentences(
    num_settings: int,
    num_samples: int,
    num_timed: int | None,
    noise: SweepNoise,
    detect: float | None,
    best: float = 1.0,
    score: str = "accuracy",
) -> list[str]:
    """What the plan's samples show, and the power for `detect` (scores as a part of `best`, latency relative).

    One setting can only be compared with itself in another run, which is said on request.

    Args:
        num_timed: None where requests arrive at a rate: nothing is said of differences between their times.
        score: what scores are called.
    """
    if num_settings < 2 and detect is None:
        return []
    pairs = f"two of {num_settings} settings" if num_settings > 1 else "two equally fast runs of one setting"
    num_settings = max(num_settings, 2)
    accuracy = SweepPower.of_accuracy(num_settings, noise.changed)
    latency = SweepPower.of_latency(num_settings, noise.log_times)
    scores = accuracy.shown(num_samples)
    of = "" if best == 1.0 else f" of {best:g}"
    basis = f"of {noise.num_settings} earlier settings" if noise.num_settings else "assumed"
    lines = [
        f"differences that {pairs} show (95 % over all pairs, 80 % power): {score} "
        + ("none" if scores is None else f"{scores * best:.2g}")
        + f"{of} with {counted(num_samples, 'sample')}, mean latency "
        + _shown_latency(latency, num_timed)
        + f" ({basis}: {noise.changed:.0%} of answers change"
        + ("" if num_timed is None else f", times spread by {noise.spread:.1%}")
        + ")"
    ]
    if detect is not None:
        answers = accuracy.needed(detect)
        needed = "no number of samples, fewer answers change" if answers is None else f"{_rounded(answers)} samples"
        now = accuracy.power(num_samples, detect)
        line = f"to show {detect:g} with 80 % power: {score} {needed} ({now:.0%} with {num_samples})"
        if num_timed is not None:
            timed, now = latency.needed(math.log1p(detect)) or 0, latency.power(num_timed, math.log1p(detect))
            line += f"; mean latency ({detect:.1%}) {_rounded(timed)} timed samples ({now:.0%} with {num_timed})"
        lines.append(line)
    return lines


def _shown_latency(latency: SweepPower, num_timed: int | None) -> str:
    if num_timed is None:
        return "none, since requests that arrive at a rate wait for each other"
    shown = latency.shown(num_timed)
    return f"{'none' if shown is None else f'{math.expm1(shown):.1%}'} with {counted(num_timed, 'timed one')}"


def _rounded(number: int) -> int:
    """Up to two digits, which is what a simulation knows."""
    unit = 10 ** max(len(str(number)) - 2, 0)
    return math.ceil(number / unit) * unit
