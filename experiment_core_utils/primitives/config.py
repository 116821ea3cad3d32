"""In: argv; out: one frozen configuration, judged once. After this file no code applies a default again.

Nothing here imports torch, so that `--help` and a wrong flag answer at once.
"""

import argparse
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn, TypeVar

from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.knobs import TIERS, VisionTarget, tier_target, token_target
from experiment_core_utils.primitives.strategies import LHS_CONFIGS, STRATEGIES

REPOSITORY = Path(__file__).resolve().parents[2]
EMBEDDED_MODEL = REPOSITORY / "checkpoints" / "molmoe_tiny"
EMBEDDED_TASK = "reference_vqa"
PARETO_MARGIN, PARETO_ALPHA = 0.01, 0.05
MAX_WARMUP_RUNS = 6

T = TypeVar("T")
Device = Literal["auto", "cpu", "cuda"]
Precision = Literal["auto", "float32", "bfloat16", "float16"]
SampleBy = Literal["random", "question_type"]
SettingOrder = Literal["shuffled", "planned"]
ProfilerMode = Literal["minimal", "full"]


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
    seed: int
    num_latency_samples: int | None
    accuracy_batch_size: int
    importance_scores: Mapping[int, float] | None
    importance_scores_file: Path | None
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
    random_weights: bool
    use_profiler: bool
    use_profiler_on_all_samples: bool
    profiler_mode: ProfilerMode
    dry_run: bool

    @property
    def profiler(self) -> ProfilerMode | None:
        """How samples are profiled; None where none is."""
        return self.profiler_mode if self.use_profiler or self.use_profiler_on_all_samples else None


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the whole usage."""

    def error(self, message: str) -> NoReturn:
        """Raises ConfigurationError."""
        raise ConfigurationError(f"{message}; see --help")


def build_parser() -> argparse.ArgumentParser:
    """The published flags with their defaults."""
    parser = OneLineParser(
        prog="acc_lat_profiling.py",
        description="Measure accuracy and stage-wise latency of a vision-language model for each setting of three "
        "knobs: vision tokens, experts per token (MoE top-k) and active transformer blocks.",
    )
    what = parser.add_argument_group("what is measured")
    what.add_argument("--model_path", default=str(EMBEDDED_MODEL), help="model folder (default: the embedded model)")
    what.add_argument("--dataset_name", default=EMBEDDED_TASK, help="task (default: %(default)s, needs no download)")
    what.add_argument("--split", help="split of the task (default: the task's own, for most validation)")
    what.add_argument("--data_dir", type=Path, help="folder of a local copy of the dataset")
    what.add_argument("--hf_cache_dir", type=Path, help="cache folder for models and datasets of the hub")
    what.add_argument("--dataset_revision", help="commit, tag or branch of the dataset on the hub (default: main)")
    what.add_argument("--prompt_template", help="text around the question, in place of the task's own")
    what.add_argument("--num_samples", type=int, default=1000, help="samples drawn without replacement (%(default)s)")
    what.add_argument(
        "--sample_by",
        choices=("random", "question_type"),
        default="random",
        help="random: of the whole split (default); question_type: each type keeps its share",
    )
    what.add_argument("--seed", type=int, default=42, help="seed of the draw (%(default)s)")
    what.add_argument("--ids", nargs="+", type=int, metavar="ID", help="just these samples of the split, none drawn")
    what.add_argument("--max_new_tokens", type=int, help="most tokens of an answer (default: the task's own number)")
    what.add_argument(
        "--random_weights",
        action="store_true",
        help="--model_path holds no weights: config, tokenizer and image processor; the weights are random",
    )
    knobs = parser.add_argument_group("knobs")
    vision = knobs.add_mutually_exclusive_group()
    vision.add_argument("--tier_list", nargs="+", default=list(TIERS), metavar="TIER", help="among: low medium high")
    vision.add_argument("--vision_tokens_list", nargs="+", type=int, metavar="N", help="tokens instead of tiers")
    knobs.add_argument(
        "--top_k_list", nargs="+", type=int, metavar="K", help="experts per token (default: half the model's, and its)"
    )
    knobs.add_argument(
        "--num_active_blocks_list",
        nargs="+",
        type=int,
        metavar="N",
        help="blocks, block 0 counted (default: three quarters of the model's, and all)",
    )
    knobs.add_argument(
        "--sampling_strategy",
        default="balanced",
        help="full: every combination; balanced: at most 4 values a knob, evenly spread (default); stratified: "
        "smallest, middle and largest value of each; boundary: corners and edges of the grid; lhs: a Latin hypercube",
    )
    knobs.add_argument(
        "--num_configs",
        type=int,
        metavar="N",
        help=f"settings of lhs (default: {LHS_CONFIGS}, or the whole grid where it is smaller)",
    )
    knobs.add_argument("--importance_scores_file", type=Path, help="JSON of block -> score that chooses the blocks")
    front = parser.add_argument_group("the accuracy-latency front without the full grid")
    front.add_argument(
        "--pareto_search",
        action="store_true",
        help="measure in rounds and leave out what another setting beats, for a third of the full grid's model time",
    )
    front.add_argument(
        "--pareto_margin",
        type=float,
        default=PARETO_MARGIN,
        help="share of the best score that a faster setting may be worse by and still beat (%(default)s)",
    )
    front.add_argument(
        "--pareto_alpha",
        type=float,
        default=PARETO_ALPHA,
        help="probability that a given setting eliminates another wrongly (%(default)s)",
    )
    how = parser.add_argument_group("how it is measured")
    how.add_argument("--num_runs_per_sample", type=int, default=3)
    how.add_argument(
        "--num_latency_samples",
        type=int,
        metavar="M",
        help="samples that are measured, a random part of those drawn; the others are only answered (default: all)",
    )
    how.add_argument(
        "--accuracy_batch_size",
        type=int,
        default=8,
        help="most samples answered together, of those that are not measured (%(default)s)",
    )
    how.add_argument("--num_warmup_runs", type=int, default=2, help="unmeasured runs before each setting (%(default)s)")
    how.add_argument(
        "--max_warmup_runs",
        type=int,
        metavar="N",
        help="a warm-up goes on until its last three runs agree within 5 %%, to this many at most "
        f"(default: {MAX_WARMUP_RUNS}, or --num_warmup_runs where that is more)",
    )
    how.add_argument(
        "--setting_order",
        choices=("shuffled", "planned"),
        default="shuffled",
        help="shuffled: settings run in an order drawn by --seed (default); planned: in that of the plan",
    )
    how.add_argument(
        "--drift_check_every",
        type=int,
        default=4,
        metavar="N",
        help="measure a control setting again after every N settings; 0: never (%(default)s)",
    )
    how.add_argument(
        "--until_precision",
        type=float,
        metavar="P",
        help="end a setting once the 95 %% interval of its mean T_total is within P of it, such as 0.02",
    )
    how.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    how.add_argument(
        "--precision",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="auto: bfloat16 on a GPU, float32 on the CPU",
    )
    how.add_argument(
        "--request_cache_gb",
        type=float,
        metavar="GB",
        help="host memory for prepared requests, of each process (default: a quarter of what is free / processes here)",
    )
    how.add_argument("--num_threads", type=int, help="CPU threads of each process (default: cores / processes here)")
    how.add_argument("--experts_implementation", help="transformers' experts implementation, e.g. grouped_mm, eager")
    how.add_argument("--attn_implementation", help="transformers' attention implementation, e.g. sdpa, eager")
    how.add_argument(
        "--enable_memory_optimization",
        action="store_true",
        help="release cached GPU memory after each setting",
    )
    profiler = parser.add_argument_group("PyTorch's profiler, on runs of their own that no statistic counts")
    profiler.add_argument("--use_profiler", action="store_true", help="profile the first sample of each setting")
    profiler.add_argument(
        "--use_profiler_on_all_samples", action="store_true", help="profile every sample of each setting"
    )
    profiler.add_argument(
        "--profiler_mode",
        choices=("minimal", "full"),
        default="minimal",
        help="minimal: operators, kernels and stages (default); full: also shapes, stacks, memory and FLOPs",
    )
    run = parser.add_argument_group("the run")
    run.add_argument("--output_dir", type=Path, default=Path("./results/core_exp"))
    run.add_argument("--max_config_retries", type=int, default=2, help="times a failed setting is tried again")
    run.add_argument("--config_retry_delay", type=float, default=5.0, metavar="S", help="seconds before a retry")
    run.add_argument("--sample_timeout", type=float, metavar="S", help="seconds after which a sample has failed")
    run.add_argument(
        "--worker_timeout",
        type=float,
        default=3600.0,
        metavar="S",
        help="seconds without a finished sample after which another process counts as lost (%(default)s)",
    )
    run.add_argument("--dry_run", action="store_true", help="print the plan with estimates of time and memory")
    run.add_argument("--num_processes", type=int, help="fail unless this many processes were launched")
    return parser


def parse_config(argv: Sequence[str] | None = None) -> ProfilingConfig:
    """Parse and judge; raises ConfigurationError for what argparse cannot see by itself."""
    given = build_parser().parse_args(argv)
    _check_strategy(given.sampling_strategy, given.num_configs)
    for name in ("num_samples", "num_runs_per_sample", "accuracy_batch_size"):
        _at_least(name, getattr(given, name), 1)
    for name in ("num_warmup_runs", "max_config_retries", "config_retry_delay", "seed", "drift_check_every"):
        _at_least(name, getattr(given, name), 0)
    for name in ("top_k_list", "num_active_blocks_list"):
        for value in getattr(given, name) or ():
            _at_least(name, value, 1)
    if given.ids is not None and given.sample_by != "random":
        raise ConfigurationError(f"--ids leaves nothing to draw: --sample_by {given.sample_by} cannot act; drop one")
    for name in ("sample_timeout", "worker_timeout"):
        if getattr(given, name) is not None:
            _at_least(name, getattr(given, name), 0.001)
    for name in ("request_cache_gb", "num_latency_samples"):
        if getattr(given, name) is not None:
            _at_least(name, getattr(given, name), 0)
    if given.until_precision is not None and given.num_latency_samples is not None:
        raise ConfigurationError(
            "--until_precision decides how many samples are measured, and so does --num_latency_samples; drop one"
        )
    _check_search(given)
    if given.seed >= 2**32:
        raise ConfigurationError(f"--seed {given.seed} is not possible; give at most {2**32 - 1}")
    if given.num_latency_samples == 0 and (given.use_profiler or given.use_profiler_on_all_samples):
        raise ConfigurationError("--use_profiler profiles measured samples, and --num_latency_samples 0 leaves none")
    if given.profiler_mode == "full" and not (given.use_profiler or given.use_profiler_on_all_samples):
        raise ConfigurationError("--profiler_mode full has nothing to act on; give --use_profiler too, or drop it")
    for name in ("num_processes", "num_threads", "max_new_tokens", "num_configs"):
        if getattr(given, name) is not None:
            _at_least(name, getattr(given, name), 1)
    if given.max_warmup_runs is not None and given.max_warmup_runs < given.num_warmup_runs:
        raise ConfigurationError(
            f"--max_warmup_runs {given.max_warmup_runs} is less than --num_warmup_runs {given.num_warmup_runs}; "
            f"give at least {given.num_warmup_runs}"
        )
    if given.until_precision is not None and not 0 < given.until_precision < 1:
        raise ConfigurationError(
            f"--until_precision {given.until_precision} is not possible; give a share of the mean between 0 and 1, "
            "such as 0.02"
        )
    cores = os.cpu_count() or 1
    if given.num_threads is not None and given.num_threads > cores:
        raise ConfigurationError(f"--num_threads {given.num_threads} is more than the {cores} cores of this machine")
    targets = (
        [token_target(tokens) for tokens in given.vision_tokens_list]
        if given.vision_tokens_list is not None
        else [tier_target(name) for name in given.tier_list]
    )
    return ProfilingConfig(
        model_path=given.model_path,
        output_dir=given.output_dir,
        dataset_name=given.dataset_name,
        split=given.split,
        data_dir=given.data_dir,
        hf_cache_dir=given.hf_cache_dir,
        prompt_template=given.prompt_template,
        dataset_revision=given.dataset_revision,
        max_new_tokens=given.max_new_tokens,
        vision_targets=_unique(targets),
        top_k_list=_unique(given.top_k_list) if given.top_k_list else None,
        num_active_blocks_list=_unique(given.num_active_blocks_list) if given.num_active_blocks_list else None,
        sampling_strategy=given.sampling_strategy,
        num_configs=given.num_configs,
        pareto_search=given.pareto_search,
        pareto_margin=given.pareto_margin,
        pareto_alpha=given.pareto_alpha,
        num_samples=given.num_samples,
        sample_by=given.sample_by,
        ids=_unique(sorted(given.ids)) if given.ids is not None else None,
        num_runs_per_sample=given.num_runs_per_sample,
        num_warmup_runs=given.num_warmup_runs,
        max_warmup_runs=(
            max(MAX_WARMUP_RUNS, given.num_warmup_runs) if given.max_warmup_runs is None else given.max_warmup_runs
        ),
        setting_order=given.setting_order,
        drift_check_every=given.drift_check_every,
        until_precision=given.until_precision,
        seed=given.seed,
        num_latency_samples=given.num_latency_samples,
        accuracy_batch_size=given.accuracy_batch_size,
        importance_scores=read_importance(given.importance_scores_file),
        importance_scores_file=given.importance_scores_file,
        enable_memory_optimization=given.enable_memory_optimization,
        max_config_retries=given.max_config_retries,
        config_retry_delay=given.config_retry_delay,
        sample_timeout=given.sample_timeout,
        worker_timeout=given.worker_timeout,
        request_cache_gb=given.request_cache_gb,
        num_processes=given.num_processes,
        num_threads=given.num_threads,
        device=given.device,
        precision=given.precision,
        experts_implementation=given.experts_implementation,
        attn_implementation=given.attn_implementation,
        random_weights=given.random_weights,
        use_profiler=given.use_profiler,
        use_profiler_on_all_samples=given.use_profiler_on_all_samples,
        profiler_mode=given.profiler_mode,
        dry_run=given.dry_run,
    )


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


def _check_strategy(name: str, num_configs: int | None) -> None:
    if name not in STRATEGIES:
        raise ConfigurationError(f"unknown sampling strategy {name!r}; choose among {', '.join(STRATEGIES)}")
    if num_configs is not None and name != "lhs":
        raise ConfigurationError(f"--num_configs {num_configs} is for --sampling_strategy lhs, not for {name}; drop it")


def _at_least(name: str, value: float, least: float) -> None:
    if not math.isfinite(value) or value < least:
        allowed = f"at least {least}" if math.isfinite(value) else "a finite number"
        raise ConfigurationError(f"--{name} {value} is not possible; give {allowed}")


def _unique(values: Sequence[T]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(values))


def read_importance(path: Path | None) -> Mapping[int, float] | None:
    """Scores by block from a JSON object {"0": 0.56, ...}; which blocks must be there is checked with the model."""
    if path is None:
        return None
    hint = 'give a JSON object of block -> score such as {"1": 0.56, "2": 0.31}'
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ConfigurationError(f"--importance_scores_file {path}: {error.strerror}; {hint}") from error
    except ValueError as error:
        raise ConfigurationError(f"--importance_scores_file {path} is not JSON ({error}); {hint}") from error
    if not isinstance(content, dict) or not content:
        raise ConfigurationError(f"--importance_scores_file {path} holds no scores; {hint}")
    scores = {}
    for block, score in content.items():
        is_number = isinstance(score, int | float) and not isinstance(score, bool) and math.isfinite(score)
        if not block.isdecimal() or not is_number:
            raise ConfigurationError(f"--importance_scores_file {path}: {block!r}: {score!r} is no score; {hint}")
        if int(block) in scores:
            raise ConfigurationError(f"--importance_scores_file {path} names block {int(block)} twice")
        scores[int(block)] = float(score)
    return scores
