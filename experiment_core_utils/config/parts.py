"""The parts of a configuration: type, default, limits and help text of each flag, written once.

The command line and the Python call of a knob run are made from the six models of this module; a text run shares the
types. What the fields of a part rule out together is checked in the part.
"""

import logging
import os
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError, create_model, model_validator
from pydantic_core import ErrorDetails

from experiment_core_utils.config.served import ServeCommand, ServedModel, serve_commands, served_models
from experiment_core_utils.knobs.registry import all_knobs, knob_file, knob_named
from experiment_core_utils.knobs.request_knobs import requested_fields
from experiment_core_utils.knobs.strategies import LHS_CONFIGS, Strategy
from experiment_core_utils.primitives.cpu_threads import environment_threads
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import EMBEDDED_MODEL, is_gguf
from experiment_core_utils.primitives.flag_fields import (
    Count,
    CountInMemory,
    CountOrZero,
    FilePath,
    FolderPath,
    LargeNumber,
    Listed,
    Metavar,
    Part,
    ProperFraction,
    Text,
    not_empty,
)
from experiment_core_utils.primitives.texts import did_you_mean
from experiment_core_utils.primitives.units import LARGEST_SEED, MOST_SECONDS, MOST_TIMES, shown

LOGGER = logging.getLogger(__name__)
T = TypeVar("T")
P = TypeVar("P", bound=BaseModel)
Device = Annotated[Literal["auto", "cpu", "cuda"], Field(description="auto: a GPU where there is one, else the CPU")]
NUMBER_FORMAT = Field(description="number format of the weights; auto: bfloat16 on a GPU, else float32")
Precision = Annotated[Literal["auto", "float32", "bfloat16", "float16"], NUMBER_FORMAT]
ExecutionMode = Literal["auto", "eager", "graph", "kernels", "inductor"]
EnergyMode = Literal["off", "required", "optional"]
ProfiledEnergyMode = Literal["auto", EnergyMode]
ProfilerMode = Literal["minimal", "full"]
TableFormat = Literal["csv", "parquet"]
TrackerName = Literal["aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb"]


def _with_line_ends(text: str) -> str:
    """A stop text in which a shell's \\n and \\t are the characters; raises ValueError for an empty one."""
    if not text:
        raise ValueError("an empty stop text would end every answer before it begins; leave it out")
    return text.replace("\\n", "\n").replace("\\t", "\t")


StopText = Annotated[Text, AfterValidator(_with_line_ends)]


_LISTED_MODELS = 10


def only_model_in(path: str) -> str:
    """`path`, or the only model in it where it is a folder without one of its own; see `say_only_model`.

    A model in a folder is a GGUF file, or a folder of its own.

    Raises:
        ConfigurationError: it contains several models.
    """
    folder = Path(path)
    try:
        if not folder.is_dir() or _is_model(folder):
            return path
        inside = sorted(str(each) for each in folder.iterdir() if is_gguf(each) or (each.is_dir() and _is_model(each)))
    except (OSError, ValueError):
        # Whoever opens it says why that is not possible.
        return path
    if len(inside) > 1:
        listed = ", ".join(inside[:_LISTED_MODELS]) + (", ..." if len(inside) > _LISTED_MODELS else "")
        raise ConfigurationError(f"{path} contains {len(inside)} models; give one of {listed}")
    if inside:
        _TAKEN[inside[0]] = path
    return inside[0] if inside else path


def _is_model(folder: Path) -> bool:
    """Whether a folder has a config.

    Beside GGUF files and without other weights, a config is a copy of what they contain.
    """
    if any(folder.glob("*.gguf")) and not any(any(folder.glob(kind)) for kind in ("*.safetensors", "*.bin")):
        return False
    return (folder / "config.json").exists()


# Models that were taken, and the folders that were given for them.
_TAKEN: dict[str, str] = {}


def say_only_model(model: str) -> None:
    """Warn in one line that a model was taken because it is the only one in a folder; for one that can be measured."""
    if model in _TAKEN:
        _say_taken(_TAKEN[model], model)


