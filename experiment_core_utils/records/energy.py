"""Records of energy: windows, stages and settings, in joules, watts and seconds.

Every figure carries its origin. What is not available is None, and `reason` says why; nothing here is ever clamped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from experiment_core_utils.primitives.statistics import Distribution
from experiment_core_utils.records.json_record import Amount, Count, Number, Record

EnergySource = Literal["nvml_counter", "power_integral", "rapl", "codecarbon_estimate", "simulated"]
EnergyKind = Literal["measured", "estimated"]
Component = Literal["gpu", "cpu", "dram", "ram"]
# counter: the device adds up its own energy. instant_power, averaged_power: power readings, integrated here.
# load_model: computed from load and nominal power.
Basis = Literal["counter", "instant_power", "averaged_power", "load_model"]
Alignment = Literal["ticks", "acts"]
# power: in proportion to the power read while each request ran. time: in proportion to how long each ran.
AllocationMethod = Literal["apportioned", "apportioned by time"]
PassesEnd = Literal["error goal", "time limit", "number of passes"]
ALL_DEVICES = "all"
# What a GPU's counter is called among the instruments that are missing, before the GPU's UUID.
GPU_COUNTER = "energy counter of"
# Component and basis of the figures that a setting reports where there are several: the first that has figures.
PREFERRED_SOURCES: tuple[tuple[Component, Basis], ...] = (
    ("gpu", "counter"),
    ("gpu", "instant_power"),
    ("gpu", "averaged_power"),
    ("cpu", "counter"),
    ("cpu", "load_model"),
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
class PowerBeside:
    """Power that was read beside a part of a run, and when what ran in it began and ended."""

    traces: Sequence[PowerTrace]  #: one of each device that computes; none where no power can be read
    windows: Sequence[tuple[float, float]]  #: begin and end of what ran, each by the traces' clock, in order
    reason: str | None  #: why there is no trace


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
    flops_over_mean: float | None = None  #: FLOPs of the request / mean of the setting's samples; None if not known


@dataclass(frozen=True)
class AllocatedJoules:
    """The part of a window's energy that one request of a sample is given."""

    joules: float | None
    bound_j: float | None  #: error bound; None if `joules` is, or if no power reading says how it is divided
    method: AllocationMethod | None
    origin: EnergyOrigin | None  #: of the window's energy
    reason: str | None  #: why there is no figure


@dataclass(frozen=True)
class EnergyPass:
    """One window of one setting: its energy samples run back to back, all of them once or several times."""

    #: experiment_id, rank: of the run and the process that measured it
    experiment_id: str
    rank: int
    pass_index: int  #: 0, 1, ...: even passes go through the settings in their order, odd ones in the reverse order
    place: int  #: of the window in its pass
    sample_ids: tuple[int, ...]  #: that ran, in order
    output_tokens: int  #: of all of them, each once
    windows: tuple[ActEnergy, ...]  #: for each source and device; an act is every sample once
    allocated: tuple[AllocatedJoules, ...]  #: of one request of each sample, in order
    idle: tuple[IdlePower, ...]  #: before the pass, for each source and device


@dataclass(frozen=True)
class EnergyPassesEnd:
    """The end of the energy passes of a setting."""

    #: experiment_id, rank: of the run and the process that ended them
    experiment_id: str
    rank: int
    num_settings: int  #: that the passes went through
    ended_by: PassesEnd | None  #: None where nothing was measured, for which `reason` says why
    #: what half of the 95 % interval over passes was to be at most, as a fraction; None for no goal
    error_goal: float | None
    limit_s: float  #: seconds of windows after which no further pass was begun, for each setting
    idle: tuple[IdlePower, ...]  #: after the last pass, for each source and device
    missing: Mapping[str, str]  #: sources that are not there, by name, and why
    reason: str | None


class EnergyOfSource(Record):
    """The source, device and basis of an energy figure."""

    device: str | None = None  #: id of a GPU, RAPL zone, or `all`
    component: str | None = None  #: `gpu`, `cpu`, `dram` or `ram`
    source: str | None = None  #: `nvml_counter`, `power_integral`, `rapl` or `codecarbon_estimate`
    kind: str | None = None  #: `measured`, or `estimated` from load and nominal power
    basis: str | None = None  #: `counter`, `instant_power`, `averaged_power` or `load_model`

    def is_from_source_of(self, figure: "EnergyOfSource") -> bool:
        """Whether both are of the same device by the same source."""
        return all(getattr(self, name) == getattr(figure, name) for name in EnergyOfSource.model_fields)


