"""The flags of `acc_lat_profiling.py`, their help and defaults; what argparse cannot judge is judged in `config`."""

import argparse
from pathlib import Path
from typing import NoReturn

from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.knobs import TIERS
from experiment_core_utils.primitives.paths import EMBEDDED_MODEL
from experiment_core_utils.primitives.strategies import LHS_CONFIGS

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
