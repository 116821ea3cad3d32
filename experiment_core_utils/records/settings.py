"""Records of a knob run: samples, journal lines and the result of a setting.

Times are in seconds here and become the published milliseconds (`T_*`) in `j_results_saving`. Nothing here imports
torch, so that stored results can be read and scored again without it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from experiment_core_utils.primitives.statistics import Distribution
from experiment_core_utils.records.compute import LoadTrace
from experiment_core_utils.records.energy import RunsEnergy, SettingEnergy
from experiment_core_utils.records.requests import (
    BatchedAnswer,
    KnobProof,
    MemoryReading,
    RequestShape,
    StagedRun,
    StageFlops,
)

When = Literal["open", "between", "close"]


@dataclass(frozen=True)
class MeasuredSample:
    """One sample at one setting: every run, and the answer beside what it is scored against.

    It has no score yet: answers are scored over the whole run, after the parts of all processes are merged.

    Attributes:
        shape: sizes of its request.
        runs: every measured run, in order; none where the sample was answered in a batch.
        outputs_identical: whether every run gave the same tokens; None without runs.
        transfer_s: host to device, outside the total; None without runs.
        prediction: decoded text of the first run, or of the answer.
        flops: None for an unknown architecture.
        references, options, answer_index, question_type, image_id: what the prediction is scored against, as in the
            task's sample.
        metadata: the question and what else the task says (JSON values only).
        answer: of a sample without runs; None with them.
        energy: of its runs; None where it was not requested, and without runs.
    """

    sample_id: int
    shape: RequestShape
    runs: tuple[StagedRun, ...]
    outputs_identical: bool | None
    transfer_s: float | None
    prediction: str
    flops: StageFlops | None
    question_type: str
    image_id: str
    references: tuple[str, ...]
    options: tuple[str, ...]
    answer_index: int | None
    metadata: dict[str, Any]
    answer: BatchedAnswer | None = None
    energy: RunsEnergy | None = None

    @property
    def run_place(self) -> int | None:
        """Place among the runs of the one with the median total time (the lower one of two in the middle)."""
        if not self.runs:
            return None
        by_time = sorted(range(len(self.runs)), key=lambda place: self.runs[place].total_s)
        return by_time[(len(self.runs) - 1) // 2]

    @property
    def run(self) -> StagedRun | None:
        """The run at `run_place`; its times are the sample's published ones, so that they add up. None without runs."""
        place = self.run_place
        return None if place is None else self.runs[place]

    @property
    def energy_j(self) -> float | None:
        """Energy of the measured run."""
        place = self.run_place
        return None if self.energy is None or place is None else self.energy.joules[place]

    @property
    def output_tokens(self) -> int:
        """Output tokens of `run`, or of the answer in a batch."""
        answer = self.run or self.answer
        assert answer is not None
        return len(answer.token_ids)

    @property
    def ended(self) -> bool:
        """Whether end-of-sequence came before the limit, in the first run or in the answer in a batch."""
        answer = self.runs[0] if self.runs else self.answer
        assert answer is not None
        return answer.ended


@dataclass(frozen=True)
class FailedSample:
    """A sample that could not be read or run; excluded from the means, and counted.

    Attributes:
        sample_id: position in the task's split.
        error: class of the error.
        reason: its message.
    """

    sample_id: int
    error: str
    reason: str


@dataclass(frozen=True)
class SettingFailure:
    """A setting that could not be run, after `attempts` attempts."""

    error: str
    reason: str
    attempts: int


@dataclass(frozen=True)
class JournalHeader:
    """A process takes up the journal of a setting; the first line, and one more for each time that it goes on.

    Attributes:
        schema_version: of the journal's lines.
        key: `KnobSetting.key`.
        fingerprint: digest of everything else that the result depends on.
        experiment_id: of the run that the process belongs to.
        num_processes: of that run.
        sample_ids: the process's share of the samples, those that are finished already included.
        engines: what runs each stage, by name; None in journals from before it was noted.
    """

    schema_version: int
    key: str
    fingerprint: str
    rank: int
    num_processes: int
    experiment_id: str
    sample_ids: tuple[int, ...]
    engines: Mapping[str, str] | None = None


