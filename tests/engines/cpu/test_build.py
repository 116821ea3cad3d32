"""The compiler is found as it was requested, and whatever stands in its way is one named error."""

import ctypes
import shlex
import shutil
import tempfile
from pathlib import Path

import pytest

from experiment_core_utils.engines.cpu import build as building
from experiment_core_utils.engines.cpu.build import built, found_compiler, refuse_other_openmp
from experiment_core_utils.primitives.errors import ConfigurationError
from tests.engines.cpu_compiler import needs_compiler


@needs_compiler
def test_a_launcher_and_flags_may_stand_around_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"env 'SOME NAME=1' {shlex.join(found_compiler())} -g0")
    assert callable(built("vision_block.cpp").vision_project)


@needs_compiler
def test_a_blank_name_asks_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", " ")
    assert callable(built("vision_block.cpp").vision_project)


@pytest.mark.parametrize(
    ("command", "output"),
    [
        (
            "no-such-launcher g++",
            r"^CXX=no-such-launcher g\+\+ names no program that can be run: no-such-launcher is not found$",
        ),
        ("g++ 'open", r"^CXX=g\+\+ 'open cannot be read as a command: No closing quotation$"),
    ],
)
def test_what_is_no_compiler_is_refused(command: str, output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", command)
    with pytest.raises(ConfigurationError, match=output):
        built("vision_block.cpp")


def test_a_machine_without_a_compiler_gets_the_advice_which_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigurationError, match=r"^there is no C\+\+ compiler; install one of g\+\+, c\+\+"):
        built("vision_block.cpp")


@pytest.mark.skipif(shutil.which("clang++") is None, reason="there is no clang++")
@pytest.mark.skipif(hasattr(ctypes.CDLL(None), "__kmpc_fork_call"), reason="torch has loaded LLVM's OpenMP")
def test_clang_is_refused_where_torch_brings_another_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "clang++ -g0")
    with pytest.raises(ConfigurationError, match=r"clang\+\+ -g0 is clang, whose code needs LLVM's OpenMP, .* set CXX"):
        built("vision_block.cpp")


def a_compiler(folder: Path, script: str) -> str:
    """The path of a shell script."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_clang_is_taken_where_torch_has_loaded_its_openmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another function that every process has stands for LLVM's."""
    compiler = [a_compiler(tmp_path, "echo '#define __clang__ 1'")]
    monkeypatch.setattr(building, "LLVM_OPENMP", "no_function_of_this_name")
    with pytest.raises(ConfigurationError, match="is clang"):
        refuse_other_openmp(compiler)
    monkeypatch.setattr(building, "LLVM_OPENMP", "malloc")
    refuse_other_openmp(compiler)


@pytest.mark.parametrize(
    ("script", "output"),
    [
        ("echo 'included from x:' >&2; echo 'x:3: error: no such' >&2; exit 1", "x:3: error: no such"),
        ("echo 'cannot start' >&2; exit 1", "cannot start"),
        ("exit 3", "exit code 3"),
    ],
)
def test_the_first_error_of_the_compiler_is_the_reason(
    script: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", a_compiler(tmp_path, script))
    with pytest.raises(ConfigurationError, match=rf"^the C\+\+ compiler refuses an empty file: {output}$"):
        built("vision_block.cpp")


@needs_compiler
def test_a_library_that_lacks_a_function_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This compiler makes an empty library of whatever it is given."""
    (tmp_path / "empty.cpp").write_text("")
    real = f'{shlex.join(found_compiler())} -shared -fPIC {tmp_path}/empty.cpp -o "$last"'
    monkeypatch.setenv("CXX", a_compiler(tmp_path, f'for last; do :; done\ncase "$*" in *-shared*) {real};; esac'))
    with pytest.raises(ConfigurationError, match=r"^what was made of attention\.cpp lacks attend; check the compiler"):
        built("attention.cpp", HEAD=32)


def test_a_temporary_folder_that_is_not_there_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "true")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(
        ConfigurationError, match=r"^vision_block\.cpp has no temporary folder to be compiled in: .*gone"
    ):
        built("vision_block.cpp")


def test_a_compiler_that_does_not_end_is_stopped_after_a_line_that_says_what_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "sh -c 'exec sleep 30'")
    monkeypatch.setattr(building, "MOST_S", 0.5)
    for after_s, lines in ((0.01, 1), (15.0, 0)):
        monkeypatch.setattr(building, "SAYS_AFTER_S", after_s)
        caplog.clear()
        with pytest.raises(ConfigurationError, match=r"^the C\+\+ compiler takes more than 0\.5 s for an empty file$"):
            built("vision_block.cpp")
        known = [each.getMessage() for each in caplog.records]
        shell = shutil.which("sh")
        assert known == [f"waiting for the C++ compiler ({shell}) for an empty file, at most 0.5 s"] * lines
