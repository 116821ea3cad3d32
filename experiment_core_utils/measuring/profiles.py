"""Extra runs of samples under PyTorch's profiler, saved as a table and a trace.

A profiled run is slower than a measured one, so it is one more run, kept in its two files only: no statistic counts it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from experiment_core_utils.config.parts import ProfilerMode
from experiment_core_utils.engines.greedy import generate_greedily
from experiment_core_utils.engines.likelihood import ScoredRequest, ScoringStages, score_timed
from experiment_core_utils.models.interface import Stages, devices_of
from experiment_core_utils.primitives.device import NoMarks, synchronize
from experiment_core_utils.primitives.files import replaced_whole, write_text_atomically
from experiment_core_utils.records.stages import Component

LONGEST_NAME = 80


def stages_in_ranges(model: Stages) -> Any:
    """A model for `generate_greedily` whose stages are the ranges `vision`, `prefill` and `decode` (one a step).

    A range covers the model's own work on the host; choosing the token lies between the ranges. Without a picture
    `vision` is there and nearly empty.
    """
    return SimpleNamespace(
        ends=model.ends,
        encode_image=record_function("vision")(model.encode_image),
        prefill=record_function("prefill")(model.prefill),
        decoding=model.decoding,
        decode_step=record_function("decode")(model.decode_step),
    )


@contextmanager
def component_ranges(components: Mapping[Component, Sequence[torch.nn.Module]]) -> Iterator[None]:
    """Inside, every call of a component of the decoder appears in a profile as a range of its name."""
    opened: list[record_function] = []

    def enter(name: Component) -> None:
        opened.append(record_function(name))
        opened[-1].__enter__()

    def leave(*_: object) -> None:
        opened.pop().__exit__(None, None, None)

    with ExitStack() as hooks:
        for name, modules in components.items():
            for module in modules:
                hooks.enter_context(module.register_forward_pre_hook(lambda *_, name=name: enter(name)))
                hooks.enter_context(module.register_forward_hook(leave, always_call=True))
        yield


@dataclass(frozen=True)
class TorchProfiles:
    """Decides which samples of a run are profiled, and writes their files into `folder`."""

    folder: Path
    mode: ProfilerMode | None  #: None where nothing is to be profiled
    every_sample: bool  #: else the first sample of each setting that the main process measures
    is_main_process: bool
    setting_keys: Sequence[str]  #: the whole plan in order; a setting's place in it is the `config_idx` of its files
    sample_ids: Sequence[int]  #: all samples of the run in order; a sample's place among them is the `sample_idx`
    profiled: set[str] = field(default_factory=set)  #: settings that have a profile by now

    def needs(self, setting_key: str) -> bool:
        """Whether the next sample of the setting is one to profile."""
        first_here = self.is_main_process and setting_key not in self.profiled
        return self.mode is not None and (self.every_sample or first_here)

    def take(
        self, model: Stages, setting_key: str, sample_id: int, inputs: Mapping[str, Any], max_new_tokens: int
    ) -> None:
        """Profile one more run of the request if it is one of those to profile; the knobs must be in force.

        Raises:
            ResultsNotSaved: a file cannot be written.
        """
        if self.mode is None or not self.needs(setting_key):
            return
        self.profiled.add(setting_key)
        profiled = profiled_run(model, inputs, max_new_tokens, self.mode)
        place = f"config_{self.setting_keys.index(setting_key)}_sample_{self.sample_ids.index(sample_id)}"
        heading = (
            f"setting {setting_key}, sample id {sample_id}, {self.mode} profile on {model.device.type}\n"
            "The times below contain the profiler's own overhead: use them as fractions, not as latencies.\n"
        )
        # The largest total first: device time on a GPU, host time on the CPU; `full` by input shapes.
        sort_by = "device_time_total" if model.device.type == "cuda" else "cpu_time_total"
        averages = profiled.key_averages(group_by_input_shape=self.mode == "full")
        table = averages.table(sort_by=sort_by, row_limit=-1, max_name_column_width=LONGEST_NAME)
        path = self.folder / f"profiler_trace_{place}.json.gz"
        with replaced_whole(path, ending=".tmp.gz") as temporary:  # it is the ending that asks for compression
            profiled.export_chrome_trace(str(temporary))
        write_text_atomically(heading + table, self.folder / f"profiler_results_{place}.txt")


def profiled_run(model: Stages, inputs: Mapping[str, Any], max_new_tokens: int, mode: ProfilerMode) -> profile:
    """One run of the request under the profiler, with ranges of its components; the device is idle at both ends."""
    synchronize(*devices_of(model))
    with component_ranges(model.components()), new_profiler(model.device, mode) as profiler:
        if isinstance(inputs, ScoredRequest):
            score_timed(cast(ScoringStages, model), inputs, NoMarks())
        else:
            generate_greedily(stages_in_ranges(model), inputs, max_new_tokens, NoMarks())
        synchronize(*devices_of(model))
    return profiler


def new_profiler(device: torch.device, mode: ProfilerMode) -> profile:
    """`minimal` records activities only (operators, ranges, GPU kernels); `full` shapes, stacks, memory, FLOPs too."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    full = mode == "full"
    return profile(activities=activities, record_shapes=full, with_stack=full, profile_memory=full, with_flops=full)
