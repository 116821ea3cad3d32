"""What flows between the steps, one frozen record per stage; this page is the schema of `results/`.

Times are in seconds here and become the published milliseconds (`T_*`) in `j_results_saving`. Nothing here imports
torch, so that stored results can be read and scored again without it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypedDict

from experiment_core_utils.primitives.compute_records import LoadTrace, MemoryParts
from experiment_core_utils.primitives.distributions import Distribution
from experiment_core_utils.primitives.energy_records import RunsEnergy, SettingEnergy
from experiment_core_utils.primitives.errors import ConfigurationError

When = Literal["open", "between", "close"]
StageName = Literal["vision", "prefill", "decode"]


class ProcessPlace(Protocol):
    """A process among those of a run; an `Accelerator` is one."""

    @property
    def process_index(self) -> int:
        """Its rank in the run."""
        ...

    @property
    def local_process_index(self) -> int:
        """Its rank on its machine."""
        ...


@dataclass(frozen=True)
class VisionGeometry:
    """How one picture was cut.

    Attributes:
        num_crops: tiles R * C, without the crop of the whole picture; 0 where the picture is not cut.
        tiling: (R, C); None where the picture is not cut, or its tiles are counted but not placed.
        image_size: (height, width) in pixels of the canvas that the tiles are cut from, or of the picture as the model
            sees it; None where it cannot be told.
        pooled_features: what the vision stage gives: (num_crops + 1) * 144 in MolmoE.
        has_overview: whether the whole picture is a crop too.
        patches: patches of the picture, for models that take it in its own shape; None where it is cut into crops.
        patch_grid: (rows, columns) of these; None where it is cut, or has several frames.
    """

    num_crops: int
    tiling: tuple[int, int] | None
    image_size: tuple[int, int] | None
    pooled_features: int
    has_overview: bool = True
    patches: int | None = None
    patch_grid: tuple[int, int] | None = None

    @property
    def tiles(self) -> int | None:
        """`num_crops`; None for a picture that is not cut because it is taken in its own shape."""
        return None if self.patches is not None else self.num_crops

    @property
    def total_crops(self) -> int:
        """Crops that the vision stage takes, the whole picture counted; 0 for a picture in its own shape."""
        return 0 if self.patches is not None else self.num_crops + self.has_overview

    @property
    def crop_features(self) -> int | None:
        """Features that each crop gives; None where crops differ in it, and for a picture in its own shape."""
        if self.total_crops == 0 or self.pooled_features % self.total_crops:
            return None
        return self.pooled_features // self.total_crops


@dataclass(frozen=True)
class RequestSize:
    """What a request's operations depend on beside the model and its setting.

    Attributes:
        prompt_tokens: positions of the prompt, those of pictures among them; no padding.
        output_tokens: n, generated tokens; n - 1 decode steps, since the first comes from the prefill.
        crops: pictures or crops of one size, the crop of a whole picture counted, for models that cut so.
        patches: patches of each picture (or of each frame pair), for models that take pictures as they are.
        requests: how many requests of this size run.
        grids: (rows, columns) of the patches of each picture, for models whose patches attend in windows; empty where
            they are not known.
        crop_features: features that each crop gives, for models whose crops have one of several sizes; None where it
            is not known.

    Raises:
        ConfigurationError: no token in the prompt, no request, a negative number, or grids of other patches.
    """

    prompt_tokens: int
    output_tokens: int
    crops: int = 0
    patches: tuple[int, ...] = ()
    requests: int = 1
    grids: tuple[tuple[int, int], ...] = ()
    crop_features: int | None = None

    def __post_init__(self) -> None:
        if min(self.prompt_tokens, self.requests) < 1 or min(self.output_tokens, self.crops, *self.patches, 0) < 0:
            raise ConfigurationError(
                f"{self} is not possible; give at least one prompt token and one request, and no negative number"
            )
        if self.grids and self.patches != tuple(rows * columns for rows, columns in self.grids):
            raise ConfigurationError(
                f"{self} is not possible; give grids whose rows times columns are the patches, or none"
            )


@dataclass(frozen=True)
class RequestShape:
    """Sizes of one prepared request, without its tensors.

    Attributes:
        theoretical: the geometry that the picture's size and the vision target call for; None without a picture.
        actual: the geometry that the tensors have.
        vision_tokens: image features that enter the language model.
        image_marker_tokens: start, end and column tokens of the image part.
        text_tokens: all other prompt tokens, bos included.
        preprocess_s: host time for resizing, cutting and tokenising.
    """

    theoretical: VisionGeometry | None
    actual: VisionGeometry | None
    vision_tokens: int
    image_marker_tokens: int
    text_tokens: int
    preprocess_s: float

    @property
    def prompt_tokens(self) -> int:
        """All positions of the prompt."""
        return self.vision_tokens + self.image_marker_tokens + self.text_tokens

    @property
    def vision_tokens_difference(self) -> int | None:
        """Theoretical minus actual vision tokens; None without a picture."""
        return None if self.theoretical is None else self.theoretical.pooled_features - self.vision_tokens

    def size(self, output_tokens: int) -> RequestSize:
        """What the request's operations depend on, with an answer of so many tokens."""
        actual = self.actual
        patches = None if actual is None else actual.patches
        grid = None if actual is None else actual.patch_grid
        return RequestSize(
            prompt_tokens=self.prompt_tokens,
            output_tokens=output_tokens,
            crops=0 if actual is None else actual.total_crops,
            patches=() if patches is None else (patches,),
            grids=() if grid is None else (grid,),
            crop_features=None if actual is None else actual.crop_features,
        )