@dataclass(frozen=True)
class MeasuringOrder:
    """In which order a run measures the settings of its plan.

    Attributes:
        how: `shuffled` or `planned`.
        seed: of the shuffle; None where there was none.
        keys: `KnobSetting.key` of every setting of the plan, done or due, in that order.
    """

    how: str
    seed: int | None
    keys: tuple[str, ...]


@dataclass(frozen=True)
class WarmUp:
    """The unmeasured runs of one sample that one process made before its window of a setting.

    Attributes:
        total_s: of each run, in order.
        is_stable: whether the last three agreed; None where warm-up is switched off.
        spread: max / min - 1 of the last three; None for fewer runs.
    """

    experiment_id: str
    rank: int
    total_s: tuple[float, ...]
    is_stable: bool | None
    spread: float | None


@dataclass(frozen=True)
class GpuReading:
    """One GPU at one moment; None where it does not tell, for which `reason` says why.

    Attributes:
        throttle_reasons: names of NVML's clocks event reasons that are set.
        power_throttled_s, thermal_throttled_s: for how long clocks were held down because of power and of heat, since
            the driver was loaded; only differences have a meaning.
        utilisation_percent: share of the driver's last sampling period (up to a second) in which a kernel ran,
            this process's among them.
        foreign_processes: other processes that compute on it.
        foreign_memory_bytes: memory that they hold.
    """

    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    temperature_c: int | None
    power_w: float | None
    throttle_reasons: tuple[str, ...] | None
    power_throttled_s: float | None
    thermal_throttled_s: float | None
    utilisation_percent: int | None
    foreign_processes: int | None
    foreign_memory_bytes: int | None
    reason: str | None


@dataclass(frozen=True)
class CpuReading:
    """The host's CPUs at one moment; only differences of the times have a meaning.

    Attributes:
        busy_s: seconds that its logical CPUs were busy, summed over them.
        total_s: seconds that they were there.
        own_s: seconds that this process used of them.
        frequency_mhz: mean over CPUs; None where the host does not tell.
    """

    busy_s: float
    total_s: float
    own_s: float
    frequency_mhz: float | None


@dataclass(frozen=True)
class ConditionsReading:
    """What went on at one moment at which no run was measured.

    Attributes:
        when: at the opening or the close of a setting's window, or between two samples.
        wall_time: UTC.
        monotonic_s: the same moment by the host's monotonic clock.
        gpu: None without a GPU, or where it cannot be read, for which `gpu_reason` says why.
    """

    experiment_id: str
    rank: int
    when: When
    wall_time: str
    monotonic_s: float
    gpu: GpuReading | None
    gpu_reason: str | None
    cpu: CpuReading


@dataclass(frozen=True)
class SettingLoad:
    """Load and memory along one window in which a process measured samples of a setting.

    Attributes:
        has_timeline: whether the samples themselves were requested, beside what they come to.
    """

    experiment_id: str
    rank: int
    trace: LoadTrace
    has_timeline: bool


@dataclass(frozen=True)
class DriftReading:
    """The control setting, measured once more by one process.

    Attributes:
        when: `start`, `between` or `end` of the run.
        num_settings_before: settings that the run had measured before.
        wall_time: UTC, when it was done.
        since_start_s: seconds since the run began to measure, by the monotonic clock.
        control: key of the control setting.
        total_s: of one run of each of `sample_ids`.
        ratio: median over samples of the time as a multiple of that at the run's first reading; None without times.
        reason: why there are no times.
    """

    experiment_id: str
    rank: int
    when: str
    num_settings_before: int
    wall_time: str
    since_start_s: float
    control: str
    sample_ids: tuple[int, ...]
    total_s: tuple[float, ...]
    ratio: float | None
    reason: str | None


@dataclass(frozen=True)
class FinishedSample:
    """A sample that is done with: either measured or failed.

    Attributes:
        memory: of the window so far.
    """

    measured: MeasuredSample | None
    failed: FailedSample | None
    memory: MemoryReading

    @property
    def sample_id(self) -> int:
        """The sample's position in the task's split."""
        done = self.measured or self.failed
        assert done is not None
        return done.sample_id


