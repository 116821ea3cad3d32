"""The result of a setting as one record: its fields are the keys of the setting's JSON file.

The tables of docs/results_schema.md are made from the `#:` comments. Keys that are not known are kept.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field

from experiment_core_utils.knobs.batch_size import batch_size_of
from experiment_core_utils.knobs.placebo import PLACEBO
from experiment_core_utils.knobs.setting import setting_of
from experiment_core_utils.knobs.vision_tokens import TIERS
from experiment_core_utils.primitives.errors import ConfigurationError, OtherVersion, ResultsRefused
from experiment_core_utils.primitives.files import write_json_atomically
from experiment_core_utils.primitives.notebook_html import block, field_table, shown
from experiment_core_utils.primitives.statistics import fraction_of, mean_of, rate
from experiment_core_utils.primitives.texts import without_hidden
from experiment_core_utils.records.at_dfe8f148 import completed_result
from experiment_core_utils.records.columns import ANALYSIS_KEYS, TABLE_COLUMNS
from experiment_core_utils.records.compute import ComputePart
from experiment_core_utils.records.energy import Energy
from experiment_core_utils.records.json_record import AS_IT_IS, Amount, Count, Knob, Number, Ratio, Record, Share, Time
from experiment_core_utils.records.provenance import Provenance, Variables
from experiment_core_utils.records.result_files import content_digest, read_versioned_object
from experiment_core_utils.records.sample_result import (
    QUANTITIES,
    DecoderKnobValues,
    FailedSample,
    SampleResult,
    TheoreticalGeometry,
)

SCHEMA_VERSION = 1
# How settings are measured, and what figures are means of.
PROTOCOL_VERSION = 2
ADVICE = "remove it or measure the setting again"
_ABOVE_ZERO = re.compile(
    rf"(?:{'|'.join(each.key for each in QUANTITIES.values() if each.unit == 'ms' and not each.may_be_zero)})"
    "_(?:mean|p50|p95|p99|min|max)(?:_typical)?"
)


# Tokens of the answer that all settings are compared at, where answers may be as long.
FIXED_LENGTH = 16


class FixedLengthTime(Record):
    """The time of an answer whose length is the same at every setting."""

    num_tokens: Count  #: n, 16 or the limit of tokens where that is less; with `--ignore_eos` the limit
    mean: Time  #: mean, in ms, of the same runs as those of the means that it is made of
    #: `computed`: `T_first_token_mean` + (n - 1) x `T_decode_per_token_mean`; `measured`: `T_total_mean` of a run with
    #: `--ignore_eos`
    how: Literal["computed", "measured"]

    @classmethod
    def from_stats(cls, stats: Mapping[str, Number | None], variables: Variables) -> Self | None:
        """From the means in `aggregate_stats`; None where no decode step, or no sample, was measured."""
        limit = variables.max_new_tokens
        if limit is None:
            return None
        if variables.ignore_eos:
            total = stats.get("T_total_mean")
            return None if total is None else cls(num_tokens=limit, mean=total, how="measured")
        tokens = min(limit, FIXED_LENGTH)
        first, each = stats.get("T_first_token_mean"), stats.get("T_decode_per_token_mean")
        if first is None or each is None:
            return None
        return cls(num_tokens=tokens, mean=first + (tokens - 1) * each, how="computed")


class WarmUpRuns(Record):
    """The unmeasured runs of one process before its window of a setting."""

    rank: Count | None = None  #: the process
    experiment_id: str | None = None  #: the run that it was part of
    num_runs: Count | None = None  #: unmeasured runs of the process's first sample, 0 where warm-up is off
    is_stable: bool | None = None  #: whether the last three agreed within 5 %; None if warm-up is off
    spread_of_last_3: Number | None = None  #: longest / shortest - 1 of their `T_total`; None if fewer than 3 runs
    T_total: list[Number] | None = None  #: list of the runs' total times in ms


class Conditions(Record):
    """Other load on the device and the host while a process measured."""

    rank: Count | None = None  #: the process
    experiment_id: str | None = None  #: the run that it was part of
    opened: str | None = None  #: UTC, at the first reading
    num_readings: Count | None = None  #: how many there were
    window_s: Amount = 0.0  #: seconds from opening to the last reading, summed over windows
    #: [lowest, highest] clock of the GPU's multiprocessors; None if no GPU, or not reported
    sm_clock_mhz: list[Amount | None] | None
    #: [lowest, highest] clock of its memory; None if no GPU, or not reported
    memory_clock_mhz: list[Amount | None] | None
    temperature_c_max: Number | None  #: highest temperature of the GPU; None if no GPU, or not reported
    power_w_max: Amount | None  #: highest power draw; None if no GPU, or not reported
    #: names of all of NVML's clocks event reasons that a reading showed (`gpu_idle`, `sw_power_cap`,
    #: `hw_thermal_slowdown` ...); None if no GPU, or not reported
    throttle_reasons: list[str] | None = None
    #: seconds in the window in which clocks were held down because of power, by the driver's counter; None if no GPU,
    #: or not reported
    power_throttled_s: Amount | None
    thermal_throttled_s: Amount | None  #: the same because of heat; None if no GPU, or not reported
    #: highest utilisation that the driver reported when a window opened; its period of up to a second may include
    #: work of this process; None if no GPU, or not reported
    utilisation_percent_at_open: Amount | None = None
    #: most other processes that computed on the GPU; None if no GPU, or ids of processes cannot be compared
    #: (containers)
    foreign_gpu_processes_max: Count | None = None
    foreign_gpu_memory_bytes_max: Count | None = None  #: most memory that they held; None if as above
    gpu_reason: str | None = None  #: why figures of the GPU are null; None if none is
    #: time that the host's logical CPUs were busy with other processes (other ranks of this run among them, processes
    #: that prepare requests not), as a fraction of all their time; None if one reading only
    foreign_cpu_share: Amount | None
    #: [lowest, highest] mean frequency of the CPUs; None if the host does not report it
    cpu_frequency_mhz: list[Amount | None] | None


class Precision(Record):
    """How well the mean total time is known, and why no more samples were requested."""

    asked: Number | None = None  #: `--until_precision`; None if not given
    #: half of the 95 % interval of the mean `T_total`, as a fraction of the mean: Student's t over samples, or over
    #: pictures where samples share some; None if samples of fewer than 2 pictures
    reached: Number | None = None
    #: `num_samples`: every sample drawn was requested; `precision`: a process was precise enough before;
    #: `stopped`: the run was stopped, and is not finished
    stopped_by: str | None = None
    num_processes_stopped: Count | None = None  #: how many processes had enough before their last sample


class Order(Record):
    """The order in which a run measured its settings, and the place of one among them."""

    #: `rounds`: for each sample, all settings in turn; `loads`: so far as they share a copy of the model, which is
    #: loaded anew for each run of the samples; at commit dfe8f148 also `blocked`: one setting after another
    how: str | None = None
    seed: int | None = None  #: what the order was drawn by; None if it is that of the plan
    position: Count | None  #: place of this setting in the plan's order, from 0; None if not measured
    num_settings: Count | None = None  #: settings of the plan


class CommonFactor(Record):
    """How the machine's speed changed between rounds of the same sample, which is in no comparison of settings.

    The factor of a round is the geometric mean over settings of a run's time / the time of the same sample's first run
    at the setting.
    """

    min: Ratio | None = None  #: lowest factor of the further rounds of a sample; None if one run a sample
    max: Ratio | None = None  #: highest factor; None as there
    #: factor of the first sample's round, repeated after all others; None if it could not be
    last_over_first: Ratio | None = None


class Rounds(Record):
    """The rounds in which one process measured several settings: each is one sample, once at every setting."""

    rank: Count | None = None  #: the process
    experiment_id: str | None = None  #: the run that it was part of
    num_settings: Count | None = None  #: settings that took turns
    num_rounds: Count  #: rounds that were finished, each sample counted once for each of its runs
    #: samples that each setting ran one after the other, or with `--request_rate` together; otherwise more than 1 if
    #: memory did not allow to keep what all settings need
    samples_per_round: Count | None = None
    seed: int | None = None  #: what the orders of the settings were drawn by
    common_factor: CommonFactor | None = None  #: changes of the machine's speed, as information
    switch_ms: Amount | None = None  #: median time of a change of settings


class OpenLoop(Record):
    """How a server kept up with requests that arrived at a rate."""

    request_rate: Ratio  #: `--request_rate`: requests a second that came, in each batch
    #: requests a second that were answered: `request_rate` x the time in which the middle 80 % of those that were
    #: answered had come / the time in which the middle 80 % of the answers were done; None if no batch has two
    achieved_rate: Ratio | None
    num_batches: Count  #: batches of requests, each run of a group of samples one
    num_requests: Count  #: requests that came
    num_answered: Count  #: those that did not fail
    most_under_way: Count  #: most requests at a time that had come and were not answered
    num_late: Count  #: requests that the client sent more than 5 ms after they were due
    late_max_ms: Amount | None  #: how late it sent the latest; None if none was sent


class TypeScores(Record):
    """Accuracy of one type of question, null where none of its samples has a score, and its number of samples."""

    accuracy: Amount | None = None
    num_samples: Count | None = None


class VisionKnob(Record):
    """The published forms of the vision knob."""

    #: `low`, `medium` or `high`; None if a fraction, a token target or the model's own were requested
    tier: Literal[tuple(TIERS)] | None  # type: ignore[valid-type]
    #: N of `--vision_tokens_list`; None if no number of tokens was requested
    vision_tokens_target: Knob | None
    #: F of `--vision_fraction_list`; None if it is 1, the model's own, or a tier or number was requested
    vision_fraction: Amount | None = None


class VisionPart(VisionKnob, TheoreticalGeometry):
    """The vision knob of a setting, and the crops and vision tokens that came of it."""

    #: crops allowed: object of `min_crops` and `max_crops`; both are the fixed number for a token target; None for a
    #: fraction, the model's own, and a token target of a model that takes pictures in their own shape
    tier_range: dict[str, Count] | None = None
    #: mean number of crops that the rule chose; None if no sample has a picture that is cut (some models take pictures
    #: in their own shape)
    selected_crops_mean: Amount | None
    #: number of crops (as text) -> samples; `{}` without pictures
    selected_crops_distribution: dict[str, Count] | None = None
    #: the token target; else the mean over samples of the tokens that a fraction asks for, or of (crops + 1) x 144 (in
    #: other models, of the vision tokens that the rule gives); None if no sample has a picture
    target_vision_tokens_mean: Amount | None
    #: mean of the features that entered the language model, 0 for a sample without a picture; None if no samples
    actual_vision_tokens_mean: Amount | None
    max_crops: Count | None  #: upper end of `tier_range`; None as there


class DecoderPart(DecoderKnobValues):
    """The decoder's knobs of a setting, and its blocks."""

    num_total_blocks: Knob | None  #: blocks of the model; None if a server shows none
    active_block_indices: list[Count] | None = None  #: the requested blocks, ascending; None if a server shows none


