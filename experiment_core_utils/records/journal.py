"""The journal of a process's samples of one setting, written line by line so that none is lost.

One JSON object a line, of one key that says what it is, and `crc32`, that of the line without it: `header`
(JournalHeader), `warmup` (WarmUp), `conditions` (ConditionsReading), `sample` (FinishedSample), `group` (ArrivedGroup),
`rounds` (RoundsTrace), `energy` (SettingEnergy), `energy_pass` (EnergyPass), `energy_end` (EnergyPassesEnd),
`memory_pass` (MemoryPass), `load` (SettingLoad) or `end` (ShardDone).
The lines of a sample are on the disk before the next one begins. A process that is killed while it writes leaves the
beginning of a line; it is ignored when read, and cut off by the process that resumes. So samples that arrive together
are one line: all of them are finished or none is.
"""

import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from experiment_core_utils.primitives.errors import ResultsRefused, first_line
from experiment_core_utils.primitives.files import (
    FILE_NAME_PART,
    failed_writes_named,
    move_file,
    open_regular_file,
    read_regular_file,
    remove_file,
    shortened,
)
from experiment_core_utils.primitives.texts import without_hidden
from experiment_core_utils.records.at_dfe8f148 import completed_line
from experiment_core_utils.records.energy import EnergyPass, EnergyPassesEnd, SettingEnergy
from experiment_core_utils.records.locks import RunLock, locked_file, refuse_removed
from experiment_core_utils.records.result_files import check_schema, field_fault, parsed_json
from experiment_core_utils.records.settings import (
    ArrivalsTrace,
    ArrivedGroup,
    ConditionsReading,
    FinishedSample,
    JournalHeader,
    MeasuredSample,
    MemoryPass,
    RoundsTrace,
    SettingLoad,
    ShardDone,
    WarmUp,
)

JOURNAL_VERSION = 1
LOCK_NAME = "lock"
_CRC = re.compile(rb',"crc32":[0-9]{1,10}}$')
# Longer than any `end` line.
_TAIL_BYTES = 1 << 16
Line = (
    JournalHeader
    | WarmUp
    | ConditionsReading
    | FinishedSample
    | ArrivedGroup
    | RoundsTrace
    | SettingEnergy
    | EnergyPass
    | EnergyPassesEnd
    | MemoryPass
    | SettingLoad
    | ShardDone
)
Part = Line | ArrivalsTrace
P = TypeVar("P", bound=Part)
LINE_KINDS = {
    "header": JournalHeader,
    "warmup": WarmUp,
    "conditions": ConditionsReading,
    "sample": FinishedSample,
    "group": ArrivedGroup,
    "rounds": RoundsTrace,
    "energy": SettingEnergy,
    "energy_pass": EnergyPass,
    "energy_end": EnergyPassesEnd,
    "memory_pass": MemoryPass,
    "load": SettingLoad,
    "end": ShardDone,
}
_NAMES = {kind: name for name, kind in LINE_KINDS.items()}
_ADAPTERS: dict[str, TypeAdapter[Any]] = {name: TypeAdapter(kind) for name, kind in LINE_KINDS.items()}