class StageFigure(EnergyOfSource):
    """Energy of one stage by one source."""

    gross_j: Number | None = None  #: mean over windows of the energy of one act; None if no window gave a figure
    #: 95 % interval of it, Student's t over windows; None if fewer than 2 windows
    gross_j_ci95_low: Number | None = None
    gross_j_ci95_high: Number | None = None  #: its upper end; None if fewer than 2 windows
    #: standard uncertainty: spread over windows, and bound of the ticks; None if fewer than 2 windows, or ticks not
    #: known
    uncertainty_j: Number | None = None
    idle_w: Number | None = None  #: idle power, mean of before and after; None if not measured
    idle_j: Number | None = None  #: idle power over the time of an act; None if `idle_w` is
    net_j: Number | None = None  #: `gross_j` - `idle_j`; may be negative; None if one of them is
    net_uncertainty_j: Number | None = None  #: with that of the idle power; None if as `uncertainty_j`
    act_s: Number | None = None  #: mean time of an act; None if `gross_j` is
    #: acts in all windows; not whole where windows lie between ticks; None if `gross_j` is
    num_acts: Number | None = None
    window_s: Number | None = None  #: length of all windows; None if `gross_j` is
    num_windows: Count | None = None  #: windows that gave a figure
    reason: str | None = None  #: why there is no figure, or fewer windows; None if all gave one
    #: how many windows something was done to or is weak in, and what it was in the first of them: a wrap that was
    #: undone, an error above the goal, another source that does not agree; None if nothing was
    remark: str | None = None
    #: error of the resolution that windows were made long enough for, as a fraction of the energy; the largest of all
    #: windows; None if no figure, or the windows' length was chosen by another source
    window_error: Number | None = None


class EnergySummary(EnergyOfSource):
    """The energy figures of one source."""

    vision_j: Number | None = None  #: gross energy of the stage; None if no picture, or not measured
    prefill_j: Number | None = None  #: gross energy of the stage; None if not measured
    #: gross energy of all decode steps; None if fewer than 2 output tokens, or not measured
    decode_j: Number | None = None
    decode_j_per_token: Number | None = None  #: `decode_j` / (output tokens - 1); None if `decode_j` is
    end_to_end_j: Number | None = None  #: gross energy of the whole request, from windows of its own
    end_to_end_uncertainty_j: Amount | None = None  #: its standard uncertainty; None if as in the figures
    end_to_end_idle_j: Number | None = None  #: idle power over its time; None if not measured
    end_to_end_net_j: Number | None = None  #: gross less idle; None if not measured
    j_per_output_token: Number | None = None  #: `end_to_end_j` / output tokens
    #: `end_to_end_j` / (accuracy / best score): [what it is](energy.md#joules-per-correct-answer); None if no answer is
    #: correct or has a score, or the metric's best score is not 1
    j_per_correct_answer: Number | None = None
    #: lower end of its 95 % interval, from those of energy and accuracy; None if it is, or an uncertainty is not known
    j_per_correct_answer_ci95_low: Number | None = None
    #: its upper end; None if as the lower one, or the accuracy's interval reaches 0
    j_per_correct_answer_ci95_high: Number | None = None
    j_per_correct_answer_reason: str | None = None  #: why one of the three is null; None if none is
    #: (`end_to_end_j` - sum of the stages) / `end_to_end_j`; None if a stage was not measured
    closure_residual_share: Number | None = None
    #: integrated power / counter of the whole request; None if one of the two is missing, or not of GPUs
    source_ratio: Number | None = None


class EnergyClosure(EnergyOfSource):
    """The whole request against the sum of its stages, by one source."""

    end_to_end_j: Number | None = None  #: gross energy of the whole request; None if not measured
    stages_j: Number | None = None  #: sum over its stages; None if one was not measured
    residual_j: Number | None = None  #: `end_to_end_j` - `stages_j`; None if one of them is
    residual_share: Number | None = None  #: `residual_j` / `end_to_end_j`; None if one of them is
    uncertainty_j: Number | None = None  #: standard uncertainty of `residual_j`; None if one is not known
    reason: str | None = None  #: why a figure is null; None if none is


class EnergyIdle(EnergyOfSource):
    """Idle power by one source."""

    #: mean power while nothing runs, model loaded, before the first window; None if not measured
    before_w: Number | None = None
    after_w: Number | None = None  #: the same after the last; None if not measured
    seconds: Number | None = None  #: length of each of the two windows
    reason: str | None = None  #: why a power is null; None if none is


