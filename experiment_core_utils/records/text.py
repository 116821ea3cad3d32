"""Records of a text run, as they are published in its JSON files, and what of them is read again."""

from dataclasses import dataclass
from typing import Any, Literal, NotRequired, Protocol, TypedDict, TypeVar, cast

from pydantic import Field

from experiment_core_utils.records.compute import ComputeUtilisation, MemoryParts
from experiment_core_utils.records.json_record import Amount, Count, Name, Record

T = TypeVar("T")


class ProcessPlace(Protocol):
    """A process among those of a run; an `Accelerator` is one."""

    @property
    def process_index(self) -> int:
        """The process's rank in the run."""

    @property
    def local_process_index(self) -> int:
        """The process's rank on its machine."""


class QuantSupport(TypedDict):
    """What this machine can load quantised; a type is None where that width is not supported."""

    supports_4bit: bool
    supports_8bit: bool
    default_4bit_quant_type: str | None
    default_8bit_quant_type: str | None


class PartEnergy(TypedDict):
    """Energy of a part of a run, from power readings taken beside the whole of it."""

    #: of all devices that the process computes on, idle power included; None where no power is read
    energy_j: float | None
    energy_bound_j: float | None  #: most that the time between readings can make of an error
    energy_method: Literal["apportioned"] | None  #: `apportioned`: not from a window of its own
    #: energy_source, energy_basis: as in `EnergyOrigin`; several, where devices differ, are joined by "+"
    energy_source: str | None
    energy_basis: str | None
    energy_reason: str | None  #: why there is no figure


class QueryRecord(TypedDict):
    """One prompt of a text run."""

    #: its place among all prompts, over all processes; in files of a text run that in the source of the prompts, where
    #: those that were too long count
    prompt_index: int
    process_index: int  #: which process ran it
    batch_index: int  #: of the process's own batches
    input_tokens: int  #: true tokens, without padding
    output_tokens: int  #: generated tokens up to end-of-sequence, that one included
    ended: bool  #: whether end-of-sequence came before the limit
    output_token_ids: list[int]  #: the generated ids
    #: the text up to its end, thinking included; None where decoding to text was not requested
    output_text: str | None
    #: answer_text, thinking_tokens: None where decoding to text was not requested
    answer_text: NotRequired[str | None]  #: the text without thinking; "" where thinking has not ended
    #: output tokens up to the end of thinking, its tags included; 0 if the model did not think
    thinking_tokens: NotRequired[int | None]
    energy_j: float | None  #: its part of its batch's, by its tokens; see `meters.power.allocated_to_query`


class BatchRecord(PartEnergy):
    """One batch that came to its end."""

    process_index: int  #: which process made it
    batch_index: int  #: of the process's own batches, in the order in which they ran
    prompt_indices: list[int]  #: which prompts ran together, each by its `prompt_index`
    inference_time_s: float  #: prompts on the device -> last token on the host
    #: -> first token, the same for every prompt of the batch; None for a model whose own `generate()` does not
    #: report each token
    ttft_s: float | None
    #: the times between the batch's tokens; after its first rows have ended, those of the others
    inter_token_s: list[float]
    input_tokens: int  #: true tokens
    padded_input_tokens: int  #: positions of prompts that were computed: N * T by `generate()`, true tokens by engines
    output_tokens: int  #: true tokens
    computed_output_tokens: int  #: positions that were generated, those after an end-of-sequence included
    simulated_delay_s: float  #: waiting before the batch as if it had arrived late; in no other time
    #: how often a larger batch had run out of memory before this one fitted; the time of those attempts is in no figure
    halvings: int
    over_token_limit: bool  #: a single prompt longer than `adaptive_max_tokens`, which ran alone