@dataclass(frozen=True)
class PreparedRequest:
    """One sample ready for the model, on the host.

    Attributes:
        inputs: tensors by argument name; `input_ids` [1, T], with a picture also `pixel_values` [1, K, 3, S, S],
            `image_masks` [1, K, P] and `image_input_idx` [1, K, F].
    """

    inputs: Mapping[str, Any]
    shape: RequestShape


@dataclass(frozen=True)
class MarkedTokens:
    """An answer, and what lies between the marks that were set while it was made.

    Attributes:
        token_ids: generated ids, end-of-sequence included where it came.
        spans: the stage of each interval between neighbouring marks, in order; one `decode` for each token after the
            first.
    """

    token_ids: tuple[int, ...]
    spans: tuple[StageName, ...]


@dataclass(frozen=True)
class StagedRun:
    """One run of one request, from marks of that run; the stages add up to the total.

    Attributes:
        token_ids: generated ids, end-of-sequence included where it came.
        vision_s: crops on the device -> features ready; None without a picture.
        prefill_s: features and prompt on the device -> first token on the host.
        decode_s: first token -> last token; None for fewer than 2 tokens.
        total_s: request handed over -> last token.
        inter_token_s: the n - 1 times between tokens.
        ended: whether end-of-sequence came before the limit.
    """

    token_ids: tuple[int, ...]
    vision_s: float | None
    prefill_s: float
    decode_s: float | None
    total_s: float
    inter_token_s: tuple[float, ...]
    ended: bool

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for fewer than 2 tokens."""
        return None if self.decode_s is None else self.decode_s / len(self.inter_token_s)

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return (self.vision_s or 0.0) + self.prefill_s


@dataclass(frozen=True)
class KnobProof:
    """What ran when the setting was in force, counted inside the model on one request outside the measurement.

    Attributes:
        experts_per_token: experts that the router chose for a token, for each block that ran, in the prefill; a block
            without a router has none.
        blocks_run: blocks that ran in the prefill, as indices of the whole model.
        blocks_run_decode: the same in a decode step; None where no step was run.
        cache_layers: layers of the cache that hold keys or a recurrent state.
        execution: how the setting ran, as `model.execution`; None in results from before it was noted.
        execution_reason: why not as asked; None where it did.
        experts_implementation: transformers' way by which the experts of the prefill were computed, as they found it;
            None where there are none, or engines compute them by kernels of their own.
        experts_implementation_decode: the same in a decode step; None in the same cases.
    """

    experts_per_token: tuple[int | None, ...]
    blocks_run: tuple[int, ...]
    blocks_run_decode: tuple[int, ...] | None
    cache_layers: int
    execution: str | None = None
    execution_reason: str | None = None
    experts_implementation: str | None = None
    experts_implementation_decode: str | None = None


@dataclass(frozen=True)
class StageFlops:
    """Floating-point operations of one request; one multiply-add is 2. The model's own formulas say what counts."""

    vision_flops: int | None
    prefill_flops: int
    decode_flops_per_token: float | None


@dataclass(frozen=True)
class RequestFlops:
    """Operations of all requests of a `RequestSize`; one multiply-add is 2.

    Attributes:
        stages: by stage; decode as the mean over steps.
        decode_flops: sum over all decode steps; 0 where there is none.
    """

    stages: StageFlops
    decode_flops: int

    @property
    def total_flops(self) -> int:
        """Vision, prefill and every decode step."""
        return (self.stages.vision_flops or 0) + self.stages.prefill_flops + self.decode_flops


