"""The variance between settings that were measured one after another, by hand."""

import math
from itertools import product

import numpy as np
import pytest
from scipy import stats

from experiment_core_utils.primitives.files import REPOSITORY
from experiment_core_utils.primitives.replication import UNKNOWN
from experiment_core_utils.sweep.arrivals import arrivals_s
from experiments.analyses.knobs.grid import KnobPoint, TaskGrid, load_study
from experiments.analyses.knobs.objectives import LATENCY_MEAN
from experiments.analyses.knobs.setting_variance import setting_variance
from tests.experiments.hand_made_grid import measured

TABLES = ("pareto_table.json", "pareto_table_knowledge.json")


def levels_of_grid(*numbers: int) -> dict[str, list[int]]:
    """A full grid of knobs a, b, ... of so many values."""
    rows = list(product(*map(range, numbers)))
    return {name: [row[at] for row in rows] for at, name in zip(range(len(numbers)), "abc", strict=False)}


def test_an_additive_law_leaves_nothing_and_interactions_in_pairs_are_left_out_where_settings_allow() -> None:
    levels = levels_of_grid(3, 4, 5)
    a, b, c = (np.array(levels[name], dtype=float) for name in "abc")
    found = setting_variance(np.outer(a + 0.3 * b - c + a * b, np.ones(4)), levels)
    # 60 settings less 1 + 2 + 3 + 4 + 6 + 8 + 12: what three knobs do together.
    assert found.fields() == {"std": pytest.approx(0.0, abs=1e-10), "degrees": 24, "source": "settings"}


def test_a_small_grid_is_additive() -> None:
    # 3 x 2 x 2 would leave 2 degrees of freedom with the pairs; 12 - 1 - 2 - 1 - 1 = 7 without.
    levels = levels_of_grid(3, 2, 2)
    one_off = np.zeros(12)
    one_off[0] = 0.12
    found = setting_variance(np.outer(one_off, np.ones(4)), levels)
    # Of one setting's own 0.12 the additive model keeps 5 of 12 parts.
    assert found.fields() == {"std": pytest.approx(0.12 / 12**0.5), "degrees": 7, "source": "settings"}


def test_samples_that_a_setting_lacks_do_not_count() -> None:
    times = np.zeros((12, 3))
    times[3, 2] = np.nan
    times[:, 2] += 1.0
    assert setting_variance(times, levels_of_grid(3, 2, 2)).fields()["std"] == pytest.approx(0.0, abs=1e-10)


def test_readings_of_the_control_setting_stand_in_by_their_standard_deviation() -> None:
    two = {"a": [0, 1]}
    found = setting_variance(np.zeros((2, 5)), two, [1.0, 1.0, 1.1, 1.1, 1 / 1.1])
    # Two readings beside the first, each between two settings: both log(1.1) from it.
    assert found.fields() == {"std": pytest.approx(math.log(1.1)), "degrees": 2, "source": "control"}
    assert setting_variance(np.zeros((2, 5)), two) is UNKNOWN
    assert setting_variance(np.zeros((2, 5)), two, [1.0]) is UNKNOWN


def _waits(arrivals_s: list[float], services_s: np.ndarray) -> np.ndarray:
    """Time of each request at a server that answers one at a time, in the order in which they come."""
    times, free_s = [], 0.0
    for came_s, service_s in zip(arrivals_s, services_s, strict=True):
        free_s = max(free_s, came_s) + service_s
        times.append(free_s - came_s)
    return np.array(times)


def test_samples_that_waited_for_each_other_call_equal_settings_different() -> None:
    """Of 100 pairs of equal settings, by three runs of 100 samples whose service varies by 5 %: at a load of 80 % about
    54 differ by Student's t at 5 %, with a standard error of 5.
    """
    draws, wrong = np.random.default_rng(0), 0
    for seed in range(100):
        came_s = arrivals_s(100, 0.8, (seed, 0))
        one, other = (
            np.mean([_waits(came_s, np.exp(draws.normal(0.0, 0.05, 100))) for _ in range(3)], axis=0) for _ in range(2)
        )
        wrong += stats.ttest_1samp(np.log(one / other), 0.0).pvalue < 0.05
    assert wrong > 30


def does_more(one: KnobPoint, other: KnobPoint) -> bool:
    """Whether `one` does strictly more work: the same vision, no fewer experts and blocks, and not the same of both."""
    if one.value("vision") != other.value("vision") or one.key == other.key:
        return False
    return all(float(one.value(knob)) >= float(other.value(knob)) for knob in ("top_k", "num_active_blocks"))


@pytest.mark.parametrize("name", TABLES)
def test_more_work_is_not_faster_in_a_shipped_table(name: str) -> None:
    (made,) = load_study([REPOSITORY / "docs" / "core_exp" / name]).grids
    assert isinstance(made, TaskGrid)
    found = measured(made, LATENCY_MEAN)
    pairs = [
        (at, than)
        for at, one in enumerate(found.points)
        for than, other in enumerate(found.points)
        if does_more(one, other)
    ]
    called = [pair for pair in pairs if found.cheaper(pair[0])[pair[1]]]
    print(f"{name}: {len(called)} of {len(pairs)} pairs with more work are called faster")
    assert len(pairs) == 390 and called == []
