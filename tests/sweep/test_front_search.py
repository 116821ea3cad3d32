"""The race: who leaves and for whom, by hand, what it may spend, and how often it is wrong."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from experiment_core_utils.primitives.contrasts import PairedContrasts, ScoreContrasts
from experiment_core_utils.sweep.front_search import (
    Observation,
    ParetoSearch,
    Round,
    SearchResult,
    Survivor,
    front_of,
    planned_looks,
    random_order,
    run_search,
    surely_better,
)

ALL_WRONG, ALL_RIGHT = (0.0,) * 60, (1.0,) * 60


def seen(sample_id: int, score: float | None, seconds: float) -> Observation:
    return Observation(score, seconds, seconds, picture=sample_id)


def race(
    scores: Mapping[str, Sequence[float]],
    seconds: Mapping[str, float],
    failing: Sequence[str] = (),
    fails_from: int = 0,
) -> tuple[SearchResult, list[Round]]:
    """A race over samples 0 to 59 in that order, each of its own picture, with times that never vary.

    Rounds end at 10, 15, 23, ... samples. Settings in `failing` give nothing for rounds that begin at sample
    `fails_from` or later.
    """
    rounds: list[Round] = []

    def measure(requested: Mapping[str, Sequence[int]]) -> dict[str, dict[int, Observation]]:
        rounds.append(dict(requested))  # type: ignore[arg-type]
        return {
            key: {}
            if key in failing and requested[0] >= fails_from
            else {each: seen(each, scores[key][each], seconds[key]) for each in requested}
            for key, requested in requested.items()
        }

    return run_search(ParetoSearch(list(scores), list(range(60))), measure), rounds


def test_better_is_students_t_of_a_pair() -> None:
    # Differences 1, 2, ..., 6: mean 3.5, variance 3.5, error sqrt(3.5 / 6) = 0.7638, t = 4.58; t(5) exceeds 4.58 with
    # probability 0.003.
    log_times = np.array([[0.0] * 6, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
    times = PairedContrasts.of(log_times, range(6))
    assert surely_better(times, 0.004).tolist() == [[False, True], [False, False]]
    assert not surely_better(times, 0.002).any()
    # Of scores the higher is better; squares 17.5, and 4 added: error sqrt(21.5 / 5 / 6) = 0.8466, t = 4.13, p 0.0045.
    scores = ScoreContrasts.of(log_times / 6, range(6), best=1.0)
    assert surely_better(scores, 0.2).tolist() == [[False, False], [True, False]]
    assert not surely_better(PairedContrasts.of(log_times[:, :5], range(5)), 0.4).any()


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
    assert planned_looks(num_samples) == looks


def test_the_order_is_random_by_seed_and_does_not_depend_on_the_order_given() -> None:
    order = random_order(range(50), 3)
    assert sorted(order) == list(range(50))
    assert order == random_order(list(reversed(range(50))), 3)
    assert order != random_order(range(50), 4)
    assert list(order) != sorted(order)


def test_who_is_beaten_in_both_leaves_after_the_first_round_and_names_who_beat_it() -> None:
    result, rounds = race({"bad": ALL_WRONG, "good": ALL_RIGHT}, {"bad": 2.0, "good": 1.0})
    (gone,) = result.eliminated
    assert (gone.key, gone.by, gone.round, gone.num_samples, gone.gain) == ("bad", "good", 1, 10, 1.0)
    assert gone.time_ratio == pytest.approx(0.5)
    assert [each.key for each in result.front] == ["good"]
    assert rounds == [{"bad": tuple(range(10)), "good": tuple(range(10))}]
    assert (result.stopped, result.cost_s, result.full_cost_s) == ("settled", 30.0, 180.0)
    assert result.share == pytest.approx(1 / 6)


def test_slower_but_better_is_another_point_of_the_front_and_needs_no_second_round() -> None:
    result, rounds = race({"sure": ALL_RIGHT, "quick": ALL_WRONG}, {"sure": 2.0, "quick": 1.0})
    assert [each.key for each in result.front] == ["quick", "sure"]  # the fastest first
    assert not (result.eliminated or result.undecided)
    assert (len(rounds), result.stopped) == (1, "settled")


def test_who_is_only_slower_stays_undecided_until_the_time_is_used_up() -> None:
    result, rounds = race({"slow": ALL_RIGHT, "quick": ALL_RIGHT}, {"slow": 2.0, "quick": 1.0})
    assert [each.key for each in result.front] == ["quick"]
    assert [(each.key, each.num_samples) for each in result.undecided] == [("slow", 20)]  # a third of 60
    assert (result.stopped, len(rounds), result.cost_s) == ("budget", 3, 60.0)


def test_a_setting_leaves_for_one_that_stays() -> None:
    # b and c both beat a; b leaves as well, and c is as accurate as the best of them.
    scores = {"a": ALL_WRONG, "b": ((1.0, 0.0) * 30), "c": ALL_RIGHT}
    result, _ = race(scores, {"a": 3.0, "b": 2.0, "c": 1.0})
    assert {each.key: each.by for each in result.eliminated} == {"a": "c", "b": "c"}


def test_two_settings_that_are_the_same_both_stay() -> None:
    result, _ = race({"one": ALL_RIGHT, "two": ALL_RIGHT}, {"one": 1.0, "two": 1.0})
    assert [each.key for each in result.front] == ["one", "two"]


def test_a_setting_that_fails_is_removed_and_the_search_continues() -> None:
    scores, seconds = {"broken": ALL_RIGHT, "a": ALL_RIGHT, "b": ALL_WRONG}, {"broken": 1.0, "a": 2.0, "b": 3.0}
    result, _ = race(scores, seconds, failing=("broken",))
    assert result.failed == ("broken",)
    assert [each.key for each in result.front] == ["a"]
    # No sample of it ran, so nothing is known of its cost.
    assert result.full_cost_s == 300.0


def test_who_left_for_a_setting_that_fails_later_is_back_in_the_race() -> None:
    # `open` keeps the race going: as accurate as `good` and slower. `bad` is better than it, slower, and worse than
    # `good`.
    scores = {"bad": (0.0,) * 5 + (1.0,) * 55, "good": ALL_RIGHT, "open": (0.0,) * 2 + (1.0,) * 58}
    result, rounds = race(scores, {"bad": 3.0, "good": 1.0, "open": 2.0}, failing=("good",), fails_from=10)
    assert "bad" not in rounds[1]
    assert rounds[2] == {"bad": tuple(range(10, 15))}  # what `open` has by then
    assert result.failed == ("good",)
    assert not result.eliminated
    assert {each.key for each in (*result.front, *result.undecided)} == {"bad", "open"}


def test_nothing_at_all_could_be_run() -> None:
    result, rounds = race({"a": ALL_RIGHT, "b": ALL_RIGHT}, {"a": 1.0, "b": 1.0}, failing=("a", "b"))
    assert (result.failed, result.front, result.share, len(rounds)) == (("a", "b"), (), None, 1)


def test_samples_that_failed_at_one_setting_do_not_count() -> None:
    search = ParetoSearch(["a", "b"], list(range(60)))
    requested = search.next_round()
    assert requested == {"a": tuple(range(10)), "b": tuple(range(10))}
    search.record(
        {"a": {at: seen(at, 0.0, 2.0) for at in range(9)}, "b": {at: seen(at, 1.0, 1.0) for at in range(1, 10)}}
    )
    (gone,) = search.result().eliminated
    assert (gone.key, gone.num_samples) == ("a", 8)


def test_without_a_score_there_is_no_front_only_open_questions() -> None:
    search = ParetoSearch(["a", "b"], list(range(60)))
    while requested := search.next_round():
        search.record({key: {each: seen(each, None, 1.0) for each in ids} for key, ids in requested.items()})
    result = search.result()
    assert not result.front
    assert [(each.key, each.accuracy) for each in result.undecided] == [("a", None), ("b", None)]


def test_the_front_by_hand() -> None:
    points = {"a": (0.5, 1.0), "b": (0.5, 2.0), "c": (0.7, 2.0), "d": (0.7, 2.0), "e": (0.6, 3.0), "f": (0.9, 4.0)}
    standings = [Survivor(key, 10, accuracy, seconds) for key, (accuracy, seconds) in points.items()]
    # b is as accurate as a and slower, e less accurate than c and slower; c and d are the same point.
    assert [each.key for each in front_of(standings)] == ["a", "c", "d", "f"]


def test_what_a_search_refuses() -> None:
    with pytest.raises(ValueError, match="at least one setting"):
        ParetoSearch([], [1])
    with pytest.raises(ValueError, match="twice"):
        ParetoSearch(["a", "a"], [1])
    search = ParetoSearch(["a", "b"], list(range(60)))
    with pytest.raises(ValueError, match="not over"):
        search.result()
    with pytest.raises(ValueError, match="exactly the settings that next_round returned"):
        search.record({"a": {}})
    with pytest.raises(ValueError, match="not the samples of next_round"):
        search.record({"a": {15: seen(15, 1.0, 1.0)}, "b": {}})


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

    result = run_search(ParetoSearch(names, list(range(num_samples))), measure)
    # The full grid's time is estimated, and estimated again at the end.
    assert result.cost_s <= 1.2 * times.sum() / 3 and (result.share or 1.0) <= 0.36
    return result


# Points s0 to s4 are the true front; s5 to s9 are each slower than one of them and worse by 0.12.
FRONT_ACCURACIES, FRONT_SECONDS = (0.50, 0.60, 0.70, 0.80, 0.90), (1.0, 2.0, 3.0, 4.0, 5.0)
ACCURACIES = (*FRONT_ACCURACIES, *(each - 0.12 for each in FRONT_ACCURACIES))
SECONDS = (*FRONT_SECONDS, *(each * 1.1 for each in FRONT_SECONDS))


@pytest.mark.parametrize("seed", range(6))
def test_a_known_front_is_found_within_a_third_of_the_time(seed: int) -> None:
    result = drawn_race(seed, 400, ACCURACIES, SECONDS)
    assert [each.key for each in result.front] == ["s0", "s1", "s2", "s3", "s4"]
    left = {each.key: each.by for each in result.eliminated}
    assert left.keys() == {"s5", "s6", "s7", "s8", "s9"}
    assert set(left.values()) <= {"s0", "s1", "s2", "s3", "s4"}


def test_who_is_as_accurate_hardly_ever_leaves() -> None:
    """The worst case: the same accuracy; each of up to three looks is at 0.1, and answers are added besides."""
    wrong = sum(bool(drawn_race(seed, 300, (0.80, 0.80), (2.0, 1.0)).eliminated) for seed in range(60))
    assert wrong <= 12


@pytest.mark.parametrize("num_samples", [9, 20, 61, 150])
@pytest.mark.parametrize("seed", range(4))
def test_the_budget_is_kept_at_any_size(num_samples: int, seed: int) -> None:
    """`drawn_race` checks the share of the time; those that stay have equally many samples."""
    generator = np.random.default_rng(seed)
    accuracies, seconds = generator.uniform(0.3, 1.0, 8), generator.uniform(0.5, 3.0, 8)
    result = drawn_race(seed, num_samples, tuple(accuracies), tuple(seconds))
    assert len({each.num_samples for each in (*result.front, *result.undecided)}) == 1


def test_the_same_measurements_lead_to_the_same_requests() -> None:
    first, second = drawn_race(5, 200, ACCURACIES, SECONDS), drawn_race(5, 200, ACCURACIES, SECONDS)
    assert first == second
