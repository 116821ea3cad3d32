"""The errors of the project: one class for each different reaction of the caller."""

from collections.abc import Iterator
from contextlib import contextmanager

# What the code of a library raises where what it is given is not as it expects.
LIBRARY_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


class ProfilerError(Exception):
    """Base of all errors that the project raises on purpose; its message is one line for the user."""

    exit_code = 1


class ConfigurationError(ProfilerError):
    """Something that was requested cannot be done: stop before loading. Exit code 2."""

    exit_code = 2


class HubUnreachable(ConfigurationError):
    """The hub does not answer, and what is requested from it is not in the cache: nothing else comes from it either."""


class ImpossibleCombination(ConfigurationError):
    """A point of a grid that the other values or the model rule out: a grid leaves it out and says why, as long as
    another point is possible.
    """


class SampleError(ProfilerError):
    """One sample cannot be read or run: record it, count it and continue."""


class SampleTimedOut(SampleError):
    """One sample took longer than `--sample_timeout`."""


class SettingError(ProfilerError):
    """One knob setting cannot be run (out of memory, a knob that does not act): record it by its class and continue."""


class OutOfMemory(SettingError):
    """The device or the host has no memory left for this setting."""


class GenerationFailed(SettingError):
    """The model broke off while it generated (weights that are not finite, a kernel that refuses)."""


class KnobDidNotAct(SettingError):
    """What ran is not what the setting requested."""


class MeterUnavailable(ProfilerError):
    """What would measure is not there: run without it, and say so."""


class EnergyRefused(MeterUnavailable):
    """A text run requires energy, and nothing here measures it: stop before loading. Exit code 2."""

    exit_code = 2


class WorkerLost(ProfilerError):
    """A process of the run is gone or the launch does not match what was requested: stop all."""


class ResultsError(ProfilerError):
    """Results are not there, too few, or do not belong together."""


class ResultsRefused(ResultsError):
    """A results file is damaged, of another schema or not what its name says, or another run is at work on it. Exit
    code 2."""

    exit_code = 2


class ResultsNotSaved(ProfilerError):
    """The disk is full or gone: stop, what was finished before is safe."""


class OutputRefused(ResultsNotSaved):
    """The place that was given cannot be written to, however much room there is. Exit code 2."""

    exit_code = 2


class Stopped(ProfilerError):
    """A stop was requested, and the run stopped between two samples. Exit code 130."""

    exit_code = 130


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@contextmanager
def package_of_extra(package: str, extra: str) -> Iterator[None]:
    """Context of the import of an optional package; raises ConfigurationError where it is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ConfigurationError(
            f"the package {package} is not installed; run: pip install {package} (or install this package with its "
            f"extra [{extra}])"
        ) from error
