"""Levels of replication by hand, and equal settings measured in windows."""

import math

import numpy as np
import pytest
from scipy import stats

from experiment_core_utils.primitives.contrasts import PairedContrasts
from experiment_core_utils.primitives.replication import (
    COUNTED,
    IN_ROUNDS,
    UNKNOWN,
    Component,
    across_runs,
    in_loads,
    in_passes,
)
from tests.hand_made_replication import with_variance


def test_fields_are_finite_or_null() -> None:
    assert IN_ROUNDS.fields() == {"std": 0.0, "degrees": None, "source": "rounds"}
    assert UNKNOWN.fields() == {"std": None, "degrees": 1, "source": "unknown"}
    assert with_variance(0.04, 5, 2).fields() == {"std": 0.2, "degrees": 5, "source": "runs"}
    assert with_variance(0.04, 5, 2).level_fields() == {
        "levels": ["sample", "picture", "run"],
        "components": [{"level": "run", "replicates": 1, "std": 0.2, "degrees": 5}],
        "undecided": None,
    }


def test_factors_are_those_of_two_settings_and_of_students_t() -> None:
    assert COUNTED.factors(0, 0.025) == 1.0
    expected = math.exp(stats.t.isf(0.025, 5) * math.sqrt(0.02))
    assert with_variance(0.01, 5, 3).factors(1, 0.025) == pytest.approx([expected, 1.0, expected])


def test_passes_are_paired() -> None:
    # Logs 0, 2, 1 and 1, 2, 3: differences 1, 0, 2 of mean 1, variance 1, in three passes.
    found = Component.of_passes(np.array([[0.0, 2.0, 1.0], [1.0, 2.0, 3.0], [0.0, 2.0, 1.0]]))
    assert found.variances(0) == pytest.approx([0.0, 1 / 3, 0.0]) and (found.degrees, found.replicates) == (2, 3)
    # The mean of both sides of the second difference: half of it.
    half = found.averaged(np.array([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]]))
    assert half.variances(0)[1] == pytest.approx(1 / 12)
    # Those that all settings have count.
    assert in_passes([[1.0] * 5, [2.0] * 3]).components[0].replicates == 3


def test_loads_are_a_level_of_their_own_and_three_decide() -> None:
    # Differences of logs 1, 0, 2 as above.
    found = in_loads([[0.0, 2.0, 1.0], [1.0, 2.0, 3.0]])
    assert found.variances(0) == pytest.approx([0.0, 1 / 3]) and found.levels == ("sample", "picture", "load")
    assert (found.source, found.components[0].level, found.degrees) == ("loads", "load", 2)
    assert in_loads([[0.0, 2.0], [1.0, 2.0]]).undecided == (
        "is of 2 loads of each copy of the model, and a verdict needs 3; give --num_runs_per_sample 4"
    )


def test_settings_of_one_run_share_its_speed() -> None:
    found = across_runs(IN_ROUNDS, 0.0004, ["a", "b", "a"])
    assert found.variances(0) == pytest.approx([0.0, 0.0008, 0.0]) and found.source == "runs"
    assert across_runs(IN_ROUNDS, 0.0004, ["a", "a"]) is IN_ROUNDS
    # Averaged over both runs alike nothing is left; the difference of the runs has it whole.
    assert found.averaged(np.array([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5]])).variances(0) == pytest.approx([0.0, 0.0])
    drawn = found.draw(np.random.default_rng(0), 4000, 3)
    assert drawn[:, 0] == pytest.approx(drawn[:, 2]) and (drawn[:, 0] - drawn[:, 1]).std() == pytest.approx(
        math.sqrt(0.0008), rel=0.05
    )
    assert found.at([0, 2]).variances(0) == pytest.approx([0.0, 0.0])


@pytest.mark.parametrize("passes", [0, 1, 2])
def test_two_passes_decide_nothing_and_say_how_many_would(passes: int) -> None:
    found = in_passes([[1.0, 1.1][:passes], [5.0, 5.1][:passes]])
    contrasts = PairedContrasts.of(np.log([[1.0] * 9, [5.0] * 9]), range(9), replication=found)
    assert contrasts.word(0, 1) == "can't tell" and contrasts.interval(0, 1) is None
    assert contrasts.no_verdict is not None and "needs 3: 4 or more" in contrasts.no_verdict


def calls(windows: float, parts: float, passes: int, gap: float = 0.0, num_runs: int = 60) -> tuple[float, float]:
    """Percent of runs in which any of eight equal settings is called cheaper, and of pairs `gap` apart that are."""
    draws, wrong, found = np.random.default_rng(3), 0, 0.0
    truth = np.log([1.0] * 4 + [1.0 + gap] * 4)[:, None, None]
    for _ in range(num_runs):
        noise = windows * draws.normal(size=(8, passes, 1)) + parts * draws.normal(size=(8, passes, 32))
        joules = np.exp(truth + draws.normal(0, 0.3, 32) + noise)
        contrasts = PairedContrasts.of(
            np.log(joules.mean(axis=1)), range(32), replication=in_passes(joules.mean(axis=2).tolist())
        )
        called = np.stack([contrasts.better(at) for at in range(8)])
        wrong += bool(called[:4, :4].any() or called[4:].any())
        found += called[:4, 4:].mean()
    return 100 * wrong / num_runs, 100 * found / num_runs


@pytest.mark.parametrize("windows", [0.003, 0.005, 0.01])
def test_equal_settings_of_few_windows_are_not_called_different(windows: float) -> None:
    """Parts of 1 %: by samples as units 56 to 100 % of runs are wrong. At 5 %, 7 of 60 or fewer in 98 %."""
    assert calls(windows, 0.01, 2) == (0.0, 0.0)
    assert calls(windows, 0.01, 6)[0] <= 100 * 7 / 60


def test_settings_5_percent_apart_are_told_apart_by_four_passes() -> None:
    assert calls(0.003, 0.01, 4, gap=0.05, num_runs=20)[1] > 80
