"""The configuration of a knob run: its parts, validated once, from a command line or from Python.

Nothing here imports torch, so that `--help` and a wrong flag answer at once.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, cast

import yaml
from pydantic import Field, field_validator, model_validator

from experiment_core_utils.config.command_line import OneLineParser, add_flags, add_knob_module
from experiment_core_utils.config.parts import (
    GridConfig,
    MachineConfig,
    MeasuringConfig,
    ModelConfig,
    QuestionConfig,
    TaskConfig,
    knob_config,
    validated_as,
)
from experiment_core_utils.config.text_grid import read_yaml
from experiment_core_utils.knobs.registry import all_knobs, load_knob_module
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.flag_fields import Part
from experiment_core_utils.primitives.texts import did_you_mean, without_secrets


class ProfilingConfig(Part):
    """What was requested of one knob run; the fields of its parts are the flags of `acc_lat_profiling.py`."""

    model: ModelConfig = Field(default_factory=ModelConfig, title="the model")
    task: TaskConfig = Field(default_factory=TaskConfig, title="the task")
    #: of the class that `knob_config` makes
    knobs: Any = Field(default_factory=lambda: knob_config()(), title="knobs")
    measuring: MeasuringConfig = Field(default_factory=MeasuringConfig, title="how it is measured")
    machine: MachineConfig = Field(default_factory=MachineConfig, title="the machine and the output")
    question: QuestionConfig = Field(default_factory=QuestionConfig, title="the question")

    @classmethod
    def of(cls, **values: Any) -> Self:
        """The configuration of flat values by the names of the flags; raises ConfigurationError.

        Those of the file `config` are in force where they are not given themselves.
        """
        if (file := values.pop("config", None)) is not None:
            values = {**read_yaml(Path(file)), **values}
        if values.get("knob_module"):
            load_knob_module(Path(values["knob_module"]))
        models = parts_of_flags()
        part_of = {name: part for part, model in models.items() for name in model.model_fields}
        parts: dict[str, dict[str, Any]] = {part: {} for part in models}
        for name, value in values.items():
            if name not in part_of:
                raise ConfigurationError(
                    f"{name}: there is no such key{did_you_mean(name, part_of)}; known are {', '.join(part_of)}"
                )
            parts[part_of[name]][name] = value
        return validated_as(cls, parts, lambda location: f"--{location[1]}")

    @property
    def flags(self) -> dict[str, Any]:
        """The flat values that were requested, by the names of the flags; `of` makes this configuration from them."""
        parts = [getattr(self, part).model_dump(exclude_unset=True) for part in parts_of_flags()]
        return {name: value for part in parts for name, value in part.items()}

    @property
    def recipe(self) -> str:
        """The same in YAML, as `--config` reads it; addresses of servers are without what is secret in them."""
        flags = dict(self.flags)
        if self.model.endpoint is not None:
            flags["endpoint"] = [without_secrets(each) for each in self.model.endpoint]
        return yaml.safe_dump(json.loads(json.dumps(flags, default=str)), sort_keys=False)

    def replaced(self, **values: Any) -> Self:
        """This configuration with other flat values; raises ConfigurationError."""
        return self.of(**self.flags | values)

    @field_validator("knobs", mode="before")
    @classmethod
    def _knobs_of_now(cls, given: Any) -> GridConfig:
        """The flags of the knobs that are registered when a configuration is made."""
        return given if isinstance(given, GridConfig) else knob_config().model_validate(given)

    @model_validator(mode="after")
    def _check_in_step(self) -> Self:
        if self.model.tensor_parallel is not None and self.measuring.sample_timeout is not None:
            raise ConfigurationError(
                "--sample_timeout stops one process in the middle of a step that all of --tensor_parallel make; drop it"
            )
        return self

    @model_validator(mode="after")
    def _check_endpoint(self) -> Self:
        if self.model.endpoint is None:
            return self
        of_this_process = ("use_profiler", "use_profiler_on_all_samples", "memory_timeline")
        if given := [f"--{name}" for name in of_this_process if getattr(self.measuring, name)]:
            raise ConfigurationError(f"{given[0]} sees this process alone, and a server runs the model; drop it")
        if self.task.no_chat_template:
            raise ConfigurationError("--no_chat_template cannot act: the server of --endpoint applies its own; drop it")
        if self.machine.num_processes not in (None, 1):
            raise ConfigurationError(
                f"--num_processes {self.machine.num_processes}: --endpoint is measured by one process; drop it, and "
                "give --concurrency for samples without times"
            )
        if "accuracy_batch_size" in self.measuring.model_fields_set:
            raise ConfigurationError("--accuracy_batch_size cannot act with --endpoint; give --concurrency, or drop it")
        return self

    @model_validator(mode="after")
    def _check_rate(self) -> Self:
        if self.model.request_rate is None:
            return self
        measuring = self.measuring
        one_by_one = {
            "until_precision": measuring.until_precision is not None,
            "energy": measuring.energy not in ("auto", "off"),
        }
        if given := [f"--{name}" for name, is_given in one_by_one.items() if is_given]:
            raise ConfigurationError(
                f"{given[0]} is of requests that run one by one, and --request_rate lets them arrive together; drop one"
            )
        if measuring.num_latency_samples == 0:
            raise ConfigurationError("--request_rate is of timed samples, and --num_latency_samples 0 leaves none")
        return self

    @model_validator(mode="after")
    def _check_placebo(self) -> Self:
        if self.knobs.placebo and self.knobs.no_reference:
            raise ConfigurationError(
                "--no_reference leaves --placebo nothing to be compared with: it takes turns with the reference; drop "
                "one"
            )
        return self


def parts_of_flags() -> dict[str, type[Part]]:
    """The parts by name, that of the knobs as they are registered now; raises ConfigurationError for a flag of a knob
    that another part has.
    """
    fields = ProfilingConfig.model_fields
    parts = {name: cast(type[Part], fields[name].annotation) for name in fields if name != "knobs"}
    others: list[type[Part]] = [*parts.values(), GridConfig]
    taken = {name for part in others for name in part.model_fields}
    for knob in all_knobs():
        if twice := sorted(taken & knob.flags.model_fields.keys()):
            raise ConfigurationError(f"knob {knob.name}: there is a flag --{twice[0]} already; give it another name")
    return {name: knob_config() if name == "knobs" else parts[name] for name in fields}


def build_parser() -> argparse.ArgumentParser:
    """The published flags."""
    parser = OneLineParser(
        prog="acc_lat_profiling.py",
        description="Measure accuracy and stage-wise latency of a vision-language model for each setting of its "
        "knobs: vision tokens, experts per token (MoE top-k), active transformer blocks and further ones.",
        # The flags of all groups would be a page of their own.
        usage="%(prog)s [-h] [FLAG ...]",
        examples=(
            "knobprof profile --num_samples 64                       # the model and task that come with the project",
            "knobprof profile --model_path MODEL --data_file my.jsonl --num_samples 500 --dry_run",
            "knobprof profile --model_path MODEL --tier_list low high --num_active_blocks_list 18 24 --energy required",
            "knobprof profile --endpoint q4=http://localhost:8000/v1 q8=http://localhost:8001/v1 --model NAME",
            "accelerate launch experiments/core_exp/acc_lat_profiling.py --model_path MODEL    # on several GPUs",
        ),
    )
    for name, part in parts_of_flags().items():
        add_flags(parser, part, ProfilingConfig.model_fields[name].title)
    return parser


def parse_config(argv: Sequence[str] | None = None) -> ProfilingConfig:
    """The configuration of a command line; raises ConfigurationError."""
    # The knobs of a file bring flags of their own.
    first = OneLineParser(add_help=False)
    add_knob_module(first)
    first.parse_known_args(argv)
    return ProfilingConfig.of(**vars(build_parser().parse_args(argv)))
