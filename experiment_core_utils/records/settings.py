"""Records of a knob run before it is summarised: samples, journal lines, readings and pooled shards.

Times are in seconds here and become the published milliseconds (`T_*`) in `j_results_saving`. Nothing here imports
torch, so that stored results can be read and scored again without it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from experiment_core_utils.primitives.statistics import Distribution, mean_of
from experiment_core_utils.primitives.units import MemoryReading
from experiment_core_utils.records.compute import LoadTrace
from experiment_core_utils.records.energy import AllocatedJoules, EnergyPass, EnergyPassesEnd, SettingEnergy
from experiment_core_utils.records.requests import (
    BatchedAnswer,
    BatchedRun,
    KnobProof,
    RequestShape,
    ScoredContinuation,
    StagedRun,
    StageFlops,
)
from experiment_core_utils.records.sample_result import FailedSample
from experiment_core_utils.records.setting_result import AccuracyPart, CountsPart

When = Literal["open", "between", "close"]


@dataclass(frozen=True)
class MeasuredSample:
    """One sample at one setting: every run, and the answer beside what it is scored against.

    It has no score yet: answers are scored over the whole run, after the parts of all processes are merged.
    """

    sample_id: int
    shape: RequestShape  #: sizes of its request
    #: every measured run, in order; none where the sample was answered in a batch
    runs: tuple[BatchedRun | StagedRun, ...]
    outputs_identical: bool | None  #: whether every run gave the same tokens; None without runs
    #: host times outside the total, by the name of the quantity; those of runs are missing without runs
    host_s: Mapping[str, float]
    prediction: str  #: decoded text of the first run, or of the answer
    flops: StageFlops | None  #: None for an unknown architecture
    #: what the prediction is scored against, as in the task's sample
    question_type: str
    image_id: str
    references: tuple[str, ...]
    options: tuple[str, ...]
    answer_index: int | None
    metadata: dict[str, Any]  #: the question and what else the task says (JSON values only)
    answer: BatchedAnswer | None = None  #: of a sample without runs; None with them
    energy: AllocatedJoules | None = None  #: of one request; None where not measured, and in the journal
    num_discarded_runs: int = 0  #: runs before these, discarded because throttling or other load disturbed them
    disturbances: tuple[str, ...] = ()  #: what disturbed these runs, the last that were allowed; () for nothing
    #: digests of question, answers, options and picture, and of the picture alone, None without a picture
    data_sha256: str | None = None
    picture_sha256: str | None = None
    #: the part of the prediction that is scored, without thinking; None where that is the prediction
    scored_answer: str | None = None
    thinking_tokens: int = 0  #: tokens up to the end of thinking; 0 without thinking
    thinking_forced: int | None = None  #: 1 where the thought was closed at its budget, else 0; None without a budget
    round_places: tuple[int, ...] | None = None  #: place of each run in its round, from 0; None outside rounds

    @property
    def median_places(self) -> tuple[int, ...]:
        """Places among the runs of the one with the median total time, of an even number of the two in the middle."""
        by_time = sorted(range(len(self.runs)), key=lambda place: self.runs[place].total_s)
        return tuple(by_time[(len(by_time) - 1) // 2 : len(by_time) // 2 + 1])

    @property
    def mean_total_s(self) -> float | None:
        """Mean total time of its runs; `T_total_mean` is its mean over samples. None without runs."""
        return mean_of([run.total_s for run in self.runs])

    @property
    def mean_log_s(self) -> float | None:
        """Mean of the natural logarithm of its runs' total times in seconds, which is compared; None without runs."""
        return mean_of([math.log(run.total_s) for run in self.runs])

    @property
    def batch_size(self) -> int:
        """Requests that ran together in each of its runs."""
        return self.runs[0].num_requests if self.runs else 1

    @property
    def energy_j(self) -> float | None:
        """Energy of one request, mean over energy passes."""
        return None if self.energy is None else self.energy.joules

    @property
    def output_tokens(self) -> int:
        """Output tokens of the first run, or of the answer in a batch."""
        return len(self._answer.token_ids)

    @property
    def scores(self) -> tuple[ScoredContinuation, ...]:
        """Of given continuations, in the first run or in place of an answer; () where an answer was generated."""
        return self._answer.scores

    @property
    def most_positions(self) -> int:
        """Tokens of the prompt with its answer, or its longest continuation, of which the last is not computed."""
        given = max((score.num_tokens for score in self.scores), default=self.output_tokens)
        return self.shape.prompt_tokens + given - 1

    def thinking_s_of(self, place: int) -> float | None:
        """Decode time of the thinking tokens after the first in the run at `place`; None without such tokens."""
        gaps = self.runs[place].inter_token_s
        return sum(gaps[: self.thinking_tokens - 1]) if self.thinking_tokens > 1 and gaps else None

    @property
    def ended(self) -> bool:
        """Whether its end came before the limit, in the first run or in the answer in a batch."""
        return self._answer.ended

    @property
    def _answer(self) -> StagedRun | BatchedAnswer:
        """What the prediction is the text of."""
        answer = self.runs[0] if self.runs else self.answer
        assert answer is not None
        return answer