@dataclass(frozen=True)
class JournalContent:
    """The whole lines of a journal, in order; in place of a group what it has."""

    lines: tuple[Part, ...]
    num_bytes: int  #: their length; what comes after them is torn

    @property
    def header(self) -> JournalHeader:
        """The first line."""
        first = self.lines[0]
        assert isinstance(first, JournalHeader)
        return first

    @property
    def last_header(self) -> JournalHeader:
        """The header of the run that took the journal up last."""
        return self.every(JournalHeader)[-1]

    def every(self, kind: type[P]) -> tuple[P, ...]:
        """The lines of one kind, in order."""
        return tuple(line for line in self.lines if isinstance(line, kind))

    @property
    def finished(self) -> tuple[FinishedSample, ...]:
        """The samples, in the order in which they were finished."""
        return self.every(FinishedSample)

    @property
    def energy(self) -> SettingEnergy | None:
        """The energy of a request's stages, which is measured once; None while it is not."""
        return next(iter(self.every(SettingEnergy)), None)

    @property
    def energy_end(self) -> EnergyPassesEnd | None:
        """The end of the energy passes; None while they are not done."""
        return next(iter(self.every(EnergyPassesEnd)), None)

    @property
    def end(self) -> ShardDone | None:
        """The last line where it is an end; None while samples may follow."""
        last = self.lines[-1]
        return last if isinstance(last, ShardDone) else None

    @property
    def experiment_ids(self) -> tuple[str, ...]:
        """The runs that finished samples here, in order."""
        return tuple(dict.fromkeys(each.experiment_id for each in self._headers_of_samples))

    @property
    def run_uids(self) -> tuple[str, ...]:
        """The `run_uid` of these runs, as far as they have one."""
        return tuple(dict.fromkeys(each.run_uid for each in self._headers_of_samples if each.run_uid is not None))

    @property
    def _headers_of_samples(self) -> Iterator[JournalHeader]:
        """The header in front of each finished sample."""
        current = self.header
        for line in self.lines:
            if isinstance(line, JournalHeader):
                current = line
            elif isinstance(line, FinishedSample):
                yield current


def journal_path(folder: Path, key: str, rank: int) -> Path:
    """Where a process keeps its samples of a setting."""
    return folder / f"{key}.rank{rank}.jsonl"


