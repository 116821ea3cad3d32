"""Journals: what is on the disk after any end of the process that wrote them."""

import errno
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from experiment_core_utils.primitives.device import MemoryReading
from experiment_core_utils.primitives.errors import OutputRefused, ResultsError, ResultsNotSaved, ResultsRefused
from experiment_core_utils.primitives.files import failed_writes_named
from experiment_core_utils.records.journal import (
    JOURNAL_VERSION,
    Journal,
    Line,
    _encode,
    journal_path,
    journals_in,
    only_run_in,
    read_end,
    read_journal,
    remove_journals,
    tidy_journals,
)
from experiment_core_utils.records.requests import StageFlops
from experiment_core_utils.records.settings import (
    ArrivalsTrace,
    ArrivedGroup,
    FinishedSample,
    JournalHeader,
    SettingFailure,
    ShardDone,
)
from tests.hand_made_records import PROOF, SETTING, failed_sample, measured_sample, staged_run

HEADER = JournalHeader(JOURNAL_VERSION, SETTING.key, "f00d", 0, 2, "0001", (1, 3, 5))
MEMORY = MemoryReading(5, 6, 7, None)
MEASURED = FinishedSample(
    measured_sample(1, staged_run(), staged_run(vision_s=None, inter_token_s=()), flops=StageFlops(7, 3, 20.5)),
    None,
    MEMORY,
)
FAILED = FinishedSample(None, failed_sample(3, "ä\nb"), MEMORY)
END = ShardDone("0001", PROOF, MEMORY, SettingFailure("OutOfMemory", "no room", 3))
PATH_NAME = "tier-low_topk2_blocks3.rank0.jsonl"


def written(folder: Path, *lines: Line, header: JournalHeader = HEADER) -> Path:
    with Journal(folder, header) as journal:
        for line in lines:
            journal.append(line)
    return journal.path


def test_lines_come_back_as_they_were(tmp_path: Path) -> None:
    path = written(tmp_path / "made", MEASURED, FAILED, END)
    assert path == journal_path(tmp_path / "made", SETTING.key, 0)
    assert path.name == PATH_NAME
    content = read_journal(path)
    assert content is not None
    assert content.lines == (HEADER, MEASURED, FAILED, END)
    assert [each.sample_id for each in content.finished] == [1, 3]
    assert content.end == read_end(path) == END
    assert content.num_bytes == path.stat().st_size


def test_of_samples_that_arrived_together_all_are_there_or_none(tmp_path: Path) -> None:
    trace = ArrivalsTrace("0001", 0, 2.0, 2, 1, 0.0, 0.0, 2, 0, None)
    path = written(tmp_path, ArrivedGroup((trace, trace), (MEASURED, FAILED)))
    content, header = path.read_bytes(), _encode(HEADER)
    whole = read_journal(path)
    assert whole is not None and whole.lines == (HEADER, trace, trace, MEASURED, FAILED)
    assert whole.experiment_ids == ("0001",) and [each.sample_id for each in whole.finished] == [1, 3]
    for length in range(len(header), len(content), 40):
        path.write_bytes(content[:length])
        torn = read_journal(path)
        assert torn is not None and torn.lines == (HEADER,)
    path.write_bytes(content.replace(b'"total_s":', b'"total_s":-'))
    with pytest.raises(ResultsRefused, match="line 2 is broken: total_s is -"):
        read_journal(path)


def test_cut_at_any_byte_it_has_the_whole_lines_and_continues_after_them(tmp_path: Path) -> None:
    content = written(tmp_path, MEASURED, FAILED, END).read_bytes()
    path = tmp_path / PATH_NAME
    lines = content.splitlines(keepends=True)
    again = replace(HEADER, experiment_id="0002")
    for length in range(len(content)):
        path.write_bytes(content[:length])
        whole = 0
        while sum(map(len, lines[: whole + 1])) <= length:
            whole += 1
        torn = read_journal(path)
        assert (torn is None) == (whole == 0)
        assert torn is None or torn.lines == (HEADER, MEASURED, FAILED)[:whole]
        assert read_end(path) is None
        if length % 40 == 0 or length - sum(map(len, lines[:whole])) < 2:
            with Journal(tmp_path, again) as journal:
                assert journal.before == torn
            assert path.read_bytes().splitlines(keepends=True)[:-1] == lines[:whole]