@dataclass(frozen=True)
class SettingFailure:
    """A setting that could not be run, after `attempts` attempts."""

    error: str
    reason: str
    attempts: int


@dataclass(frozen=True)
class JournalHeader:
    """The first line of a process's journal, and one more each time that the process resumes it."""

    schema_version: int  #: of the journal's lines
    key: str  #: `Setting.key`
    fingerprint: str  #: digest of everything else that the result depends on
    rank: int
    num_processes: int  #: of that run
    experiment_id: str  #: of the run that the process belongs to
    sample_ids: tuple[int, ...]  #: the process's shard of the samples, those that are finished already included
    engines: Mapping[str, str] | None = None  #: what runs each stage, by name; None where not noted
    run_uid: str | None = None  #: the run's, as in `Provenance`; None in journals of commit dfe8f148


@dataclass(frozen=True)
class MeasuringOrder:
    """In which order a run warms up the settings of its plan."""

    seed: int | None  #: of the shuffle; None for the order of the plan
    keys: tuple[str, ...]  #: `Setting.key` of every setting of the plan, done or due, in that order
    how: str = "rounds"  #: or `loads`, where one copy of the model is in memory at a time


@dataclass(frozen=True)
class WarmUp:
    """The unmeasured runs of one sample that one process made before its window of a setting."""

    experiment_id: str
    rank: int
    total_s: tuple[float, ...]  #: of each run, in order
    is_stable: bool | None  #: whether the last three agreed; None where warm-up is switched off
    spread: float | None  #: max / min - 1 of the last three; None for fewer runs


@dataclass(frozen=True)
class GpuReading:
    """One GPU at one moment; None where it does not report it, for which `reason` says why."""

    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    temperature_c: int | None
    power_w: float | None
    throttle_reasons: tuple[str, ...] | None  #: names of NVML's clocks event reasons that are set
    #: power_throttled_s, thermal_throttled_s: for how long clocks were held down because of power and of heat, since
    #: the driver was loaded; only differences have a meaning
    power_throttled_s: float | None
    thermal_throttled_s: float | None
    #: fraction of the driver's last sampling period (up to a second) in which a kernel ran, this process's among them
    utilisation_percent: int | None
    foreign_processes: int | None  #: other processes that compute on it
    foreign_memory_bytes: int | None  #: memory that they use
    reason: str | None


@dataclass(frozen=True)
class CpuReading:
    """The host's CPUs at one moment; only differences of the times have a meaning."""

    busy_s: float  #: seconds that its logical CPUs were busy, summed over them
    total_s: float  #: seconds that they were there
    #: seconds that the run's processes on this machine and their descendants, such as preparing ones, used of them;
    #: None where one of these processes cannot be seen
    own_s: float | None
    frequency_mhz: float | None  #: mean over CPUs; None where the host does not report it


@dataclass(frozen=True)
class ConditionsReading:
    """The load and the clocks of the machine at one moment outside of measured runs."""

    experiment_id: str
    rank: int
    when: When  #: at the opening or the close of a setting's window, or between two samples
    wall_time: str  #: UTC
    monotonic_s: float  #: the same moment by the host's monotonic clock
    gpu: GpuReading | None  #: None without a GPU, or where it cannot be read, for which `gpu_reason` says why
    gpu_reason: str | None
    cpu: CpuReading


@dataclass(frozen=True)
class SettingLoad:
    """Load and memory along one window in which a process measured samples of a setting."""

    experiment_id: str
    rank: int
    trace: LoadTrace
    has_timeline: bool  #: whether the samples themselves were requested, beside what they come to


@dataclass(frozen=True)
class RoundsTrace:
    """The rounds in which one process measured several settings, and what they showed of the machine."""

    experiment_id: str
    rank: int
    num_settings: int
    num_rounds: int
    seed: int  #: of the order of the settings in them
    group_size: int  #: samples of a round
    switch_s: float | None  #: median time that it took to put a setting in force; None for no rounds
    #: lowest and highest common factor of a sample's further rounds, relative to its first; None for one round a sample
    factors: tuple[float, float] | None
    #: the same of the first sample's round, repeated after all others; None where it was not
    closing_factor: float | None


@dataclass(frozen=True)
class ArrivalsTrace:
    """One batch of requests that arrived at a rate at one setting, and how the server kept up."""

    experiment_id: str
    rank: int
    request_rate: float  #: requests a second
    num_requests: int
    num_answered: int
    #: of those that were answered: the time between the 10th and the 90th percentile of when they were due, and of when
    #: they had been answered; 0 for fewer than 2
    due_span_s: float
    answered_span_s: float
    most_under_way: int  #: requests at a time
    num_late: int  #: requests that the client sent more than 5 ms after they were due
    late_max_s: float | None  #: how late it sent the latest; None where none was sent
    sample_ids: tuple[int, ...] = ()  #: the samples that they are of


