"""What was compiled is loaded again by the next process, and nothing else is taken for it."""

import os
import shutil
from pathlib import Path

import pytest

from experiment_core_utils.models.molmoe.cpu_kernels.building import COMPILERS, FOLDER, built
from experiment_core_utils.models.molmoe.cpu_kernels.kept_libraries import is_whole, keep, kept_file
from experiment_core_utils.primitives.errors import ConfigurationError

SOURCES = [FOLDER / "rows.cpp"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "inference_knob_profiler" / "cpu_kernels"


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that writes a line for each of its runs."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    notes, script = tmp_path / "notes", tmp_path / "compiler"
    script.write_text(f'#!/bin/sh\necho run >> {notes}\nexec {compiler} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    notes.touch()
    return notes


def runs(notes: Path) -> int:
    return len(notes.read_text().splitlines())


def test_a_library_is_compiled_once(cache: Path, noted: Path) -> None:
    for _ in range(2):
        assert callable(built("rows.cpp").normalise)
    # Once compiled, once linked.
    assert runs(noted) == 2 and len(list(cache.iterdir())) == 1


def test_other_constants_and_another_compiler_are_another_library(
    cache: Path, noted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built("rows.cpp")
    built("rows.cpp", SOMETHING=1)
    assert runs(noted) == 4
    monkeypatch.setenv("CXX", f"{os.environ['CXX']} -g0")
    built("rows.cpp")
    assert runs(noted) == 6 and len(list(cache.iterdir())) == 3


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.75, 0.99])
def test_a_file_that_was_cut_off_is_made_again(cache: Path, noted: Path, share: float) -> None:
    """Loaded as it is, such a file ends the process by a bus error."""
    built("rows.cpp")
    (kept,) = cache.iterdir()
    # A new file: the old one is in use here.
    content = kept.read_bytes()
    kept.unlink()
    kept.write_bytes(content[: int(share * len(content))])
    assert callable(built("rows.cpp").normalise)
    assert runs(noted) == 4 and kept.read_bytes() == content


def test_a_file_that_is_no_library_is_made_again(cache: Path, noted: Path) -> None:
    built("rows.cpp")
    (kept,) = cache.iterdir()
    kept.unlink()
    no_library = cache.parent / "no_library"
    no_library.write_bytes(b"no library")
    keep(no_library, kept)
    assert is_whole(kept)
    assert callable(built("rows.cpp").normalise)
    assert runs(noted) == 4 and len(list(cache.iterdir())) == 1


def test_without_a_folder_it_is_compiled_each_time(tmp_path: Path, cache: Path, noted: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    for _ in range(2):
        assert callable(built("rows.cpp").normalise)
    assert runs(noted) == 4
    with pytest.raises(ConfigurationError, match=r"cpu_kernels does not keep compiled kernels: .*Not a directory"):
        keep(SOURCES[0], cache / "library.so")


def test_the_name_tells_sources_and_programs_apart(tmp_path: Path, cache: Path) -> None:
    program, source = tmp_path / "program", tmp_path / "source.cpp"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    source.write_text("int one;")
    first = kept_file([str(program), "-O3"], [source])
    assert first.parent == cache and first == kept_file([str(program), "-O3"], [source])
    assert first != kept_file([str(program), "-O2"], [source])
    program.write_text("#!/bin/sh\n# A newer one.\n")
    newer = kept_file([str(program), "-O3"], [source])
    source.write_text("int two;")
    assert len({first, newer, kept_file([str(program), "-O3"], [source])}) == 3


def test_a_relative_cache_folder_is_not_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As the XDG base directory specification has it."""
    monkeypatch.setenv("XDG_CACHE_HOME", "somewhere")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert kept_file(["g++"], SOURCES).is_relative_to(tmp_path / ".cache")