# A journal that somebody made: its bytes, what a run that goes on finds in it, or words of the refusal.
STARTED = _encode(HEADER)
ODD: dict[str, tuple[bytes, int | None, str]] = {
    "empty": (b"", None, ""),
    "the beginning of a header": (STARTED[:-1], None, ""),
    "a header alone": (STARTED, 1, ""),
    "two headers": (STARTED + _encode(replace(HEADER, experiment_id="0009")), 2, ""),
    "two headers, the second torn": (STARTED + STARTED[:20], 1, ""),
    "a second header of another run": (
        STARTED + _encode(replace(HEADER, fingerprint="beef")),
        None,
        "line 2 is the header",
    ),
    "a second header of another setting": (
        STARTED + _encode(replace(HEADER, key="other")),
        None,
        "line 2 is the header",
    ),
    "a second header of another process": (STARTED + _encode(replace(HEADER, rank=7)), None, "line 2 is the header"),
    "an empty line": (b"\n" + STARTED, None, "line 1 is not one of this version's journal"),
    "a sample before the header": (_encode(MEASURED) + STARTED, None, "does not begin with a header"),
}


@pytest.mark.parametrize(("content", "num_lines", "words"), ODD.values(), ids=ODD)
def test_a_run_resumes_from_an_odd_journal_or_refuses_it(
    tmp_path: Path, content: bytes, num_lines: int | None, words: str
) -> None:
    path = journal_path(tmp_path, HEADER.key, HEADER.rank)
    path.write_bytes(content)
    again = replace(HEADER, experiment_id="0010")
    if words:
        for read in (read_journal, lambda _: Journal(tmp_path, again)):
            with pytest.raises(ResultsRefused, match=words) as caught:
                read(path)
            assert str(path) in str(caught.value) and caught.value.exit_code == 2
        assert path.read_bytes() == content
        return
    with Journal(tmp_path, again) as journal:
        assert (None if journal.before is None else len(journal.before.lines)) == num_lines
        journal.append(MEASURED)
    found = read_journal(path)
    assert found is not None and found.lines[-2:] == (again, MEASURED) and len(found.lines) == (num_lines or 0) + 2
    assert found.experiment_ids == ("0010",)


def test_an_end_that_was_gone_on_from_is_no_end(tmp_path: Path) -> None:
    path = written(tmp_path, MEASURED, replace(END, experiment_id="0001"))
    with Journal(tmp_path, replace(HEADER, experiment_id="0002")) as journal:
        assert journal.before is not None and journal.before.end is not None
        assert read_end(path) is None
        journal.append(FAILED)
    content = read_journal(path)
    assert content is not None and content.end is None
    assert content.experiment_ids == ("0001", "0002")


def test_runs_that_finished_nothing_are_not_among_those_that_did(tmp_path: Path) -> None:
    for number in ("0001", "0002", "0003"):
        path = written(
            tmp_path, *([MEASURED] if number == "0002" else []), header=replace(HEADER, experiment_id=number)
        )
    content = read_journal(path)
    assert content is not None and content.experiment_ids == ("0002",)