@dataclass(frozen=True)
class MemoryPass:
    """The memory of one window of one setting, in which its largest requests ran and nothing was kept for others."""

    #: experiment_id, rank: of the run and the process that measured it
    experiment_id: str
    rank: int
    pass_index: int  #: 0, 1: the second pass goes through the settings in the reverse order
    sample_ids: tuple[int, ...]  #: that ran, in order
    memory: MemoryReading


@dataclass(frozen=True)
class FinishedSample:
    """A finished sample: either measured or failed."""

    measured: MeasuredSample | None
    failed: FailedSample | None
    memory: MemoryReading  #: of the window so far
    finished_unix_s: float | None = None  #: in seconds since 1970; None where not noted

    @property
    def sample_id(self) -> int:
        """The sample's position in the task's split."""
        done = self.measured or self.failed
        assert done is not None
        return done.sample_id


@dataclass(frozen=True)
class ArrivedGroup:
    """Samples whose requests arrived together at one setting, in every run, with what each batch of them showed."""

    arrivals: tuple[ArrivalsTrace, ...]  #: of each run, in order; none where no request could be made
    samples: tuple[FinishedSample, ...]


@dataclass(frozen=True)
class ShardDone:
    """The end of a process's shard of a setting."""

    experiment_id: str  #: of the run that it belongs to
    proof: KnobProof | None  #: None where the shard has no sample that can be read
    memory: MemoryReading | None
    failure: SettingFailure | None  #: why samples of the shard are missing
    num_given: int | None = None  #: how many samples the shard had
    #: how many of them, from the front, were requested: fewer where sampling stopped early; both are None in the ends
    #: of shards of which every sample was requested
    num_asked: int | None = None


@dataclass(frozen=True)
class MeasuredSetting:
    """One process's shard of the samples of one setting, or all shards merged."""

    key: str  #: `Setting.key`
    #: digest of everything else that the result depends on; parts that differ in it do not belong together
    fingerprint: str
    rank: int
    num_processes: int
    #: of the runs that finished samples of it, ascending; more than one where a run was resumed
    experiment_ids: tuple[str, ...]
    samples: tuple[MeasuredSample, ...]
    failures: tuple[FailedSample, ...]
    proof: KnobProof | None
    memory: MemoryReading | None
    failure: SettingFailure | None  #: why samples are missing
    #: samples that must be there; of a process that has not come to the end of its shard None
    requested_ids: tuple[int, ...] | None = None
    num_stopped_early: int = 0  #: processes that did not come to their last sample because there were enough
    warmups: tuple[WarmUp, ...] = ()  #: of every process and run
    #: readings of every process and run, in order of time for each of them
    conditions: tuple[ConditionsReading, ...] = ()
    energy: SettingEnergy | None = None  #: of one request's stages; None where it was not requested
    energy_passes: tuple[EnergyPass, ...] = ()  #: windows over many samples, in order
    energy_end: EnergyPassesEnd | None = None  #: of these; None where there are none, or they did not end
    loads: tuple[SettingLoad, ...] = ()  #: of every window of every process
    rounds: tuple[RoundsTrace, ...] = ()  #: of every process and run that measured several settings in turn
    arrivals: tuple[ArrivalsTrace, ...] = ()  #: of every batch of requests that arrived at a rate
    run_uids: tuple[str, ...] = ()  #: of these runs, as far as they have one, ascending

    def only(self, sample_ids: set[int]) -> "MeasuredSetting":
        """The part of these samples alone; of a batch of requests all are among them or none is."""
        return replace(
            self,
            requested_ids=None,
            samples=tuple(sample for sample in self.samples if sample.sample_id in sample_ids),
            failures=tuple(failure for failure in self.failures if failure.sample_id in sample_ids),
            arrivals=tuple(each for each in self.arrivals if sample_ids.issuperset(each.sample_ids)),
        )


@dataclass(frozen=True)
class Outliers:
    """Runs that stand out from the other runs of their sample; they are marked, and stay in every statistic."""

    #: for each sample the indices of its runs that do, None where it has too few runs for that
    by_sample: tuple[tuple[int, ...] | None, ...]
    share: float | None  #: of the runs that were checked; None where none was
    reason: str | None  #: why `share` is None


@dataclass(frozen=True)
class SettingSummary:
    """What a setting's samples come to."""

    accuracy: AccuracyPart
    counts: CountsPart
    #: by quantity: stage times in seconds, over all runs; token counts as they are, over samples
    distributions: Mapping[str, Distribution]
    typical: Mapping[str, Distribution]  #: of quantities of runs, over each sample's median run alone
    #: for each sample the indices of its runs that stand out, None where it has too few runs for that
    outlier_runs: tuple[tuple[int, ...] | None, ...]