class AccuracyPart(Record):
    """What depends on how the answers are scored."""

    metric: str  #: the metric that scored the answers
    metric_best: Annotated[float, Field(gt=0, le=1e6), AS_IT_IS]  #: its highest score; its lowest is 0
    metric_details: dict[str, Any]  #: further numbers of the metric, see below; may be `{}`
    #: mean score of the samples that ran, by `metric`, of which more is always better, of `perplexity` 100 / perplexity
    #: per byte; an answer that could not be parsed counts as 0; None if no sample has a score (CIDEr of fewer than two
    #: pictures)
    accuracy: Amount | None
    accuracy_std: Amount | None  #: standard deviation of single scores (n - 1); None if fewer than 2 samples
    #: [low, high], 95 % interval of the mean, inside [0, `metric_best`]; below; None if as `accuracy`
    accuracy_ci95: Annotated[list[Amount], Field(min_length=2, max_length=2)] | None
    #: question type -> object of its `accuracy`, null where no sample has a score, and `num_samples`
    accuracy_by_type: dict[str, TypeScores]
    #: answers of samples that ran that could not be read as an answer at all, such as an empty one or one that names no
    #: option
    num_unparsed: Count
    share_unparsed: Share | None  #: `num_unparsed` / `num_samples`; None if no samples
    #: fraction of answers without any text; None if no samples
    share_empty: Share | None


