"""A load that comes and goes: when it is busy, and that it ends."""

import multiprocessing
import os

from experiments.controller.running.changing_load import changing_load, is_busy


def test_every_second_period_is_busy() -> None:
    # Periods of 2 s from second 10: idle until 12, busy until 14, idle again.
    assert [is_busy(10.0, now_s, 2.0) for now_s in (10.0, 11.9, 12.0, 13.9, 14.0)] == [False, False, True, True, False]


def test_the_processes_end_with_the_block() -> None:
    before = set(multiprocessing.active_children())
    with changing_load(1.0):
        assert len(set(multiprocessing.active_children()) - before) == (os.cpu_count() or 1)
    assert set(multiprocessing.active_children()) == before


def test_no_load_is_no_process() -> None:
    before = set(multiprocessing.active_children())
    with changing_load(None):
        assert set(multiprocessing.active_children()) == before
