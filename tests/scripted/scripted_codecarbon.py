"""A codecarbon that returns scripted figures, and what the real one gives for a CPU alone."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from experiment_core_utils.meters.codecarbon import CodecarbonLibrary

# 36 s in which the CPU used 10 W, memory 20 W and the GPU 300 W: 1e-4, 2e-4 and 3e-3 kWh.
WINDOW: dict[str, Any] = {
    "experiment_id": "their own",
    "duration": 36.0,
    "emissions": 0.0015675,
    "cpu_power": 7.0,
    "gpu_power": 8.0,
    "ram_power": 9.0,
    "cpu_energy": 1e-4,
    "gpu_energy": 3e-3,
    "ram_energy": 2e-4,
    "energy_consumed": 3.3e-3,
    "country_iso_code": None,
    "cpu_model": "a CPU",
    "gpu_count": 1,
    "gpu_model": "1 x H200",
    "tracking_mode": "machine",
    "cpu_utilization_percent": 50.0,
    "gpu_utilization_percent": 90.0,
    "ram_utilization_percent": 3.0,
    "ram_used_gb": 0.7,
}


class ScriptedTracker:
    """Windows have the values of `window`; `fail_at` raises when it is called, `silent_at` does nothing then."""

    def __init__(self, window: dict[str, Any], fail_at: str | None, silent_at: str | None, **settings: Any) -> None:
        self.settings = settings
        self.calls: list[str] = []
        self._window = window
        self._fail_at = fail_at
        self._silent_at = silent_at
        self._task: str | None = None

    def get_detected_hardware(self) -> None:
        self._note("probe")

    def start_task(self, name: str) -> None:
        self._note(f"start {name}")
        if self._silent_at != f"start {name}":
            self._task = name

    def stop_task(self, name: str) -> Any:
        self._note(f"stop {name}")
        if self._task != name:
            return None
        self._task = None
        return SimpleNamespace(values=dict(self._window))

    def stop(self) -> None:
        self._note("stop")

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call == self._fail_at:
            raise AttributeError("'OfflineEmissionsTracker' object has no attribute '_hardware'")


def scripted_library(
    made: list[ScriptedTracker] | None = None,
    window: dict[str, Any] = WINDOW,
    fail_at: str | None = None,
    silent_at: str | None = None,
    rapl: bool = False,
) -> CodecarbonLibrary:
    """A library whose trackers are added to `made`."""

    def new_tracker(**settings: Any) -> ScriptedTracker:
        tracker = ScriptedTracker(window, fail_at, silent_at, **settings)
        if made is not None:
            made.append(tracker)
        return tracker

    reads: Callable[[], bool] = lambda: rapl  # noqa: E731
    return CodecarbonLibrary(new_tracker=new_tracker, countries=lambda: {"FRA", "USA"}, reads_rapl=reads)
