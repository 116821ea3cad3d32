"""In: argv; out: one frozen configuration, judged once. After this file no code applies a default again.

Nothing here imports torch, so that `--help` and a wrong flag answer at once.
"""

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from experiment_core_utils.primitives.block_choice import NO_SCORES, read_block_sets, read_importance
from experiment_core_utils.primitives.bounds import LARGEST_SEED, MOST_SECONDS, MOST_TIMES, shown
from experiment_core_utils.primitives.cpu_threads import environment_threads
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.flags import MAX_WARMUP_RUNS, PARETO_ALPHA, PARETO_MARGIN, build_parser
from experiment_core_utils.primitives.knobs import TIERS, VisionTarget, tier_target, token_target
from experiment_core_utils.primitives.strategies import STRATEGIES

T = TypeVar("T")
Device = Literal["auto", "cpu", "cuda"]
Precision = Literal["auto", "float32", "bfloat16", "float16"]
SampleBy = Literal["random", "question_type"]
SettingOrder = Literal["shuffled", "planned"]
ProfilerMode = Literal["minimal", "full"]
QuantizationWidth = Literal["none", "4bit", "8bit"]
ExecutionMode = Literal["auto", "eager", "graph"]
EnergyWish = Literal["required", "optional", "off"]


@dataclass(frozen=True)
class ProfilingConfig:
    """Everything that was asked of one profiling run; the fields are the flags of `acc_lat_profiling.py`."""

    model_path: str
    output_dir: Path
    dataset_name: str
    split: str | None
    data_dir: Path | None
    hf_cache_dir: Path | None
    prompt_template: str | None
    dataset_revision: str | None
    max_new_tokens: int | None
    vision_targets: tuple[VisionTarget, ...]
    vision_targets_given: bool
    top_k_list: tuple[int, ...] | None
    num_active_blocks_list: tuple[int, ...] | None
    sampling_strategy: str
    num_configs: int | None
    pareto_search: bool
    pareto_margin: float
    pareto_alpha: float
    num_samples: int
    sample_by: SampleBy
    ids: tuple[int, ...] | None
    num_runs_per_sample: int
    num_warmup_runs: int
    max_warmup_runs: int
    setting_order: SettingOrder
    drift_check_every: int
    until_precision: float | None
    energy: EnergyWish
    memory_timeline: bool
    seed: int
    num_latency_samples: int | None
    accuracy_batch_size: int
    importance_scores: Mapping[int, float] | None
    importance_scores_file: Path | None
    use_own_scores: bool
    block_sets: Mapping[int, tuple[int, ...]] | None
    block_sets_file: Path | None
    enable_memory_optimization: bool
    max_config_retries: int
    config_retry_delay: float
    sample_timeout: float | None
    worker_timeout: float
    request_cache_gb: float | None
    num_processes: int | None
    num_threads: int | None
    device: Device
    precision: Precision
    experts_implementation: str | None
    attn_implementation: str | None
    quantization: QuantizationWidth
    execution: ExecutionMode
    random_weights: bool
    use_profiler: bool
    use_profiler_on_all_samples: bool
    profiler_mode: ProfilerMode
    dry_run: bool

    @property
    def profiler(self) -> ProfilerMode | None:
        """How samples are profiled; None where none is."""
        return self.profiler_mode if self.use_profiler or self.use_profiler_on_all_samples else None


def parse_config(argv: Sequence[str] | None = None) -> ProfilingConfig:
    """Parse and judge; raises ConfigurationError for what argparse cannot see by itself."""
    given = build_parser().parse_args(argv)
    for name, least in _LEAST.items():
        _within(name, getattr(given, name), least, _MOST[name])
    for check in (_check_strategy, _check_draw, _check_warm_up, _check_search, _check_precision, _check_profiler):
        check(given)
    _check_threads(given.num_threads)
    asked = vars(given)
    tiers, tokens = asked.pop("tier_list"), asked.pop("vision_tokens_list")
    targets = [tier_target(each) for each in tiers or TIERS]
    if tokens is not None:
        targets = [token_target(each) for each in tokens]
    scores_file = asked.pop("importance_scores_file")
    named_file = None if scores_file in (None, NO_SCORES) else Path(scores_file)
    return ProfilingConfig(
        **asked
        | {
            "vision_targets": _unique(targets),
            "vision_targets_given": tiers is not None or tokens is not None,
            "top_k_list": _unique(given.top_k_list) if given.top_k_list else None,
            "num_active_blocks_list": _unique(given.num_active_blocks_list) if given.num_active_blocks_list else None,
            "ids": _unique(sorted(given.ids)) if given.ids is not None else None,
            "max_warmup_runs": (
                max(MAX_WARMUP_RUNS, given.num_warmup_runs) if given.max_warmup_runs is None else given.max_warmup_runs
            ),
            "importance_scores": None if named_file is None else read_importance(named_file),
            "importance_scores_file": named_file,
            "use_own_scores": scores_file is None and given.block_sets_file is None,
            "block_sets": None if given.block_sets_file is None else read_block_sets(given.block_sets_file),
        }
    )


