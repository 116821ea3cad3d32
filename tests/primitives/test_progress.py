"""What a long run says of its progress, to a person and to a log."""

import io

from experiment_core_utils.primitives.progress import ProgressBars, ProgressLines, SampleLines, progress_of


class Terminal(io.StringIO):
    """Says that a person watches."""

    def isatty(self) -> bool:
        return True


def test_a_log_gets_a_whole_line_at_most_once_a_minute_and_one_at_the_end() -> None:
    now = [0.0]
    log = io.StringIO()
    with ProgressLines(2, 10, log, clock=lambda: now[0]) as progress:
        progress.start("first", already_done=4)
        for _ in range(6):  # 6 samples in 180 s: 30 s each
            now[0] += 30.0
            progress.advance()
        progress.start("second", already_done=0)
        now[0] += 3600.0
        progress.advance()
    assert log.getvalue().splitlines() == [
        "setting 1/2 first: 4/10 samples; 0 s gone",
        # 2 done in 60 s; 4 + 10 owed
        "setting 1/2 first: 6/10 samples; 1 min gone, about 7 min left",
        "setting 1/2 first: 8/10 samples; 2 min gone, about 6 min left",
        "setting 1/2 first: 10/10 samples; 3 min gone, about 5 min left",
        # 7 done in 3780 s: 540 s each; 9 owed
        "setting 2/2 second: 1/10 samples; 1 h 03 min gone, about 1 h 21 min left",
        "setting 2/2 second: 1/10 samples; 1 h 03 min gone, about 1 h 21 min left",
    ]


def test_a_person_sees_a_bar_for_the_run_and_one_for_the_setting() -> None:
    terminal = Terminal()
    with progress_of(2, 3, shown=True, stream=terminal) as progress:
        assert isinstance(progress, ProgressBars)
        progress.start("first", already_done=1)
        progress.advance()
        progress.start("second", already_done=0)  # one sample of the first was never counted: it failed
        for _ in range(3):
            progress.advance()
    shown = terminal.getvalue()
    assert "2/2 settings" in shown and "second" in shown
    assert "6/6" in shown


def test_other_processes_say_nothing() -> None:
    for stream in (Terminal(), io.StringIO()):
        with progress_of(2, 3, shown=False, stream=stream) as progress:
            progress.start("first", already_done=0)
            progress.advance()
        assert stream.getvalue() == ""


def test_work_on_samples_gets_a_line_each_half_minute() -> None:
    now = [0.0]
    log = io.StringIO()
    lines = SampleLines("recording states", 8, log, clock=lambda: now[0])
    for samples in (1, 1, 1, 3, 2):
        now[0] += 20.0
        lines.advance(samples)
    assert log.getvalue().splitlines() == [
        "recording states: 0/8 samples; 0 s gone",
        # 2 done in 40 s; 6 owed
        "recording states: 2/8 samples; 40 s gone, about 2 min left",
        # 6 done in 80 s; 2 owed
        "recording states: 6/8 samples; 1 min gone, about 27 s left",
        "recording states: 8/8 samples; 2 min gone",
    ]
