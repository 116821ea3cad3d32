"""The configuration of one text experiment, from YAML, a notebook object or flags.

Notebooks use the published form, an object with plain dicts that may be changed between two steps
(`config.decoder_config["decoding_mode"] = "top_k"`); every lettered step takes it through `validated`. Nothing here
imports torch.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from experiment_core_utils.config.parts import (
    NUMBER_FORMAT,
    WORKER_TIMEOUT_S,
    AttnImplementation,
    Delay,
    Device,
    Energy,
    EnergyMode,
    MemoryTimeline,
    NumProcesses,
    NumThreads,
    Seed,
    StopText,
    TimeLimit,
    WorkerTimeout,
    launched_mixed_precision,
    only_model_in,
    validated_as,
)
from experiment_core_utils.primitives.errors import ConfigurationError, ImpossibleCombination
from experiment_core_utils.primitives.files import EMBEDDED_MODEL, check_file_name_part
from experiment_core_utils.primitives.flag_fields import Count, CountInMemory, CountOrZero, Part

FpPrecision = Annotated[Literal["auto", "float32", "float16", "bfloat16", "float8"], NUMBER_FORMAT]
DecodingMode = Literal["greedy", "temperature", "top_k", "top_p"]

USED_BY_MODE: Mapping[str, frozenset[str]] = {
    "greedy": frozenset(),
    "temperature": frozenset({"decoder_temperature"}),
    "top_k": frozenset({"decoder_temperature", "decoder_top_k"}),
    "top_p": frozenset({"decoder_temperature", "decoder_top_p"}),
}


class Quantisation(Part):
    """Weights in 8 or 4 bits by bitsandbytes."""

    quantization: bool = False  #: quantise the weights with bitsandbytes, in one of the next two ways
    load_in_4bit: bool = False  #: to 4 bits
    load_in_8bit: bool = False  #: to 8 bits
    bnb_4bit_quant_type: Literal["nf4", "fp4"] | None = None  #: data type of 4-bit weights; null: `nf4`

    @model_validator(mode="after")
    def _check_width(self) -> Self:
        chosen = self.load_in_4bit + self.load_in_8bit
        if self.quantization and chosen != 1:
            raise ImpossibleCombination(
                "quantization_config.quantization needs exactly one of load_in_4bit and load_in_8bit"
            )
        if chosen and not self.quantization:
            raise ImpossibleCombination("load_in_4bit and load_in_8bit need quantization_config.quantization: true")
        if self.bnb_4bit_quant_type is not None and not self.load_in_4bit:
            raise ImpossibleCombination(f"bnb_4bit_quant_type {self.bnb_4bit_quant_type} needs load_in_4bit")
        return self


class Batching(Part):
    """Which prompts run together."""

    batch_size___fixed_batching: Count = 16  #: prompts per batch
    adaptive_batching: bool = False  #: fill batches up to the next two limits instead
    adaptive_max_tokens: Count = 2048  #: prompts of a batch x the longest of them; a longer prompt runs alone
    max_batch_size___adaptive_batching: Count = 32  #: prompts per adaptive batch
    #: run a batch that does not fit in halves and record it; otherwise the experiment fails
    halve_on_out_of_memory: bool = False


class DecoderConfig(Part):
    """How the next token is chosen; a mode uses the temperature and the number of its own name only."""

    decoding_mode: DecodingMode = "greedy"  #: all but `greedy` sample from the distribution
    decoder_temperature: float | None = Field(default=None, ge=0)  #: for sampling; null: 1
    decoder_top_k: Count | None = None  #: `top_k` samples from this many most likely tokens
    decoder_top_p: float | None = Field(default=None, gt=0, le=1)  #: `top_p`: from those that sum to this probability

    @model_validator(mode="after")
    def _check_mode(self) -> Self:
        mode = self.decoding_mode
        if mode != "greedy" and getattr(self, f"decoder_{mode}") is None:
            raise ImpossibleCombination(f"decoding_mode {mode} needs decoder_{mode}")
        if mode != "greedy" and self.decoder_temperature == 0:
            raise ImpossibleCombination(
                f"decoder_temperature 0 leaves {mode} nothing to draw; use decoding_mode greedy"
            )
        return self


class LatencySimulation(Part):
    """Waiting before batches as if requests arrived late; in seconds, never part of a measured time."""

    simulate: bool = False  #: wait before each batch as if requests arrived late; no measured time includes it
    delay_min: Delay = 0.0  #: shortest delay in seconds; delays are uniform
    delay_max: Delay = 0.0  #: longest delay in seconds
    simulate_burst: bool = False  #: batches come in bursts
    burst_interval: Delay = 0.0  #: seconds between bursts
    burst_size: Count = 1  #: batches per burst

    @model_validator(mode="after")
    def _check_delays(self) -> Self:
        if self.delay_min > self.delay_max:
            raise ImpossibleCombination(f"delay_min {self.delay_min} is more than delay_max {self.delay_max}")
        if self.simulate_burst and not self.simulate:
            raise ImpossibleCombination("simulate_burst needs simulate: true")
        return self


class PromptSource(Part):
    """Where prompts come from: the embedded set, a file, or a dataset."""

    path: str | None = None  #: text file (one prompt per line) or JSONL (`*.jsonl`, `*.ndjson`)
    dataset_name: str | None = None  #: hub id, or folder of a local copy (`save_to_disk`, parquet or arrow files)
    config_name: str | None = None  #: the dataset's own configuration
    split: str = "train"  #: split of the dataset
    column: str = "text"  #: key of a JSONL line, or column of a dataset
    revision: str | None = None  #: commit, tag or branch of the dataset on the hub; null: `main`
    chat_template: Literal["auto", "off"] = "auto"  #: `auto`: each prompt is a user turn where the tokenizer has one
    system_prompt: str | None = None  #: system message of the chat template; null: what the template adds by itself

    @field_validator("chat_template", mode="before")
    @classmethod
    def _yaml_word(cls, given: Any) -> Any:
        """YAML reads a bare `off` as false."""
        return "off" if given is False else given

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.chat_template == "off" and self.system_prompt is not None:
            raise ImpossibleCombination("prompts.system_prompt is a part of the chat template, which is off; drop one")
        return self

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if self.path is not None and self.dataset_name is not None:
            raise ImpossibleCombination("prompts.path and prompts.dataset_name are both given; choose one")
        if self.dataset_name is None and (self.config_name is not None or self.revision is not None):
            raise ImpossibleCombination(
                "prompts.config_name and prompts.revision belong to prompts.dataset_name, which is not given"
            )
        return self


class TextConfig(Part):
    """One text experiment: a model, prompts, and how they are run. Every key: `docs/reference/command_line.md`."""

    #: folder, a folder with one model in it, or hub id; a MolmoE checkpoint loads as its language model
    model_name: Annotated[str, AfterValidator(only_model_in)] = str(EMBEDDED_MODEL)
    revision: str | None = None  #: commit, tag or branch on the hub; the commit is recorded
    allow_pickled_weights: bool = False  #: also load `*.bin` weights, which can run code
    trust_remote_code: bool = False  #: run the code that comes with a checkpoint
    fp_precision: FpPrecision = "auto"
    quantization_config: Quantisation = Quantisation()
    device_map: Literal["auto"] | None = None  #: `auto`: spread the layers over the GPUs of this process
    attn_implementation: AttnImplementation = None

    device: Device = "auto"
    mixed_precision: Literal["no", "fp16", "bf16"] = "no"  #: accelerate's autocast
    num_processes: NumProcesses = None
    num_threads: NumThreads = None
    worker_timeout: WorkerTimeout = WORKER_TIMEOUT_S

    prompts: PromptSource = PromptSource()
    num_input_prompts: Count | None = None  #: use the first so many of those that are short enough; null: all
    max_input_tokens: Count = 512  #: longer prompts are left out and counted
    sort_prompts: bool = True  #: shortest first, so that batches need less padding

    max_output_tokens: CountInMemory = 64  #: longest answer, end-of-sequence included
    #: texts that end an answer, such as `Question:`; what comes before the first is the answer
    stop: tuple[StopText, ...] = Field(default=(), strict=False)
    ignore_eos: bool = False  #: nothing ends an answer: each has exactly `max_output_tokens` tokens
    batching_options: Batching = Batching()
    decoder_config: DecoderConfig = DecoderConfig()
    latency_simulation: LatencySimulation = LatencySimulation()
    random_seed: Seed = 42  #: seed of sampling and of delays
    #: unmeasured batches; null: all on a GPU, where kernels depend on shapes, and 16 tokens of the first on the CPU
    num_warmup_batches: CountOrZero | None = None

    task_type: str = "text_generation"  #: names the files `results/{task_type}_results.json` and `.csv`
    cycle_id: CountOrZero = 1  #: a number of your own, to tell repetitions apart
    decode_token_to_text: bool = True  #: decode the answers to text
    save_outputs: bool = False  #: also write texts and tokens
    #: functions of your own, `package.module:function`
    custom_metrics: tuple[str, ...] = Field(default=(), strict=False)
    track_energy: bool = True  #: false is the same as `energy: off`
    energy: Energy = "optional"
    country_iso_code: str | None = Field(default=None, pattern=r"^[A-Z]{3}$")  #: for CO2 per kWh; null: world mean
    #: of `flops`; `formula`: if the architecture is known, else as `counter`: torch's, with corrections
    flops_method: Literal["formula", "counter", "ptflops"] = "formula"
    memory_timeline: MemoryTimeline = False  #: write memory along the run to `{id}_5_memory_timeline.json`
    flops_timeout_s: TimeLimit = 10.0  #: seconds to count one prompt
    #: attributes of the published object that this project does not know; recorded, without effect
    further: Mapping[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _energy_off(cls, given: Any) -> Any:
        """`track_energy: false` by itself is `energy: off`."""
        if isinstance(given, Mapping) and given.get("track_energy") is False and given.get("energy") is None:
            return {**given, "energy": "off"}
        return given

    @model_validator(mode="before")
    @classmethod
    def _launched_autocast(cls, given: Any) -> Any:
        """The mixed precision of accelerate's launcher, where none is given."""
        launched = launched_mixed_precision()
        if launched is None or not isinstance(given, Mapping):
            return given
        own = given.get("mixed_precision", launched)
        if own in ("no", "fp16", "bf16", False) and own != launched:
            raise ConfigurationError(
                f"accelerate launch --mixed_precision {launched} and mixed_precision {own or 'no'} contradict each "
                "other; drop one"
            )
        return {**given, "mixed_precision": own}

    @field_validator("custom_metrics", "stop", mode="before")
    @classmethod
    def _one_text(cls, given: Any) -> Any:
        """A single text means a list of one."""
        return [given] if isinstance(given, str) else given

    @field_validator("mixed_precision", "energy", mode="before")
    @classmethod
    def _yaml_word(cls, given: Any, field: ValidationInfo) -> Any:
        """YAML reads a bare `no` or `off` as false."""
        return ("off" if field.field_name == "energy" else "no") if given is False else given

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if not self.model_name.strip():
            raise ValueError("model_name is empty; give a folder or a hub id, or leave it out for the embedded model")
        check_file_name_part(self.task_type, "task_type")
        for name in self.custom_metrics:
            module, _, function = name.partition(":")
            if not all(part.isidentifier() for part in (*module.split("."), function)):
                raise ValueError(f"custom_metrics names {name!r}; write package.module:function")
        return self

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.fp_precision == "float8" and self.quantization_config.quantization:
            raise ImpossibleCombination(
                "fp_precision float8 quantises the weights itself; choose it or bitsandbytes, not both"
            )
        if self.energy == "required" and not self.track_energy:
            raise ImpossibleCombination(
                "energy: required and track_energy: false contradict each other; to measure none, write energy: off"
            )
        return self

    @property
    def batch_size(self) -> int | None:
        """Prompts of a fixed batch; None where batches are adaptive."""
        options = self.batching_options
        return None if options.adaptive_batching else options.batch_size___fixed_batching

    @property
    def energy_mode(self) -> EnergyMode:
        """What `energy` says; `track_energy: false` means `off`."""
        return self.energy if self.track_energy else "off"

    def effective(self) -> Self:
        """This experiment without the values that its modes leave without effect, to recognise it by."""
        decoding, batching, simulation = self.decoder_config, self.batching_options, self.latency_simulation
        draws = decoding.decoding_mode != "greedy" or simulation.simulate
        quant_type = self.quantization_config.bnb_4bit_quant_type
        if self.quantization_config.load_in_4bit:
            quant_type = quant_type or "nf4"
        used = {"decoding_mode", *USED_BY_MODE[decoding.decoding_mode]}
        unused_batching = (
            {"batch_size___fixed_batching"}
            if batching.adaptive_batching
            else {"adaptive_max_tokens", "max_batch_size___adaptive_batching"}
        )
        return self.model_copy(
            update={
                "decoder_config": DecoderConfig(**decoding.model_dump(include=used)),
                "batching_options": Batching(**batching.model_dump(exclude=unused_batching)),
                "latency_simulation": simulation if simulation.simulate else LatencySimulation(),
                "quantization_config": self.quantization_config.model_copy(update={"bnb_4bit_quant_type": quant_type}),
                "random_seed": self.random_seed if draws else 0,
                "track_energy": self.energy_mode != "off",
            }
        )


