"""The race: bounds by hand, who leaves and for whom, what it may spend, and how often it is wrong."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from experiment_core_utils.sweep.front_search import (
    Observation,
    ParetoSearch,
    Round,
    SearchResult,
    SearchRules,
    Survivor,
    front_of,
    mean_bound,
    planned_looks,
    random_order,
    run_search,
)

# Two looks at level 0.05 each: 10 samples, then 20 (the third is the round that the time cuts short).
RULES = SearchRules(margin=0.0, alpha=0.15, doubt=0.05, first_samples=10, growth=2.0, share=1.0)
ALL_WRONG, ALL_RIGHT = (0.0,) * 20, (1.0,) * 20


def seen(sample_id: int, score: float | None, seconds: float) -> Observation:
    return Observation(score, seconds, seconds, picture=sample_id)


def race(
    scores: Mapping[str, Sequence[float]],
    seconds: Mapping[str, float],
    rules: SearchRules = RULES,
    failing: Sequence[str] = (),
    fails_from: int = 0,
) -> tuple[SearchResult, list[Round]]:
    """A race over samples 0, 1, ... in that order, each of its own picture, with times that never vary.

    Settings in `failing` give nothing for rounds that begin at sample `fails_from` or later.
    """
    num_samples = len(next(iter(scores.values())))
    rounds: list[Round] = []

    def measure(requested: Mapping[str, Sequence[int]]) -> dict[str, dict[int, Observation]]:
        rounds.append(dict(requested))  # type: ignore[arg-type]
        return {
            key: {}
            if key in failing and requested[0] >= fails_from
            else {each: seen(each, scores[key][each], seconds[key]) for each in requested}
            for key, requested in requested.items()
        }

    return run_search(ParetoSearch(list(scores), list(range(num_samples)), rules), measure), rounds


def test_the_bound_is_students_t_over_samples_where_each_has_its_own_picture() -> None:
    # Mean 2.5, squares (2.25 + 0.25) * 2 = 5, variance 5/3, SE sqrt(5/3 / 4) = 0.645497; t(3) at 5 % = 2.353363.
    bound = mean_bound(np.array([1.0, 2.0, 3.0, 4.0]), np.arange(4), 0.05)
    assert (bound.n, bound.mean) == (4, 2.5)
    assert bound.se == pytest.approx(0.645497, abs=1e-6)
    assert bound.low == pytest.approx(2.5 - 2.353363 * 0.645497, abs=1e-5)
    assert bound.high == pytest.approx(2.5 + 2.353363 * 0.645497, abs=1e-5)


def test_samples_of_one_picture_are_one_draw() -> None:
    # Pictures {1, 3} and {5, 7}: mean 4, picture sums of residuals -4 and 4, so squares 32;
    # SE = sqrt(32 * 2 / 1) / 4 = 2; one degree of freedom: t(1) at 25 % = tan(45 deg) = 1.
    bound = mean_bound(np.array([1.0, 3.0, 5.0, 7.0]), np.array([0, 0, 1, 1]), 0.25)
    assert (bound.mean, bound.se, bound.half) == pytest.approx((4.0, 2.0, 2.0))


def test_equal_scores_so_far_leave_room_for_unequal_ones_to_come() -> None:
    # z at 5 % = 1.644854: z^2 / 8 = 0.338193 better and as many worse, 0.676386 equal, so n = 11.352772; mean 0;
    # squares 2 * 0.338193; SE = sqrt(0.676386 * 11.352772 / 10.352772) / 11.352772 = 0.075861; t(9) = 1.833113.
    bound = mean_bound(np.zeros(10), np.arange(10), 0.05, best=1.0)
    assert (bound.n, bound.mean) == (10, 0.0)
    assert bound.se == pytest.approx(0.075861, abs=1e-6)
    assert bound.low == pytest.approx(-1.833113 * 0.075861, abs=1e-5)
    # On a scale to 10, ten times as much.
    assert mean_bound(np.zeros(10), np.arange(10), 0.05, best=10.0).low == pytest.approx(10 * bound.low)


def test_what_was_not_measured_does_not_count_and_one_picture_bounds_nothing() -> None:
    with_gaps = mean_bound(np.array([1.0, np.nan, 2.0, 3.0, np.nan, 4.0]), np.array([0, 1, 2, 3, 4, 5]), 0.05)
    assert with_gaps == mean_bound(np.array([1.0, 2.0, 3.0, 4.0]), np.arange(4), 0.05)
    assert mean_bound(np.array([1.0, 2.0]), np.array([0, 0]), 0.05).high == math.inf
    assert mean_bound(np.array([np.nan]), np.array([0]), 0.05).low == -math.inf


@pytest.mark.parametrize(
    ("num_samples", "looks"),
    [
        (300, (50, 75, 113, 170, 255, 300)),  # 50 is half of a third of 300
        (1000, (50, 75, 113, 170, 255, 383, 575, 863, 1000)),
        (60, (10, 15, 23, 35, 53, 60)),
        (3, (2, 3)),
        (1, (1,)),
    ],
)
def test_rounds_are_planned_before_the_first(num_samples: int, looks: tuple[int, ...]) -> None:
    assert planned_looks(num_samples, SearchRules()) == looks


def test_the_order_is_random_by_seed_and_does_not_depend_on_the_order_given() -> None:
    order = random_order(range(50), 3)
    assert sorted(order) == list(range(50))
    assert order == random_order(list(reversed(range(50))), 3)
    assert order != random_order(range(50), 4)
    assert list(order) != sorted(order)


def test_who_is_beaten_in_both_leaves_after_the_first_round_and_names_who_beat_it() -> None:
    result, rounds = race({"bad": ALL_WRONG, "good": ALL_RIGHT}, {"bad": 2.0, "good": 1.0})
    (gone,) = result.eliminated
    assert (gone.key, gone.by, gone.round, gone.gain.n) == ("bad", "good", 1, 10)
    assert (gone.saving_s.mean, gone.level) == pytest.approx((1.0, 0.05))
    assert gone.gain.low > 0
    assert [each.key for each in result.front] == ["good"]
    assert rounds == [{"bad": tuple(range(10)), "good": tuple(range(10))}]
    assert (result.stopped, result.cost_s, result.full_cost_s) == ("settled", 30.0, 60.0)
    assert result.share == 0.5


def test_slower_but_better_is_another_point_of_the_front_and_needs_no_second_round() -> None:
    result, rounds = race({"sure": ALL_RIGHT, "quick": ALL_WRONG}, {"sure": 2.0, "quick": 1.0})
    assert [each.key for each in result.front] == ["quick", "sure"]  # the fastest first
    assert not (result.eliminated or result.set_aside or result.undecided)
    assert (len(rounds), result.stopped) == (1, "settled")


def test_as_accurate_and_faster_beats_only_within_a_margin() -> None:
    scores, seconds = {"slow": ALL_RIGHT, "quick": ALL_RIGHT}, {"slow": 2.0, "quick": 1.0}
    strict, _ = race(scores, seconds)
    assert [each.key for each in strict.front] == ["quick"]
    # It cannot be ruled out that the slow one is a little better: 20 equal samples are not proof.
    assert [(each.key, each.open_against) for each in strict.undecided] == [("slow", ("quick",))]
    assert strict.stopped == "samples"
    # After 20 equal samples the gain is above -0.08: n = 21.352772, SE 0.039434 (as above), t(19) = 1.729133.
    loose, _ = race(scores, seconds, replace(RULES, margin=0.08))
    assert [(each.key, each.by, each.round) for each in loose.eliminated] == [("slow", "quick", 2)]
    assert loose.eliminated[0].gain.low == pytest.approx(-1.729133 * 0.039434, abs=1e-4)


def test_less_accurate_by_no_more_than_the_margin_is_still_an_open_question() -> None:
    # The quick one is worse by 0.3. As above, with as much room for others: after 20 samples the gain is surely below
    # -0.28 + 1.73 * 0.107 = -0.096, but it is not known whether below -0.35.
    scores = {"slow": ALL_RIGHT, "quick": ((0.0,) * 3 + (1.0,) * 7) * 2}
    result, rounds = race(scores, {"slow": 2.0, "quick": 1.0}, replace(RULES, margin=0.35))
    assert {each.key: each.open_against for each in result.front} == {"quick": (), "slow": ("quick",)}
    assert (result.stopped, len(rounds)) == ("samples", 2)
    settled, _ = race(scores, {"slow": 2.0, "quick": 1.0}, replace(RULES, margin=0.09))
    assert {each.key: each.open_against for each in settled.front} == {"quick": (), "slow": ()}


def test_who_most_likely_is_beaten_gets_no_more_samples_but_is_not_called_beaten() -> None:
    # 3 of 10 better, none worse: not sure at 1 %, likely at 20 %.
    scores = {"slow": (0.0,) * 3 + (1.0,) * 17, "quick": ALL_RIGHT}
    rules = replace(RULES, alpha=0.03, doubt=0.2)
    result, rounds = race(scores, {"slow": 2.0, "quick": 1.0}, rules)
    (aside,) = result.set_aside
    assert (aside.key, aside.by, aside.round, aside.level) == ("slow", "quick", 1, 0.2)
    assert not result.eliminated
    assert len(rounds) == 1


def test_a_witness_that_goes_itself_hands_over_to_one_that_stays() -> None:
    # After 10 samples b beats a. From then on c, equal to b until there, is better: after 20 it beats b, and a too.
    scores = {
        "a": (0.0,) * 20,
        "b": (1.0,) * 10 + (0.0,) * 10,
        "c": (1.0,) * 20,
    }
    seconds = {"a": 3.0, "b": 2.0, "c": 1.0}
    result, _ = race(scores, seconds, replace(RULES, doubt=1e-9))
    assert {each.key: each.by for each in result.eliminated} == {"a": "c", "b": "c"}
    assert [each.key for each in result.front] == ["c"]


def test_a_witness_that_nobody_else_can_stand_in_for_stays() -> None:
    # Margin 0.35. a leaves for b after 10 equal samples. c is wrong on 3 of those: too unsure to beat anybody (0.7 of
    # 10 less 1.83 SE of 0.14 is below -0.35), but beats b after 20 (-0.14 less 1.73 SE of 0.08). It has no say about a,
    # which was measured on 10 samples only, so b, that a left for, stays.
    right = (1.0,) * 40
    scores = {"a": right, "b": right, "c": (0.0,) * 3 + (1.0,) * 37}
    seconds = {"a": 3.0, "b": 2.0, "c": 1.0}
    rules = replace(RULES, margin=0.35, alpha=0.2, doubt=1e-9)
    result, _ = race(scores, seconds, rules)
    assert [(each.key, each.by, each.round) for each in result.eliminated] == [("a", "b", 1)]
    assert {each.key for each in (*result.front, *result.undecided)} == {"b", "c"}
    # Without a, b leaves.
    del scores["a"]
    alone, _ = race(scores, seconds, rules)
    assert [(each.key, each.by, each.round) for each in alone.eliminated] == [("b", "c", 2)]


def test_a_witness_is_not_set_aside() -> None:
    scores = {"a": (0.0,) * 40, "b": (1.0,) * 10 + (0.0,) * 3 + (1.0,) * 27, "c": (1.0,) * 40}
    result, _ = race(scores, {"a": 3.0, "b": 2.0, "c": 1.0}, replace(RULES, alpha=0.04, doubt=0.3))
    # After 20 samples c most likely beats b, but a left for b, which is therefore measured to the end.
    assert [(each.key, each.by) for each in result.eliminated] == [("a", "b")]
    assert not result.set_aside
    assert {each.key: each.num_samples for each in (*result.front, *result.undecided)} == {"b": 40, "c": 40}


def test_two_settings_that_are_the_same_both_stay() -> None:
    result, _ = race({"one": ALL_RIGHT, "two": ALL_RIGHT}, {"one": 1.0, "two": 1.0})
    assert [each.key for each in result.front] == ["one", "two"]


def test_a_setting_that_fails_is_removed_and_the_search_continues() -> None:
    scores, seconds = {"broken": ALL_RIGHT, "a": ALL_RIGHT, "b": ALL_WRONG}, {"broken": 1.0, "a": 2.0, "b": 3.0}
    result, _ = race(scores, seconds, failing=("broken",))
    assert result.failed == ("broken",)
    assert [each.key for each in result.front] == ["a"]
    # No sample of it ran, so nothing is known of its cost.
    assert result.full_cost_s == 100.0


def test_who_left_for_a_setting_that_fails_later_is_back_in_the_race() -> None:
    # `open` keeps the race going: as accurate as `good` and slower, neither can be ruled out.
    scores = {"bad": ALL_WRONG, "good": ALL_RIGHT, "open": ALL_RIGHT}
    result, rounds = race(scores, {"bad": 3.0, "good": 1.0, "open": 2.0}, failing=("good",), fails_from=10)
    assert result.failed == ("good",)
    assert [(each.key, each.by) for each in result.eliminated] == [("bad", "open")]
    assert "bad" not in rounds[1]


def test_nothing_at_all_could_be_run() -> None:
    result, rounds = race({"a": ALL_RIGHT, "b": ALL_RIGHT}, {"a": 1.0, "b": 1.0}, failing=("a", "b"))
    assert (result.failed, result.front, result.share, len(rounds)) == (("a", "b"), (), None, 1)


def test_samples_that_failed_at_one_setting_do_not_count_in_its_pairs() -> None:
    search = ParetoSearch(["a", "b"], list(range(20)), RULES)
    requested = search.next_round()
    assert requested == {"a": tuple(range(10)), "b": tuple(range(10))}
    search.record(
        {"a": {at: seen(at, 0.0, 2.0) for at in range(9)}, "b": {at: seen(at, 1.0, 1.0) for at in range(1, 10)}}
    )
    (gone,) = search.result().eliminated
    assert (gone.key, gone.gain.n, gone.saving_s.n) == ("a", 8, 8)


def test_without_a_score_there_is_no_front_only_open_questions() -> None:
    search = ParetoSearch(["a", "b"], list(range(4)), RULES)
    while requested := search.next_round():
        search.record({key: {each: seen(each, None, 1.0) for each in ids} for key, ids in requested.items()})
    result = search.result()
    assert not result.front
    assert [(each.key, each.accuracy) for each in result.undecided] == [("a", None), ("b", None)]


def test_the_front_by_hand() -> None:
    points = {"a": (0.5, 1.0), "b": (0.5, 2.0), "c": (0.7, 2.0), "d": (0.7, 2.0), "e": (0.6, 3.0), "f": (0.9, 4.0)}
    standings = [Survivor(key, 10, accuracy, seconds, ()) for key, (accuracy, seconds) in points.items()]
    # b is as accurate as a and slower, e less accurate than c and slower; c and d are the same point.
    assert [each.key for each in front_of(standings)] == ["a", "c", "d", "f"]


def test_what_a_search_refuses() -> None:
    with pytest.raises(ValueError, match="at least one setting"):
        ParetoSearch([], [1], RULES)
    with pytest.raises(ValueError, match="twice"):
        ParetoSearch(["a", "a"], [1], RULES)
    search = ParetoSearch(["a", "b"], list(range(20)), RULES)
    with pytest.raises(ValueError, match="not over"):
        search.result()
    with pytest.raises(ValueError, match="exactly the settings that next_round returned"):
        search.record({"a": {}})
    with pytest.raises(ValueError, match="not the samples of next_round"):
        search.record({"a": {15: seen(15, 1.0, 1.0)}, "b": {}})
    for wrong in ({"margin": -0.1}, {"alpha": 0.0}, {"doubt": 0.5}, {"share": 1.1}, {"first_samples": 1}):
        with pytest.raises(ValueError, match="between 0 and 1|at least 2"):
            SearchRules(**wrong)


def drawn_race(seed: int, num_samples: int, accuracies: Sequence[float], seconds: Sequence[float]) -> SearchResult:
    """Settings with known accuracies: right where a question's hardness, common to all, is below the accuracy, with a
    twentieth of the questions drawn anew for each setting; times vary by a factor common to all and a little noise."""
    generator = np.random.default_rng(seed)
    shape = (len(accuracies), num_samples)
    hardness = np.where(generator.random(shape) < 0.05, generator.random(shape), generator.random(num_samples))
    right = hardness < np.array(accuracies)[:, None]
    times = np.array(seconds)[:, None] * generator.uniform(0.5, 1.5, num_samples) * generator.uniform(0.97, 1.03, shape)
    names = [f"s{at}" for at in range(len(accuracies))]

    def measured(key: str, at: int) -> Observation:
        row = names.index(key)
        return Observation(float(right[row, at]), float(times[row, at]), float(times[row, at]), picture=at // 2)

    def measure(requested: Mapping[str, Sequence[int]]) -> dict[str, dict[int, Observation]]:
        return {key: {at: measured(key, at) for at in ids} for key, ids in requested.items()}

    result = run_search(ParetoSearch(names, list(range(num_samples)), SearchRules()), measure)
    assert result.cost_s <= times.sum() / 3
    return result


# Points s0 to s4 are the true front; s5 to s9 are each slower than one of them and worse by 0.12.
FRONT_ACCURACIES, FRONT_SECONDS = (0.50, 0.60, 0.70, 0.80, 0.90), (1.0, 2.0, 3.0, 4.0, 5.0)
ACCURACIES = (*FRONT_ACCURACIES, *(each - 0.12 for each in FRONT_ACCURACIES))
SECONDS = (*FRONT_SECONDS, *(each * 1.1 for each in FRONT_SECONDS))


@pytest.mark.parametrize("seed", range(12))
def test_a_known_front_is_found_within_a_third_of_the_time(seed: int) -> None:
    result = drawn_race(seed, 400, ACCURACIES, SECONDS)
    assert [each.key for each in result.front] == ["s0", "s1", "s2", "s3", "s4"]
    left = {each.key: each.by for each in (*result.eliminated, *result.set_aside)}
    assert left.keys() == {"s5", "s6", "s7", "s8", "s9"}
    assert set(left.values()) <= {"s0", "s1", "s2", "s3", "s4"}


def test_wrong_eliminations_are_no_more_than_alpha() -> None:
    """The worst case: a faster setting that is worse by the margin and a little more, so that it does not dominate."""
    wrong = sum(bool(drawn_race(seed, 300, (0.80, 0.789), (2.0, 1.0)).eliminated) for seed in range(300))
    # alpha is 0.05: of 300 races 15 are expected at most, and more than 24 come with probability 0.01 only.
    assert wrong <= 24


def test_a_setting_that_is_dominated_outright_is_hardly_ever_kept_on_the_front() -> None:
    kept = 0
    for seed in range(40):
        result = drawn_race(seed, 300, (0.80, 0.90), (2.0, 1.0))
        kept += "s0" in {each.key for each in result.front}
        assert "s1" in {each.key for each in result.front}
    assert kept == 0


@pytest.mark.parametrize("num_samples", [9, 20, 61, 150])
@pytest.mark.parametrize("seed", range(6))
def test_the_budget_is_kept_at_any_size(num_samples: int, seed: int) -> None:
    """`drawn_race` checks the share of the time; those that stay have equally many samples."""
    generator = np.random.default_rng(seed)
    accuracies, seconds = generator.uniform(0.3, 1.0, 8), generator.uniform(0.5, 3.0, 8)
    result = drawn_race(seed, num_samples, tuple(accuracies), tuple(seconds))
    assert len({each.num_samples for each in (*result.front, *result.undecided)}) == 1


def test_the_same_measurements_lead_to_the_same_requests() -> None:
    first, second = drawn_race(5, 200, ACCURACIES, SECONDS), drawn_race(5, 200, ACCURACIES, SECONDS)
    assert first == second