class CountsPart(Record):
    """How many samples ran, and which fractions of them fell short."""

    num_samples: Count  #: samples that ran, over all processes
    num_failed_samples: Count  #: samples that did not, not in any mean
    #: samples of those that were measured; the others were answered in batches and have no times
    num_latency_samples: Count
    #: fraction of samples whose first run (or answer in a batch) reached the limit of tokens (`--max_new_tokens`, else
    #: the task's own) without end-of-sequence; None if no samples
    share_truncated: Share | None
    #: fraction of samples whose answer is a single token before end-of-sequence, although most of their reference
    #: answers have several words; None if no samples
    share_one_token: Share | None
    #: `num_failed_samples` / (`num_samples` + `num_failed_samples`); None if no samples were requested
    share_failed: Share | None
    #: fraction of outliers among the runs; `outlier_runs` marks them, and they are in every
    #: statistic; see [measurement.md](measurement.md#runs-that-stand-out); None if no sample has 3 runs
    share_outlier_runs: Share | None
    share_outlier_runs_reason: str | None  #: why there is no share; None if there is one
    num_discarded_runs: Count  #: sum of that of the samples
    #: fraction of all runs that were discarded, and so are missing in means and percentiles; None if no runs
    share_discarded_runs: Share | None
    num_disturbed_samples: Count  #: samples of which `disturbances` names something


