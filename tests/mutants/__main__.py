"""Runs the killing test of each listed mutant, with the change and without it.

    python -m tests.mutants [WORD ...]      # those whose file or test has one of the words

A child is forked for each, from a process that has imported the libraries and none of the project's modules. Which
libraries these are the first child says, which runs all the tests without a change. The command ends with 1 where a
mutant survives, or a test fails without it.
"""

import importlib
import os
import re
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.mutants.changed_source import Mutant, listed_mutants

OWN = ("experiment_core_utils", "experiments", "knob_profiler", "scripts", "tests")
OPTIONS = ("-q", "-x", "-n0", "-p", "no:cacheprovider", "--no-header", "-W", "ignore")


def outcome(tests: list[str], log: Path, mutant: Mutant | None = None) -> int:
    """Pytest's exit code in a child of its own, which leaves the names of what it has imported beside the log."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 70
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        if mutant is not None:
            mutant.import_changed()
        code = int(pytest.main([*OPTIONS, *tests]))
        log.with_suffix(".modules").write_text("\n".join(sys.modules))
    finally:
        os._exit(code)


def import_libraries(names: list[str]) -> None:
    """Import those of the modules that are not the project's, and that can be imported by their names."""
    libraries = [name for name in names if name.partition(".")[0] not in (*OWN, "__main__", "conftest")]
    for name in libraries:
        with suppress(Exception):
            importlib.import_module(name)
    if "torch" in libraries:
        sys.modules["torch"].set_num_threads(1)


def main(words: list[str]) -> int:
    mutants = [each for each in listed_mutants() if not words or any(word in each.file + each.test for word in words)]
    survivors = []
    with TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        if outcome(sorted({each.test for each in mutants}), log) != 0:
            print(log.read_text()[-3000:], "the tests fail without any change", sep="\n")
            return 1
        import_libraries(log.with_suffix(".modules").read_text().splitlines())
        for each in mutants:
            started = time.monotonic()
            code = outcome([each.test], log, each)
            failed = re.search(r"^FAILED (\S+)", log.read_text(), re.MULTILINE)
            word = (
                f"killed by {failed[1]}"
                if code == 1 and failed
                else "SURVIVES"
                if code == 0
                else f"BROKEN (pytest ended with {code})"
            )
            print(f"{word} in {time.monotonic() - started:.0f} s: {each.file}: {each.why}", flush=True)
            if not word.startswith("killed"):
                survivors.append(each)
                print("" if code == 0 else log.read_text()[-2000:], end="")
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} mutants are killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
