"""The caveats of a server's speed, cache and hidden tokens, by runs made by hand."""

from dataclasses import replace

import pytest

from experiment_core_utils.finishing.noted_caveats import served_caveats, speed_step
from experiment_core_utils.records.requests import ServedNotes, StagedRun
from tests.hand_made_records import measured_sample, staged_run


@pytest.mark.parametrize(
    ("times_s", "expected"),
    [
        ([0.4] * 9 + [0.046] * 12, (0.4, 0.046, 9)),
        ([0.1, 0.12, 0.11, 0.1, 0.13, 0.2, 0.21, 0.19, 0.22, 0.2, 0.9], (0.11, 0.205, 5)),
        ([0.1, 0.2] * 10, None),
        ([0.1] * 10 + [0.14] * 10, None),
        ([0.4] * 4 + [0.05] * 5, None),
        ([], None),
    ],
)
def test_a_step_in_a_servers_speed_is_found_where_nearly_all_times_follow_it(
    times_s: list[float], expected: tuple[float, float, int] | None
) -> None:
    assert speed_step(times_s) == (None if expected is None else pytest.approx(expected))


def served_run(first_token_s: float, *, hidden_tokens: int = 0) -> StagedRun:
    decode_s = (0.125, 0.125)
    return StagedRun((0, 2, 5), None, None, 0.25, first_token_s + 0.25, decode_s, True, first_token_s, 7, hidden_tokens)


@pytest.mark.parametrize(("ratios", "median"), [((0.5, 0.75, 2.0), 0.75), ((0.5, 0.875, 1.0), None), ((), None)])
def test_repeated_requests_that_come_sooner_are_from_a_cache(ratios: tuple[float, ...], median: float | None) -> None:
    samples = [measured_sample(place, *map(served_run, (2.0, 1.0, 2 * ratio))) for place, ratio in enumerate(ratios)]
    # A single run and times of models in this process say nothing.
    samples += [measured_sample(8, served_run(9.0)), measured_sample(9, staged_run(), staged_run(prefill_s=0.01))]
    found = served_caveats(samples)
    assert [(each.kind, each.figures) for each in found] == [("server_warm", {"ratio": median})] * (median is not None)
    if median is not None:
        assert "first token after 75% of the first time" in found[0].sentence
    # Of requests that waited for each other a shorter time does not mean that.
    assert served_caveats(samples, have_waited=True) == []


def test_tokens_that_a_server_hides_are_counted() -> None:
    runs = [served_run(1.0, hidden_tokens=each) for each in (100, 0, 20)]
    (found,) = served_caveats([measured_sample(1, *runs)])
    assert (found.kind, found.figures) == ("server_hidden_tokens", {"num_tokens": 120, "num_runs": 2, "num_all": 3})


def test_answers_longer_than_asked_for_are_told() -> None:
    runs = [replace(served_run(1.0), served=ServedNotes(is_too_long=each)) for each in (True, False, True)]
    (found,) = served_caveats([measured_sample(1, *runs)])
    assert (found.kind, found.figures) == ("server_too_long", {"num_runs": 2, "num_all": 3})
    assert found.sentence.startswith("server: 2 of 3 runs have more tokens than were asked for")
