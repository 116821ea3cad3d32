"""Main effects and interactions, recovered from figures that were made of known ones."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from experiments.analyses.knobs.effects import Effects, effects, is_beyond_noise, main_effect_p_values
from tests.hand_made_replication import with_variance

LEVELS = (("low", "high"), (1, 8), (12, 16))
SIGN = {"low": -1, "high": 1, 1: -1, 8: 1, 12: -1, 16: 1}


def split(
    law: Callable[[int, int, int], float],
    noise: float = 0.0,
    leave_out: int = 0,
) -> Effects:
    """A grid of two values a knob, coded -1 and 1; draws add independent noise."""
    rows = list(product(*LEVELS))[leave_out:]
    figures = np.array([law(*(SIGN[value] for value in row)) for row in rows])
    draws = figures + noise * np.random.default_rng(0).normal(size=(500, len(rows)))
    names = ("vision", "top_k", "num_active_blocks")
    return effects({name: [row[at] for row in rows] for at, name in enumerate(names)}, figures, draws)


def shares(found: Effects) -> dict[str, float | None]:
    return {" x ".join(term.knobs): term.share for term in found.terms}


def test_fractions_are_those_of_the_squared_coefficients() -> None:
    # Coefficients 3, 2, 1 and 1: of 9 + 4 + 1 + 1 = 15.
    found = split(lambda v, k, b: 10 + 3 * v + 2 * k + b + v * k)
    assert found.is_full_grid and found.reason is None
    assert shares(found) == {
        "vision": pytest.approx(9 / 15),
        "top_k": pytest.approx(4 / 15),
        "num_active_blocks": pytest.approx(1 / 15),
        "vision x top_k": pytest.approx(1 / 15),
        "vision x num_active_blocks": pytest.approx(0, abs=1e-12),
        "top_k x num_active_blocks": pytest.approx(0, abs=1e-12),
        "vision x top_k x num_active_blocks": pytest.approx(0, abs=1e-12),
    }
    assert [term.degrees for term in found.terms] == [1] * 7
    assert found.rest_share == pytest.approx(0, abs=1e-12)


def test_level_means_are_those_of_the_grid() -> None:
    found = split(lambda v, k, b: 10 + 3 * v + 2 * k + b + v * k)
    means = {(mean.knob, mean.value): (mean.mean, mean.change) for mean in found.level_means}
    assert means["vision", "low"] == (pytest.approx(7), 0.0)
    assert means["vision", "high"] == (pytest.approx(13), pytest.approx(6))
    assert means["top_k", 8] == (pytest.approx(12), pytest.approx(4))
    assert means["num_active_blocks", 16] == (pytest.approx(11), pytest.approx(2))


def test_degrees_are_values_less_one_and_their_products() -> None:
    rows = list(product(("low", "medium", "high"), (1, 2, 4, 8)))
    figures = np.random.default_rng(1).normal(size=len(rows))
    levels = {"vision": [row[0] for row in rows], "top_k": [row[1] for row in rows], "num_active_blocks": [16] * 12}
    found = effects(levels, figures, figures + np.zeros((200, 1)))
    assert [(term.knobs, term.degrees) for term in found.terms] == [
        (("vision",), 2), (("top_k",), 3), (("vision", "top_k"), 6),
    ]  # fmt: skip
    assert sum(term.share or 0.0 for term in found.terms) == pytest.approx(1.0)


def test_a_grid_with_a_hole_still_gives_the_additive_law() -> None:
    found = split(lambda v, k, b: 10 + 3 * v + 2 * k + b, leave_out=1)
    assert not found.is_full_grid
    means = {(mean.knob, mean.value): mean.change for mean in found.level_means}
    assert means["vision", "high"] == pytest.approx(6) and means["num_active_blocks", 16] == pytest.approx(2)
    by_name = shares(found)
    assert by_name["vision x top_k"] == pytest.approx(0, abs=1e-12)
    # One of eight cells is gone, and with it what would show the three-way interaction.
    assert found.terms[-1].degrees == 0 and by_name["vision x top_k x num_active_blocks"] is None
    # The others do not add up to the whole: without a cell they overlap.
    assert found.rest_share is not None and abs(found.rest_share) > 0.1


def test_noise_is_distinguished_from_an_effect() -> None:
    found = split(lambda v, k, b: 10 + 3 * v + 0.01 * k, noise=0.5)
    vision, top_k = found.terms[0], found.terms[1]
    assert is_beyond_noise(vision) and vision.p_value == pytest.approx(1 / 501)
    assert not is_beyond_noise(top_k) and top_k.p_value is not None and top_k.p_value > 0.5
    # Noise of variance 0.25 adds 8 x 0.25 / 8 to a mean square, of 8 x 9 in all.
    assert vision.noise_share == pytest.approx(0.25 / 72, rel=0.2)


def test_the_highest_interaction_has_a_test_of_its_own() -> None:
    # A noise of 1 in each draw makes three-way terms of 0.3 in most draws, and none of 3.
    for size, beyond in ((0.3, False), (3.0, True)):
        found = split(lambda v, k, b, size=size: 10 + 30 * v + size * v * k * b, noise=1.0)  # type: ignore[misc]
        highest = found.terms[-1]
        assert highest.degrees == 1 and is_beyond_noise(highest) is beyond
        assert highest.p_value is not None and (highest.p_value < 0.01) is beyond


def grid_of_pictures(change: float, noise: float) -> tuple[dict[str, list[str | int]], np.ndarray]:
    """3 x 2 x 2 settings of 40 pictures: values of 1, `change` more with top-k 8, and noise."""
    rows = list(product(("low", "medium", "high"), (4, 8), (12, 16)))
    levels = {name: [row[at] for row in rows] for at, name in enumerate(("vision", "top_k", "num_active_blocks"))}
    own = np.array([[1.0 + change * (row[1] == 8)] for row in rows])
    return levels, own + noise * np.random.default_rng(6).normal(size=(12, 40))


def test_a_main_effect_is_tested_over_pictures_and_not_against_two_degrees_of_freedom() -> None:
    levels, values = grid_of_pictures(0.05, 0.1)
    found = main_effect_p_values(levels, values, np.arange(40))
    # Six settings each: an error of 0.1 sqrt(1 / 6 + 1 / 6) / sqrt(40) = 0.0091 for 0.05.
    assert list(found) == ["vision", "top_k", "num_active_blocks"]
    assert found["top_k"] < 0.002 and min(found["vision"], found["num_active_blocks"]) > 0.05
    figures, random = values.mean(axis=1), np.random.default_rng(7)
    draws = figures + 0.016 * random.normal(size=(500, 12))
    split_up = effects(levels, figures, draws, paired=found)
    assert [is_beyond_noise(term) for term in split_up.terms] == [False, True, False, False, False, False, False]
    # An incomplete grid is not balanced: the draws decide.
    part = {name: own[:-1] for name, own in levels.items()}
    assert effects(part, figures[:-1], draws[:, :-1], paired={"top_k": 1.0}).terms[1].p_value == pytest.approx(1 / 501)


def test_what_the_machine_may_have_added_is_in_a_main_effect() -> None:
    levels, values = grid_of_pictures(0.05, 0.01)
    for std, sure in ((0.0, True), (0.01, True), (0.1, False)):
        found = main_effect_p_values(levels, values, np.arange(40), with_variance(std**2, 20, 12))
        # The mean of six settings: an error of std sqrt(1 / 6 + 1 / 6) = 0.0058 or 0.058 for 0.05.
        assert (found["top_k"] < 0.05) is sure


def test_a_knob_that_rests_has_no_main_effect() -> None:
    assert main_effect_p_values({"top_k": [1, 1]}, np.ones((2, 9)), np.arange(9)) == {}


def test_equal_figures_and_single_settings_are_not_split() -> None:
    found = split(lambda v, k, b: 0.0)
    assert (found.terms, found.reason, found.rest_share) == ((), "all settings are equal", None)
    one = effects({"vision": ["low"], "top_k": [1]}, np.array([1.0]), np.ones((100, 1)))
    assert (one.terms, one.reason, one.std) == ((), "one setting has no spread", None)


def test_values_that_move_together_have_no_means_of_their_own() -> None:
    levels = {"vision": ["low", "high"], "top_k": [1, 8]}
    figures = np.array([1.0, 2.0])
    found = effects(levels, figures, np.tile(figures, (100, 1)))
    assert found.level_means == () and not found.is_full_grid
    assert [term.degrees for term in found.terms] == [0, 0, 0] and found.rest_share == 1.0


def test_values_are_in_order_of_size() -> None:
    levels = {"vision": ["low", "low"], "top_k": [8, 1]}
    figures = np.array([5.0, 3.0])
    found = effects(levels, figures, np.tile(figures, (100, 1)))
    assert [(mean.value, mean.change) for mean in found.level_means] == [(1, 0.0), (8, pytest.approx(2.0))]
