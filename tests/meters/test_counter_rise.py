"""Rises of counters by hand: what wrapped, what was reset, and what cannot be told."""

from experiment_core_utils.meters.counter_rise import CounterReading, counter_delta, rise_along


def test_a_counter_that_rises_is_subtracted() -> None:
    assert counter_delta(100.0, 350.5, 2.0, None, None) == (250.5, None, None)


def test_a_counter_that_falls_was_reset_where_it_does_not_wrap() -> None:
    joules, reason, remark = counter_delta(100.0, 3.0, 2.0, None, 700.0)
    assert (joules, remark) == (None, None)
    assert reason == "the counter went backwards, from 100.000 to 3.000 J: it was reset"


def test_a_counter_that_falls_has_wrapped_where_the_rise_is_possible() -> None:
    # 262,000 to 262,144 and 56 more are 200 J in 2 s.
    joules, reason, remark = counter_delta(262_000.0, 56.0, 2.0, 262_144.0, 1000.0)
    assert (joules, reason) == (200.0, None)
    assert remark is not None and "wrapped at 262144 J" in remark
    # From 1000 J it would have had to rise by 261,200 J in 2 s.
    joules, reason, _ = counter_delta(1000.0, 56.0, 2.0, 262_144.0, 1000.0)
    assert joules is None and reason is not None and "it was reset" in reason


def readings(*joules: float | None) -> list[CounterReading]:
    """One a second."""
    return [
        CounterReading(float(second), second + 0.004, value, None if value is not None else "GPU is lost")
        for second, value in enumerate(joules)
    ]


def test_a_rise_is_the_sum_of_its_pieces() -> None:
    assert rise_along(readings(100.0, 250.0, 400.0), None, None) == (300.0, None, None)


def test_a_reset_between_any_two_readings_leaves_no_rise() -> None:
    # Read at both ends alone it would be 300 J.
    joules, reason, _ = rise_along(readings(100.0, 90.0, 400.0), None, None)
    assert (joules, reason) == (None, "the counter went backwards, from 100.000 to 90.000 J: it was reset")


def test_a_reading_that_failed_leaves_no_rise() -> None:
    assert rise_along(readings(100.0, None, 400.0), None, None) == (None, "GPU is lost", None)