@cache
def _say_taken(path: str, model: str) -> None:
    # A model is found more than once, and of a launcher's processes one speaks.
    if os.environ.get("RANK", "0") == "0":
        LOGGER.warning("%s contains one model, which is taken: %s", path, model)


# What accelerate's launcher calls a number format, and `--precision`.
_LAUNCHED_FORMATS = {"bf16": "bfloat16", "fp16": "float16"}


def launched_mixed_precision() -> str | None:
    """`accelerate launch --mixed_precision`, bf16 or fp16; None where it is not given, or is `no`.

    Raises:
        ConfigurationError: it is another one.
    """
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "").lower()
    if launched in ("", "no"):
        return None
    if launched not in _LAUNCHED_FORMATS:
        raise ConfigurationError(
            f"accelerate launch --mixed_precision {launched} cannot be measured; give bf16, fp16 or no"
        )
    return launched


@cache
def _say_launched_format(launched: str, precision: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        LOGGER.warning("accelerate launch --mixed_precision %s is measured as --precision %s", launched, precision)


ModelPath = Annotated[str, BeforeValidator(not_empty), AfterValidator(only_model_in), Metavar("MODEL")]
Delay = Annotated[float, Field(ge=0, le=MOST_SECONDS), Metavar("SECONDS")]
TimeLimit = Annotated[float, Field(ge=0.001, le=MOST_SECONDS), Metavar("SECONDS")]
Implementation = Annotated[str, Metavar("IMPLEMENTATION")]
Seed = Annotated[int, Field(ge=0, le=LARGEST_SEED)]

NumProcesses = Annotated[
    Count | None,
    Field(description="check: exit unless exactly this many processes were launched (does not launch any)"),
]

NumThreads = Annotated[
    Count | None,
    Field(description="CPU threads of each process (default: OMP_NUM_THREADS, else cores / processes here)"),
]

WORKER_TIMEOUT_S = 3600.0
WorkerTimeout = Annotated[
    TimeLimit, Field(description="seconds without a finished sample after which another process counts as lost")
]
AttnImplementation = Annotated[
    Implementation | None,
    Field(description="attention of transformers, such as sdpa or eager (default: the model's)"),
]

Energy = Annotated[
    EnergyMode,
    Field(
        description="measure energy; if nothing measures it, required stops, optional estimates it or continues without"
    ),
]

MemoryTimeline = Annotated[bool, Field(description="record memory twice a second while a setting is measured")]


class ModelConfig(Part):
    """Which model, and how it is loaded and run."""

    model_path: ModelPath = Field(
        default=str(EMBEDDED_MODEL),
        description="model folder, GGUF file, a folder with one model in it, or hub id (default: the model that comes "
        "with the project)",
    )
    endpoint: Annotated[Listed[str], Metavar("URL")] | None = Field(
        default=None,
        description="measure a model behind an OpenAI-compatible server in place of one here, such as "
        "http://localhost:8000/v1; several, also as NAME=URL, are compared as values of the knob variant",
    )
    model: Annotated[Listed[str], Metavar("NAME")] | None = Field(
        default=None, description="what the server of --endpoint calls the model; one, or one for each URL"
    )
    concurrency: Count = Field(
        default=1,
        description="with --endpoint: requests at a time of samples that are only answered; timed ones go one by one",
    )
    request_rate: Annotated[float, Field(gt=0, le=MOST_TIMES), Metavar("R")] | None = Field(
        default=None,
        examples=[2.5],
        description="with --endpoint: timed requests arrive at R a second (Poisson, by --seed), however many are under "
        "way, and their times count from then (default: each begins when the one before has ended)",
    )
    serve: Annotated[str, BeforeValidator(not_empty), Metavar("'COMMAND {NAME}'")] | None = Field(
        default=None,
        description="start a server for each value of --set, which listens at --endpoint on this machine, measure it, "
        "and end it: A B B A, one at a time, each in a folder of its own, and compare them",
    )
    set: Annotated[Listed[str], Metavar("NAME=V1,V2")] | None = Field(
        default=None, description="with --serve: values that stand for {NAME} in its command, such as q=none,fp8"
    )
    serve_timeout: TimeLimit = Field(
        default=600.0, description="with --serve: seconds that a server has until it answers"
    )
    random_weights: bool = Field(
        default=False,
        description="use random weights; --model_path then needs only the config, tokenizer and processor",
    )
    precision: Precision = "auto"
    quantization: Literal["none", "4bit", "8bit", "fp8"] = Field(
        default="none",
        description="quantise the weights while loading, for models of transformers: 4bit and 8bit by bitsandbytes, "
        "fp8 on GPUs that have it",
    )
    device_map: Literal["auto"] | None = Field(
        default=None,
        description="auto: spread the model over this process's GPUs and, where they are full, the host's memory, for "
        "models of transformers (default: one device)",
    )
    tensor_parallel: Annotated[int, Field(ge=2, le=MOST_TIMES), Metavar("N")] | None = Field(
        default=None,
        description="processes that share one model, each with a part of its weights, launched by torchrun "
        "--nproc-per-node=N, for models of transformers (default: each process has the whole model)",
    )
    loads: Literal["auto", "together", "in_turn"] = Field(
        default="auto",
        description="copies of the model that knobs compare; together: all in memory, by turns in rounds; in_turn: one "
        "at a time, loaded anew for each run of the samples; auto: together where they fit into memory",
    )
    execution: ExecutionMode = Field(
        default="auto",
        description="eager: the model's modules; graph: CUDA graphs (on the CPU: compiled kernels), where the model "
        "allows it; kernels: graph, of own kernels in place of a transformers decoder on a GPU, else its modules; "
        "inductor: graph, of a transformers model's modules on a GPU, whose decode step Inductor compiles for a "
        "minute or more at each setting; auto: the first of kernels, graph and eager that can run all stages and "
        "settings",
    )
    attn_implementation: AttnImplementation = None
    experts_implementation: Implementation | None = Field(
        default=None,
        description="experts of transformers, such as grouped_mm or eager (default: the model's)",
    )

    @model_validator(mode="after")
    def _check_devices(self) -> Self:
        if self.device_map is not None and self.tensor_parallel is not None:
            raise ConfigurationError(
                f"--device_map {self.device_map} and --tensor_parallel {self.tensor_parallel} are two ways to spread "
                "one model; drop one"
            )
        return self

    repeated: ClassVar[tuple[str, ...]] = ("set",)

    @cached_property
    def serve_commands(self) -> tuple[ServeCommand, ...]:
        """The servers that the run starts; none without `--serve`."""
        return () if self.serve is None else serve_commands(self.serve, self.set or ())

    @model_validator(mode="after")
    def _check_serve(self) -> Self:
        if (self.serve is None) != (self.set is None):
            raise ConfigurationError("--serve 'COMMAND {NAME}' and --set NAME=V1,V2 go together; give both, or neither")
        if self.serve is not None and (len(self.served) != 1 or self.request_rate is not None):
            raise ConfigurationError("--serve needs one --endpoint, where its servers listen, and no --request_rate")
        if self.serve is None and "serve_timeout" in self.model_fields_set:
            raise ConfigurationError("--serve_timeout is of the servers of --serve, which is not given; drop it")
        _ = self.serve_commands
        return self

    @cached_property
    def served(self) -> tuple[ServedModel, ...]:
        """The models at the servers of `--endpoint`; none without it."""
        return () if self.endpoint is None else served_models(self.endpoint, self.model or ())

    @model_validator(mode="after")
    def _check_endpoint(self) -> Self:
        if (self.endpoint is None) != (self.model is None):
            raise ConfigurationError(
                "--endpoint needs --model NAME, what its server calls the model"
                if self.model is None
                else "--model names a model of the server of --endpoint, which is not given; for a folder give "
                "--model_path"
            )
        if self.endpoint is None and self.concurrency != 1:
            raise ConfigurationError(
                "--concurrency is of requests to --endpoint; for a model here give --accuracy_batch_size"
            )
        if self.request_rate is not None and self.endpoint is None:
            raise ConfigurationError("--request_rate is of requests to --endpoint, which is not given; drop it")
        if self.request_rate is not None and self.concurrency != 1:
            raise ConfigurationError(
                f"--request_rate {self.request_rate:g} and --concurrency {self.concurrency} are two ways to ask "
                "several at a time; drop one"
            )
        if self.endpoint is not None:
            own = ("endpoint", "model", "concurrency", "request_rate", "serve", "set", "serve_timeout")
            others = {name: each for name, each in type(self).model_fields.items() if name not in own}
            if given := [f"--{name}" for name, each in others.items() if getattr(self, name) != each.default]:
                raise ConfigurationError(
                    f"{', '.join(given)} cannot act with --endpoint: its server has loaded the model already; drop it"
                )
        # Made here, so that a wrong address is reported at once.
        _ = self.served
        return self

    @model_validator(mode="before")
    @classmethod
    def _launched_precision(cls, given: Any) -> Any:
        """The number format of accelerate's launcher is the one that is measured."""
        launched = launched_mixed_precision()
        if launched is None or not isinstance(given, Mapping):
            return given
        precision, own = _LAUNCHED_FORMATS[launched], given.get("precision") or "auto"
        if own not in ("auto", precision):
            raise ConfigurationError(
                f"accelerate launch --mixed_precision {launched} and --precision {own} contradict each other; drop one"
            )
        if own == "auto":
            _say_launched_format(launched, precision)
        return {**given, "precision": precision}


# Files with these endings are whole data sets; folders and datasets of the hub have splits.
DATA_FILE_ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")


def _pairs(given: Any) -> Any:
    """Pairs of a mapping, as Python gives them, in the form of the command line."""
    return [f"{name}={source}" for name, source in given.items()] if isinstance(given, Mapping) else given


class TaskConfig(Part):
    """Which samples of which task, and how they are put to the model."""

    dataset_name: Annotated[str, Metavar("TASK")] | None = Field(
        default=None,
        description="name of the task (default: reference_vqa, for text models reference_questions; need no download)",
    )
    data_file: FilePath | None = Field(
        default=None,
        description="your own questions in place of a task: a .jsonl, .json, .csv, .tsv or .parquet file, a folder of "
        "save_to_disk or of pictures with metadata, or a dataset OWNER/NAME of the hub, with the columns image, "
        "question, answer or answers, options, type",
    )
    columns: Annotated[Listed[Annotated[str, Metavar("COLUMN=NAME")]], BeforeValidator(_pairs)] | None = Field(
        default=None, description="columns of --data_file by other names, such as question=prompt image=image_path"
    )
    type_column: Annotated[str, Metavar("COLUMN")] | None = Field(
        default=None,
        description="column of --data_file with the type of each question, by which prices are (default: type, else "
        "question_type)",
    )
    text_only: bool = Field(
        default=False, description="leave the pictures of --data_file out, also where it has none for a vision model"
    )
    task_module: FilePath | None = Field(
        default=None, description="Python file that registers tasks or metrics of your own (register_task)"
    )
    metric: Annotated[str, Metavar("METRIC")] | None = Field(
        default=None,
        description="metric that scores the answers (default: the task's own; of a file mc, relaxed or em_lenient); "
        "acc, acc_norm, acc_bytes and perplexity score given options or texts by log-probability",
    )
    split: Annotated[str, Metavar("SPLIT")] | None = Field(
        default=None, description="split of the task (default: the task's own, for most validation)"
    )
    data_dir: FolderPath | None = Field(
        default=None, description="folder of a local copy of the dataset, or of the pictures of --data_file"
    )
    hf_cache_dir: FolderPath | None = Field(default=None, description="cache folder for models and datasets of the hub")
    dataset_revision: Annotated[str, Metavar("REVISION")] | None = Field(
        default=None, description="commit, tag or branch on the hub (default: main)"
    )
    prompt_template: Text | None = Field(
        default=None, description="text around the question (default: by model family and task)"
    )
    system_prompt: Text | None = Field(
        default=None, description="system message of the chat template (default: what the template adds by itself)"
    )
    no_chat_template: bool = Field(
        default=False, description="give the prompt to a chat model without its chat template"
    )
    num_samples: Count = Field(default=1000, description="number of samples, drawn without replacement")
    sample_by: Literal["random", "question_type"] = Field(
        default="random", description="question_type: each type of question keeps its proportion in the split"
    )
    seed: Seed = Field(default=42, description="seed of the samples and of the order of the settings")
    ids: Annotated[Listed[LargeNumber], AfterValidator(lambda ids: tuple(sorted(ids))), Metavar("ID")] | None = Field(
        default=None, description="ids of the samples of the split to measure, in place of a draw"
    )
    max_new_tokens: CountInMemory | None = Field(
        default=None, description="largest number of tokens of an answer (default: the task's own)"
    )
    stop: Listed[StopText] | None = Field(
        default=None,
        description="texts that end an answer, such as 'Question:'; what comes before the first is the answer "
        "(default: the task's own, mostly none)",
    )
    ignore_eos: bool = Field(
        default=False,
        description="generate exactly --max_new_tokens tokens, so that times do not depend on the length of answers; "
        "the text up to where the answer would have ended is scored",
    )

    @model_validator(mode="after")
    def _check_data_file(self) -> Self:
        file = self.data_file
        whole = file is not None and file.suffix.lower() in DATA_FILE_ENDINGS
        for name in ("dataset_name", *(("split", "dataset_revision") if whole else ())):
            if file is not None and name in self.model_fields_set:
                raise ConfigurationError(f"--data_file is the whole data set: --{name} cannot act; drop one")
        for name in ("columns", "type_column"):
            if file is None and getattr(self, name):
                raise ConfigurationError(f"--{name} is for the rows of --data_file, which is not given; drop it")
        return self

    @property
    def named_columns(self) -> list[str] | None:
        """`columns` with that of the types; None where none is named."""
        of_types = [] if self.type_column is None else [f"type={self.type_column}"]
        return [*(self.columns or []), *of_types] or None

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.no_chat_template and self.system_prompt is not None:
            raise ConfigurationError("--system_prompt is a part of the chat template, and --no_chat_template; drop one")
        return self

    @model_validator(mode="after")
    def _check_draw(self) -> Self:
        if self.ids is not None and self.sample_by != "random":
            raise ConfigurationError(f"--ids leaves nothing to draw: --sample_by {self.sample_by} cannot act; drop one")
        return self


class GridConfig(Part):
    """Which combinations of the knobs' values are settings; the values themselves are flags of the knobs."""

    knob_module: Annotated[FilePath, BeforeValidator(knob_file)] | None = Field(
        default=None, description="Python file, or module, that registers knobs of your own, with their flags"
    )
    request_knob: Annotated[Listed[str], Metavar("NAME=V1,V2")] | None = Field(
        default=None,
        description="with --endpoint: values of any field of a request, such as top_k=20,40 or "
        "chat_template_kwargs.enable_thinking=true,false; each NAME is a knob, own a value that leaves it out",
    )
    no_reference: bool = Field(
        default=False,
        description="leave out the reference setting (the model's own crops or pixels, its own number of experts, all "
        "blocks), which is measured beside the others",
    )
    sampling_strategy: Strategy = Field(
        default="balanced",
        description="full: every combination; balanced: at most 4 values a knob, evenly spread; stratified: smallest, "
        "middle and largest value of each; boundary: corners and edges of the grid; lhs: a Latin hypercube",
    )
    num_configs: CountInMemory | None = Field(
        default=None,
        description=f"settings of lhs (default: {LHS_CONFIGS}, or the whole grid if it is smaller)",
    )

    repeated: ClassVar[tuple[str, ...]] = ("request_knob",)

    @model_validator(mode="after")
    def _name_request_knobs(self) -> Self:
        for name in requested_fields(self.request_knob or ()):
            knob_named(name)
        return self

    @model_validator(mode="after")
    def _check_strategy(self) -> Self:
        if self.num_configs is not None and self.sampling_strategy != "lhs":
            raise ConfigurationError(
                f"--num_configs {self.num_configs} is for --sampling_strategy lhs, not for {self.sampling_strategy}; "
                "drop it"
            )
        return self


def knob_config() -> type[GridConfig]:
    """The part of the knobs: the flags of every knob that is registered, and those of the grid."""
    return _knob_config(tuple(dict.fromkeys(knob.flags for knob in all_knobs())))


@cache
def _knob_config(flags: tuple[type[Part], ...]) -> type[GridConfig]:
    alternatives = tuple(pair for each in flags for pair in each.alternatives)
    # Fields of the last base are first.
    made: type[Any] = create_model("KnobConfig", __base__=cast(Any, (GridConfig, *reversed(flags))))
    made.alternatives = alternatives
    made.__doc__ = "The values of the knobs, and which of their combinations are settings."
    return cast(type[GridConfig], made)


NUM_WARMUP_RUNS = 2


class MeasuringConfig(Part):
    """How each setting is measured."""

    num_runs_per_sample: Count = Field(default=3, description="measured runs of each sample")
    num_latency_samples: CountOrZero | None = Field(
        default=None,
        description="samples drawn to be measured; the others are only answered (default: 100; all with "
        "--until_precision)",
    )
    accuracy_batch_size: CountInMemory = Field(
        default=8,
        description="largest number of samples answered together, of those that are not measured, where modules run "
        "the model; engines and graphs answer one by one",
    )
    num_warmup_runs: CountOrZero = Field(
        default=NUM_WARMUP_RUNS,
        description="unmeasured runs of each setting before the rounds (default: 2, at most --max_warmup_runs)",
    )
    max_warmup_runs: int = Field(
        default_factory=lambda given: max(6, given["num_warmup_runs"]),
        description="most runs of a warm-up, which ends once three agree within 5 % (default: 6 or --num_warmup_runs)",
    )
    max_repeats: CountOrZero = Field(
        default=2,
        description="times a round is discarded and measured again where the GPU was throttled or other processes used "
        "more than 10 % of the CPUs; 0: never",
    )
    setting_order: Literal["shuffled", "planned"] = Field(
        default="shuffled",
        description="shuffled: warm-ups come in an order drawn by --seed; planned: as in the plan",
    )
    until_precision: ProperFraction | None = Field(
        default=None,
        examples=[0.02],
        description="end once the 95 % interval of how many times as long every two settings take is within this "
        "fraction of it, such as 0.02; a setting alone is measured on every sample",
    )
    energy: ProfiledEnergyMode = Field(
        default="auto",
        description="measure energy; auto: where there is a counter, in a fifth of the run's time; if nothing measures "
        "it, required stops, optional estimates it or continues without",
    )
    memory_timeline: MemoryTimeline = False
    use_profiler: bool = Field(
        default=False,
        description="run the first sample of each setting once more under PyTorch's profiler, without counting it",
    )
    use_profiler_on_all_samples: bool = Field(
        default=False, description="profile every sample of each setting in this way"
    )
    profiler_mode: ProfilerMode = Field(
        default="minimal", description="minimal: operators, kernels, stages; full: also shapes, stacks, memory, FLOPs"
    )
    sample_timeout: TimeLimit | None = Field(
        default=None, description="seconds after which a sample has failed (default: no limit)"
    )
    max_config_retries: CountOrZero = Field(default=2, description="times a failed setting is tried again")
    config_retry_delay: Delay = Field(default=5.0, description="seconds before a retry")

    @property
    def profiler(self) -> ProfilerMode | None:
        """How samples are profiled; None where none is."""
        return self.profiler_mode if self.use_profiler or self.use_profiler_on_all_samples else None

    @model_validator(mode="before")
    @classmethod
    def _shorter_warm_up(cls, given: Any) -> Any:
        """A limit below the usual number of warm-up runs lowers that number, where it is not given."""
        most = given.get("max_warmup_runs") if isinstance(given, Mapping) else None
        if isinstance(most, int) and most < NUM_WARMUP_RUNS and given.get("num_warmup_runs") is None:
            return {**given, "num_warmup_runs": max(most, 0)}
        return given

    @model_validator(mode="after")
    def _check_warm_up(self) -> Self:
        if self.max_warmup_runs < self.num_warmup_runs:
            raise ConfigurationError(
                f"--max_warmup_runs {self.max_warmup_runs} is less than --num_warmup_runs {self.num_warmup_runs}; "
                f"give at least {self.num_warmup_runs}"
            )
        return self

    @model_validator(mode="after")
    def _check_samples(self) -> Self:
        if self.until_precision is not None and self.num_latency_samples is not None:
            raise ConfigurationError(
                "--until_precision decides how many samples are measured, and so does --num_latency_samples; drop one"
            )
        if self.profiler is not None and self.num_latency_samples == 0:
            raise ConfigurationError(
                "--use_profiler profiles measured samples, and --num_latency_samples 0 leaves none"
            )
        if self.profiler_mode == "full" and self.profiler is None:
            raise ConfigurationError("--profiler_mode full has nothing to act on; give --use_profiler too, or drop it")
        return self


_Budget = Annotated[float, Field(gt=0, le=MOST_TIMES), Metavar("MS")]


class QuestionConfig(Part):
    """What a user accepts to lose, or can pay: the prices that a run ends with answer it, and no measurement does."""

    accept_loss: Annotated[float, Field(ge=0, lt=1), Metavar("FRACTION")] | None = Field(
        default=None,
        description="accuracy that may be lost, a fraction of the best score, 0.05 is 5 points: which setting is "
        "cheapest (default: 0.2 0.1 0.05 0.02 0)",
    )
    min_accuracy: ProperFraction | None = Field(
        default=None, description="which setting is cheapest of those that surely have this fraction of the best score"
    )
    budget_ms: _Budget | None = Field(
        default=None, description="which setting is most accurate of those whose mean latency is surely within it"
    )
    budget_p95_ms: _Budget | None = Field(default=None, description="the same of the 95th percentile of latencies")
    budget_j: Annotated[float, Field(gt=0, le=MOST_TIMES), Metavar("J")] | None = Field(
        default=None, description="the same of the mean energy of a request"
    )

    @property
    def losses(self) -> tuple[float, ...]:
        """Largest first; the one that is asked for alone where one is, and none where budgets alone are."""
        if self.accept_loss is not None:
            return (self.accept_loss,)
        return () if self.has_budgets else (0.2, 0.1, 0.05, 0.02, 0.0)

    @property
    def has_budgets(self) -> bool:
        """Whether a least accuracy or a budget is given."""
        return any(each is not None for each in (self.min_accuracy, self.budget_ms, self.budget_p95_ms, self.budget_j))


class MachineConfig(Part):
    """On what it runs, with how much of it, and where the results go."""

    config: Path | None = Field(
        default=None,
        description="YAML of flags, such as the recipe.yaml that a run leaves beside its results; flags that are given "
        "with it replace its own",
    )
    output_dir: FolderPath = Field(default=Path("results/core_exp"), description="folder of the results")
    format: TableFormat = Field(
        default="csv", description="tables of settings and samples; parquet: as Parquet files, too, beside the CSV"
    )
    tracker: TrackerName | None = Field(
        default=None, description="log each setting as a step to this experiment tracker, whose package is installed"
    )
    strict: bool = Field(
        default=False,
        description="exit code 4 where the run is INVALID: other load, throttling, disturbed or failed samples",
    )
    dry_run: bool = Field(
        default=False, description="print the plan with estimates of time and memory, and measure nothing"
    )
    detect: ProperFraction | None = Field(
        default=None,
        description="with --dry_run: also print how many samples show this difference in accuracy (a part of the best "
        "score) and in latency (relative)",
    )
    device: Device = "auto"
    num_processes: NumProcesses = None
    num_threads: NumThreads = None
    worker_timeout: WorkerTimeout = WORKER_TIMEOUT_S
    request_cache_gb: Annotated[float, Field(ge=0, le=MOST_TIMES), Metavar("GB")] | None = Field(
        default=None,
        description="GB of host memory for prepared requests, of each process (default: a quarter of what is free / "
        "processes here)",
    )
    enable_memory_optimization: bool = Field(default=False, description="release cached GPU memory after each setting")

    @model_validator(mode="after")
    def _check_detect(self) -> Self:
        if self.detect is not None and not self.dry_run:
            raise ConfigurationError("--detect is answered before a run; give --dry_run too, or drop it")
        return self

    @model_validator(mode="after")
    def _check_threads(self) -> Self:
        cores = os.cpu_count() or 1
        if self.num_threads is None:
            environment_threads()
        elif self.num_threads > cores:
            raise ConfigurationError(f"--num_threads {self.num_threads} is more than the {cores} cores of this machine")
        return self


Place = tuple[int | str, ...]

# What is allowed where a limit is broken, by pydantic's name of the fault.
_LIMITS = {
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "finite_number": "a finite number",
}


def validated_as(model: type[P], values: Any, name_of: Callable[[Place], str]) -> P:
    """The model of `values`; raises ConfigurationError with one line about the first value that is not allowed.

    Args:
        name_of: what the user calls the value at a place in the model.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first, *rest = error.errors(include_url=False)
        # A list whose only value is wrong is reported as too short, too.
        others = [each for each in rest if each["loc"] != first["loc"][: len(each["loc"])]]
        more = f"; {len(others)} more like it" if others else ""
        raise ConfigurationError(_one_line(model, first, name_of(first["loc"])) + more) from None


def _one_line(model: type[BaseModel], fault: ErrorDetails, name: str) -> str:
    kind, given, place = fault["type"], fault["input"], fault["loc"]
    if kind == "extra_forbidden":
        known = [each for each in _model_at(model, place).model_fields if each != "further"]
        return f"{name}: there is no such key{did_you_mean(str(place[-1]), known)}; known are {', '.join(known)}"
    if kind in _LIMITS:
        *_, field_name = (each for each in place if isinstance(each, str))
        examples = _model_at(model, place).model_fields[field_name].examples
        limits = {word: shown(int(each) if each == int(each) else each) for word, each in fault.get("ctx", {}).items()}
        example = f", such as {examples[0]}" if examples else ""
        return f"{name} {shown(given)} is not possible; give {_LIMITS[kind].format(**limits)}{example}"
    message = fault["msg"].removeprefix("Value error, ")
    if kind in ("model_type", "dict_type"):
        message = "write a group of keys"
    message += _written_as_text(given) if kind in ("float_type", "int_type") else ""
    return f"{name}: {message} (given: {given!r})" if name else message


def _written_as_text(given: Any) -> str:
    """What to write instead of a number that YAML reads as text: `1e-1` has no point."""
    try:
        return f"; write {float(given):.12g} without quotes" if isinstance(given, str) else ""
    except ValueError:
        return ""


def _model_at(model: type[BaseModel], location: tuple[int | str, ...]) -> type[BaseModel]:
    """The model that has the value at `location` among its fields."""
    for name in location[:-1]:
        inner = model.model_fields[name].annotation if name in model.model_fields else None
        # The part of the knobs is made of those that are registered.
        inner = knob_config() if name == "knobs" and inner is Any else inner
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            model = inner
    return model
