"""How a setting was measured: the run, the machine, the model, the task and the requested parameters."""

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Self

from experiment_core_utils.records.caveats import Caveat, sentences
from experiment_core_utils.records.json_record import Count, Name, Record

# What stands before the addresses of servers in place of a device.
ASKED_AT = "asked at "


class TaskDescription(Record):
    """The task and how it is scored; `name` is part of file names."""

    name: Name  #: task
    split: str  #: split
    metric: str | None = None  #: metric that scores it
    max_new_tokens: Count | None = None  #: the task's own limit of tokens
    #: object of texts: where the samples come from (hub id and the commit that it gave, files, or the generator's seed)
    source: dict[str, Any] | None = None
    #: object of texts: the templates that were used, `open` and, with options, `choice`; for Molmo its `style`, the
    #: name of the kind of question; for other models `family` (`chat`, `plain`, `paligemma`, or `own` for a task's own
    #: words), `chat_template` (`applied`, `none` or `off`) and, if given, `system_prompt`; None if not reported
    prompt_form: dict[str, Any] | None = None


class ExecutionStages(Record):
    """The engine of each stage of the model."""

    #: the engine: `modules`, `reference`, `cpu blocks`, `cuda graph` or `kernel graph`
    #: ([execution.md](execution.md#what-is-recorded))
    vision: str | None = None
    prefill: str | None = None  #: the same
    decode: str | None = None  #: the same, `cpu step` or `inductor graph`


class Decoding(Record):
    """What decides, beside the logits, which tokens an answer has, and what surrounds a prompt."""

    #: object: preferences in the checkpoint's `generation_config.json` that are applied to the logits, and stop strings
    #: that end an answer; `{}` for none
    kept: dict[str, Any] | None = None
    left_out: dict[str, Any] | None = None  #: object: those that are not, such as sampling; `{}` for none
    bos_token_id: Count | None = None  #: begin of sequence; None if the checkpoint names none
    eos_token_ids: list[Count] | None = None  #: tokens that end an answer: the union of `eos_sources`
    #: object: ids by where the checkpoint names them (`generation_config`, `config`, `tokenizer`, `chat_template`: what
    #: ends an assistant's turn), and `stop` for special tokens among `stop`
    eos_sources: dict[str, list[Count]] | None = None
    stop: list[str] | None = None  #: texts that end an answer: of `--stop` and of the task
    ignore_eos: bool | None = None  #: whether nothing ends an answer before the limit
    pad_token_id: Count | None = None  #: fills shorter rows of a batch; None if the checkpoint names none
    #: SHA-256 of the chat template that prompts are put into; None if there is none, or the model has its own format
    chat_template_sha256: str | None = None


class Model(Record):
    """The model as it is loaded; models of transformers have further keys."""

    name: str | None = None  #: folder or hub id as given, or the only model in that folder
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
    #: how the model really ran: `eager`, by its modules; else by what runs decode steps: `graph`, CUDA graphs;
    #: `kernels`, ones of own kernels in place of a transformers decoder; `inductor`, ones of modules that Inductor
    #: compiled; `cpu`, compiled C++; `reference`, plain torch on fused weights ([execution.md](execution.md))
    execution: str | None = None
    execution_asked: str | None = None  #: `--execution`
    #: why not all stages are graphs, though those were requested, or not of own kernels or Inductor, or need a mask of
    #: the whole cache; None if all are and do not, or were not requested
    execution_reason: str | None = None
    execution_stages: ExecutionStages | None = None  #: object, next rows
    #: what answered the samples that are not timed: `as timed`, each alone by `execution_stages`; `batches`, the
    #: modules or a server, several together; None if all are timed, or in files of commit dfe8f148
    execution_untimed: str | None = None
    #: that own GPU kernels run on another card than the one that they were tuned on; None if they do not, or none run
    execution_untuned: str | None = None
    decoding: Decoding | None = None  #: object, next rows
    #: whether vision blocks without effect on the output run; None if not MolmoE
    runs_unused_vision_blocks: bool | None = None


class Hardware(Record):
    """The device and the host."""

    #: device of the main process; of a model behind servers `asked at` and their addresses, and the rest is of the host
    #: that asked
    device: str | None = None
    gpu_name: str | None = None  #: its name; None if on the CPU
    gpu_memory_bytes: Count | None = None  #: its whole memory; None if on the CPU
    cuda: str | None = None  #: CUDA version that torch was built for; None if a build without CUDA
    num_gpus: Count | None = None  #: GPUs that torch sees, used or not
    cpu: str | None = None  #: name of the processor; None if it cannot be read
    cpu_count: Count | None = None  #: logical processors of the machine; None if it cannot be read
    cpu_quota: float | None = None  #: CPUs' worth of time that the control group allows; None if there is no limit
    torch_threads: Count | None = None  #: torch's CPU threads in the main process
    ram_bytes: Count | None = None  #: memory of the machine

    @property
    def computing(self) -> str:
        """Name of the GPU, or of the processor where there is none; of a model behind servers where it was asked."""
        if self.device is not None and self.device.startswith(ASKED_AT):
            return self.device
        return self.gpu_name or self.cpu or "CPU"


