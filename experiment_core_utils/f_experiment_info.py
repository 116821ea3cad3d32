"""In: a configuration, a process and a model; out: what a reader needs to judge and repeat the run."""

import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil
import torch
from accelerate import Accelerator

from experiment_core_utils.primitives.config import ProfilingConfig
from experiment_core_utils.primitives.paths import REPOSITORY

RECORDED_PACKAGES = ("torch", "transformers", "accelerate", "numpy", "pillow")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def gather_provenance(accelerator: Accelerator, device: torch.device, experiment_id: str) -> Mapping[str, Any]:
    """Who measured, when, with what: versions, hardware, processes, git commit and command line."""
    return {
        "experiment_id": experiment_id,
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([os.path.basename(sys.executable), *sys.argv]),
        "git_commit": git_commit(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in RECORDED_PACKAGES},
        "num_processes": accelerator.num_processes,
        "hardware": describe_hardware(device),
    }


def describe_hardware(device: torch.device) -> Mapping[str, Any]:
    """The device and the host, as found; None for what cannot be read."""
    is_cuda = device.type == "cuda"
    return {
        "device": str(device),
        "gpu_name": torch.cuda.get_device_name(device) if is_cuda else None,
        "gpu_memory_bytes": torch.cuda.get_device_properties(device).total_memory if is_cuda else None,
        "cuda": torch.version.cuda,
        "num_gpus": torch.cuda.device_count(),
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "ram_bytes": psutil.virtual_memory().total,
    }


def environment_stamp(device: torch.device) -> tuple[str | None, ...]:
    """Versions and device that times and, in the last digits, answers depend on."""
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    return (_version("torch"), _version("transformers"), device.type, hardware)


def variables_of(config: ProfilingConfig, max_new_tokens: int) -> dict[str, Any]:
    """The experimental parameters as asked for; `max_new_tokens` as it came out."""
    return {
        "num_samples": config.num_samples,
        "sample_by": config.sample_by,
        "seed": config.seed,
        "ids": list(config.ids) if config.ids is not None else None,
        "prompt_template": config.prompt_template,
        "dataset_revision": config.dataset_revision,
        "max_new_tokens": max_new_tokens,
        "num_runs_per_sample": config.num_runs_per_sample,
        "num_warmup_runs": config.num_warmup_runs,
        "max_warmup_runs": config.max_warmup_runs,
        "until_precision": config.until_precision,
        "drift_check_every": config.drift_check_every,
        "num_latency_samples": config.num_latency_samples,
        "accuracy_batch_size": config.accuracy_batch_size,
        "precision": config.precision,
        "num_threads": config.num_threads,
        "batch_size": 1,
        "decoding": "greedy",
        "sampling_strategy": config.sampling_strategy,
        "importance_scores_file": str(config.importance_scores_file) if config.importance_scores_file else None,
        "random_weights": config.random_weights,
        "enable_memory_optimization": config.enable_memory_optimization,
        "max_config_retries": config.max_config_retries,
        "sample_timeout_s": config.sample_timeout,
        "profiler": config.profiler,
        "use_profiler_on_all_samples": config.use_profiler_on_all_samples,
        "pareto_search": config.pareto_search,
        "first_block_top_k_rule": "block 0 keeps the model's own top-k",
    }


def caveats_of(
    config: ProfilingConfig, device: torch.device, processes_here: int, data_source: Mapping[str, str]
) -> list[str]:
    """What a reader must know before quoting the numbers.

    Args:
        data_source: the task's `source`.
    """
    caveats = []
    if data_source.get("read_from") == "hub" and not _COMMIT.fullmatch(data_source["revision"]):
        caveats.append("the commit of the data on the hub is not known: --dataset_revision COMMIT makes it repeatable")
    if config.random_weights:
        caveats.append("random weights: accuracy means nothing, routing may be more even than a trained model's")
    if device.type == "cpu" and processes_here > 1:
        caveats.append(f"{processes_here} processes share the CPU cores: latencies are not those of one alone")
    return caveats


def git_commit() -> str | None:
    """Commit of the working tree, with "+changes" where files differ from it; None outside a checkout."""
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return None
    return commit + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str | None:
    try:
        with open("/proc/cpuinfo") as info:
            names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    except OSError:
        return platform.processor() or None
    return names[0] if names else None
