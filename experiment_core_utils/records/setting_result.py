"""The result of a setting as one record: its fields are the keys of the setting's JSON file.

The tables of docs/results_schema.md are made from the `#:` comments. Keys that older files of this schema lack
have a default, and keys that are not known are kept.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from experiment_core_utils.primitives.errors import ResultsRefused
from experiment_core_utils.primitives.files import FILE_NAME_PART
from experiment_core_utils.primitives.knobs import TIERS
from experiment_core_utils.records.caveats import Caveat, sentences
from experiment_core_utils.records.result_files import field_fault, read_versioned_object

SCHEMA_VERSION = 1
ADVICE = "remove it or measure the setting again"
# Published name of each distribution that is a time; these alone are converted to milliseconds.
TIME_NAMES = {
    "vision_s": "T_vision_total",
    "prefill_s": "T_LLM_prefill",
    "decode_s": "T_LLM_decode",
    "e2e_s": "T_total",
    "tpot_s": "T_decode_per_token",
    "ttft_s": "T_first_token",
    "preprocess_s": "T_preprocess",
    "transfer_s": "T_transfer",
}
# The work may be none; a request takes time.
_MAY_BE_ZERO = ("T_vision_total", "T_preprocess", "T_transfer")
_ABOVE_ZERO = re.compile(
    rf"(?:{'|'.join(name for name in TIME_NAMES.values() if name not in _MAY_BE_ZERO)})_(?:mean|p50|p95|p99|min|max)"
)


def _as_it_is(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    check(value)
    return value


def _text(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError("Input should be a text")
    return value


def _text_or_number(value: Any) -> Any:
    return value if value is None or type(value) is int else _text(value)


# A whole number among floats stays one.
AS_IT_IS = WrapValidator(_as_it_is)
Name = Annotated[str, StringConstraints(pattern=f"^{FILE_NAME_PART}$")]
Count = Annotated[int, Field(ge=0, le=2**53)]
Flops = Annotated[int, Field(ge=0, le=10**30)]
Knob = Annotated[int, Field(ge=1, le=10**6)]
Number = Annotated[float, Field(ge=-1e30, le=1e30), AS_IT_IS]
Positive = Annotated[float, Field(ge=0, le=1e30)]
Amount = Annotated[Positive, AS_IT_IS]
Peak = Annotated[float, Field(gt=0, le=1e30), AS_IT_IS]
Ratio = Annotated[float, Field(gt=0, le=1e9), AS_IT_IS]
Share = Annotated[float, Field(ge=0, le=1), AS_IT_IS]
# Milliseconds: of a stage, and of what may take none.
Time = Annotated[float, Field(ge=1e-9, le=1e12)]
Delay = Annotated[float, Field(ge=0, le=1e12)]
# Answers may contain half a surrogate pair, which pydantic's own type refuses.
Text = Annotated[Any, AfterValidator(_text)]


class Record(BaseModel):
    """A part of a result; keys that it does not know are kept."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)

    def content(self) -> dict[str, Any]:
        """The keys as a JSON file has them: those that were read or made, no defaults."""
        return self.model_dump(exclude_unset=True)

    @classmethod
    def of(cls, *parts: "Record", **own: Any) -> Self:
        """The record of these parts and further keys, each key once; nothing is checked until it is read again."""
        given = {name: getattr(part, name) for part in parts for name in part.model_fields_set}
        return cls.model_construct(**given, **own)

    def with_keys(self, **keys: Any) -> Self:
        """The same record with these keys in place of its own."""
        return self.model_copy(update=keys)


class TaskDescription(Record):
    """The task and how it is scored; `name` is part of file names."""

    name: Name  #: task
    split: str  #: split
    metric: str | None = None  #: metric that scores it
    max_new_tokens: Count | None = None  #: the task's own limit of tokens
    #: object of texts: where the samples come from (hub id and the commit that it gave, files, or the generator's seed)
    source: dict[str, Any] | None = None
    #: object of texts: `style`, Molmo's name of the kind of question, and the templates that were used, `open` and,
    #: with options, `choice`; each sample has its whole prompt; None if the task does not report it
    prompt_form: dict[str, Any] | None = None


