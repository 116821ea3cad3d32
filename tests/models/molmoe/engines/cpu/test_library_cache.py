"""What was compiled is loaded again by the next process, and nothing else is taken for it."""

import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from experiment_core_utils.models.molmoe.engines.cpu.build import (
    FOLDER,
    built,
    found_compiler,
    keep,
    kept_file,
    verified_content,
)
from experiment_core_utils.primitives.errors import ConfigurationError
from tests.models.molmoe.cpu_compiler import needs_compiler

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
        assert callable(built("vision_block.cpp").tile_width)
    # Once asked for its macros, once compiled, once linked.
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
    (kept,) = cache.iterdir()
    # A new file: the old one is in use here.
    content = kept.read_bytes()
    kept.unlink()
    kept.write_bytes(content[: int(share * len(content))])
    assert callable(built("vision_block.cpp").tile_width)
    assert runs(noted) == 6 and kept.read_bytes() == content


def test_a_file_that_is_no_library_is_made_again(cache: Path, noted: Path) -> None:
    built("vision_block.cpp")
    (kept,) = cache.iterdir()
    kept.unlink()
    no_library = cache.parent / "no_library"
    no_library.write_bytes(b"no library")
    keep(no_library, kept)
    assert verified_content(kept) == b"no library"
    assert callable(built("vision_block.cpp").tile_width)
    assert runs(noted) == 6 and len(list(cache.iterdir())) == 1


def test_without_a_folder_it_is_compiled_each_time(tmp_path: Path, cache: Path, noted: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    for _ in range(2):
        assert callable(built("vision_block.cpp").tile_width)
    assert runs(noted) == 6
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


def plant(kept: Path, marker: Path) -> bytes:
    """A whole library in the cache that makes the marker file as soon as it is loaded."""
    source, library = marker.with_suffix(".c"), marker.with_suffix(".so")
    source.write_text(
        f'#include <stdio.h>\n__attribute__((constructor)) static void run(void) {{ fclose(fopen("{marker}", "w")); }}'
    )
    subprocess.run([*found_compiler(), "-x", "c", "-shared", "-fPIC", source, "-o", library], check=True)
    keep(library, kept)
    return kept.read_bytes()


def given_away(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if another user owned folder and file."""
    monkeypatch.setattr(os, "geteuid", lambda: kept.stat().st_uid + 1)


def open_folder(kept: Path, _: pytest.MonkeyPatch) -> None:
    kept.parent.chmod(0o777)


def open_file(kept: Path, _: pytest.MonkeyPatch) -> None:
    kept.chmod(0o620)


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
    kept = cache / "library.so"
    keep(SOURCES[0], kept)
    assert verified_content(kept) == SOURCES[0].read_bytes()
    make(kept, monkeypatch)
    with pytest.raises(ConfigurationError, match=output):
        verified_content(kept)


def test_nothing_is_kept_in_a_folder_that_others_may_write_to(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o770)
    with pytest.raises(ConfigurationError, match="other users may write to"):
        keep(SOURCES[0], cache / "library.so")
    assert list(cache.iterdir()) == []


def test_links_and_pipes_are_not_followed(tmp_path: Path, cache: Path) -> None:
    kept, elsewhere = cache / "library.so", tmp_path / "elsewhere"
    keep(SOURCES[0], kept)
    kept.rename(cache / "moved.so")
    kept.symlink_to(cache / "moved.so")
    assert verified_content(kept) is None
    kept.unlink()
    os.mkfifo(kept, 0o600)
    assert verified_content(kept) is None
    kept.unlink()
    (cache / "moved.so").rename(kept)
    cache.rename(elsewhere)
    cache.symlink_to(elsewhere)
    assert verified_content(kept) is None
    with pytest.raises(ConfigurationError, match="does not keep compiled kernels"):
        keep(SOURCES[0], kept)


def test_a_planted_library_is_not_loaded(
    tmp_path: Path, cache: Path, noted: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    built("vision_block.cpp")
    (kept,) = cache.iterdir()
    kept.unlink()
    marker = tmp_path / "marker"
    planted = plant(kept, marker)
    open_folder(kept, monkeypatch)
    assert callable(built("vision_block.cpp").tile_width)
    assert not marker.exists() and kept.read_bytes() == planted
    assert [record.getMessage() for record in caplog.records] == [
        "compiled CPU kernels are neither loaded from the cache nor kept there: other users may write to "
        f"{cache}; run: chmod go-w {cache}"
    ]
    # It is what would have been loaded.
    cache.chmod(0o700)
    content = verified_content(kept)
    assert content is not None and planted.startswith(content)
