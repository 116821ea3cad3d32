"""The configuration of a profiling run: its flags, defaults and checks.

After this file no code applies a default again.

Nothing here imports torch, so that `--help` and a wrong flag answer at once.
"""

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from experiment_core_utils.config.block_choice import NO_SCORES, read_block_sets, read_importance
from experiment_core_utils.config.strategies import LHS_CONFIGS, STRATEGIES
from experiment_core_utils.primitives.cpu_threads import environment_threads
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import EMBEDDED_MODEL
from experiment_core_utils.primitives.knobs import TIERS, VisionTarget, tier_target, token_target
from experiment_core_utils.primitives.units import LARGEST_SEED, MOST_SECONDS, MOST_TIMES, shown

EMBEDDED_TASK = "reference_vqa"


PARETO_MARGIN, PARETO_ALPHA = 0.01, 0.05


MAX_WARMUP_RUNS = 6


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
    for add_group in (_add_what, _add_knobs, _add_front, _add_how, _add_profiler, _add_run):
        add_group(parser)
    return parser


def _add_what(parser: argparse.ArgumentParser) -> None:
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


def _add_knobs(parser: argparse.ArgumentParser) -> None:
    knobs = parser.add_argument_group("knobs")
    vision = knobs.add_mutually_exclusive_group()
    vision.add_argument("--tier_list", nargs="+", metavar="TIER", help=f"among: {' '.join(TIERS)} (default: all)")
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
    chosen_by = knobs.add_mutually_exclusive_group()
    chosen_by.add_argument(
        "--importance_scores_file",
        metavar="FILE",
        help="JSON of block -> score that chooses the blocks; none: the first blocks (default: block_importance.json "
        "in the model's folder, where there is one)",
    )
    chosen_by.add_argument(
        "--block_sets_file", type=Path, metavar="FILE", help="JSON of number of blocks -> the blocks that run"
    )


def _add_front(parser: argparse.ArgumentParser) -> None:
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


def _add_how(parser: argparse.ArgumentParser) -> None:
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
    _add_course(how)
    _add_machine(how)


def _add_course(how: argparse._ArgumentGroup) -> None:
    """In which order, for how long, and what is measured beside."""
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
    how.add_argument(
        "--energy",
        choices=("off", "required", "optional"),
        default="off",
        help="energy of each stage and sample; required stops where nothing measures it (%(default)s)",
    )
    how.add_argument(
        "--memory_timeline", action="store_true", help="keep memory along each setting's window, twice a second"
    )


def _add_machine(how: argparse._ArgumentGroup) -> None:
    """On what, and with how much of it."""
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
    how.add_argument(
        "--num_threads",
        type=int,
        help="CPU threads of each process (default: OMP_NUM_THREADS, else cores / processes here)",
    )
    how.add_argument("--experts_implementation", help="transformers' experts implementation, e.g. grouped_mm, eager")
    how.add_argument("--attn_implementation", help="transformers' attention implementation, e.g. sdpa, eager")
    how.add_argument(
        "--quantization",
        choices=("none", "4bit", "8bit"),
        default="none",
        help="weights by bitsandbytes while loading, for models of transformers (%(default)s)",
    )
    how.add_argument(
        "--execution",
        choices=("auto", "eager", "graph"),
        default="auto",
        help="eager: the model's modules; graph: no Python between kernels, by CUDA graphs (on the CPU: compiled "
        "kernels), where the model allows it; auto: graph where every stage can, else eager (default)",
    )
    how.add_argument(
        "--enable_memory_optimization",
        action="store_true",
        help="release cached GPU memory after each setting",
    )


def _add_profiler(parser: argparse.ArgumentParser) -> None:
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


def _add_run(parser: argparse.ArgumentParser) -> None:
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
