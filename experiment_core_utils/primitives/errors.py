"""The errors of the project: one class for each different reaction of the caller."""


class ProfilerError(Exception):
    """Base of all errors that the project raises on purpose; its message is one line for the user."""

    exit_code = 1


class ConfigurationError(ProfilerError):
    """Something that was asked for cannot be done: stop before loading. Exit code 2."""

    exit_code = 2


class SampleError(ProfilerError):
    """One sample cannot be read or run: record it, count it and go on."""


class SettingError(ProfilerError):
    """One knob setting cannot be run (out of memory, time-out): record it with its class and go on."""


class OutOfMemory(SettingError):
    """The device has no memory left for this setting."""


class KnobDidNotAct(SettingError):
    """What ran is not what the setting asked for."""


class MeterUnavailable(ProfilerError):
    """A meter has no source on this machine: report None with this reason."""


class WorkerLost(ProfilerError):
    """A process of the run is gone or the launch does not match what was asked: stop all."""


class ResultsError(ProfilerError):
    """A results file is of another schema, or not what its name says."""
