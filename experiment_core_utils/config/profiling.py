"""The configuration of a knob run: six parts, validated once, from a command line or from Python.

Nothing here imports torch, so that `--help` and a wrong flag answer at once.
"""

import argparse
from collections.abc import Sequence
from typing import Any, Self

from pydantic import Field, model_validator

from experiment_core_utils.config.command_line import OneLineParser, add_flags
from experiment_core_utils.config.parts import (
    KnobConfig,
    MachineConfig,
    MeasuringConfig,
    ModelConfig,
    Part,
    SearchConfig,
    TaskConfig,
    validated_as,
)
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.texts import did_you_mean


class ProfilingConfig(Part):
    """What was requested of one knob run; the fields of its parts are the flags of `acc_lat_profiling.py`."""

    model: ModelConfig = Field(default_factory=ModelConfig, title="the model")
    task: TaskConfig = Field(default_factory=TaskConfig, title="the task")
    knobs: KnobConfig = Field(default_factory=KnobConfig, title="knobs")
    search: SearchConfig = Field(
        default_factory=SearchConfig, title="search of the accuracy-latency front without the full grid"
    )
    measuring: MeasuringConfig = Field(default_factory=MeasuringConfig, title="how it is measured")
    machine: MachineConfig = Field(default_factory=MachineConfig, title="the machine and the output")

    @classmethod
    def of(cls, **values: Any) -> Self:
        """The configuration of flat values by the names of the flags; raises ConfigurationError."""
        part_of = {name: part for part, model in _PARTS.items() for name in model.model_fields}
        parts: dict[str, dict[str, Any]] = {part: {} for part in _PARTS}
        for name, value in values.items():
            if name not in part_of:
                raise ConfigurationError(
                    f"{name}: there is no such key{did_you_mean(name, part_of)}; known are {', '.join(part_of)}"
                )
            parts[part_of[name]][name] = value
        return validated_as(cls, parts, lambda location: f"--{location[1]}")

    def replaced(self, **values: Any) -> Self:
        """This configuration with other flat values; raises ConfigurationError."""
        given = [getattr(self, part).model_dump(exclude_unset=True) for part in _PARTS]
        return self.of(**{name: value for part in given for name, value in part.items()} | values)

    @model_validator(mode="after")
    def _check_search(self) -> Self:
        for name in ("until_precision", "num_latency_samples"):
            if self.search.pareto_search and getattr(self.measuring, name) is not None:
                raise ConfigurationError(f"--pareto_search decides how many samples are measured; drop --{name}")
        return self


_PARTS: dict[str, type[Part]] = {
    name: field.annotation
    for name, field in ProfilingConfig.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Part)
}


def build_parser() -> argparse.ArgumentParser:
    """The published flags."""
    parser = OneLineParser(
        prog="acc_lat_profiling.py",
        description="Measure accuracy and stage-wise latency of a vision-language model for each setting of three "
        "knobs: vision tokens, experts per token (MoE top-k) and active transformer blocks.",
    )
    for name, part in _PARTS.items():
        add_flags(parser, part, ProfilingConfig.model_fields[name].title)
    return parser


def parse_config(argv: Sequence[str] | None = None) -> ProfilingConfig:
    """The configuration of a command line; raises ConfigurationError."""
    return ProfilingConfig.of(**vars(build_parser().parse_args(argv)))
