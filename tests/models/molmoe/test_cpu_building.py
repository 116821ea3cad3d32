"""The compiler is found as it was asked for, and whatever stands in its way is one named error."""

import shutil
import tempfile
from pathlib import Path

import pytest

from experiment_core_utils.models.molmoe.cpu_kernels import building
from experiment_core_utils.models.molmoe.cpu_kernels.building import COMPILERS, built
from experiment_core_utils.primitives.errors import ConfigurationError

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="there is no C++ compiler")


@needs_compiler
def test_a_launcher_and_flags_may_stand_around_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = next(filter(None, map(shutil.which, COMPILERS)))
    monkeypatch.setenv("CXX", f"env 'SOME NAME=1' {compiler} -g0")
    assert callable(built("rows.cpp").normalise)


@needs_compiler
def test_a_blank_name_asks_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", " ")
    assert callable(built("rows.cpp").normalise)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("no-such-launcher g++", r"^there is no C\+\+ compiler \(no-such-launcher g\+\+\)$"),
        ("g++ 'open", r"^CXX=g\+\+ 'open cannot be read as a command: No closing quotation$"),
    ],
)
def test_what_is_no_compiler_is_said(asked: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", asked)
    with pytest.raises(ConfigurationError, match=said):
        built("rows.cpp")


def test_a_temporary_folder_that_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "true")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(ConfigurationError, match=r"^rows\.cpp has no temporary folder to be compiled in: .*gone"):
        built("rows.cpp")


def test_a_compiler_that_does_not_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "sh -c 'exec sleep 30'")
    monkeypatch.setattr(building, "MOST_S", 0.1)
    with pytest.raises(ConfigurationError, match=r"^the C\+\+ compiler takes more than 0\.1 s for rows\.cpp$"):
        built("rows.cpp")
