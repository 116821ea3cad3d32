"""Functions by Inductor, compiled here to C++ in place of a GPU's kernels."""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from experiment_core_utils.models.hf.static_cache_decode import CACHE, InductorFunction
from experiment_core_utils.primitives.errors import ConfigurationError
from tests.engines.cpu_compiler import needs_compiler


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one that is to be chosen, while none is given."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # What torch puts there where it finds nothing.
    monkeypatch.setenv(CACHE, f"{tempfile.gettempdir()}/torchinductor_someone")
    return tmp_path / "inference_knob_profiler" / "inductor"


@needs_compiler
def test_each_function_is_compiled_by_itself_and_kept(folder: Path) -> None:
    """Under a limit that the second one would reach if it shared the code of the first."""
    x = torch.tensor([[1.0, 2.0, 5.0]])
    with torch._dynamo.config.patch(recompile_limit=1):
        made: list[InductorFunction[Any]] = []
        for factor in (2.0, 3.0):
            made.append(InductorFunction(lambda row, factor=factor: row.square() * factor + 1, "the function"))
            assert made[-1].compile_s is None
            assert made[-1](x).tolist() == [[1 * factor + 1, 4 * factor + 1, 25 * factor + 1]]
    assert [each(x).tolist()[0] for each in made] == [[3.0, 9.0, 51.0], [4.0, 13.0, 76.0]]
    assert all(each.compile_s is not None and each.compile_s > 0 for each in made)
    assert folder.stat().st_mode & 0o777 == 0o700 and list((folder / "fxgraph").rglob("*"))


def test_a_folder_that_is_given_stays(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path / "given"))
    InductorFunction(torch.square, "the function")
    assert os.environ[CACHE] == str(tmp_path / "given") and not folder.exists()


def test_a_folder_of_others_is_refused(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(ConfigurationError, match="^other users may write to .*inductor; run: chmod go-w "):
        InductorFunction(torch.square, "the function")


def test_a_function_that_asks_the_host_is_refused(folder: Path) -> None:
    asks: InductorFunction[Any] = InductorFunction(lambda row: row if row.sum() > 0 else -row, "the step")
    with pytest.raises(ConfigurationError, match=r"^Inductor cannot compile the step \(\w+: .*\)$"):
        asks(torch.ones(3))
    assert asks.compile_s is None


def test_a_function_that_would_not_be_compiled_is_refused(folder: Path) -> None:
    plain: InductorFunction[Any] = InductorFunction(torch.square, "the step")
    with torch.compiler.set_stance("force_eager"), pytest.raises(ConfigurationError, match="^the step is not compiled"):
        plain(torch.ones(3))
