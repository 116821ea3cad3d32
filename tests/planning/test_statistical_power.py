"""Numbers of samples and what they show, by hand and by simulation of whole sweeps."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from experiment_core_utils.planning.statistical_power import (
    SweepPower,
    assumed_log_times,
    power_sentences,
    sweep_noise,
)
from experiment_core_utils.primitives.contrasts import PairedContrasts, ScoreContrasts
from experiment_core_utils.records.setting_result import SettingResult
from tests.hand_made_records import measured_sample, part, result_of, staged_run

NUM_SWEEPS = 200
# 80 % within three standard errors of so many sweeps, 0.028 each.
WITHIN = 3 * math.sqrt(0.8 * 0.2 / NUM_SWEEPS)


def test_two_settings_need_what_the_t_test_needs() -> None:
    # Ratios spread by 0.1; to show 0.02 of them: Student's t of a mean that is 0.2 standard deviations above 0.
    number = SweepPower.of_latency(2, assumed_log_times(0.1)).needed(0.02) or 0
    power = stats.nct.sf(stats.t.ppf(0.975, number - 1), number - 1, 0.2 * math.sqrt(number))
    assert power == pytest.approx(0.8, abs=0.03)


@pytest.mark.parametrize("num_settings", [2, 6, 12])
def test_a_sweep_shows_a_difference_in_latency_as_often_as_promised(num_settings: int) -> None:
    # Noise of the normal's kind, and one run of 50 that is late.
    generator = np.random.default_rng(1)
    noise = 0.05 * generator.normal(size=2000) + 0.3 * (generator.random(2000) < 0.02)
    number = SweepPower.of_latency(num_settings, noise - noise.mean()).needed(math.log(1.05)) or 0
    shown = 0
    for _ in range(NUM_SWEEPS):
        times = generator.choice(noise, (num_settings, number)) + generator.normal(0, 0.3, number)
        times[1] += math.log(1.05)
        shown += PairedContrasts.of(times, range(number)).better(0)[1]
    assert shown / NUM_SWEEPS == pytest.approx(0.8, abs=WITHIN + 0.02)


@pytest.mark.parametrize("num_settings", [2, 6])
def test_a_sweep_shows_a_difference_in_accuracy_as_often_as_promised(num_settings: int) -> None:
    # Each setting flips 0.0528 of the common answers, so that two differ in 0.1; the first flips 0.05 more of the wrong
    # and less of the right ones, which makes it better by 0.05.
    number = SweepPower.of_accuracy(num_settings, 0.1).needed(0.05) or 0
    generator, shown, flipped = np.random.default_rng(2), 0, (1 - math.sqrt(0.8)) / 2
    for _ in range(NUM_SWEEPS):
        common = generator.random(number) < 0.5
        chances = np.full((num_settings, number), flipped)
        chances[0] += np.where(common, -0.05, 0.05)
        scores = (common ^ (generator.random(chances.shape) < chances)).astype(float)
        shown += ScoreContrasts.of(scores, range(number)).better(0)[1]
    assert shown / NUM_SWEEPS == pytest.approx(0.8, abs=WITHIN + 0.02)


def test_what_is_shown_what_is_needed_and_power_agree() -> None:
    for power in (SweepPower.of_latency(12, assumed_log_times(0.1)), SweepPower.of_accuracy(12, 0.1)):
        number = power.needed(0.05) or 0
        assert power.shown(number) == pytest.approx(0.05, rel=0.02)
        assert power.power(number, 0.05) == pytest.approx(0.8, abs=0.02)
        assert power.power(number // 4, 0.05) < 0.2
        assert power.shown(5) is None and power.power(5, 0.05) == 0.0
    # Fewer answers change than would have to; 16 samples show nothing.
    accuracy = SweepPower.of_accuracy(12, 0.1)
    assert accuracy.needed(0.2) is None and accuracy.power(1000, 0.2) == 0.0 and accuracy.shown(16) is None
    more = SweepPower.of_accuracy(60, 0.1).needed(0.05) or 0
    assert more > 1.2 * (accuracy.needed(0.05) or 0)


def test_the_noise_of_earlier_results_by_hand() -> None:
    # Ratios exp(0.6), exp(0.4), ... of 6 samples: standard deviation of their logarithms sqrt(6 * 0.01 / 5) = 0.1095,
    # whatever their runs differ by. 3 of 6 answers change.
    def timed(ratios: Sequence[float], predictions: Sequence[str]) -> SettingResult:
        return result_of(
            part(
                *(
                    measured_sample(
                        at, *(staged_run(0.0, math.exp(at + ratio + run), ()) for run in (-0.2, 0.2)), prediction=text
                    )
                    for at, (ratio, text) in enumerate(zip(ratios, predictions, strict=True))
                )
            )
        )

    earlier = {"a": timed([0.0] * 6, ["1.0"] * 6), "b": timed([0.6, 0.4] * 3, ["1.0", "0.0"] * 3)}
    noise = sweep_noise(earlier)
    assert (noise.changed, noise.num_settings) == (0.5, 2)
    assert noise.spread == pytest.approx(0.1095, abs=1e-4)
    assert "of 2 earlier settings" in power_sentences(12, 16, 16, noise, None)[0]
    # One setting says nothing of pairs.
    assert sweep_noise({"a": earlier["a"]}).num_settings == 0


def test_what_was_not_measured_is_assumed_and_reported() -> None:
    noise = sweep_noise({})
    assert (noise.changed, noise.num_settings) == (0.1, 0) and noise.spread == pytest.approx(0.1, rel=0.01)
    first, second = power_sentences(12, 16, 16, noise, 0.02)
    assert first.startswith(
        "differences that two of 12 settings show (95 % over all pairs, 80 % power): accuracy none "
    )
    assert "assumed" in first
    assert second.startswith("to show 0.02 with 80 % power: accuracy 4")
    first, second = power_sentences(12, 16, None, noise, 0.02)
    assert "mean latency none, since requests that arrive at a rate wait for each other (assumed: 10% of" in first
    assert "latency" not in second and "times" not in first
    assert "no number of samples" in power_sentences(12, 16, 16, noise, 0.2)[1]
    assert power_sentences(1, 16, 16, noise, None) == []
    alone, of_two = power_sentences(1, 16, 16, noise, 0.02), power_sentences(2, 16, 16, noise, 0.02)
    assert alone[0].startswith("differences that two equally fast runs of one setting show (95 %")
    assert alone[1:] == of_two[1:]
