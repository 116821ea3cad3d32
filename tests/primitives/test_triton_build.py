"""Triton's errors while it builds kernels get the project's name; all others go through."""

import subprocess
import sys

import pytest

from experiment_core_utils.primitives.errors import ConfigurationError, ProfilerError, SettingError
from experiment_core_utils.primitives.files import REPOSITORY
from experiment_core_utils.primitives.triton_build import built


@pytest.mark.parametrize("refused", [ConfigurationError, SettingError])
def test_errors_of_building_are_refusals(refused: type[ProfilerError]) -> None:
    errors = pytest.importorskip("triton.errors")
    for error, output in (
        (errors.TritonError("out of registers\nand more"), "out of registers"),
        (subprocess.CalledProcessError(1, "ptxas"), "Command 'ptxas' returned non-zero exit status 1."),
        (RuntimeError("Failed to find C compiler. Please specify"), "Failed to find C compiler. Please specify"),
    ):
        with pytest.raises(ProfilerError) as found, built("the kernels of the step", refused):
            raise error
        assert type(found.value) is refused
        assert str(found.value) == f"Triton does not build the kernels of the step: {output}"


def test_other_errors_are_not() -> None:
    pytest.importorskip("triton")
    with pytest.raises(RuntimeError, match="^CUDA error$"), built("the kernels", ConfigurationError):
        raise RuntimeError("CUDA error")


def test_importing_it_needs_no_triton() -> None:
    code = "import sys; import experiment_core_utils.primitives.triton_build; sys.exit(int('triton' in sys.modules))"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)