class ExecutionStages(Record):
    """The engine of each stage of the model."""

    #: the engine: `modules`, `reference`, `cpu blocks` or `cuda graph` ([execution.md](execution.md#what-is-recorded));
    #: results from before say `cpu rows`, `eager`, `straight` or `captured`
    vision: str | None = None
    prefill: str | None = None  #: the same
    decode: str | None = None  #: the same, or `cpu step`


class Model(Record):
    """The model as it is loaded; models of transformers have further keys."""

    name: str | None = None  #: folder or hub id as given
    revision: str | None = None  #: commit on the hub; None if a local folder
    model_class: str | None = None  #: Python class
    total_parameters: Count | None = None  #: parameters of all blocks and experts, active or not
    dtype: str | None = None  #: number format of the weights
    attn_implementation: str | None = None  #: attention implementation of the loaded decoder
    #: experts implementation of the loaded model; engines compute experts by kernels of their own; None if the model
    #: chose none, or is dense
    experts_implementation: str | None = None
    #: the same in decode steps: on a GPU `batched_mm` where the model has `grouped_mm`, as `generate()` has it; None if
    #: the model chose none, or is dense
    experts_implementation_decode: str | None = None
    #: experts per token in block 0, of models of transformers in the first block with experts; None if a dense model
    first_block_top_k: Count | None = None
    num_experts: Count | None = None  #: experts in each block that has some; None if a dense model
    num_total_blocks: Count | None = None  #: blocks of the decoder
    #: kind of key-value cache: `dynamic`, it grows token by token; `static`, of fixed size, made before anything is
    #: timed
    cache: str | None = None
    #: how the model really ran: `eager`, by its modules; else by what runs decode steps: `graph`, CUDA graphs; `cpu`,
    #: compiled C++; `reference`, plain torch on fused weights ([execution.md](execution.md)); results from before say
    #: `straight` for the last two
    execution: str | None = None
    execution_asked: str | None = None  #: `--execution`
    #: why it is not `graph` in all stages, though that or `auto` was requested; None if it is, or was not requested
    execution_reason: str | None = None
    execution_stages: ExecutionStages | None = None  #: object, next rows
    #: that own GPU kernels run on another card than the one that they were tuned on; None if they do not, or none run
    execution_untuned: str | None = None
    runs_unused_vision_blocks: bool | None = None  #: whether vision blocks without effect on the output run


class Hardware(Record):
    """The device and the host."""

    device: str | None = None  #: device of the main process
    gpu_name: str | None = None  #: its name; None if on the CPU
    gpu_memory_bytes: Count | None = None  #: its whole memory; None if on the CPU
    cuda: str | None = None  #: CUDA version that torch was built for; None if a build without CUDA
    num_gpus: Count | None = None  #: GPUs that torch sees, used or not
    cpu: str | None = None  #: name of the processor; None if it cannot be read
    cpu_count: Count | None = None  #: logical processors of the machine; None if it cannot be read
    torch_threads: Count | None = None  #: torch's CPU threads in the main process
    ram_bytes: Count | None = None  #: memory of the machine