class SteadinessPart(Record):
    """How steady a setting's numbers are."""

    #: in which order the run measured its settings, [below](#order-and-rounds); None if measured outside a plan
    setting_order: Order | None = None
    #: list of the rounds, one entry for each process and run, [below](#order-and-rounds); `[]` of a single setting
    rounds: list[Rounds] = []
    #: how the server kept up with `--request_rate`, [below](#order-and-rounds); None if not given
    open_loop: OpenLoop | None = None
    warmup: list[WarmUpRuns] = []  #: list of the warm-ups, [below](#warm-up), `[]` where no sample could be read
    conditions: list[Conditions] = []  #: list of the conditions of the device and the host, [below](#conditions)
    #: how well the mean `T_total` is known, and why no more samples were requested, [below](#precision)
    precision: Precision | None = None


class ResultOrigin(Record):
    """Which schema a result follows, and what it may be compared with."""

    schema_version: Literal[1]  #: 1; see the end of this page
    protocol_version: Literal[2]  #: 2: settings in rounds, and `aggregate_stats` of all runs
    #: digest of everything but the knobs that makes results comparable; see
    #: [profiling.md](profiling.md#stopping-and-resuming)
    fingerprint: str
    #: SHA-256 of the file's other keys, as JSON of sorted keys without spaces, by which an edited file is known; None
    #: if not saved, or of commit dfe8f148
    digest: str | None = None