class Variables(Record):
    """The parameters of a run as they were requested."""

    endpoint: Any = None  #: `--endpoint`; None if not given
    model: Any = None  #: `--model`, what the server calls the model; None if not given
    concurrency: Any = None  #: `--concurrency`, 1 without `--endpoint`
    request_rate: Any = None  #: `--request_rate`, a second; None if not given
    num_samples: Any = None  #: `--num_samples`, also where the split has fewer or `--ids` chose
    sample_by: Any = None  #: `--sample_by`
    seed: Any = None  #: `--seed`
    ids: Any = None  #: `--ids`, each once and ascending; None if not given
    prompt_template: Any = None  #: `--prompt_template`; None if not given
    columns: Any = None  #: `--columns`, each as NAME=COLUMN; None if not given
    text_only: bool = False  #: `--text_only`
    system_prompt: Any = None  #: `--system_prompt`; None if not given
    no_chat_template: bool = False  #: `--no_chat_template`
    dataset_revision: Any = None  #: `--dataset_revision`; None if not given
    max_new_tokens: Any = None  #: the limit that was used: `--max_new_tokens`, else the task's own
    stop: Any = None  #: `--stop`; None if not given
    ignore_eos: Any = None  #: `--ignore_eos`
    num_runs_per_sample: Any = None  #: `--num_runs_per_sample`
    num_warmup_runs: Any = None  #: `--num_warmup_runs`
    max_warmup_runs: Any = None  #: `--max_warmup_runs`
    max_repeats: Any = None  #: `--max_repeats`
    until_precision: Any = None  #: `--until_precision`; None if not given
    energy: Any = None  #: `--energy`
    num_latency_samples: Any = None  #: `--num_latency_samples`; None if not given
    #: `--accuracy_batch_size`, without effect where all are measured, and at a `batch_size` above 1
    accuracy_batch_size: Any = None
    precision: Any = None  #: `--precision`; what came of `auto` is `model.dtype`
    execution: Any = None  #: `--execution`; what is used is `model.execution`
    quantization: Any = None  #: `--quantization`; what is used is `model.quantisation`
    device_map: Any = None  #: `--device_map`; what came of it is `model.device_map`; None if not given
    tensor_parallel: Any = None  #: `--tensor_parallel`; None if not given
    #: `--num_threads`; what came of it, or of `OMP_NUM_THREADS`, is `hardware.torch_threads`; None if not given
    num_threads: Any = None
    batch_size: Any = None  #: 1: of measured samples where `knobs` names no other
    decoding: Any = None  #: `greedy`
    sampling_strategy: Any = None  #: `--sampling_strategy`
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
    knob_flags: dict[str, Any] = {}  #: flags of knobs beside their values that are not at their default, such as a rule


class FinalPrompt(Record):
    """What the model was given of one sample."""

    sample_id: Count  #: the first sample that can be used
    #: what was tokenised, in its chat template; a picture is one placeholder (in MolmoE it stands before the text)
    text: str
    #: its ids at the first setting of the plan, begin of sequence included; `[id, count]` stands for a run of one id,
    #: such as the places of a picture; None if a server alone knows them
    token_ids: list[Any] | None

    @classmethod
    def of_ids(cls, sample_id: int, text: str, token_ids: Sequence[int] | None) -> Self:
        """Four and more equal ids in a row become a run."""
        if token_ids is None:
            return cls(sample_id=sample_id, text=text, token_ids=None)
        runs = [(token_id, len(list(found))) for token_id, found in groupby(token_ids)]
        compact = [[[token_id, count]] if count > 3 else [token_id] * count for token_id, count in runs]
        return cls(sample_id=sample_id, text=text, token_ids=[each for run in compact for each in run])

    def lines(self, words: str) -> list[str]:
        """A line for the text, with `words` about its form, and one for the ids."""
        text = json.dumps(self.text, ensure_ascii=False)
        first = f"prompt of sample {self.sample_id} ({words}): {text}"
        if self.token_ids is None:
            return [first]
        ids = " ".join(f"{each[0]}x{each[1]}" if isinstance(each, list) else str(each) for each in self.token_ids)
        return [first, f"ids: {ids}"]


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
    #: random identity of the run, alike in all of its results and kept where it is resumed: only this
    #: says that two results are of one run, since ids begin at "0001" everywhere; None if in files of commit dfe8f148
    run_uid: str | None = None
    run_uids: list[str] | None = None  #: those of the runs that measured its samples, ascending; None as above
    timestamp: str | None = None  #: UTC, when it was gathered
    command: str | None = None  #: interpreter and arguments, without the launcher
    #: commit of the checkout, with `+changes` where tracked files differ from it; None if not a checkout
    git_commit: str | None = None
    python: str | None = None  #: version
    #: of this profiler (`inference-knob-profiler`), `torch`, `transformers`, `accelerate`, `numpy`, `pillow`, null for
    #: one that is not installed, and of `lm_eval` and `lmms_eval` where they are
    versions: dict[str, str | None] = {}
    num_processes: Count | None = None  #: processes of the run
    hardware: Hardware = Hardware()  #: object, next rows
    model: Model = Model()  #: object, next rows
    task: TaskDescription  #: object, next rows
    experimental_variables: Variables = Variables()  #: object, next rows: the requested parameters
    final_prompt: FinalPrompt | None = None  #: object, next rows
    #: object, next rows: how requests were prepared by the main process when the setting was saved
    preparation: Preparation | None = None
    caveats: list[str] = []  #: the sentences of `caveat_records`, which belong beside the numbers; `[]` for none
    #: list of objects, below: what weakens the numbers of this setting or of the whole run; `[]` for none
    caveat_records: list[Caveat] = []

    def with_caveats(self, found: list[Caveat]) -> Self:
        """The result with these caveats in place of those of the same kinds."""
        kinds = {each.kind for each in found}
        records = [*(each for each in self.caveat_records if each.kind not in kinds), *found]
        return self.with_keys(caveats=sentences(records), caveat_records=records)