class Variables(Record):
    """The parameters of a run as they were requested."""

    num_samples: Any = None  #: `--num_samples`, also where the split has fewer or `--ids` chose
    sample_by: Any = None  #: `--sample_by`
    seed: Any = None  #: `--seed`
    ids: Any = None  #: `--ids`, each once and ascending; None if not given
    prompt_template: Any = None  #: `--prompt_template`; None if not given
    dataset_revision: Any = None  #: `--dataset_revision`; None if not given
    max_new_tokens: Any = None  #: the limit that was used: `--max_new_tokens`, else the task's own
    num_runs_per_sample: Any = None  #: `--num_runs_per_sample`
    num_warmup_runs: Any = None  #: `--num_warmup_runs`
    max_warmup_runs: Any = None  #: `--max_warmup_runs`
    max_repeats: Any = None  #: `--max_repeats`
    until_precision: Any = None  #: `--until_precision`; None if not given
    drift_check_every: Any = None  #: `--drift_check_every`
    energy: Any = None  #: `--energy`
    num_latency_samples: Any = None  #: `--num_latency_samples`; None if not given
    accuracy_batch_size: Any = None  #: `--accuracy_batch_size`, without effect where all are measured
    precision: Any = None  #: `--precision`; what came of `auto` is `model.dtype`
    execution: Any = None  #: `--execution`; what is used is `model.execution`
    quantization: Any = None  #: `--quantization`; what is used is `model.quantisation`
    #: `--num_threads`; what came of it, or of `OMP_NUM_THREADS`, is `hardware.torch_threads`; None if not given
    num_threads: Any = None
    batch_size: Any = None  #: 1: of measured samples
    decoding: Any = None  #: `greedy`
    sampling_strategy: Any = None  #: `--sampling_strategy`
    pareto_search: Any = None  #: `--pareto_search`: the setting has the samples of its rounds only
    #: the scores that were used: path as given, or that of the model's own; None if neither, `none`, or sets
    importance_scores_file: Any = None
    block_sets_file: Any = None  #: path as given; None if not given
    random_weights: bool = False  #: `--random_weights`
    enable_memory_optimization: Any = None  #: `--enable_memory_optimization`
    max_config_retries: Any = None  #: `--max_config_retries`
    sample_timeout_s: Any = None  #: `--sample_timeout`, in seconds; None if not given
    #: `minimal` or `full`, the mode of the profiled runs beside the measured ones; None if nothing was profiled
    profiler: Any = None
    use_profiler_on_all_samples: Any = None  #: `--use_profiler_on_all_samples`
    #: the rule in words: the first block with experts keeps the model's own top-k (in MolmoE block 0;
    #: `provenance.model.first_routed_block` says which in other models); nothing follows from it in a dense one
    first_block_top_k_rule: Any = None


class Preparation(Record):
    """How requests were prepared."""

    workers: Count | None = None  #: processes that prepared requests ahead; 0: prepared between samples
    #: host memory granted to prepared requests and pictures (`--request_cache_gb`)
    cache_budget_bytes: Count | None = None
    cache_used_bytes: Count | None = None  #: memory of the requests kept, without the pictures


class Provenance(Record):
    """How a setting was measured."""

    experiment_id: str | None = None  #: id of the run that put the result together, such as "0001"
    #: ids of the runs that measured its samples, ascending; more than one where a run was resumed
    experiment_ids: list[str] | None = None
    timestamp: str | None = None  #: UTC, when it was gathered
    command: str | None = None  #: interpreter and arguments, without the launcher
    #: commit of the checkout, with `+changes` where tracked files differ from it; None if not a checkout
    git_commit: str | None = None
    python: str | None = None  #: version
    #: of `torch`, `transformers`, `accelerate`, `numpy`, `pillow`; null for one that is not installed
    versions: dict[str, str | None] = {}
    num_processes: Count | None = None  #: processes of the run
    hardware: Hardware = Hardware()  #: object, next rows
    model: Model = Model()  #: object, next rows
    task: TaskDescription  #: object, next rows
    experimental_variables: Variables = Variables()  #: object, next rows: the requested parameters
    #: object, next rows: how requests were prepared by the main process when the setting was saved
    preparation: Preparation | None = None
    caveats: list[str] = []  #: the sentences of `caveat_records`, which belong beside the numbers; `[]` for none
    #: list of objects, below: what weakens the numbers of this setting or of the whole run; `[]` for none, and in files
    #: from before the key was there
    caveat_records: list[Caveat] = []

    def with_caveats(self, found: list[Caveat]) -> Self:
        """The result with these caveats in place of those of the same kinds; a file without records keeps sentences
        alone.
        """
        if self.caveats and not self.caveat_records:
            return self.with_keys(caveats=[*self.caveats, *sentences(found)])
        kinds = {each.kind for each in found}
        records = [*(each for each in self.caveat_records if each.kind not in kinds), *found]
        return self.with_keys(caveats=sentences(records), caveat_records=records)


class Metadata(Record):
    """What a sample's answer is scored against, and what the task says of the sample."""

    question: Text = ""  #: the question without the prompt's template
    answers: list[Text]  #: reference answers
    image_id: Annotated[Any, AfterValidator(_text_or_number)]  #: name of the picture
    options: list[Text] = []  #: the choices, in the order of their letters; [] for none
    #: which option is right, counted from 0; None if not known, or there are no options
    answer_index: Count | None = None
    #: the prompt before a chat template; None if in older files
    prompt: Text | None = None


