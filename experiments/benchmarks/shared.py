"""Shared parts of benchmarks: a model and its task's first request, times on an idle device, alternating runs."""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from experiment_core_utils.b_model_loader import find_requested_checkpoint
from experiment_core_utils.config.parts import TaskConfig
from experiment_core_utils.config.profiling import ProfilingConfig, parse_config
from experiment_core_utils.knobs.vision_tokens import VisionTarget
from experiment_core_utils.models.interface import StagedModel
from experiment_core_utils.primitives.device import choose_device, set_cpu_threads, synchronize
from experiment_core_utils.requests.drawing import open_task
from experiment_core_utils.tasks.prompt_forms import prompt_for

T = TypeVar("T")


def parsed(
    parser: argparse.ArgumentParser, num_samples: int | None = None
) -> tuple[argparse.Namespace, ProfilingConfig]:
    """The benchmark's own flags, and the pipeline's configuration from all others; the CPU's threads are set by it.

    Args:
        num_samples: where `--num_samples` is not given.
    """
    own, flags = parser.parse_known_args()
    is_given = any(flag.partition("=")[0] == "--num_samples" for flag in flags)
    config = parse_config([*(["--num_samples", str(num_samples)] if num_samples and not is_given else []), *flags])
    set_cpu_threads(config.machine.num_threads, 1)
    return own, config


def loaded_model(config: ProfilingConfig) -> StagedModel:
    """The model on its device."""
    return find_requested_checkpoint(config).load(config.model, choose_device(config.machine.device))


def endless_model(config: ProfilingConfig) -> StagedModel:
    """The model; its answers always have their full length, so that all runs do the same work."""
    model = loaded_model(config)
    model.ends = replace(model.ends, token_ids=frozenset())
    return model


def first_inputs(model: StagedModel, config: TaskConfig, target: VisionTarget) -> Mapping[str, Any]:
    """The first sample of the task at a vision target, on the model's device."""
    task = open_task(config)
    return model.to_device(model.prepare(task[0], prompt_for(task, task[0], model.prompt_family), target.crops).inputs)


def timed(device: torch.device, act: Callable[[], T]) -> tuple[float, T]:
    """Seconds of an act by the host's clock, the device idle at both ends, and what it returned."""
    synchronize(device)
    started = time.perf_counter()
    returned = act()
    synchronize(device)
    return time.perf_counter() - started, returned


def paired_ratios(one: Callable[[], float], other: Callable[[], float], pairs: int) -> list[float]:
    """Seconds of `one` over those of `other` in each pair; which of the two goes first alternates."""
    ratios = []
    for pair in tqdm(range(pairs), desc="pairs", leave=False):
        first = one() if pair % 2 else other()
        second = other() if pair % 2 else one()
        ratios.append(first / second if pair % 2 else second / first)
    return ratios


def quartiles(values: Sequence[float], digits: int = 4) -> str:
    """The median, and the first and third quartile."""
    low, middle, high = (f"{each:.{digits}f}" for each in statistics.quantiles(values, n=4))
    return f"{middle} ({low} to {high})"