class InferenceResults(TypedDict):
    """What one process generated, or all of them; rates over `total_inference_time_s`, None where nothing was timed."""

    output_tokens: Any  #: generated ids [N, longest] on the host, by prompt index, padded to the right after each end
    output_text: list[str] | None  #: by prompt index, thinking included; None where decoding to text was not requested
    answer_text: list[str] | None  #: the same without thinking; None as there
    #: sum over batches, without simulated waiting and decoding to text; pooled: that of the process that took longest,
    #: for they run side by side
    total_inference_time_s: float
    total_input_tokens: int  #: true tokens
    total_output_tokens: int  #: true tokens
    num_prompts_processed: int
    tokens_per_second: float | None  #: output tokens
    queries_per_second: float | None
    #: total time / prompts, which is not a prompt's own waiting time where batches contain several
    latency_per_query_s: float | None
    process_index: int | None  #: None where all processes are pooled
    num_processes: int
    queries: list[QueryRecord]  #: by prompt index
    batches: list[BatchRecord]  #: by process, then in the order in which they ran
    #: `execution` and its reason, the effective `GenerationConfig` values and the seed, under `ignored` what was given
    #: without having an effect in this mode, and of the checkpoint's preferences `preferences_kept` and
    #: `preferences_left_out`
    decoding: dict[str, Any]
    simulated_delay_s: float  #: sum over batches. Pooled: that of the process that waited longest.


class AllocatedEnergy(TypedDict):
    """The energies of a run's batches and queries, allocated from power readings; all None where one was not read.

    Its keys are beside those of `InferenceMetrics`.
    """

    energy_per_batch_j: dict[str, Any] | None  #: `Distribution` over batches; None if one was not measured
    energy_per_query_j: dict[str, Any] | None  #: `Distribution` over queries; None if one was not measured
    energy_per_output_token_j: float | None  #: energy of all batches / output tokens; None if one was not measured
    energy_method: str | None  #: `apportioned`; None if there is no figure
    energy_reason: str | None  #: why there is no figure; None if there is one


class InferenceMetrics(TypedDict):
    """Counts and rates of a run, over one process or pooled over all; None where nothing was generated or timed.

    The keys after `avg_output_tokens_per_prompt` are more than the published ones. They come from the records of
    batches and prompts, and are None for results without these.
    """

    total_input_tokens: int  #: without padding
    total_output_tokens: int  #: up to and with end-of-sequence
    total_tokens: int  #: input and output
    num_prompts: int  #: answered prompts
    total_time_s: float  #: sum over batches; of several processes that of the slowest
    tokens_per_second: float | None  #: output tokens / total time; None if nothing was timed
    queries_per_second: float | None  #: prompts / total time; None if nothing was timed
    latency_per_query_s: float | None  #: total time / prompts, not what one prompt waited; None without prompts
    avg_input_tokens_per_prompt: float | None  #: mean; None without prompts
    avg_output_tokens_per_prompt: float | None  #: mean; None without prompts
    num_batches: int | None  #: batches that finished; None without records of batches
    mean_batch_size: float | None  #: prompts / batches; None without records of batches
    padding_share: float | None  #: fraction of the prompts' positions that is padding; None without records of batches
    #: real output tokens / generated positions, below 1 if rows wait for longer answers; None without records of
    #: batches
    batch_efficiency: float | None
    share_truncated: float | None  #: fraction of answers that reached the limit; None without records of prompts
    #: `Distribution` over batches, in seconds; all prompts of a batch have the same; None if it was not timed
    ttft_s: dict[str, Any] | None
    #: `Distribution` over batches of the mean time between two tokens; None without second tokens
    time_per_output_token_s: dict[str, Any] | None
    #: `Distribution` over all tokens but each batch's first; None without second tokens
    inter_token_s: dict[str, Any] | None
    #: waiting, in no other time; of several processes that of the longest; None without records of batches
    simulated_delay_s: float | None
    #: batches that ran after a larger one had run out of memory; None without records of batches
    num_halved_batches: int | None
    most_halvings: int | None  #: of one batch; None without records of batches
    #: mean of the output tokens up to the end of thinking; None where decoding to text was not requested
    avg_thinking_tokens_per_prompt: float | None
    #: what ran the batches, as in a knob run: `kernels`, `graph`, `cpu`, or `eager`, the model's own `generate()`; None
    #: without records of decoding
    execution: str | None
    execution_reason: str | None  #: why nothing faster did; None where the fastest did