def test_run_uids_are_those_of_the_runs_that_finished_samples_as_far_as_they_have_one(tmp_path: Path) -> None:
    for number, uid in (("0001", None), ("0002", "b" * 32), ("0003", "a" * 32)):
        path = written(tmp_path, MEASURED, header=replace(HEADER, experiment_id=number, run_uid=uid))
    content = read_journal(path)
    assert content is not None and content.run_uids == ("b" * 32, "a" * 32)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no json\n", "line 1 is not one of this version's journal"),
        ("[]\n", "line 1 is not one of this version's journal"),
        ('{"header": {"schema_version": 99}}\n', r"is not a journal of schema 1 \(its schema is 99\)"),
        ('{"sample": {"measured": null}}\n', "line 1 is not"),
        ('{"end": {"experiment_id": "1", "proof": null, "memory": null, "failure": null}}\n', "does not begin with"),
    ],
)
def test_what_this_version_did_not_write_is_refused_with_its_path(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / PATH_NAME
    path.write_text(content)
    with pytest.raises(ResultsError, match=f"{PATH_NAME}.*{message}.*delete it"):
        read_journal(path)


def test_a_journal_of_another_run_is_not_written_on(tmp_path: Path) -> None:
    path = written(tmp_path, MEASURED)
    before = path.read_bytes()
    with pytest.raises(ResultsError, match="belongs to another run"):
        Journal(tmp_path, replace(HEADER, fingerprint="beef"))
    assert path.read_bytes() == before


def test_two_processes_do_not_write_into_one_journal(tmp_path: Path) -> None:
    with Journal(tmp_path, HEADER), pytest.raises(ResultsError, match="is being written by another process"):
        Journal(tmp_path, HEADER)
    with Journal(tmp_path, HEADER):
        pass  # the lock went with the one that had it


def test_one_run_at_a_time_works_in_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    with (
        only_run_in(folder),
        pytest.raises(ResultsError, match="/made/lock is being written by another process; wait for that run"),
        only_run_in(folder),
    ):
        pass
    with only_run_in(folder):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(ResultsNotSaved, match="Not a directory"), only_run_in(tmp_path / "file" / "made"):
        pass


@pytest.mark.parametrize("how", ["removed", "moved", "moved with its folder", "replaced"])
def test_a_journal_that_is_removed_or_moved_takes_no_further_line(tmp_path: Path, how: str) -> None:
    folder, elsewhere = tmp_path / "parts", tmp_path / "elsewhere"
    with Journal(folder, HEADER) as journal:
        journal.append(MEASURED)
        if how == "moved with its folder":
            folder.rename(elsewhere)
        else:
            journal.path.unlink() if how == "removed" else journal.path.rename(elsewhere)
        if how == "replaced":
            journal.path.write_bytes(elsewhere.read_bytes())
        with pytest.raises(ResultsNotSaved, match=f"{PATH_NAME} was removed or moved while this run writes it; put it"):
            journal.append(FAILED)


def test_a_full_disk_is_one_line_and_what_was_finished_stays(tmp_path: Path) -> None:
    """The system refuses to let the file grow, in the middle of a line: a limit of file size stands for the disk."""
    path = written(tmp_path, MEASURED)
    whole = path.stat().st_size
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with Journal(tmp_path, HEADER) as journal:
            start = path.stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (start + 20, limits[1]))
            with pytest.raises(ResultsNotSaved, match=f"{PATH_NAME} cannot be written .*same command again") as caught:
                journal.append(FAILED)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert isinstance(caught.value.__cause__, OSError) and caught.value.__cause__.errno == errno.EFBIG
    assert whole < start < path.stat().st_size == start + 20
    with Journal(tmp_path, HEADER) as journal:
        assert journal.before is not None and journal.before.lines == (HEADER, MEASURED, HEADER)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_no_space_left_is_reported_in_the_systems_words(tmp_path: Path) -> None:
    with (
        Path("/dev/full").open("wb", buffering=0) as full,
        pytest.raises(ResultsNotSaved, match="/r.json cannot be written .No space left on device.*same command again"),
        failed_writes_named(tmp_path / "r.json"),
    ):
        full.write(b"x")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"prefill_s":', '"prefill_s":NaN,"x":', "prefill_s is nan, and numbers are finite"),
        ('"prefill_s":', '"prefill_s":"x","y":', "prefill_s is 'x', and it should be a valid number"),
        ('"prefill_s":', '"prefill_s":-1.0,"y":', "prefill_s is -1.0, and a time is above 0"),
        ('"total_s":', '"total_s":0,"y":', "total_s is 0.0, and a time is above 0"),
        ('"runs":', '"runs":null,"y":', "runs is None"),
        ('"fingerprint":', '"fingerprint":"../../x","y":', "fingerprint is '../../x', which is part of file names"),
        ('"key":', '"key":"another","y":', "line 1 is broken: it was EDITED: its crc32 is that of another line"),
        ('"total_s":', '"total_s":1', "line 2 is broken: it was EDITED: its crc32 is that of another line"),
    ],
)
def test_an_edited_line_is_named_with_its_field(tmp_path: Path, old: str, new: str, words: str) -> None:
    path = written(tmp_path, MEASURED)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(ResultsRefused) as caught:
        read_journal(path)
    assert words in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_with_the_name_of_a_journal_is_one_line(tmp_path: Path) -> None:
    (tmp_path / PATH_NAME).mkdir()
    (tmp_path / "notes.rankings.jsonl").write_text("not a journal's name")
    with pytest.raises(ResultsRefused, match="is not a journal, but a folder"):
        list(journals_in(tmp_path))
    with pytest.raises(OutputRefused, match="a folder has this name"):
        Journal(tmp_path, HEADER)