# The least and the most that a flag may be given, or each of its values; one that was not given stays so.
_LEAST: Mapping[str, float] = {
    **dict.fromkeys(("num_samples", "num_runs_per_sample", "accuracy_batch_size", "top_k_list"), 1),
    **dict.fromkeys(("num_active_blocks_list", "num_processes", "num_threads", "max_new_tokens", "num_configs"), 1),
    **dict.fromkeys(("num_warmup_runs", "max_config_retries", "config_retry_delay", "seed", "drift_check_every"), 0),
    **dict.fromkeys(("request_cache_gb", "num_latency_samples"), 0),
    **dict.fromkeys(("sample_timeout", "worker_timeout"), 0.001),
    **dict.fromkeys(("vision_tokens_list", "ids"), -math.inf),
}
_MOST: Mapping[str, float] = {
    **dict.fromkeys(_LEAST, MOST_TIMES),
    **dict.fromkeys(("sample_timeout", "worker_timeout", "config_retry_delay"), MOST_SECONDS),
    # Room for an answer is taken before it is made.
    **dict.fromkeys(("max_new_tokens", "accuracy_batch_size", "num_configs"), 1_000_000),
    **dict.fromkeys(("vision_tokens_list", "ids"), 10**12),
    "seed": LARGEST_SEED,
}


def _check_draw(given: argparse.Namespace) -> None:
    if given.ids is not None and given.sample_by != "random":
        raise ConfigurationError(f"--ids leaves nothing to draw: --sample_by {given.sample_by} cannot act; drop one")


def _check_warm_up(given: argparse.Namespace) -> None:
    if given.max_warmup_runs is not None and given.max_warmup_runs < given.num_warmup_runs:
        raise ConfigurationError(
            f"--max_warmup_runs {given.max_warmup_runs} is less than --num_warmup_runs {given.num_warmup_runs}; "
            f"give at least {given.num_warmup_runs}"
        )


def _check_precision(given: argparse.Namespace) -> None:
    if given.until_precision is None:
        return
    if given.num_latency_samples is not None:
        raise ConfigurationError(
            "--until_precision decides how many samples are measured, and so does --num_latency_samples; drop one"
        )
    if not 0 < given.until_precision < 1:
        raise ConfigurationError(
            f"--until_precision {given.until_precision} is not possible; give a share of the mean between 0 and 1, "
            "such as 0.02"
        )


def _check_profiler(given: argparse.Namespace) -> None:
    is_used = given.use_profiler or given.use_profiler_on_all_samples
    if is_used and given.num_latency_samples == 0:
        raise ConfigurationError("--use_profiler profiles measured samples, and --num_latency_samples 0 leaves none")
    if given.profiler_mode == "full" and not is_used:
        raise ConfigurationError("--profiler_mode full has nothing to act on; give --use_profiler too, or drop it")


def _check_threads(wanted: int | None) -> None:
    cores = os.cpu_count() or 1
    if wanted is None:
        environment_threads()
    elif wanted > cores:
        raise ConfigurationError(f"--num_threads {wanted} is more than the {cores} cores of this machine")


def _check_search(given: argparse.Namespace) -> None:
    if not 0 <= given.pareto_margin < 1:
        raise ConfigurationError(f"--pareto_margin {given.pareto_margin} is not possible; give 0 or more, less than 1")
    if not 0 < given.pareto_alpha < 1:
        raise ConfigurationError(f"--pareto_alpha {given.pareto_alpha} is not possible; give more than 0, less than 1")
    if (given.pareto_margin, given.pareto_alpha) != (PARETO_MARGIN, PARETO_ALPHA) and not given.pareto_search:
        raise ConfigurationError(
            "--pareto_margin and --pareto_alpha say how --pareto_search decides; give it, or drop them"
        )
    for name in ("until_precision", "num_latency_samples"):
        if given.pareto_search and getattr(given, name) is not None:
            raise ConfigurationError(f"--pareto_search decides how many samples are measured; drop --{name}")


def _check_strategy(given: argparse.Namespace) -> None:
    name, num_configs = given.sampling_strategy, given.num_configs
    if name not in STRATEGIES:
        raise ConfigurationError(f"unknown sampling strategy {name!r}; choose among {', '.join(STRATEGIES)}")
    if num_configs is not None and name != "lhs":
        raise ConfigurationError(f"--num_configs {num_configs} is for --sampling_strategy lhs, not for {name}; drop it")


def _within(name: str, given: Any, least: float, most: float) -> None:
    """`given` is a number, a list of numbers, or None."""
    for value in given if isinstance(given, list) else [given]:
        if value is None or least <= value <= most:
            continue
        allowed = f"at least {least}" if value < least else f"at most {most}"
        if isinstance(value, float) and not math.isfinite(value):
            allowed = "a finite number"
        raise ConfigurationError(f"--{name} {shown(value)} is not possible; give {allowed}")


def _unique(values: Sequence[T]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(values))