class CustomMetricsReport(TypedDict):
    """What the user's own metrics gave."""

    columns: dict[str, dict[str, float | int | str | bool | None]]  #: by function, then by column
    failures: list[dict[str, str]]  #: metrics without columns, each with `name`, `error` (its class) and `message`


class GpuMemory(TypedDict):
    """torch's allocator on one GPU, in bytes; all None, with the reason, where there is no GPU."""

    gpu_current_memory_allocated_bytes: int | None  #: allocated by torch after the window; None on the CPU
    gpu_max_memory_allocated_bytes: int | None  #: peak of that in the window; None on the CPU
    gpu_current_memory_reserved_bytes: int | None  #: reserved by torch's allocator after the window; None on the CPU
    gpu_max_memory_reserved_bytes: int | None  #: peak of that in the window; None on the CPU
    reason: str | None  #: why these are null; None on a GPU


@dataclass(frozen=True)
class FlopCount:
    """The operations of a forward pass, one multiply-add as 2."""

    flops: float | None  #: None where they were not counted
    method: str  #: `formula`, `counter` or `ptflops`: what the figure is from
    counted_on: str  #: `model`, `meta_twin` (the same architecture without weights), or `config` for a formula
    #: num_prompts, num_tokens: what the pass is over; true tokens, no padding
    num_prompts: int
    num_tokens: int
    reason: str | None  #: why `flops` is None


class MemoryOfProcess(GpuMemory, MemoryParts):
    """Memory of one process: what torch allocated on its GPU, and what the peak is made of."""


class ComputeMetrics(TypedDict):
    """FLOPs of one forward pass over all prompts, and a process's memory and load; None where there is no figure."""

    flops: float | None  #: one forward pass of each prompt, logits at every position; None if they cannot be counted
    memory: MemoryOfProcess  #: see below
    compute_utilisation: ComputeUtilisation  #: see below
    flops_method: str  #: `formula`, `counter` or `ptflops`
    #: `config` (formula), `model` (run under a counter), or `meta_twin` (a copy without weights, for quantised ones)
    flops_counted_on: str
    flops_prompts: int  #: prompts that `flops` are of
    flops_tokens: int  #: their tokens, without padding
    flops_per_prompt: float | None  #: `flops` / prompts; None without `flops`
    flops_per_token: float | None  #: `flops` / tokens; None without `flops`
    flops_reason: str | None  #: why `flops` are null; None if they are there
    process_index: int  #: whose memory and load these are; `flops` are of all processes


class EnergySource(TypedDict):
    """Where an energy figure comes from."""

    #: `nvml_counter`, `rapl`, `codecarbon_estimate` (load or size times a nominal power), their sum, or None where the
    #: file does not say
    source: str | None
    #: `measured` or `estimated`; a sum is estimated where a part of it is
    kind: Literal["measured", "estimated"] | None


class EnergyFigures(TypedDict):
    """Energy in kWh, emissions in kg and seconds; None where it was not measured, never 0."""

    total_energy_kwh: float | None  #: CPU, GPUs and memory; None if one of them was not measured
    cpu_energy_kwh: float | None  #: all CPUs of the machine, all programs; None if not measured
    gpu_energy_kwh: float | None  #: GPUs in use, from their counters; None if not measured
    ram_energy_kwh: float | None  #: the machine's memory, estimated; None if not measured
    total_emissions_kg_co2: float | None  #: of the total, by the electricity mix of `emissions_basis`; None without it
    duration_seconds: float | None  #: of all windows; of all machines the longest; None if the process did not track


