"""The errors of the project: one class for each different reaction of the caller."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from experiment_core_utils.primitives.texts import shown

# Of a command that did what it should, of which some samples failed or cannot be used.
EXIT_CODE_FAILED_SAMPLES = 3
# Of a command that was given --strict, and whose run is INVALID.
EXIT_CODE_INVALID = 4

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


class LibraryFault(SampleError):
    """Code that works on one sample raised an error that is none of the project's."""

    kind: str = ""  #: class of that error
    trace: str = ""  #: its traceback, "" where there was no memory for it


class DeviceLost(ProfilerError):
    """The GPU refuses all further work of this process: stop, a new process can go on."""


class SettingError(ProfilerError):
    """One knob setting cannot be run (out of memory, a knob that does not act): record it by its class and continue."""


# Words of the errors that torch raises as plain RuntimeError where memory is missing.
NO_MEMORY_LEFT = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "Cannot allocate memory",
    "std::bad_alloc",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
HOST_FULL = "the host has no memory left for this process; free some, or raise its limit (ulimit -v)"


class OutOfMemory(SettingError):
    """The device or the host has no memory left for this setting."""


class GenerationFailed(SettingError):
    """The model broke off while it generated (logits that are not finite, a kernel that refuses)."""


class KnobDidNotAct(SettingError):
    """What ran is not what the setting requested."""


class EngineRefused(KnobDidNotAct):
    """An engine cannot run the setting, or computes something else than the model's modules."""


class UnforeseenError(SettingError):
    """Code that works for one setting raised an error that is none of the project's, which is the cause."""


class MeterUnavailable(ProfilerError):
    """What would measure is not there: run without it, and say so."""


class EnergyRefused(MeterUnavailable):
    """Energy is required, and nothing here measures it: stop before loading. Exit code 2."""

    exit_code = 2


class WorkerLost(ProfilerError):
    """A process of the run is gone or the launch does not match what was requested: stop all."""


class DataChanged(ProfilerError):
    """A sample is another than when the run began: stop, what was finished before is of the former data."""


class ResultsError(ProfilerError):
    """Results are not there, too few, or do not belong together."""


class ResultsRefused(ResultsError):
    """A results file is damaged, of another schema or not what its name says, or another run is at work on it. Exit
    code 2."""

    exit_code = 2


class OtherVersion(ResultsRefused):
    """A results file is of another version of this project."""


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


def described(error: BaseException) -> str:
    """An error in one line: its class and the first line of its message."""
    name, line = type(error).__name__, shown(first_line(error))
    return name if line == name else f"{name}: {line}"


def traceback_of(error: BaseException) -> str:
    """An error's traceback with its causes; "" where there is no memory left for it."""
    try:
        return "".join(traceback.format_exception(error))
    except MemoryError:
        return ""


# What torch says where a kernel broke the process's context on the GPU: every later call fails, whatever it does.
_DEVICE_LOST = ("CUDA error", "HIP error", "device-side assert", "illegal memory access")


def raise_if_device_is_lost(error: BaseException) -> None:
    """Raises DeviceLost where an error says that this process cannot use its GPU any more.

    Lack of memory, of which the process recovers, is none.
    """
    if "out of memory" in str(error):
        return
    if type(error).__name__ == "AcceleratorError" or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _DEVICE_LOST)
    ):
        raise DeviceLost(
            f"the GPU does no further work for this process ({first_line(error)}); what is finished is saved: run the "
            "same command again to resume, with CUDA_LAUNCH_BLOCKING=1 to learn which operation it was"
        ) from error


@contextmanager
def library_faults_named(what: str) -> Iterator[None]:
    """A context in which every error that is none of the project's becomes a LibraryFault.

    Libraries raise errors of nearly every class for one odd row or picture, so that no list of them is whole.
    Interruptions, which are no `Exception`, pass, and so does torch's lack of memory on the device.

    Args:
        what: names the sample, the beginning of the message.

    Raises:
        LibraryFault: see above.
        DeviceLost: the error is of the GPU, and not of the sample alone.
    """
    try:
        yield
    except ProfilerError:
        raise
    except (Exception, SystemExit) as error:  # a user's own code may end the program, and must not end it as if well
        # By its name: this module is imported without torch.
        if type(error).__name__ == "OutOfMemoryError":
            raise
        raise_if_device_is_lost(error)
        lacks_memory = "; this process has no memory left for it" if isinstance(error, MemoryError) else ""
        fault = LibraryFault(f"{what}: {described(error)}{lacks_memory}")
        fault.kind, fault.trace = type(error).__name__, traceback_of(error)
        raise fault from error


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