class SampleRequest(Record):
    """The request of a sample at a setting: its tokens and its picture's crops."""

    sample_id: Count  #: position in the task's split
    #: N of a token target; for a tier `theoretical_vision_tokens`; None if a tier, and no picture
    target_vision_tokens: Count | None = None
    target_crops: Count | None  #: crops that the rule gives; None if no picture, or one that is not cut
    actual_vision_tokens: Count  #: image features that entered the language model, 0 without a picture
    vision_tokens_diff: int | None = None  #: `theoretical_vision_tokens` - `actual_vision_tokens`; None if no picture
    pooled_image_features: Count | None  #: features that the vision stage computed; None if no picture
    top_k: Knob | None  #: as at the top level; None if a dense model
    num_active_blocks: Knob  #: as at the top level
    input_text_tokens: Count  #: prompt tokens other than image tokens, beginning-of-text included
    image_marker_tokens: Count  #: start, end and row-end tokens of the image part, 0 without a picture
    prompt_tokens: Count  #: sum of `actual_vision_tokens`, `image_marker_tokens` and `input_text_tokens`
    actual_num_crops: Count | None  #: crops, read off the tensors; None if no picture, or one that is not cut
    actual_tiling: list[Count] | None = None  #: [rows, columns], read off the tensors; None if no picture
    actual_image_size: list[Count] | None = None  #: canvas of that tiling; None if no picture


class TheoreticalGeometry(Record):
    """What the rule gives for a picture."""

    #: crops that the rule gives; at the top level those of the geometry that most samples have; None if no picture
    theoretical_num_crops: Count | None = None
    theoretical_tiling: list[Count] | None = None  #: [rows, columns] that it gives; None if no picture
    theoretical_image_size: list[Count] | None = None  #: canvas for it, [height, width] in pixels; None if no picture
    theoretical_vision_tokens: Count | None = None  #: (crops + 1) x 144 for it; None if no picture


class SampleScore(Record):
    """How a sample's answer is scored."""

    #: score of `pred`, from 0 to `metric_best`; 0 where it could not be parsed; None if the metric has none (CIDEr of
    #: fewer than two pictures)
    accuracy: Positive | None
    #: how `pred` was read as an answer: `text` where any text is one, otherwise a word of the metric's, such as
    #: `letter` or `unparsed`
    parse_status: str | None = None
    #: further numbers of the same answer by name, such as `anls` and `em`; `{}` for none
    score_details: dict[str, Any] | None = None


class StageTimes(Record):
    """The times of a request's stages in milliseconds."""

    T_vision_total: Delay | None  #: vision stage; None if no picture
    T_LLM_prefill: Time | None  #: prefill up to the first token; None if answered in a batch
    T_LLM_decode: Time | None  #: first token to last token; None if fewer than 2 output tokens
    T_total: Time | None  #: request handed to the model, to last token; None if answered in a batch
    T_decode_per_token: Time | None  #: `T_LLM_decode` / (output tokens - 1); None if fewer than 2 output tokens


class RunTimes(StageTimes):
    """The times of one run in milliseconds."""

    T_LLM_prefill: Time  #: as above, of this run
    T_total: Time  #: as above, of this run
    T_inter_token: list[Delay]  #: list of the times between neighbouring tokens; `[]` for one token


class SampleEnergy(Record):
    """The energy of a sample's run."""

    #: energy of the run whose times are these, idle power included: the integral of power readings taken beside it; see
    #: [energy.md](energy.md#windows); None if `--energy off`, no power reading, or answered in a batch
    energy_j: Positive | None = None
    #: error bound from the time between readings; None if `energy_j` is
    energy_bound_j: Positive | None = None
    energy_method: str | None = None  #: `apportioned`: not from a window of its own; None if `energy_j` is
    #: source and, in brackets, basis, such as `power_integral (instant_power)`; those of devices that differ are joined
    #: by `+`; None if `energy_j` is
    energy_source: str | None = None
    energy_reason: str | None = None  #: why there is no energy; None if there is, or `--energy off`