class InstrumentEnergy(TypedDict):
    """The same windows by the machine's own counters and power readings, in joules; None where there are none."""

    gpu_counter_j: float | None  #: rise of the energy counters, all GPUs; None if there are none
    gpu_power_integral_j: float | None  #: integrated power readings, all GPUs; None if there are none
    gpu_source_ratio: float | None  #: the second / the first; None if they are not of the same GPUs
    gpu_idle_j: float | None  #: idle energy, of the counters, or else of the integral; None if not measured
    gpu_net_j: float | None  #: gross - idle; None if not measured
    gpu_uncertainty_j: float | None  #: of the gross energy; None if not measured
    #: a `WindowFigure` per source and device, and per source over several devices
    instruments: list[dict[str, Any]]
    instruments_reason: str | None  #: what is missing, and why; None if nothing is


class EnergyMetrics(EnergyFigures, InstrumentEnergy):
    """The energy of one machine in an experiment; all monitoring periods summed.

    The figures in kWh are codecarbon's.
    """

    sources: dict[str, EnergySource]  #: `source` and `kind` of each figure that is there
    num_periods: int  #: how often tracking was started and stopped
    tracking_mode: str | None  #: `machine`: other programs on the CPU count too; None if the process did not track
    cpu_model: str | None  #: as codecarbon names it; None if unknown
    gpu_model: str | None  #: as codecarbon names it; None if unknown
    emissions_basis: str | None  #: whose electricity mix; None without emissions
    reason: str | None  #: which figures are null, and why; None if none is


class PooledEnergy(EnergyFigures):
    """The energy of all machines of a run; one that several processes share is counted once.

    `duration_seconds` is the longest window of a machine.
    """

    #: the total over all processes, also those that did not track; None without the total
    avg_energy_per_process_kwh: float | None
    per_process_breakdown: list[dict[str, Any]]  #: the entry of every process, by rank, with its rank as `process`
    total_duration_seconds: float | None  #: sum of the machines' windows; None without windows
    gpu_counter_j: float | None  #: sum over machines; None if a machine with GPUs lacks it
    gpu_power_integral_j: float | None  #: sum over machines; None if a machine with GPUs lacks it
    num_processes: int  #: processes of the run
    num_tracking_processes: int  #: those that tracked: one per machine
    reason: str | None  #: what is missing and why, by process; None if nothing is


class SavedExperiment(Record):
    """How an experiment of a results file is found again."""

    digest: str
    experiment_id: Name


class _SavedMean(Record):
    mean: Amount


class _SavedMetrics(Record):
    num_prompts: Count
    total_output_tokens: Count
    tokens_per_second: Amount | None
    queries_per_second: Amount | None
    ttft_s: _SavedMean | None
    padding_share: Amount | None


class _SavedTotal(Record):
    total_energy_kwh: Amount | None


class _SavedFailure(Record):
    name: str
    error: str
    message: str


class ShownExperiment(SavedExperiment):
    """What the closing table and the lines below it show of an experiment."""

    varied: dict[str, Any]
    inference_metrics: _SavedMetrics
    global_energy_results: _SavedTotal
    custom_failures: list[_SavedFailure] = Field(default_factory=list)


class SavedEnergy(Record):
    """What is added up over the processes of a run."""

    total_energy_kwh: Amount | None
    cpu_energy_kwh: Amount | None
    gpu_energy_kwh: Amount | None
    ram_energy_kwh: Amount | None
    total_emissions_kg_co2: Amount | None
    duration_seconds: Amount | None
    gpu_counter_j: Amount | None
    gpu_power_integral_j: Amount | None
    reason: str | None = None


def all_absent(kind: type[T], **known: Any) -> T:
    """A record of which only these fields are known; every other one is None."""
    return cast(T, {**dict.fromkeys(kind.__annotations__), **known})