def read_journal(path: Path) -> JournalContent | None:
    """The whole lines of a journal; None where there is not even the first.

    Raises:
        ResultsRefused: a whole line is not what this version writes.
    """
    try:
        content = read_regular_file(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ResultsRefused(f"{path} cannot be read ({error.strerror}); move it away") from error
    whole = content[: content.rfind(b"\n") + 1]
    if not whole:
        return None
    lines = tuple(_decode(line, path, number) for number, line in enumerate(whole.splitlines(), 1))
    first = lines[0]
    if not isinstance(first, JournalHeader):
        raise ResultsRefused(f"{path} does not begin with a header; delete it")
    if journal_path(path.parent, first.key, first.rank).name != path.name.partition(".jsonl")[0] + ".jsonl":
        raise ResultsRefused(f"{path} is of {first.key!r}, process {first.rank}, and not what its name says; delete it")
    for number, line in enumerate(lines, 1):
        # Each run that resumes writes a header of its own.
        if isinstance(line, JournalHeader) and _belongs_to(line) != _belongs_to(first):
            raise ResultsRefused(f"{path}: line {number} is the header of another setting or run; delete the file")
    return JournalContent(tuple(chain.from_iterable(map(_parts_of, lines))), len(whole))


def _parts_of(line: Line) -> tuple[Part, ...]:
    return (*line.arrivals, *line.samples) if isinstance(line, ArrivedGroup) else (line,)


def _belongs_to(header: JournalHeader) -> tuple[str, int, str]:
    return header.key, header.rank, header.fingerprint


def read_end(path: Path) -> ShardDone | None:
    """The end of a journal that another process writes, without reading it all; None while there is none.

    Raises:
        ResultsRefused: it is not a file, or its end is not what this version writes.
    """
    try:
        with open_regular_file(path) as file:
            file.seek(max(os.fstat(file.fileno()).st_size - _TAIL_BYTES, 0))
            tail = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ResultsRefused(f"{path} cannot be read ({error.strerror}); move it away") from error
    whole = tail[: tail.rfind(b"\n") + 1].splitlines()
    if not whole or not whole[-1].startswith(b'{"end":'):
        return None
    end = _decode(whole[-1], path, None)
    return end if isinstance(end, ShardDone) else None


class Journal:
    """A journal that this process, and no other, appends to; torn ends are cut off when it is opened.

    Args:
        header: of the run that resumes; the journal's own first line must be of the same setting and fingerprint.

    Raises:
        ResultsRefused: another process has it open, or it belongs to another run.
        ResultsNotSaved: (also when appending) the disk does not take it, or the file was removed or moved, by itself or
            with its folder.
    """

    def __init__(self, folder: Path, header: JournalHeader) -> None:
        self.path = journal_path(folder, header.key, header.rank)
        with ExitStack() as stack:
            self._file = stack.enter_context(locked_file(self.path, waits=False))
            self.before = read_journal(self.path)
            if self.before is not None and self.before.header.fingerprint != header.fingerprint:
                raise ResultsRefused(
                    f"{self.path} belongs to another run; delete it, or resume with that run's command"
                )
            with failed_writes_named(self.path):
                os.ftruncate(self._file, self.before.num_bytes if self.before is not None else 0)
                os.lseek(self._file, 0, os.SEEK_END)
            self.append(header)
            self._open = stack.pop_all()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def append(self, line: Line) -> None:
        """Write one line and wait until it is on the disk."""
        content = _encode(line)
        refuse_removed(self._file, self.path)
        with failed_writes_named(self.path):
            written = 0
            while written < len(content):
                written += os.write(self._file, content[written:])
            os.fsync(self._file)


@contextmanager
def only_run_in(folder: Path) -> Iterator[RunLock]:
    """Inside, no other run works on the journals of this folder; the main process of each run asks for this.

    The lock is the main process's to refresh while it works.

    Raises:
        ResultsRefused: another run is at work.
        ResultsNotSaved: the folder cannot be made or written to.
    """
    path = folder / LOCK_NAME
    with locked_file(path, waits=False) as descriptor:
        yield RunLock(path, descriptor)


def journals_in(folder: Path) -> Iterator[Path]:
    """All journals of a folder, in order of their names.

    Raises:
        ResultsRefused: something else than a file has the name of one.
    """
    try:
        found = sorted(folder.glob("*.rank*.jsonl"))
    except FileNotFoundError:  # gone since: who writes there says so
        found = []
    for path in found:
        if re.search(r"\.rank[0-9]{1,9}$", path.stem):
            if os.path.lexists(path) and not path.is_file():
                raise ResultsRefused(
                    f"{path} is not a journal, but a folder, a pipe, a device or a link to nothing; move it away"
                )
            yield path


def tidy_journals(folder: Path, fingerprint: str, is_saved: Callable[[str], bool]) -> dict[str, int]:
    """Before a run: journals of other runs are set aside, its own that were set aside come back.

    Removed are those of settings whose result is saved, and those torn in their first line: no sample is lost.

    Returns:
        finished samples that were set aside now, by the key of their setting.

    Raises:
        ResultsError: a process of another run is writing here.
        OutputRefused, ResultsNotSaved: a journal cannot be moved or removed.
    """
    aside = Counter[str]()
    for path in folder.glob(f"*.jsonl.{fingerprint}"):
        own = path.with_suffix("")
        if not own.exists() or _fingerprint_of(own) != fingerprint:
            aside += _set_aside(own)
            move_file(path, own)
    for path in journals_in(folder):
        _refuse_where_written(path)
        content = read_journal(path)
        if content is None:
            remove_file(path)
        elif content.header.fingerprint != fingerprint:
            aside += _set_aside(path)
        elif is_saved(content.header.key):
            remove_file(path)
    return dict(aside)


def _set_aside(path: Path) -> Counter[str]:
    """Finished samples that it has, by the key of its setting."""
    content = read_journal(path)
    if content is None:
        return Counter()
    _refuse_where_written(path)
    move_file(path, path.with_name(f"{path.name}.{content.header.fingerprint}"))
    return Counter({content.header.key: len(content.finished)})


def _fingerprint_of(path: Path) -> str | None:
    content = read_journal(path)
    return None if content is None else content.header.fingerprint


def _refuse_where_written(path: Path) -> None:
    with locked_file(path, waits=False):
        pass


def own_journals(folder: Path, key: str, fingerprint: str) -> dict[int, JournalContent]:
    """Journals by rank: every journal of a setting that belongs to the run, also of processes that it has no more."""
    found = {}
    for path in journals_in(folder):
        name, _, rank = path.stem.rpartition(".rank")
        if name == key and (content := read_journal(path)) is not None and content.header.fingerprint == fingerprint:
            found[int(rank)] = content
    return found


def finished_samples(folder: Path, key: str, fingerprint: str) -> dict[int, FinishedSample]:
    """Finished samples by id: the samples of a setting that no process has to measure any more."""
    journals = own_journals(folder, key, fingerprint).values()
    return {finished.sample_id: finished for content in journals for finished in content.finished}


def remove_journals(folder: Path, key: str) -> None:
    """Remove a setting's journals: it is saved as a whole."""
    for path in journals_in(folder):
        if path.stem.rpartition(".rank")[0] == key:
            remove_file(path)


def _encode(line: Line) -> bytes:
    kind = _NAMES[type(line)]
    written = f'{{"{kind}":{without_hidden(_ADAPTERS[kind].dump_json(line).decode())}'.encode()
    return written + b',"crc32":%d}\n' % zlib.crc32(written + b"}")


def _decode(line: bytes, path: Path, number: int | None) -> Line:
    where = "its last line" if number is None else f"line {number}"
    try:
        parsed = parsed_json(line)
        checksum = parsed.pop("crc32", None)
        ((kind, content),) = parsed.items()
        if kind == "header":
            advice = "resume with the version that wrote it, or delete it"
            check_schema(content["schema_version"], JOURNAL_VERSION, f"{path} is not a journal", advice)
        decoded: Line = _ADAPTERS[kind].validate_json(to_json(completed_line(kind, content)), strict=True)
    except ValidationError as error:
        raise ResultsRefused(
            f"{path}: {where} is not one of this version's journal: {kind} {field_fault(error)}; delete it, or that "
            "line alone"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f" ({first_line(error)})" if isinstance(error, ValueError) else ""
        raise ResultsRefused(f"{path}: {where} is not one of this version's journal{reason}; delete it") from error
    fault = _fault_of(decoded)
    # Commit dfe8f148 wrote none.
    if fault is None and checksum is not None and checksum != zlib.crc32(_CRC.sub(b"}", line)):
        fault = "it was EDITED: its crc32 is that of another line"
    if fault is not None:
        raise ResultsRefused(f"{path}: {where} is broken: {fault}; delete it, or that line alone")
    return decoded


def _fault_of(line: Line) -> str | None:
    """What no run writes: a name that leads out of the folder, a sample without an outcome, a time below 0."""
    if isinstance(line, JournalHeader):
        # Labels of knobs may have points.
        names = {
            "key": line.key.replace(".", "-"),
            "fingerprint": line.fingerprint,
            "experiment_id": line.experiment_id,
        }
        wrong = next((name for name, value in names.items() if not re.fullmatch(FILE_NAME_PART, value)), None)
        return None if wrong is None else f"{wrong} is {shortened(names[wrong])}, which is part of file names"
    if isinstance(line, ArrivedGroup):
        return next((fault for each in line.samples if (fault := _fault_of(each)) is not None), None)
    if not isinstance(line, FinishedSample):
        return None
    if (line.measured is None) == (line.failed is None):
        return "a sample is either measured or failed"
    return None if line.measured is None else _sample_fault(line.measured)


def _sample_fault(sample: MeasuredSample) -> str | None:
    if bool(sample.runs) == (sample.answer is not None):
        return "a sample has either runs or an answer of a batch"
    if any(run.decode_s is None and run.inter_token_s for run in sample.runs):
        return "decode_s and inter_token_s do not fit together"
    if any((run.prefill_s is None) == (run.first_token_s is None) for run in sample.runs):
        return "a run has either prefill_s or first_token_s"
    stages = ("vision_s", "prefill_s", "first_token_s", "decode_s", "total_s")
    for name, value in (each for run in sample.runs for each in ((name, getattr(run, name)) for name in stages)):
        if value is not None and value <= 0:
            return f"{name} is {value}, and a time is above 0"
    return None