@dataclass(frozen=True)
class FlopsFigure:
    """Operations of a request, or why there is no figure.

    Attributes:
        source: `formula`, or `counted` on a model without weights.
    """

    flops: RequestFlops | None
    source: Literal["formula", "counted"]
    reason: str | None


@dataclass(frozen=True)
class MemoryReading:
    """Memory of a window, in bytes.

    Attributes:
        peak_memory_bytes: most that torch had allocated on the GPU between open and close; None without a GPU.
        peak_reserved_bytes: the same for what its allocator had reserved.
        process_rss_bytes: resident memory of this process at the close.
        reason: why a figure is None.
    """

    peak_memory_bytes: int | None
    peak_reserved_bytes: int | None
    process_rss_bytes: int
    reason: str | None


@dataclass(frozen=True)
class BatchedAnswer:
    """What a sample was answered in a batch with others of the same setting, without measuring.

    Attributes:
        token_ids: generated ids, end-of-sequence included where it came.
        ended: whether it came before the limit.
        batch_size: requests that were answered together.
        batch_limit: most that were allowed together; less than what was asked for where memory had run out.
    """

    token_ids: tuple[int, ...]
    ended: bool
    batch_size: int
    batch_limit: int


@dataclass(frozen=True)
class MeasuredSample:
    """One sample at one setting: every run, and the answer beside what it is judged against.

    It has no score yet: answers are scored over the whole run, after the parts of all processes are merged.

    Attributes:
        shape: sizes of its request.
        runs: every measured run, in order; none where the sample was answered in a batch.
        outputs_identical: whether every run gave the same tokens; None without runs.
        transfer_s: host to device, outside the total; None without runs.
        prediction: decoded text of the first run, or of the answer.
        flops: None for an unknown architecture.
        references, options, answer_index, question_type, image_id: what the prediction is judged against, as in the
            task's sample.
        metadata: the question and what else the task says (JSON values only).
        answer: of a sample without runs; None with them.
        energy: of its runs; None where it was not asked for, and without runs.
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
        """Of that run."""
        place = self.run_place
        return None if self.energy is None or place is None else self.energy.joules[place]

    @property
    def output_tokens(self) -> int:
        """Of `run`, or of the answer in a batch."""
        said = self.run or self.answer
        assert said is not None
        return len(said.token_ids)

    @property
    def ended(self) -> bool:
        """Whether end-of-sequence came before the limit, in the first run or in the answer in a batch."""
        said = self.runs[0] if self.runs else self.answer
        assert said is not None
        return said.ended


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
        has_timeline: whether the samples themselves were asked for, beside what they come to.
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
        """Its position in the task's split."""
        done = self.measured or self.failed
        assert done is not None
        return done.sample_id


@dataclass(frozen=True)
class ShareDone:
    """A process has come to the end of its share of a setting.

    Attributes:
        experiment_id: of the run that it belongs to.
        proof: None where the share holds no sample that can be read.
        failure: why samples of the share are missing.
        num_given: how many samples the share had.
        num_asked: how many of them, from the front, were asked for: fewer where sampling stopped early. Both are None
            in the ends of shares of which every sample was asked for.
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
        energy: of one request's stages; None where it was not asked for.
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
        share: of the runs that were judged; None where none was.
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
        share_failed: share of the samples asked for that could not be run; None where none was asked for.
        outliers: runs that stand out from the others of their sample; they are in all distributions.
    """

    accuracy: AccuracySummary
    distributions: Mapping[str, Distribution]
    share_truncated: float | None
    share_failed: float | None
    outliers: Outliers


class QuantSupport(TypedDict):
    """What this machine can load quantised; a type is None where that width is not supported."""

    supports_4bit: bool
    supports_8bit: bool
    default_4bit_quant_type: str | None
    default_8bit_quant_type: str | None


class TokenisedPrompts(TypedDict):
    """Left-padded ids and their mask, both [N, T]; a prompt's true length is the sum of its row of the mask."""

    input_ids: Any
    attention_mask: Any


class ApportionedEnergy(TypedDict):
    """Energy of a part of a run, from power readings taken beside the whole of it.

    Attributes:
        energy_j: of all devices that the process computes on, idle power included; None where no power is read.
        energy_bound_j: most that the time between readings can make of an error.
        energy_method: `apportioned`: not from a window of its own.
        energy_source, energy_basis: as in `EnergyOrigin`; several, where devices differ, are joined by "+".
        energy_reason: why there is no figure.
    """

    energy_j: float | None
    energy_bound_j: float | None
    energy_method: Literal["apportioned"] | None
    energy_source: str | None
    energy_basis: str | None
    energy_reason: str | None