class SampleResult(SampleEnergy, StageTimes, SampleScore, TheoreticalGeometry, SampleRequest):
    """One sample at a setting: its question, answer, score and times."""

    output_tokens: Count  #: tokens generated, end-of-sequence included where it came; in a batch without the padding
    output_ended: bool | None = None  #: whether end-of-sequence came in the first run, or in the answer in a batch
    pred: Text  #: text of the first run, or of the answer in a batch
    question_type: Text  #: the task's category of the question
    metadata: Metadata  #: what the task says about the sample, below
    T_first_token: Time | None  #: `T_vision_total` + `T_LLM_prefill`; None if answered in a batch
    T_preprocess: Delay  #: resizing, cutting and tokenising on the host; not in `T_total`
    T_transfer: Delay | None  #: host to device; not in `T_total`; None if answered in a batch
    vision_flops: Flops | None  #: operations of the vision stage; None if no picture, or unknown architecture
    prefill_flops: Flops | None  #: operations of the prefill; None if unknown architecture
    #: mean operations of a decode step, for the first run's number of output tokens; None if fewer than 2 output
    #: tokens, or unknown architecture
    decode_flops_per_token: Positive | None
    outputs_identical: bool | None = None  #: whether all runs gave the same tokens; None if answered in a batch
    outlier_runs: list[Count] | None = None  #: indices in `runs` of outliers; None if fewer than 3 runs
    #: samples that were answered together with it, itself included; None if measured
    accuracy_batch_size: Count | None = None
    #: most that were allowed together then: `--accuracy_batch_size`, less where memory had run out; None if measured
    accuracy_batch_limit: Count | None = None
    #: runs that were discarded and measured again (`--max_repeats`), which are in no statistic; None if answered in a
    #: batch
    num_discarded_runs: Count | None = None
    #: what disturbed the runs that are kept, after the last repeat allowed: reasons of throttling, `other load`;
    #: `[]` for nothing; None if answered in a batch
    disturbances: list[str] | None = None
    runs: list[RunTimes]  #: every measured run, in order, `[]` where answered in a batch


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
    #: time that the host's logical CPUs were busy with other processes (other processes of this run among them), as a
    #: fraction of all their time; None if one reading only
    foreign_cpu_share: Amount | None
    #: [lowest, highest] mean frequency of the CPUs; None if the host does not report it
    cpu_frequency_mhz: list[Amount | None] | None


class Drift(Record):
    """How fast one process ran the control setting before and after a setting."""

    rank: Count | None = None  #: the process
    control: str | None = None  #: key of the control setting; None if no reading around the setting
    #: settings that the run had measured before this one; None if in older files
    num_settings_before: Count | None = None
    #: its time at the last reading before the setting, as a multiple of that when the run began; None if no such
    #: reading, or one without times
    before: Ratio | None
    #: the same at the first reading after the setting; None if the run ended before, or a reading without times
    after: Ratio | None
    reason: str | None = None  #: why a ratio is null; None if none is


class Precision(Record):
    """How well the mean total time is known, and why no more samples were requested."""

    asked: Number | None = None  #: `--until_precision`; None if not given
    #: half of the 95 % interval of the mean `T_total`, as a fraction of the mean: Student's t over samples, or over
    #: pictures where samples share some; None if samples of fewer than 2 pictures
    reached: Number | None = None
    #: `num_samples`: every sample drawn was requested; `precision`: a process was precise enough before;
    #: `pareto_search`: the search needed no more
    stopped_by: str | None = None
    num_processes_stopped: Count | None = None  #: how many processes had enough before their last sample


class Memory(Record):
    """Memory of a setting in bytes."""

    peak_memory_bytes: Amount | None  #: most memory that torch had allocated on the GPU; None if on the CPU
    #: most that torch's allocator had reserved on the GPU; None if on the CPU
    peak_reserved_bytes: Amount | None = None
    process_rss_bytes: Amount | None = None  #: resident memory of the process when the window closed
    reason: str | None = None  #: why a figure is null; None if no figure is
    #: parameters and buffers as stored, those of blocks that did not run among them; None if the model does not report
    #: it
    weights_bytes: Amount | None = None
    #: keys and values of the longest sample at its end, by formula; None if samples were answered in batches
    kv_cache_bytes: Amount | None = None
    #: `peak_memory_bytes` without these two: a lower bound of other memory; None if one of the three is null
    activation_bytes: Amount | None = None
    parts_reason: str | None = None  #: why one of these three is null; None if none is


