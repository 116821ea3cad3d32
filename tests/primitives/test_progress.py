"""What a long run says of its progress, to a person and to a log."""

import io
import re
import signal

import pytest
from tqdm import std

from experiment_core_utils.primitives.errors import Stopped
from experiment_core_utils.primitives.interruption import StopRequest
from experiment_core_utils.primitives.progress import Progress, WaitingLines, announced, sample_lines


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that tqdm's clock shows."""
    seconds = [0.0]
    monkeypatch.setattr(std, "time", lambda: seconds[0])
    return seconds


class Terminal(io.StringIO):
    """Says that a person watches."""

    def isatty(self) -> bool:
        return True


def test_a_log_gets_a_whole_line_at_most_once_a_minute_and_one_at_the_end(now: list[float]) -> None:
    log = io.StringIO()
    with Progress(2, 20, shown=True, stream=log) as progress:
        progress.start("first", 4, 10)
        for _ in range(6):  # 6 samples in 180 s: 30 s each
            now[0] += 30.0
            progress.advance()
        progress.start("second", 0, 10)
        now[0] += 3600.0
        progress.advance()
    assert log.getvalue().splitlines() == [
        "setting 1/2 first: 4/20 samples; 00:00 elapsed, ? left",
        # 2 done in 60 s; 14 missing
        "setting 1/2 first: 6/20 samples; 01:00 elapsed, 07:00 left",
        "setting 1/2 first: 8/20 samples; 02:00 elapsed, 06:00 left",
        "setting 1/2 first: 10/20 samples; 03:00 elapsed, 05:00 left",
        # 7 done in 3780 s: 540 s each; 9 missing
        "setting 2/2 second: 11/20 samples; 1:03:00 elapsed, 1:21:00 left",
        "setting 2/2 second: 11/20 samples; 1:03:00 elapsed, 1:21:00 left",
    ]


def test_a_person_sees_a_bar_for_the_run_and_one_for_the_setting() -> None:
    terminal = Terminal()
    with Progress(2, 6, shown=True, stream=terminal) as progress:
        progress.start("first", 1, 3)
        progress.advance()
        progress.start("second", 0, 3)  # one sample of the first was never counted: it failed
        for _ in range(3):
            progress.advance()
    shown = terminal.getvalue()
    assert "setting 2/2 second" in shown
    assert "6/6" in shown


def test_the_time_left_counts_what_this_run_does(now: list[float]) -> None:
    terminal = Terminal()
    with Progress(1, 100, shown=True, stream=terminal) as progress:
        progress.start("only", 90, 100)
        for _ in range(4):
            now[0] += 5.0
            progress.advance()
    # 5 s each; 6 missing.
    assert "94/100 [00:20<00:30,  5.00s/sample]" in terminal.getvalue()


def test_samples_that_end_together_took_their_time_together(now: list[float]) -> None:
    log = io.StringIO()
    with Progress(1, 20, shown=True, stream=log) as progress:
        progress.start("only", 0, 20)
        now[0] += 100.0
        with progress.at_once():
            for _ in range(10):
                progress.advance()
    # 10 s each, and 10 missing.
    assert log.getvalue().splitlines()[1:2] == ["only: 10/20 samples; 01:40 elapsed, 01:40 left"]


def test_the_last_line_is_written_once_however_long_the_last_samples_took(now: list[float]) -> None:
    log = io.StringIO()
    with Progress(1, 4, shown=True, stream=log) as progress:
        progress.start("rounds", 0, 4)
        now[0] += 70.0
        progress.advance(4)
    assert log.getvalue().splitlines()[1:] == ["rounds: 4/4 samples; 01:10 elapsed, 00:00 left"]


def test_the_clock_starts_with_the_first_sample(now: list[float]) -> None:
    """Warm-up takes 100 s and 40 s more, samples 5 s each; the second setting's own warm-up is part of the run."""
    terminal, log = Terminal(), io.StringIO()
    for stream in (terminal, log):
        now[0] = 0.0
        with Progress(2, 20, shown=True, stream=stream) as progress:
            now[0] += 7.0
            progress.start("first", 0, 10)
            with progress.announced("warming up"):
                now[0] += 100.0
                with progress.step("warming up low"):
                    now[0] += 40.0
            for _ in range(10):
                now[0] += 5.0
                progress.advance()
            progress.start("second", 0, 10)
            with progress.step("warming up"):
                now[0] += 60.0
            now[0] += 5.0
            progress.advance()
    shown = terminal.getvalue()
    # 5 s each, 19 missing; of the setting 9.
    assert "1/20 [00:05<01:35,  5.00s/sample]" in shown and "10/20 [00:50<00:50,  5.00s/sample]" in shown
    assert "1/10 [00:05<00:45,  5.00s/sample]" in shown
    assert "11/20 [01:55<01:34" in shown
    assert log.getvalue().splitlines()[-1] == "setting 2/2 second: 11/20 samples; 01:55 elapsed, 01:34 left"