class SettingResult(ComputePart, SteadinessPart, CountsPart, AccuracyPart, DecoderPart, VisionPart, ResultOrigin):
    """The result of a setting, which is the JSON of its file."""

    #: value of each knob by its name, without knobs that the model lacks and further ones that change nothing
    knobs: dict[str, str | int | float]
    #: whether this is the model as it is: its own crops or pixels, its own number of experts, all blocks; of several
    #: servers the first
    is_reference: bool
    #: whether the requested values of the knobs make this setting; False for a reference setting beside them
    in_grid: bool
    #: how the samples were chosen: object of `how`, `seed`, `num_asked`, `num_in_split`,
    #: `num_left_out` (samples that chose the blocks and are not drawn)
    sampling: dict[str, Any]
    #: the requested ids, ascending; those of `per_sample_results` and `failed_samples` together. All that were drawn
    #: where `precision.stopped_by` is `num_samples`.
    sample_ids: list[Count]
    realised: dict[str, Any] | None  #: what was counted inside the model; None if no sample could be read
    #: energy of requests and of one's stages, [below](#energy); None if `--energy off`, or `auto` without a counter
    energy: Energy | None
    #: time of an answer of fixed length, [below](#fixed-length); None if no decode step was measured
    T_fixed_length: FixedLengthTime | None
    #: spread of every quantity, [below](#aggregate-stats), may be `{}`: of energy and the model's times over all runs,
    #: where the n runs of a sample weigh 1/n each, and one without a stage that others have counts as 0 there, so that
    #: means of stages add up to that of `T_total`; of others over samples
    aggregate_stats: dict[str, Number | None]
    per_sample_results: list[SampleResult]  #: a list, in order of `sample_id`
    failed_samples: list[FailedSample]  #: a list, in order of `sample_id`
    provenance: Provenance  #: how the run was made

    def __repr__(self) -> str:
        figures = ", ".join(f"{name} {shown(value)}" for name, value in self._figures.items())
        return f"SettingResult({self.provenance.task.name} {setting_key(self)}: {figures})"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        """As a notebook shows it: what it is of, and its figures."""
        names = {"task": self.provenance.task.name, "setting": setting_key(self)}
        return block(field_table(names | self._figures))

    @property
    def is_unchecked(self) -> bool:
        """Whether its file has no digest, as those of commit dfe8f148."""
        return self.digest is None

    @property
    def is_placebo(self) -> bool:
        """Whether it is the reference measured a second time, as a control (`--placebo`)."""
        return PLACEBO.name in self.knobs

    @property
    def _figures(self) -> dict[str, Any]:
        """What a reader looks for first, by name."""
        memory = None if self.memory is None else self.memory.counted_memory_bytes
        return {
            "accuracy": self.accuracy,
            "T_total_mean_ms": self.aggregate_stats.get("T_total_mean"),
            "counted_memory_bytes": memory,
            "samples": self.num_samples,
            "failed samples": self.num_failed_samples,
        }

    @classmethod
    def from_content(cls, content: Mapping[str, Any], where: str, advice: str = ADVICE) -> Self:
        """As `read`; raises ResultsRefused also for a knob that is unknown or a field that contradicts another."""
        found = content.get("protocol_version")
        if isinstance(found, int) and found > PROTOCOL_VERSION:
            raise OtherVersion(
                f"{where} is of a newer version: its protocol_version is {found}, and this one reads up to "
                f"{PROTOCOL_VERSION}; read it with that version, or move it away"
            )
        result = completed_result(cls.read(content, where, advice))
        try:
            setting_of(result)
        except ConfigurationError as error:
            raise ResultsRefused(f"{where}: {error}") from error
        fault = next(_contradictions(result), None)
        if fault is not None:
            raise ResultsRefused(f"{where} {fault}; {advice}")
        # Commit dfe8f148 wrote neither digests nor ids of runs.
        is_unchecked = result.digest is None and result.provenance.run_uid is None
        if result.digest != content_digest(content) and not is_unchecked:
            raise ResultsRefused(f"{where} was EDITED: its digest is that of another content; {advice}")
        return result


class Rescoring(Record):
    """Where a result was scored again from: the file, and the metric and the accuracy before."""

    file: str
    metric_before: str
    accuracy_before: Amount | None


class RescoredResult(SettingResult):
    """A result whose answers were scored again."""

    rescored: Rescoring


def read_setting(path: Path) -> SettingResult:
    """The result in a setting's file.

    Raises:
        ResultsRefused: not there, not a regular file, torn, of another schema, or a field that is missing or cannot be,
            with the names of the file and the field.
    """
    return SettingResult.from_content(read_versioned_object(path, "a result", SCHEMA_VERSION), str(path))


def _contradictions(result: SettingResult) -> Iterator[str]:
    """Fields that are possible alone, but not together."""
    samples = result.per_sample_results
    if not result.metric.isascii():
        yield f"is broken: metric is {result.metric!a}, and no metric has that name"
    for name, value in result.aggregate_stats.items():
        if value is not None and value <= 0 and _ABOVE_ZERO.fullmatch(name):
            yield f"is broken: aggregate_stats.{name} is {value}, and a time is above 0"
    if result.num_samples != len(samples):
        yield f"is broken: num_samples is {result.num_samples}, and per_sample_results contains {len(samples)}"
    twice = [sample_id for sample_id, count in Counter(each.sample_id for each in samples).items() if count > 1]
    if twice:
        yield f"is broken: per_sample_results contains sample_id {twice[0]} more than once"
    for place, sample in enumerate(samples):
        if sample.runs and not math.isclose(sample.mean_total or 0.0, sample.T_total or 0.0):
            yield f"is broken: per_sample_results[{place}].T_total is {sample.T_total}, and its runs' mean is another"
        problem = _sample_fault(sample, result.metric_best)
        if problem is not None:
            yield f"is broken: per_sample_results[{place}].{problem}"