class ProcessLoad(Record):
    """Load along one window in which a process measured samples."""

    rank: Count | None = None  #: the process
    experiment_id: str | None = None  #: the run
    window_s: Number | None = None  #: length of the window: warm-up, samples, and waiting for their requests
    #: list, for each GPU that the process uses: mean over the window of the driver's figure, `[]` without a GPU; one is
    #: null where the GPU does not report it
    gpu_utilization_percent: list[Number | None] | None = None
    gpu_utilization_percent_max: list[Number | None] | None = None  #: the highest reading of each; None if as above
    #: mean of all CPUs of the host, of all programs; None if the host counted no time in the window
    cpu_usage_percent: Number | None = None
    cpu_usage_percent_max: Number | None = None  #: the highest reading; None if as above
    cpu_memory_usage_bytes: Count | None = None  #: mean resident memory of the process
    cpu_memory_usage_bytes_max: Count | None = None  #: the highest reading
    num_samples: Count | None = None  #: readings
    sample_interval_s: Number | None = None  #: time between two readings
    reason: str | None = None  #: why a figure of a GPU is missing; None if none is


class MemoryTimeline(Record):
    """Memory along one window in which a process measured samples."""

    rank: Count | None = None  #: the process
    experiment_id: str | None = None  #: the run
    interval_s: Number | None = None  #: time between two readings
    #: list of objects of `seconds` (since the window opened), `allocated_bytes`, `reserved_bytes` (torch's on the GPUs
    #: that the process uses; null without one) and `process_rss_bytes`
    samples: list[dict[str, Number | None]] | None = None


class HardwareUtilisation(Record):
    """Model FLOPs utilisation (MFU) and model bandwidth utilisation (MBU), fractions of the peaks of the data sheet."""

    #: `vision_flops` / `T_vision_total` as a fraction of `peak_flops_per_s`; None without a known peak, or where no
    #: sample has a picture
    mfu_vision: Amount | None = None
    mfu_prefill: Amount | None = None  #: the same of the prefill; None without a known peak
    #: the same of all decode steps; None without a known peak, or where no sample has 2 output tokens
    mfu_decode: Amount | None = None
    #: weights and cache that the decode steps must read / `T_LLM_decode` as a fraction of `peak_bytes_per_s`; None as
    #: above
    mbu_decode: Amount | None = None
    #: of the GPU, by its data sheet; None on the CPU, on a GPU that is not in the table, or for a number format that it
    #: has no peak for
    peak_flops_per_s: Peak | None
    peak_bytes_per_s: Peak | None  #: of its memory; None on the CPU, or on a GPU that is not in the table
    #: number format of the peak: that of the weights, `tf32` where torch may use it for float32; None where that of the
    #: model's products is not known
    peak_dtype: str | None = None
    utilisation_reason: str | None  #: why the figures are null; None where none is


class EnergyOfSource(Record):
    """The source, device and basis of an energy figure."""

    device: str | None = None  #: id of a GPU, RAPL zone, or `all`
    component: str | None = None  #: `gpu`, `cpu` or `dram`
    source: str | None = None  #: `nvml_counter`, `power_integral` or `rapl`
    kind: str | None = None  #: `measured`
    basis: str | None = None  #: `counter`, `instant_power` or `averaged_power`


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


class Energy(Record):
    """Energy of the stages of one request."""

    experiment_id: str | None = None  #: the run that measured it
    rank: Count | None = None  #: the process that measured it
    sample_id: Count | None = None  #: whose request; None if no sample can be read
    output_tokens: Count | None = None  #: of that request; None if `reason` says why
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
    reason: str | None = None  #: why nothing was measured; None if something was


class Order(Record):
    """The place of a setting in the plan: how it was ordered, by which seed, which position from 0, of how many."""

    how: str | None = None
    seed: int | None = None
    position: Count | None
    num_settings: Count | None = None


class FailedSample(Record):
    """A sample that could not be read or run; excluded from the means, and counted."""

    sample_id: Count  #: position in the task's split
    error: Text  #: class of the error
    reason: Text  #: its message


