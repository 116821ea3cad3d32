"""Rises of counters by hand: what wrapped, what was reset, and what is not known."""

from experiment_core_utils.meters.counters import CounterReading, counter_delta, rise_along


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


def test_a_reset_is_no_wrap_where_the_device_cannot_have_drawn_so_much() -> None:
    # From 261,000 J a wrap to 500 J would be 1,644 J; 1000 W for 1.2 s and a tenth more are 1,320 J.
    joules, reason, remark = counter_delta(261_000.0, 500.0, 1.0, 262_144.0, 1000.0)
    assert (joules, remark) == (None, None) and reason is not None and "it was reset" in reason
    # 1,300 J would be possible.
    assert counter_delta(261_344.0, 500.0, 1.0, 262_144.0, 1000.0).joules == 1300.0


def test_a_counter_that_wraps_needs_a_limit() -> None:
    for after_j in (50.0, 150.0):
        assert counter_delta(100.0, after_j, 1.0, 262_144.0, None) == (
            None, "the counter wraps at 262144 J and without a power limit a wrap looks like a reset", None,
        )  # fmt: skip


def test_a_counter_that_may_have_wrapped_once_more_says_nothing() -> None:
    # At 1000 W it wraps each 262 s: after 300 s 100 J may be 262,244 J; after 200 s they are 100 J.
    joules, reason, _ = counter_delta(100.0, 200.0, 300.0, 262_144.0, 1000.0)
    assert (joules, reason) == (None, "the counter wraps at 262144 J, which may have happened unseen in 300 s")
    assert counter_delta(100.0, 200.0, 200.0, 262_144.0, 1000.0).joules == 100.0
    # Backwards by 100 J is one wrap less 100 J, or two less 100 J: 524,188 J take 476 s at least, with the slack.
    assert counter_delta(200.0, 100.0, 300.0, 262_144.0, 1000.0).joules == 262_044.0
    assert counter_delta(200.0, 100.0, 480.0, 262_144.0, 1000.0).joules is None


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