def _sample_fault(sample: SampleResult, best: float) -> str | None:
    if sample.accuracy is not None and sample.accuracy > best * (1 + 1e-9):
        return f"accuracy is {sample.accuracy}, above metric_best, {best:g}"
    # A server shows neither blocks nor stages.
    first = [] if sample.continuations else ["T_first_token"]
    for name in (*first, *(["T_LLM_prefill"] if sample.num_active_blocks is not None else [])):
        if sample.runs and getattr(sample, name) is None:
            return f"{name} is None in a sample that was measured"
    # A request of a batch waits for the others.
    is_alone = all(run.batch_output_tokens is None for run in sample.runs)
    too_few = sample.output_tokens < 2 and sample.outputs_identical is not False
    if sample.T_LLM_decode is not None and is_alone and too_few:
        return f"output_tokens is {sample.output_tokens}, too few for a decode time"
    metadata = sample.metadata
    index, options = metadata.answer_index, metadata.options
    if options and "answer_index" not in metadata.model_fields_set:
        return "metadata lacks answer_index beside its options"
    if index is not None and index >= len(options):
        return f"metadata.answer_index is {index}, and there are {len(options)} options"
    return None


@cache
def published_names() -> frozenset[str]:
    """Names of columns of tables, and of keys of results and analyses, whatever record they are in."""

    def keys_of(kind: Any) -> Iterator[str]:
        if isinstance(kind, type) and issubclass(kind, Record):
            yield from kind.model_fields
            kinds: Iterable[Any] = (each.annotation for each in kind.model_fields.values())
        else:
            kinds = get_args(kind)
        for each in kinds:
            yield from keys_of(each)

    return TABLE_COLUMNS | ANALYSIS_KEYS | frozenset(keys_of(SettingResult))


@dataclass(frozen=True)
class Throughput:
    """What a setting gets done in the time of its measured runs, batch after batch."""

    requests_per_s: float | None
    output_tokens_per_s: float | None


def throughput_of(result: SettingResult) -> Throughput:
    """Requests and output tokens of all batches over their times; a batch of one is a request alone.

    None where nothing was measured, and where requests overlapped (`--request_rate`).
    """
    measured = [sample for sample in result.per_sample_results if sample.mean_total is not None]
    if result.open_loop or not measured:
        return Throughput(None, None)
    size = batch_size_of(setting_of(result))
    # Of a sample's runs the mean, so that each sample weighs as much.
    total_s = sum(sample.mean_total or 0.0 for sample in measured) / 1000
    tokens = sum(
        sample.output_tokens if size == 1 else mean_of([run.batch_output_tokens or 0 for run in sample.runs]) or 0.0
        for sample in measured
    )
    return Throughput(rate(size * len(measured), total_s), rate(tokens, total_s))


def setting_key(result: SettingResult) -> str:
    """`Setting.key` of a stored result, such as `tier-low_topk4_blocks12`."""
    return setting_of(result).key


def reference_of(results: Iterable[SettingResult]) -> SettingResult | None:
    """The model as it is among results; None where it was not measured."""
    return next((result for result in results if result.is_reference), None)


def share_of_reference(result: SettingResult, reference: SettingResult) -> float | None:
    """The mean total time of a setting over that of the reference, on the samples with times at both; None without any.

    Where both have the same samples it is the quotient of their `T_total_mean`.
    """
    own, other = (
        {sample.sample_id: sample.T_total for sample in each.per_sample_results if sample.T_total is not None}
        for each in (result, reference)
    )
    both = own.keys() & other.keys()
    return fraction_of(sum(own[at] for at in both), sum(other[at] for at in both))


def setting_file_name(result: SettingResult) -> str:
    """The published name of a setting's file; a tier carries the mean number of crops of its pictures, rounded.

    `reference-vqa_imgsizetier-low_crops2_topk8_blocks14.json`, `…_imgsizetokens1008_topk8_blocks14.json`.
    """
    crops = "" if result.tier is None else f"_crops{round(result.selected_crops_mean or 0)}"
    vision, *others = setting_of(result).labels
    task = result.provenance.task.name.replace("_", "-")
    return f"{task}_imgsize{'_'.join([f'{vision}{crops}', *others])}.json"


def save_setting_result(result: SettingResult, path: Path) -> None:
    """Write the JSON of a setting and its digest, whole or not at all; raises OutputRefused or ResultsNotSaved."""
    # The file has no secret either.
    content = json.loads(without_hidden(json.dumps(result.content())))
    write_json_atomically(content | {"digest": content_digest(content)}, path)