class TypeScores(Record):
    """Accuracy of one type of question, null where none of its samples has a score, and its number of samples."""

    accuracy: Amount | None = None
    num_samples: Count | None = None


class VisionPart(TheoreticalGeometry):
    """The vision knob of a setting, and the crops and vision tokens that came of it."""

    #: `low`, `medium` or `high`; None if a token target was requested, or vision tokens cannot be set
    tier: Literal[tuple(TIERS)] | None  # type: ignore[valid-type]
    #: crops allowed: object of `min_crops` and `max_crops`; both are the fixed number for a token target
    tier_range: dict[str, Count] | None = None
    #: N of `--vision_tokens_list`; None if a tier was requested, or vision tokens cannot be set
    vision_tokens_target: Knob | None
    #: mean number of crops that the rule chose; None if no sample has a picture that is cut (some models take pictures
    #: in their own shape)
    selected_crops_mean: Amount | None
    #: number of crops (as text) -> samples; `{}` without pictures
    selected_crops_distribution: dict[str, Count] | None = None
    #: the token target; for a tier, the mean of (crops + 1) x 144 over samples; None if no sample has a picture
    target_vision_tokens_mean: Amount | None
    #: mean of the features that entered the language model, 0 for a sample without a picture; None if no samples
    actual_vision_tokens_mean: Amount | None
    max_crops: Count  #: upper end of `tier_range`


class DecoderPart(Record):
    """The decoder's knobs of a setting."""

    #: requested experts per token, in the blocks after the first with experts; None if a dense model
    top_k: Knob | None
    num_active_blocks: Knob  #: requested blocks, block 0 counted
    num_total_blocks: Knob  #: blocks of the model
    active_block_indices: list[Count] | None = None  #: the requested blocks, ascending


class AccuracyPart(Record):
    """What depends on how the answers are scored."""

    metric: str = ""  #: the metric that scored the answers
    metric_best: Annotated[float, Field(gt=0, le=1e6), AS_IT_IS] = 1.0  #: its highest score; its lowest is 0
    metric_details: dict[str, Any] | None = None  #: further numbers of the metric, see below; may be `{}`
    #: mean score of the samples that ran, by `metric`; an answer that could not be parsed counts as 0; None if no
    #: sample has a score (CIDEr of fewer than two pictures)
    accuracy: Amount | None
    accuracy_std: Amount | None = None  #: standard deviation of single scores (n - 1); None if fewer than 2 samples
    #: [low, high], 95 % interval of the mean, inside [0, `metric_best`]; below; None if as `accuracy`
    accuracy_ci95: Annotated[list[Amount], Field(min_length=2, max_length=2)] | None
    accuracy_by_type: dict[str, TypeScores] = {}  #: question type -> object of `accuracy` and `num_samples`
    #: answers of samples that ran that could not be read as an answer at all, such as an empty one or one that names no
    #: option
    num_unparsed: Count | None = None
    share_unparsed: Share | None = None  #: `num_unparsed` / `num_samples`; None if no samples


class CountsPart(Record):
    """How many samples ran, and which fractions of them fell short."""

    num_samples: Count  #: samples that ran, over all processes
    num_failed_samples: Count  #: samples that did not, not in any mean
    #: samples of those that were measured; the others were answered in batches and have no times
    num_latency_samples: Count | None = None
    #: fraction of samples whose first run (or answer in a batch) reached the limit of tokens (`--max_new_tokens`, else
    #: the task's own) without end-of-sequence; None if no samples
    share_truncated: Share | None = None
    #: `num_failed_samples` / (`num_samples` + `num_failed_samples`); None if no samples were requested
    share_failed: Share | None = None
    #: fraction of outliers among the runs; `outlier_runs` marks them, and they are in every
    #: statistic; see [measurement.md](measurement.md#runs-that-stand-out); None if no sample has 3 runs
    share_outlier_runs: Share | None = None
    share_outlier_runs_reason: str | None = None  #: why there is no share; None if there is one
    num_discarded_runs: Count | None = None  #: sum of that of the samples
    num_disturbed_samples: Count | None = None  #: samples of which `disturbances` names something


