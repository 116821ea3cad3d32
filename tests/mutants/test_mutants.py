"""The list of mutants cannot rot unseen: each change still fits its file, and each killing test is still there.

`python -m tests.mutants` runs them, which takes minutes.
"""

import ast

import pytest

from tests.mutants.changed_source import REPOSITORY, Mutant, listed_mutants

MUTANTS = listed_mutants()


def test_every_change_fits_its_file_once_and_gives_python() -> None:
    for each in MUTANTS:
        ast.parse(each.source())
        assert each.new != each.old and each.why
    assert len({(each.file, each.old, each.new) for each in MUTANTS}) == len(MUTANTS)


def test_every_killing_test_is_there() -> None:
    for each in MUTANTS:
        file, _, name = each.test.partition("::")
        path = REPOSITORY / file
        assert path.exists(), each.test
        assert not name or f"def {name.partition('[')[0]}(" in path.read_text(), each.test


def test_a_change_that_does_not_fit_is_an_error() -> None:
    for old in ("no such text", "import"):
        with pytest.raises(ValueError, match=r"statistics\.py has \d+ times .*, not once"):
            Mutant("experiment_core_utils/primitives/statistics.py", old, "x", "", "").source()