class QueryRecord(TypedDict):
    """One prompt of a text run.

    Attributes:
        prompt_index: its place among all prompts, over all processes.
        process_index: which process ran it.
        batch_index: of the process's own batches.
        input_tokens: true tokens, without padding.
        output_tokens: generated tokens up to end-of-sequence, that one included.
        ended: whether end-of-sequence came before the limit.
        output_token_ids: the generated ids.
        output_text: None where decoding to text was not asked for.
        energy_j: its share of its batch's, by its tokens; see `apportioned_energy.share_of_query`.
    """

    prompt_index: int
    process_index: int
    batch_index: int
    input_tokens: int
    output_tokens: int
    ended: bool
    output_token_ids: list[int]
    output_text: str | None
    energy_j: float | None


class BatchRecord(ApportionedEnergy):
    """One call of `generate()` that came to its end.

    Attributes:
        process_index: which process made it.
        batch_index: of the process's own batches, in the order in which they ran.
        prompt_indices: which prompts ran together, over all processes.
        inference_time_s: prompts on the device -> last token on the host.
        ttft_s: -> first token, the same for every prompt of the batch; None for a model whose own `generate()` does
            not tell of each token.
        inter_token_s: the times between the batch's tokens; after its first rows have ended, those of the others.
        padded_input_tokens: positions of the padded prompts, N * T.
        input_tokens, output_tokens: true tokens.
        computed_output_tokens: positions that were generated, those after an end-of-sequence included.
        simulated_delay_s: waiting before the batch as if it had arrived late; in no other time.
        halvings: how often a larger batch had run out of memory before this one fitted; the time of those attempts is
            in no figure.
        over_token_limit: a single prompt longer than `adaptive_max_tokens`, which ran alone.
    """

    process_index: int
    batch_index: int
    prompt_indices: list[int]
    inference_time_s: float
    ttft_s: float | None
    inter_token_s: list[float]
    input_tokens: int
    padded_input_tokens: int
    output_tokens: int
    computed_output_tokens: int
    simulated_delay_s: float
    halvings: int
    over_token_limit: bool


class InferenceResults(TypedDict):
    """What one process generated, or all of them; rates over `total_inference_time_s`, None where nothing was timed.

    Attributes:
        output_tokens: generated ids [N, longest] on the host, by prompt index, padded to the right after each end.
        output_text: by prompt index; None where decoding to text was not asked for.
        total_inference_time_s: sum over batches, without simulated waiting and decoding to text. Pooled: that of the
            process that took longest, for they run side by side.
        total_input_tokens, total_output_tokens: true tokens.
        tokens_per_second: output tokens.
        latency_per_query_s: total time / prompts, which is no prompt's own waiting time where batches hold several.
        process_index: None where all processes are pooled.
        queries: by prompt index.
        batches: by process, then in the order in which they ran.
        decoding: the effective `GenerationConfig` values and the seed, and under `ignored` what was given without
            having an effect in this mode.
        simulated_delay_s: sum over batches. Pooled: that of the process that waited longest.
    """

    output_tokens: Any
    output_text: list[str] | None
    total_inference_time_s: float
    total_input_tokens: int
    total_output_tokens: int
    num_prompts_processed: int
    tokens_per_second: float | None
    queries_per_second: float | None
    latency_per_query_s: float | None
    process_index: int | None
    num_processes: int
    queries: list[QueryRecord]
    batches: list[BatchRecord]
    decoding: dict[str, Any]
    simulated_delay_s: float


class DistributedDescription(TypedDict):
    """A process's place."""

    num_processes: int
    local_process_index: int
    device: str


class HardwareInfo(TypedDict):
    """The host; more keys say what the driver tells of its GPUs."""

    cuda_available: bool
    num_gpus: int
    gpu_names: list[str]
    cpu_count: int
    total_ram_gb: float


class ExperimentInfo(TypedDict):
    """Who ran what, where and when; more keys hold versions, commit and command line."""

    experiment_id: str
    cycle_id: int
    timestamp: str
    distributed_config: DistributedDescription
    hardware_info: HardwareInfo


class ArchitectureSizes(TypedDict):
    """Sizes of a decoder; None where the model's config does not tell."""

    num_layers: int | None
    hidden_size: int | None
    num_attention_heads: int | None
    vocab_size: int | None
    max_position_embeddings: int | None