class SteadinessPart(Record):
    """How steady a setting's numbers are."""

    #: in which order the run measured its settings: object of `how` (`shuffled` or `planned`), `seed` (null for
    #: `planned`), `position` (place of this setting, from 0) and `num_settings`; None if the setting was measured
    #: outside a plan
    setting_order: Order | None = None
    warmup: list[WarmUpRuns] = []  #: list of the warm-ups, [below](#warm-up), `[]` where no sample could be read
    conditions: list[Conditions] = []  #: list of the conditions of the device and the host, [below](#conditions)
    #: how well the mean `T_total` is known, and why no more samples were requested, [below](#precision)
    precision: Precision | None = None


class ComputePart(Record):
    """Memory, load and utilisation of a setting."""

    memory: Memory | None  #: memory of the setting; None if no process has a reading
    #: list: load along each window in which a process measured samples of the setting, [below](#compute-utilisation),
    #: may be `[]`
    compute_utilisation: list[ProcessLoad] | None = None
    #: list: memory along the same windows, [below](#memory-timeline); None if `--memory_timeline` was not given
    memory_timeline: list[MemoryTimeline] | None = None
    hardware_utilisation: HardwareUtilisation | None = None  #: MFU and MBU, [below](#hardware-utilisation)


class ResultOrigin(Record):
    """Which schema a result follows, and what it may be compared with."""

    schema_version: Literal[1]  #: 1; see the end of this page
    #: digest of everything but the knobs that makes results comparable; see
    #: [profiling.md](profiling.md#stopping-and-resuming)
    fingerprint: str


class SettingResult(ComputePart, SteadinessPart, CountsPart, AccuracyPart, DecoderPart, VisionPart, ResultOrigin):
    """The result of a setting, which is the JSON of its file."""

    #: list of the control readings around the setting, one entry for each process, [below](#drift), `[]` where the
    #: check is off
    drift: list[Drift] = []
    #: how the samples were chosen: object of `how`, `seed`, `num_asked`, `num_in_split`
    sampling: dict[str, Any] | None = None
    #: the requested ids, ascending; those of `per_sample_results` and `failed_samples` together. All that were drawn
    #: where `precision.stopped_by` is `num_samples`.
    sample_ids: list[Count]
    realised: dict[str, Any] | None = None  #: what was counted inside the model; None if no sample could be read
    energy: Energy | None = None  #: energy of the stages of one request, [below](#energy); None if `--energy off`
    aggregate_stats: dict[str, Number | None]  #: spread of every quantity over samples, may be `{}`
    per_sample_results: list[SampleResult]  #: a list, in order of `sample_id`
    failed_samples: list[FailedSample]  #: a list, in order of `sample_id`
    provenance: Provenance  #: how the run was made

    @classmethod
    def from_content(cls, content: Mapping[str, Any], where: str, advice: str = ADVICE) -> Self:
        """The record of a file's content.

        Args:
            where: names the file in an error.

        Raises:
            ResultsRefused: a field is missing, cannot be, or contradicts another.
        """
        try:
            result = cls.model_validate(content)
        except ValidationError as error:
            fault: str | None = field_fault(error)
        else:
            fault = next(_contradictions(result), None)
            if fault is None:
                return result
        raise ResultsRefused(f"{where} {fault}; {advice}")


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
        if sample.runs and all(run.T_total != sample.T_total for run in sample.runs):
            yield f"lacks a run of T_total {sample.T_total} in per_sample_results[{place}].runs"
        problem = _sample_fault(sample, result.metric_best)
        if problem is not None:
            yield f"is broken: per_sample_results[{place}].{problem}"


def _sample_fault(sample: SampleResult, best: float) -> str | None:
    if sample.accuracy is not None and sample.accuracy > best * (1 + 1e-9):
        return f"accuracy is {sample.accuracy}, above metric_best, {best:g}"
    if sample.runs and sample.T_LLM_prefill is None:
        return "T_LLM_prefill is None in a sample that was measured"
    if sample.T_LLM_decode is not None and sample.output_tokens < 2:
        return f"output_tokens is {sample.output_tokens}, too few for a decode time"
    metadata = sample.metadata
    index, options = metadata.answer_index, metadata.options
    if options and "answer_index" not in metadata.model_fields_set:
        return "metadata lacks answer_index beside its options"
    if index is not None and index >= len(options):
        return f"metadata.answer_index is {index}, and there are {len(options)} options"
    return None