class PassesEnergy(EnergyOfSource):
    """Energy of the requests of many samples, from windows of whole passes over them."""

    sample_ids: list[int] = []  #: the samples, in the order in which they ran
    num_passes: Count | None = None  #: windows that gave a figure, each of one pass over the settings
    num_requests: Count | None = None  #: requests in all of these windows
    window_s: Number | None = None  #: length of all of these windows
    request_s: Number | None = None  #: `window_s` / `num_requests`
    j_per_request: Number | None = None  #: gross energy of a window / its requests, mean over passes
    #: the same of each pass, in their order: what differences between settings are tested by; `[]` if not measured, or
    #: in files of commit dfe8f148
    j_per_request_by_pass: list[Number] = []
    #: 95 % interval of it, Student's t over passes: how well the energy of these samples is known, not how samples
    #: differ; None if fewer than 2 windows
    j_per_request_ci95_low: Number | None = None
    j_per_request_ci95_high: Number | None = None  #: its upper end; None if fewer than 2 windows
    #: standard uncertainty: spread over passes, and bound of the ticks; None if fewer than 2 windows, or ticks not
    #: known
    j_per_request_uncertainty: Number | None = None
    #: idle power, mean of the readings before each pass and after the last; None if not measured
    idle_w: Number | None = None
    idle_j_per_request: Number | None = None  #: idle power over `request_s`; None if `idle_w` is
    net_j_per_request: Number | None = None  #: `j_per_request` - `idle_j_per_request`; may be negative; None if one is
    #: with that of the idle power; None if as `j_per_request_uncertainty`
    net_j_per_request_uncertainty: Number | None = None
    output_tokens_per_request: Number | None = None  #: mean over these samples
    j_per_output_token: Number | None = None  #: `j_per_request` / `output_tokens_per_request`
    #: `j_per_request` / (accuracy / best score): [what it is](energy.md#joules-per-correct-answer); None if no answer
    #: is correct or has a score, or the metric's best score is not 1
    j_per_correct_answer: Number | None = None
    #: lower end of its 95 % interval over pictures and passes; None if it is, or a spread is not known
    j_per_correct_answer_ci95_low: Number | None = None
    #: its upper end; None if as the lower one, or the accuracy's interval reaches 0
    j_per_correct_answer_ci95_high: Number | None = None
    j_per_correct_answer_reason: str | None = None  #: why one of the three is null; None if none is
    #: integrated power / counter; None if one of the two is missing, or not of GPUs
    source_ratio: Number | None = None
    num_settings: Count | None = None  #: settings of each pass; None if the passes did not end
    #: `error goal`, `time limit` (`limit_s` for each setting) or `number of passes`: why there were no more; None if
    #: they did not end
    ended_by: str | None = None
    #: what half of the interval was to be at most, as a fraction; None if as above, or `--energy auto`
    error_goal: Number | None = None
    #: seconds of windows for each setting, with `--energy auto` its part of all that passes take; None if as above
    limit_s: Number | None = None
    #: list of [figures](#energy-figures) of one request by every source and device
    figures: list[StageFigure] = []


class Energy(Record):
    """Energy of a setting's requests, and of the stages of one of them."""

    experiment_id: str | None = None  #: the run that measured it
    rank: Count | None = None  #: the process that measured it
    #: over [many samples](#energy-of-passes); None if not measured
    passes: PassesEnergy | None = None
    sample_id: Count | None = None  #: whose stages; None if they were not measured
    #: FLOPs of that request / mean FLOPs of the setting's samples; None if not known
    flops_over_mean: Number | None = None
    output_tokens: Count | None = None  #: of that request; None if its stages were not measured
    #: the figures of one source, [below](#energy-summary); None if no source measured the whole request
    summary: EnergySummary | None = None
    #: `vision`, `prefill`, `decode` and `end_to_end`, as far as the request has them -> list of
    #: [figures](#energy-figures), `{}` where nothing was measured
    stages: dict[str, list[StageFigure]] = {}
    #: list, for each source over its devices: [end-to-end against the sum of the stages](#energy-closures), may be `[]`
    closures: list[EnergyClosure] = []
    #: what `window_error` of the stages was to be at most; None if nothing was measured
    error_goal: Number | None = None
    #: stage -> integrated power / counter of the GPUs, may be `{}`; a ratio is null where one of the two is missing
    source_ratios: dict[str, Number | None] = {}
    idle: list[EnergyIdle] = []  #: list of [idle powers](#energy-idle), may be `[]`
    missing: dict[str, str] = {}  #: source that is not there -> why, may be `{}`
    reason: str | None = None  #: why stages or passes were not measured; None if they were, or were not requested