class ModelArchitectureInfo(TypedDict):
    """A loaded model as it is; sizes in 2**20 bytes, packed weights count as stored."""

    model_class: str
    total_parameters: int
    trainable_parameters: int
    model_size_mb: float
    architecture: ArchitectureSizes
    dtype: str
    device: str


class ExperimentalVariables(TypedDict):
    """Every parameter of a text experiment; more keys hold the others by their names in the configuration."""

    model_name: str
    precision: str
    quantization: dict[str, Any]
    batch_size: int | None
    num_processes: int | None
    decoding_config: dict[str, Any]
    latency_config: dict[str, Any]


class InferenceMetrics(TypedDict):
    """Counts and rates of a run, over one process or pooled over all; None where nothing was generated or timed.

    The keys after `avg_output_tokens_per_prompt` are more than the published ones. They come from the records of
    batches and prompts, and are None for results without these.

    Attributes:
        total_tokens: input and output.
        tokens_per_second: output tokens / total time.
        num_batches: calls of `generate()` that came to their end.
        padding_share: of the padded prompts' positions, those that hold no token.
        batch_efficiency: true output tokens / generated positions: below 1 where rows wait for longer answers.
        share_truncated: of the answers, those that reached the limit without end-of-sequence.
        ttft_s: `Distribution` over batches, all prompts of a batch have the same.
        time_per_output_token_s: `Distribution` over batches of the mean time between two tokens.
        inter_token_s: `Distribution` over all tokens but each batch's first.
        simulated_delay_s: as in the results; in no other time.
        num_halved_batches: batches that ran after a larger one had run out of memory.
        most_halvings: of one batch.
        energy_per_batch_j, energy_per_query_j: `Distribution` of the energies apportioned from power readings.
        energy_per_output_token_j: all of it over all output tokens.
        energy_method: `apportioned`; None without a figure.
        energy_reason: why there is none.
    """

    total_input_tokens: int
    total_output_tokens: int
    total_tokens: int
    num_prompts: int
    total_time_s: float
    tokens_per_second: float | None
    queries_per_second: float | None
    latency_per_query_s: float | None
    avg_input_tokens_per_prompt: float | None
    avg_output_tokens_per_prompt: float | None
    num_batches: int | None
    mean_batch_size: float | None
    padding_share: float | None
    batch_efficiency: float | None
    share_truncated: float | None
    ttft_s: dict[str, Any] | None
    time_per_output_token_s: dict[str, Any] | None
    inter_token_s: dict[str, Any] | None
    simulated_delay_s: float | None
    num_halved_batches: int | None
    most_halvings: int | None
    energy_per_batch_j: dict[str, Any] | None
    energy_per_query_j: dict[str, Any] | None
    energy_per_output_token_j: float | None
    energy_method: str | None
    energy_reason: str | None


class CustomMetricsReport(TypedDict):
    """What the user's own metrics gave.

    Attributes:
        columns: by function, then by column.
        failures: metrics without columns, each with `name`, `error` (its class) and `message`.
    """

    columns: dict[str, dict[str, float | int | str | bool | None]]
    failures: list[dict[str, str]]


class GpuMemory(TypedDict):
    """torch's allocator on one GPU, in bytes; all None, with the reason, where there is no GPU."""

    gpu_current_memory_allocated_bytes: int | None
    gpu_max_memory_allocated_bytes: int | None
    gpu_current_memory_reserved_bytes: int | None
    gpu_max_memory_reserved_bytes: int | None
    reason: str | None


class ComputeUtilisation(TypedDict):
    """Load of the GPUs (one figure each) and the CPUs in percent, and this process's resident memory in bytes.

    Over a window the figures are means over its time; of a single reading mean and most are the same.

    Attributes:
        gpu_utilization_percent: None in the place of a GPU that does not tell; empty without a GPU.
        cpu_usage_percent: of all CPUs of the host, whoever used them; None in a window too short for the host's clock.
        num_samples: readings in the window; 0 for a single one without a window.
        sample_interval_s: time between two readings; None without a window.
        reason: why a figure of a GPU is missing.
    """

    gpu_utilization_percent: list[float | None]
    gpu_utilization_percent_max: list[float | None]
    cpu_usage_percent: float | None
    cpu_usage_percent_max: float | None
    cpu_memory_usage_bytes: int
    cpu_memory_usage_bytes_max: int
    num_samples: int
    sample_interval_s: float | None
    reason: str | None


