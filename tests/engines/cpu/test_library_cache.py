"""What was compiled is loaded again by the next process, and nothing else is taken for it."""

import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from experiment_core_utils.engines.cpu.build import (
    FOLDER,
    built,
    cached_file,
    found_compiler,
    store,
    verified_content,
)
from experiment_core_utils.primitives.errors import ConfigurationError
from tests.engines.cpu_compiler import needs_compiler

pytestmark = needs_compiler
SOURCES = [FOLDER / "vision_block.cpp"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "inference_knob_profiler" / "cpu_kernels"


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that writes a line for each of its runs."""
    compiler = shlex.join(found_compiler())
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
        assert callable(built("vision_block.cpp").vision_project)
    # Once called for its macros, once compiled, once linked.
    assert runs(noted) == 3 and len(list(cache.iterdir())) == 1


def test_other_constants_and_another_compiler_are_another_library(
    cache: Path, noted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built("vision_block.cpp")
    built("vision_block.cpp", SOMETHING=1)
    assert runs(noted) == 6
    monkeypatch.setenv("CXX", f"{os.environ['CXX']} -g0")
    built("vision_block.cpp")
    assert runs(noted) == 9 and len(list(cache.iterdir())) == 3


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.75, 0.99])
def test_a_file_that_was_cut_off_is_made_again(cache: Path, noted: Path, share: float) -> None:
    """Loaded as it is, such a file ends the process by a bus error."""
    built("vision_block.cpp")
    (cached,) = cache.iterdir()
    # A new file: the old one is in use here.
    content = cached.read_bytes()
    cached.unlink()
    cached.write_bytes(content[: int(share * len(content))])
    assert callable(built("vision_block.cpp").vision_project)
    assert runs(noted) == 6 and cached.read_bytes() == content


def test_a_file_that_is_no_library_is_made_again(cache: Path, noted: Path) -> None:
    built("vision_block.cpp")
    (cached,) = cache.iterdir()
    cached.unlink()
    no_library = cache.parent / "no_library"
    no_library.write_bytes(b"no library")
    store(no_library, cached)
    assert verified_content(cached) == b"no library"
    assert callable(built("vision_block.cpp").vision_project)
    assert runs(noted) == 6 and len(list(cache.iterdir())) == 1


def test_each_folder_of_the_cache_is_this_users_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store(SOURCES[0], tmp_path / "cache" / "project" / "kernels" / "library.so")
    finally:
        os.umask(before)
    made = [tmp_path / "cache", tmp_path / "cache" / "project", tmp_path / "cache" / "project" / "kernels"]
    assert [folder.stat().st_mode & 0o777 for folder in made] == [0o700] * 3


def test_without_a_folder_it_is_compiled_each_time(tmp_path: Path, cache: Path, noted: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    for _ in range(2):
        assert callable(built("vision_block.cpp").vision_project)
    assert runs(noted) == 6
    with pytest.raises(ConfigurationError, match=r"cpu_kernels does not keep compiled kernels: .*Not a directory"):
        store(SOURCES[0], cache / "library.so")


def test_the_name_tells_sources_and_programs_apart(tmp_path: Path, cache: Path) -> None:
    program, source = tmp_path / "program", tmp_path / "source.cpp"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    source.write_text("int one;")
    first = cached_file([str(program), "-O3"], [source])
    assert first.parent == cache and first == cached_file([str(program), "-O3"], [source])
    assert first != cached_file([str(program), "-O2"], [source])
    program.write_text("#!/bin/sh\n# A newer one.\n")
    newer = cached_file([str(program), "-O3"], [source])
    source.write_text("int two;")
    assert len({first, newer, cached_file([str(program), "-O3"], [source])}) == 3


def test_a_relative_cache_folder_is_not_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As the XDG base directory specification has it."""
    monkeypatch.setenv("XDG_CACHE_HOME", "somewhere")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cached_file(["g++"], SOURCES).is_relative_to(tmp_path / ".cache")


def plant(cached: Path, marker: Path) -> bytes:
    """A whole library in the cache that makes the marker file as soon as it is loaded."""
    source, library = marker.with_suffix(".c"), marker.with_suffix(".so")
    source.write_text(
        f'#include <stdio.h>\n__attribute__((constructor)) static void run(void) {{ fclose(fopen("{marker}", "w")); }}'
    )
    subprocess.run([*found_compiler(), "-x", "c", "-shared", "-fPIC", source, "-o", library], check=True)
    store(library, cached)
    return cached.read_bytes()


def given_away(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if another user owned folder and file."""
    monkeypatch.setattr(os, "geteuid", lambda: cached.stat().st_uid + 1)


def open_folder(cached: Path, _: pytest.MonkeyPatch) -> None:
    cached.parent.chmod(0o777)


def open_file(cached: Path, _: pytest.MonkeyPatch) -> None:
    cached.chmod(0o620)


REFUSED = pytest.mark.parametrize(
    ("make", "output"),
    [
        (given_away, r"cpu_kernels belongs to user \d+, not to this user \(\d+\); remove it, or set XDG_CACHE_HOME"),
        (open_folder, r"other users may write to .*cpu_kernels; run: chmod go-w .*cpu_kernels$"),
        (open_file, r"other users may write to .*library\.so; run: chmod go-w"),
    ],
)


@REFUSED
def test_what_another_user_may_have_written_is_not_read(
    make: Callable[[Path, pytest.MonkeyPatch], None], output: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = cache / "library.so"
    store(SOURCES[0], cached)
    assert verified_content(cached) == SOURCES[0].read_bytes()
    make(cached, monkeypatch)
    with pytest.raises(ConfigurationError, match=output):
        verified_content(cached)


def test_nothing_is_kept_in_a_folder_that_others_may_write_to(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o770)
    with pytest.raises(ConfigurationError, match="other users may write to"):
        store(SOURCES[0], cache / "library.so")
    assert list(cache.iterdir()) == []


def test_links_and_pipes_are_not_followed(tmp_path: Path, cache: Path) -> None:
    cached, elsewhere = cache / "library.so", tmp_path / "elsewhere"
    store(SOURCES[0], cached)
    cached.rename(cache / "moved.so")
    cached.symlink_to(cache / "moved.so")
    assert verified_content(cached) is None
    cached.unlink()
    os.mkfifo(cached, 0o600)
    assert verified_content(cached) is None
    cached.unlink()
    (cache / "moved.so").rename(cached)
    cache.rename(elsewhere)
    cache.symlink_to(elsewhere)
    assert verified_content(cached) is None
    with pytest.raises(ConfigurationError, match="does not keep compiled kernels"):
        store(SOURCES[0], cached)


def test_a_planted_library_is_not_loaded(
    tmp_path: Path, cache: Path, noted: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    built("vision_block.cpp")
    (cached,) = cache.iterdir()
    cached.unlink()
    marker = tmp_path / "marker"
    planted = plant(cached, marker)
    open_folder(cached, monkeypatch)
    assert callable(built("vision_block.cpp").vision_project)
    assert not marker.exists() and cached.read_bytes() == planted
    assert [record.getMessage() for record in caplog.records] == [
        "compiled CPU kernels are neither loaded from the cache nor kept there: other users may write to "
        f"{cache}; run: chmod go-w {cache}"
    ]
    # It is what would have been loaded.
    cache.chmod(0o700)
    content = verified_content(cached)
    assert content is not None and planted.startswith(content)