def test_a_link_to_nothing_with_the_name_of_a_journal_is_one_line(tmp_path: Path) -> None:
    (tmp_path / PATH_NAME).symlink_to(tmp_path / "nowhere")
    with pytest.raises(ResultsRefused, match="is not a journal, but a folder, a pipe, a device or a link to nothing"):
        list(journals_in(tmp_path))


# --- before a run ------------------------------------------------------------------------------------------------


def test_removing_takes_this_settings_journals_only(tmp_path: Path) -> None:
    for head in (HEADER, replace(HEADER, rank=1), replace(HEADER, key="other")):
        written(tmp_path, header=head)
    for _ in range(2):
        remove_journals(tmp_path, SETTING.key)
    assert [path.name for path in tmp_path.iterdir()] == ["other.rank0.jsonl"]


def never_saved(_: str) -> bool:
    return False


@pytest.mark.parametrize(
    ("call", "action", "run"),
    [
        ("unlink", "removed", lambda folder: remove_journals(folder, HEADER.key)),
        ("replace", "moved", lambda folder: tidy_journals(folder, "other", never_saved)),
    ],
)
def test_a_journal_that_cannot_be_removed_or_moved_is_one_line(
    tmp_path: Path, call: str, action: str, run: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, MEASURED)

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, call, refused)
    with pytest.raises(ResultsNotSaved, match=rf"^{path} cannot be {action} \(Input/output error\); see that the disk"):
        run(tmp_path)
    assert path.exists()


def test_the_journals_of_another_run_wait_for_it_to_come_back(tmp_path: Path) -> None:
    path = written(tmp_path, MEASURED)
    content = path.read_bytes()
    assert tidy_journals(tmp_path, "beef", never_saved) == {HEADER.key: 1}
    aside = tmp_path / f"{path.name}.f00d"
    assert [each.name for each in tmp_path.iterdir()] == [aside.name]
    other = written(tmp_path, MEASURED, header=replace(HEADER, fingerprint="beef")).read_bytes()
    tidy_journals(tmp_path, "f00d", never_saved)
    assert path.read_bytes() == content
    assert (tmp_path / f"{path.name}.beef").read_bytes() == other
    assert len(list(tmp_path.iterdir())) == 2


def test_what_is_saved_or_torn_in_its_first_line_is_removed(tmp_path: Path) -> None:
    kept = written(tmp_path, MEASURED)
    written(tmp_path, MEASURED, header=replace(HEADER, key="saved"))
    (tmp_path / "torn.rank0.jsonl").write_text('{"header": {"schema_ver')
    assert tidy_journals(tmp_path, "f00d", lambda key: key == "saved") == {}
    assert list(tmp_path.iterdir()) == [kept]
    tidy_journals(tmp_path / "not there yet", "f00d", never_saved)


@pytest.mark.parametrize("fingerprint", ["f00d", "beef"])
def test_a_folder_into_which_another_process_writes_is_left_alone(tmp_path: Path, fingerprint: str) -> None:
    with (
        Journal(tmp_path, HEADER) as journal,
        pytest.raises(ResultsError, match="is being written by another process"),
    ):
        tidy_journals(tmp_path, fingerprint, never_saved)
    assert journal.path.exists()


def test_a_journal_under_another_name_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, MEASURED)
    other = path.rename(path.with_name("another.rank0.jsonl"))
    with pytest.raises(ResultsRefused, match="is of 'tier-low_topk2_blocks3', process 0, and not what its name says"):
        read_journal(other)