def validated(experiment_config: Any) -> TextConfig:
    """The frozen form of a text experiment in any form.

    Args:
        experiment_config: a `TextConfig`, a mapping (unknown keys are errors), or any object with the published
            attributes, such as what `published_form` returns (absent ones take their defaults, others are recorded).

    Raises:
        ConfigurationError: a value is not allowed.
        ImpossibleCombination: values are not allowed together.
    """
    if isinstance(experiment_config, TextConfig):
        return experiment_config
    return validated_as(TextConfig, _as_mapping(experiment_config), lambda location: ".".join(map(str, location)))


def published_form(**values: Any) -> SimpleNamespace:
    """The object that notebooks use: attributes by their published names, their groups as plain dicts.

    Raises:
        ConfigurationError: a value is not allowed.
    """
    return SimpleNamespace(**validated(values).model_dump())


def _as_mapping(given: Any) -> Mapping[str, Any]:
    """Attributes of a class and properties count too: it is someone else's object."""
    if isinstance(given, Mapping):
        return given
    known = {name: getattr(given, name) for name in TextConfig.model_fields if hasattr(given, name)}
    if not known:
        raise ConfigurationError(
            "a text experiment was expected (a mapping, or an object with attributes such as model_name), found "
            f"{type(given).__name__}"
        )
    own = vars(given) if hasattr(given, "__dict__") else {}
    further = {name: value for name, value in own.items() if name not in known and not name.startswith("_")}
    return {**known, "further": {**(known.get("further") or {}), **further}}
