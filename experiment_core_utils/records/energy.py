"""Records of energy: windows, stages and settings, in joules, watts and seconds.

Every figure carries its origin. What is not available is None, and `reason` says why; nothing here is ever clamped.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from experiment_core_utils.primitives.statistics import Distribution

EnergySource = Literal["nvml_counter", "power_integral", "rapl", "codecarbon_estimate", "simulated"]
EnergyKind = Literal["measured", "estimated"]
Component = Literal["gpu", "cpu", "dram", "ram"]
# counter: the device adds up its own energy. instant_power, averaged_power: power readings, integrated here.
# load_model: computed from load and nominal power.
Basis = Literal["counter", "instant_power", "averaged_power", "load_model"]
Alignment = Literal["ticks", "acts"]
ALL_DEVICES = "all"
# Component and basis of the figures that a setting reports where there are several: the first that was measured.
PREFERRED_SOURCES: tuple[tuple[Component, Basis], ...] = (
    ("gpu", "counter"),
    ("gpu", "instant_power"),
    ("gpu", "averaged_power"),
    ("cpu", "counter"),
)
# Name of the whole request among its stages.
END_TO_END = "end_to_end"


@dataclass(frozen=True)
class EnergyOrigin:
    """Whose energy a figure is, and how it was come by."""

    device: str  #: a GPU's UUID, a RAPL zone such as "package-0", or "all" for a sum over devices
    component: Component  #: `gpu`, `cpu`, `dram` or `ram`
    source: EnergySource  #: as in the table of sources
    kind: EnergyKind  #: `measured` by a sensor, or `estimated` from load and nominal power
    basis: Basis  #: `counter`, `instant_power`, `averaged_power` or `load_model`


@dataclass(frozen=True)
class DeviceEnergy:
    """What one source says of one device in one window."""

    origin: EnergyOrigin  #: device, source and kind
    joules: float | None  #: energy of the window; None if not measured
    bound_j: float | None  #: largest error from the resolution in time, without the sensor's own; None if unknown
    reason: str | None  #: why there is no energy; None if there is
    remark: str | None = None  #: how the figure was corrected, or what weakens it; None if nothing


@dataclass(frozen=True)
class EnergyReading:
    """One window, as an `EnergyMeter` saw it."""

    seconds: float  #: from open to close
    devices: tuple[DeviceEnergy, ...]  #: one entry for each source and device


@dataclass(frozen=True)
class TickCalibration:
    """How often a counter advances and what it costs to read, found by polling it."""

    tick_s: float | None  #: mean time between advances; None where it did not advance, for which `reason` says why
    longest_tick_s: float | None  #: longest of them; what error bounds are computed with
    read_cost_s: float | None  #: median time of a reading; None where none succeeded
    num_ticks: int  #: intervals between advances that were seen
    reason: str | None


@dataclass(frozen=True)
class PowerTrace:
    """Power readings of one device, in order of time."""

    origin: EnergyOrigin
    times_s: tuple[float, ...]  #: middle of each reading, by the meter's clock
    watts: tuple[float, ...]
    num_failed: int  #: readings that did not succeed; they are in neither list
    last_failed: bool  #: whether the last one, at the close, is among them
    failure: str | None  #: what the last failed reading said


@dataclass(frozen=True)
class IdlePower:
    """Mean power of an idle device, with context and model resident."""

    origin: EnergyOrigin  #: device, source and kind
    watts: float | None  #: mean power; None if not measured
    bound_w: float | None  #: error bound of the window's energy / its length; None if not measured
    seconds: float  #: length of the window
    reason: str | None  #: why there is no power; None if there is


@dataclass(frozen=True)
class EnergyWindow:
    """One window of an experiment, as the machine's own instruments saw it."""

    reading: EnergyReading | None  #: the energies of the window; None if nothing could measure
    idle_before: tuple[IdlePower, ...]  #: idle power per source and device; empty if not requested
    idle_after: tuple[IdlePower, ...]  #: the same after the window
    missing: Mapping[str, str]  #: missing sources by name, and why
    reason: str | None  #: why there is no reading; None if there is
    codecarbon_reason: str | None = None  #: why codecarbon has no row for this window; None if it has one
    gpus: tuple[str, ...] = ()  #: ids of the GPUs that were to be measured; empty if unknown

    @property
    def unread_gpus(self) -> tuple[str, ...]:
        """GPUs that were to be measured and that no source reports."""
        known = set() if self.reading is None else {each.origin.device for each in self.reading.devices}
        return tuple(gpu for gpu in self.gpus if gpu not in known)

    @property
    def has_figure(self) -> bool:
        """Whether any source measured any device."""
        return self.reading is not None and any(each.joules is not None for each in self.reading.devices)