def test_what_is_done_before_samples_is_reported(now: list[float]) -> None:
    terminal, log = Terminal(), io.StringIO()
    for stream in (terminal, log):
        with Progress(1, 2, shown=True, stream=stream) as progress:
            with progress.step("loading"):
                pass
            progress.start("only", 0, 2)
            with progress.step("warming up"):
                pass
            progress.advance()
    assert "loading: " in terminal.getvalue()
    assert "only, warming up: " in terminal.getvalue()
    # In a log only where a line is due.
    assert "warming up" not in log.getvalue() and len(log.getvalue().splitlines()) == 2


def test_other_processes_say_nothing() -> None:
    for stream in (Terminal(), io.StringIO()):
        with Progress(2, 6, shown=False, stream=stream) as progress:
            progress.start("first", 0, 3)
            progress.advance()
        assert stream.getvalue() == ""


def test_work_on_samples_gets_a_line_each_half_minute(now: list[float]) -> None:
    log = io.StringIO()
    lines = sample_lines("recording states", 8, log)
    for samples in (1, 1, 1, 3, 2):
        now[0] += 20.0
        lines.update(samples)
    assert log.getvalue().splitlines() == [
        "recording states: 0/8 samples; 00:00 elapsed, ? left",
        # 2 done in 40 s; 6 missing
        "recording states: 2/8 samples; 00:40 elapsed, 02:00 left",
        # 6 done in 80 s; 2 missing
        "recording states: 6/8 samples; 01:20 elapsed, 00:26 left",
        "recording states: 8/8 samples; 01:40 elapsed, 00:00 left",
    ]


def test_what_is_announced_says_how_long_it_took(capsys: pytest.CaptureFixture[str]) -> None:
    with announced("loading signs on cpu"):
        pass
    with announced("loading signs on cpu", shown=False):
        pass
    with pytest.raises(ValueError, match="torn"), announced("loading torn"):
        raise ValueError("torn")
    first, second, third = capsys.readouterr().err.splitlines()
    assert (first, third) == ("loading signs on cpu ...", "loading torn ...")
    assert re.fullmatch(r"loading signs on cpu: \d+\.\d s", second)


def test_a_log_gets_the_beginning_of_what_is_announced_and_a_person_the_end() -> None:
    terminal, log = Terminal(), io.StringIO()
    for stream in (terminal, log):
        with Progress(1, 2, shown=True, stream=stream) as progress:
            progress.start("only", 0, 2)
            with progress.announced("warming up 2 settings"):
                pass
            progress.advance()
    _, begun, ended, *_ = log.getvalue().splitlines()
    assert begun == "warming up 2 settings ..." and re.fullmatch(r"warming up 2 settings: \d+\.\d s", ended)
    assert re.search(r"warming up 2 settings: \d+\.\d s\n", terminal.getvalue())
    assert "..." not in terminal.getvalue()


def test_a_person_sees_a_table_that_is_drawn_at_most_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = [0.0]
    monkeypatch.setattr("experiment_core_utils.primitives.progress.HostClock.now_s", lambda _: drawn[0])
    monkeypatch.setenv("COLUMNS", "30")
    terminal, log, asked = Terminal(), io.StringIO(), []

    def table() -> list[str]:
        asked.append(drawn[0])
        return ["so far  samples", f"low  {len(asked)}/4 and more than thirty columns"]

    for stream in (log, terminal):
        with Progress(1, 4, shown=True, stream=stream) as progress:
            progress.show(table)
            progress.start("only", 0, 4)
            for _ in range(4):
                drawn[0] += 0.6
                progress.advance()
    # At 3.0, not at 3.6, at 4.2, not at 4.8; the log asked for none.
    assert asked == pytest.approx([3.0, 4.2])
    assert "low" not in log.getvalue()
    shown = terminal.getvalue()
    assert "so far  samples" in shown and "low  1/4 and more than thirty" in shown and "low  2/4" in shown
    assert "columns" not in shown


def test_a_wait_is_said_after_half_a_minute_then_once_a_minute_and_ends_with_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at, said, stop = [0.0], list[str](), StopRequest()
    monkeypatch.setattr("experiment_core_utils.primitives.progress.HostClock.now_s", lambda _: at[0])
    look = WaitingLines(stop, said.append)
    for at[0] in (0.0, 29.0, 30.0, 89.0, 90.0, 91.0):
        look(at[0], "m at here:1")
    assert said == [f"a sample waits since {each} s: m at here:1" for each in (30, 90)]
    stop.note(signal.SIGTERM, None)
    with pytest.raises(Stopped, match="stopped by SIGTERM while a sample waited"):
        look(0.1, "m at here:1")