@dataclass(frozen=True)
class FlopCount:
    """The operations of a forward pass, one multiply-add as 2.

    Attributes:
        flops: None where they were not counted.
        method: `formula`, `counter` or `ptflops`: what the figure is from.
        counted_on: `model`, `meta_twin` (the same architecture without weights), or `config` for a formula.
        num_prompts, num_tokens: what the pass is over; true tokens, no padding.
        reason: why `flops` is None.
    """

    flops: float | None
    method: str
    counted_on: str
    num_prompts: int
    num_tokens: int
    reason: str | None


class MemoryOfProcess(GpuMemory, MemoryParts):
    """Both."""


class ComputeMetrics(TypedDict):
    """FLOPs of one forward pass over all prompts, and a process's memory and load; None where there is no figure.

    Attributes:
        flops_method, flops_counted_on, flops_prompts, flops_tokens, flops_reason: see `FlopCount`.
        flops_per_prompt, flops_per_token: `flops` over these numbers.
        process_index: whose memory and load it is; `flops` is the same in every process and does not add up.
    """

    flops: float | None
    memory: MemoryOfProcess
    compute_utilisation: ComputeUtilisation
    flops_method: str
    flops_counted_on: str
    flops_prompts: int
    flops_tokens: int
    flops_per_prompt: float | None
    flops_per_token: float | None
    flops_reason: str | None
    process_index: int


class EnergySource(TypedDict):
    """Where an energy figure comes from.

    Attributes:
        source: `nvml_counter`, `rapl`, `codecarbon_estimate` (load or size times a nominal power), their sum, or None
            where the file does not say.
        kind: `measured` or `estimated`; a sum is estimated where a part of it is.
    """

    source: str | None
    kind: Literal["measured", "estimated"] | None


class EnergyFigures(TypedDict):
    """Energy in kWh, emissions in kg and seconds; None where it was not measured, never 0."""

    total_energy_kwh: float | None
    cpu_energy_kwh: float | None
    gpu_energy_kwh: float | None
    ram_energy_kwh: float | None
    total_emissions_kg_co2: float | None
    duration_seconds: float | None


class InstrumentEnergy(TypedDict):
    """The same windows by the machine's own counters and power readings, in joules; None where there are none.

    Attributes:
        gpu_counter_j: rise of the GPUs' energy counters, over all GPUs.
        gpu_power_integral_j: their power readings, integrated.
        gpu_source_ratio: the second over the first.
        gpu_idle_j, gpu_net_j, gpu_uncertainty_j: of the counters, or of the integral where there are none; see
            `WindowFigure`.
        instruments: a `WindowFigure` for each source and device, then for each source over its devices where they are
            several.
        instruments_reason: what is missing, and why.
    """

    gpu_counter_j: float | None
    gpu_power_integral_j: float | None
    gpu_source_ratio: float | None
    gpu_idle_j: float | None
    gpu_net_j: float | None
    gpu_uncertainty_j: float | None
    instruments: list[dict[str, Any]]
    instruments_reason: str | None


class EnergyMetrics(EnergyFigures, InstrumentEnergy):
    """The energy of one machine in an experiment; all monitoring periods summed.

    The figures in kWh are codecarbon's.

    Attributes:
        sources: by figure, of those that are not None.
        num_periods: how many times tracking was started and stopped.
        tracking_mode: `machine` counts whatever else runs on the CPU, too.
        emissions_basis: whose electricity mix the emissions are computed with.
        reason: why figures are None.
    """

    sources: dict[str, EnergySource]
    num_periods: int
    tracking_mode: str | None
    cpu_model: str | None
    gpu_model: str | None
    emissions_basis: str | None
    reason: str | None


class PooledEnergy(EnergyFigures):
    """The energy of all machines of a run; one that several processes share is counted once.

    Attributes:
        avg_energy_per_process_kwh: the total over all processes, those that did not track included.
        per_process_breakdown: by rank, each with `process`.
        duration_seconds: the longest window of a machine.
        total_duration_seconds: the sum of the machines' windows.
        gpu_counter_j, gpu_power_integral_j: of all machines with GPUs; None where one of them lacks it.
        reason: why something is missing, by rank.
    """

    avg_energy_per_process_kwh: float | None
    per_process_breakdown: list[dict[str, Any]]
    total_duration_seconds: float | None
    gpu_counter_j: float | None
    gpu_power_integral_j: float | None
    num_processes: int
    num_tracking_processes: int
    reason: str | None