@dataclass(frozen=True)
class WindowFigure:
    """Energy of an experiment's windows by one source, on one device or over all of them."""

    origin: EnergyOrigin  #: device, source and kind
    seconds: float  #: length of all windows
    gross_j: float | None  #: energy of all windows; None if one of them lacks it
    uncertainty_j: float | None  #: sum of the windows' error bounds; None without energy
    idle_j: float | None  #: idle power (mean of before and after) x length; None if not measured
    net_j: float | None  #: gross - idle, which may be negative; None if idle power was not measured
    net_uncertainty_j: float | None  #: with that of the idle power; None if it was not measured
    reason: str | None  #: why there is no energy; None if there is
    remark: str | None  #: what weakens the figure; None if nothing does


@dataclass(frozen=True)
class ActEnergy:
    """Energy of one act, from one window in which it was repeated without a pause."""

    origin: EnergyOrigin
    joules: float | None  #: of the window, divided by `count`
    bound_j: float | None  #: error bound of the window, divided by `count`
    act_s: float | None  #: length of the window divided by `count`
    #: how often the act was done between the window's ends; whole numbers where `alignment` is `acts`
    count: float | None
    window_s: float | None  #: between the ends
    alignment: Alignment  #: the ends are advances of the counter (`ticks`) or beginnings and ends of acts (`acts`)
    reason: str | None
    remark: str | None = None
    #: error bound of the resolution that the window's length was chosen by, as a fraction of its energy; None where the
    #: length was chosen by another source
    window_error: float | None = None


@dataclass(frozen=True)
class EnergyFigure:
    """Energy of one act over repeated windows."""

    origin: EnergyOrigin
    gross_j: Distribution | None  #: over windows, in joules an act, with Student's t interval of the mean
    uncertainty_j: float | None  #: standard uncertainty of the gross mean, see `energy_statistics.combined_uncertainty`
    idle_w: float | None  #: mean of idle power before and after; None where it was not measured
    idle_j: float | None  #: that power over the time of an act
    net_j: float | None  #: gross less idle; may be negative
    net_uncertainty_j: float | None  #: with that of the idle power
    act_s: float | None  #: mean time of an act
    count: float | None  #: acts in all windows
    window_s: float | None  #: length of all windows
    num_windows: int  #: windows that gave a figure
    reason: str | None  #: why there is no gross figure, or why fewer windows gave one than there were
    remark: str | None = None  #: what was done to windows, or what they are weakened by
    window_error: float | None = None  #: the largest of the windows', see `ActEnergy`


@dataclass(frozen=True)
class Closure:
    """An independent end-to-end figure against the sum of its stages."""

    origin: EnergyOrigin
    end_to_end_j: float | None
    stages_j: float | None  #: sum of the stages' gross energy
    residual_j: float | None  #: end-to-end less stages
    residual_share: float | None  #: residual over end-to-end
    uncertainty_j: float | None  #: standard uncertainty of the residual
    reason: str | None


@dataclass(frozen=True)
class StageEnergies:
    """Energy of one request, stage by stage, each stage repeated in windows of its own."""

    output_tokens: int  #: of the request; `decode` is all steps after the first of them
    #: for each of `vision`, `prefill`, `decode` that the request has, and for `end_to_end`: one for each source and
    #: device, and one for each source over all its devices where they are several
    figures: Mapping[str, tuple[EnergyFigure, ...]]
    closures: tuple[Closure, ...]  #: one for each source, over all its devices
    #: of GPUs, integrated power over counter, by stage; None where one of the two is missing
    source_ratios: Mapping[str, float | None]
    #: before the first window and after the last, for each source and device
    idle: tuple[tuple[IdlePower, IdlePower], ...]
    error_goal: float | None = None  #: what `window_error` was to be at most

    @property
    def decode_steps(self) -> int:
        """What the energy of `decode` is to be divided by for one output token after the first."""
        return self.output_tokens - 1


@dataclass(frozen=True)
class SettingEnergy:
    """Energy of the stages of one request at one setting, measured once, after the setting's samples."""

    #: experiment_id, rank: of the run and the process that measured it
    experiment_id: str
    rank: int
    sample_id: int | None  #: whose request it is
    stages: StageEnergies | None  #: None where it could not be measured, for which `reason` says why
    missing: Mapping[str, str]  #: sources that are not there, by name, and why
    reason: str | None


@dataclass(frozen=True)
class RunsEnergy:
    """Energy of a sample's measured runs, allocated from power readings taken beside them."""

    #: joules, bounds_j: of each run, in order; None where no power was read
    joules: tuple[float | None, ...]
    bounds_j: tuple[float | None, ...]
    #: source, basis: as in `EnergyOrigin`
    source: str | None
    basis: str | None
    reason: str | None  #: why a figure is None