@dataclass(frozen=True)
class ShardDone:
    """A process has come to the end of its share of a setting.

    Attributes:
        experiment_id: of the run that it belongs to.
        proof: None where the share holds no sample that can be read.
        failure: why samples of the share are missing.
        num_given: how many samples the share had.
        num_asked: how many of them, from the front, were requested: fewer where sampling stopped early. Both are None
            in the ends of shares of which every sample was requested.
    """

    experiment_id: str
    proof: KnobProof | None
    memory: MemoryReading | None
    failure: SettingFailure | None
    num_given: int | None = None
    num_asked: int | None = None


@dataclass(frozen=True)
class MeasuredSetting:
    """One process's share of the samples of one setting, or what the shares of all come to.

    Attributes:
        key: `KnobSetting.key`.
        fingerprint: digest of everything else that the result depends on; parts that differ in it do not belong
            together.
        experiment_ids: of the runs that finished samples of it, ascending; more than one where a run was resumed.
        failure: why samples are missing.
        asked_ids: samples that must be there; of a process that has not come to the end of its share None.
        num_stopped_early: processes that did not come to their last sample because there were enough.
        warmups: of every process and run.
        conditions: readings of every process and run, in order of time for each of them.
        energy: of one request's stages; None where it was not requested.
        loads: of every window of every process.
    """

    key: str
    fingerprint: str
    rank: int
    num_processes: int
    experiment_ids: tuple[str, ...]
    samples: tuple[MeasuredSample, ...]
    failures: tuple[FailedSample, ...]
    proof: KnobProof | None
    memory: MemoryReading | None
    failure: SettingFailure | None
    asked_ids: tuple[int, ...] | None = None
    num_stopped_early: int = 0
    warmups: tuple[WarmUp, ...] = ()
    conditions: tuple[ConditionsReading, ...] = ()
    energy: SettingEnergy | None = None
    loads: tuple[SettingLoad, ...] = ()


@dataclass(frozen=True)
class TypeAccuracy:
    """Accuracy of one type of question; None where the metric has no value for any of its samples."""

    accuracy: float | None
    num_samples: int


@dataclass(frozen=True)
class AccuracySummary:
    """What the scores of a setting's samples come to.

    Attributes:
        metric: name of the metric that scored them.
        best: its highest score; the lowest is 0.
        accuracy: mean score of the samples that ran; None where none did, or where the metric has no value.
        std: standard deviation over samples (n - 1); None for fewer than 2.
        interval: 95 % interval of the mean that knows which samples share a picture.
        num_unparsed: answers that could not be read as an answer at all; their score is 0.
        share_unparsed: the same as a share of the samples that ran; None where none did.
        details: further means, and what the metric used beside the answers.
    """

    metric: str
    best: float
    accuracy: float | None
    std: float | None
    interval: tuple[float, float] | None
    by_type: Mapping[str, TypeAccuracy]
    num_unparsed: int
    share_unparsed: float | None
    details: Mapping[str, Any]


@dataclass(frozen=True)
class Outliers:
    """Runs that stand out from the other runs of their sample; they are marked, and stay in every statistic.

    Attributes:
        by_sample: for each sample the indices of its runs that do, None where it has too few to judge.
        share: of the runs that were checked; None where none was.
        reason: why there is no share.
    """

    by_sample: tuple[tuple[int, ...] | None, ...]
    share: float | None
    reason: str | None


@dataclass(frozen=True)
class SettingSummary:
    """What a setting's samples come to.

    Attributes:
        accuracy: of the scores.
        distributions: over samples, by quantity: stage times in seconds, token counts as they are.
        share_truncated: share of answers that reached the limit without end-of-sequence.
        share_failed: share of the samples asked for that could not be run; None where none was requested.
        outliers: runs that stand out from the others of their sample; they are in all distributions.
    """

    accuracy: AccuracySummary
    distributions: Mapping[str, Distribution]
    share_truncated: float | None
    share_failed: float | None
    outliers: Outliers
