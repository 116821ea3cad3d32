"""A mark for tests that need kernels compiled on this machine."""

import pytest

from experiment_core_utils.engines.cpu.build import found_compiler, refuse_other_openmp
from experiment_core_utils.primitives.errors import ConfigurationError


def _unsupported_reason() -> str | None:
    try:
        refuse_other_openmp(found_compiler())
    except ConfigurationError as error:
        return str(error)
    return None


_REASON = _unsupported_reason()
needs_compiler = pytest.mark.skipif(_REASON is not None, reason=_REASON or "")
