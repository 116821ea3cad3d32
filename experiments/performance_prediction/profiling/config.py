"""The configuration of a profile, read from the command line and validated once."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.primitives.device import choose_device
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.units import LARGEST_SEED, MOST_SECONDS, MOST_TIMES, check_above, check_within
from experiments.performance_prediction.algorithms.convolution import ALGORITHMS, PRECISIONS, algorithm_named
from experiments.performance_prediction.algorithms.engines import BACKENDS, Placement
from experiments.performance_prediction.algorithms.support import ON_UNSUPPORTED
from experiments.performance_prediction.networks.registry import MODELS, model_named
from experiments.performance_prediction.profiling.records import ProfileSettings

# The most of a side of an input, and of images in a batch.
MOST_PIXELS, MOST_IMAGES = 100_000, 1_000_000


def evenly_spread(smallest: int, largest: int, count: int) -> tuple[int, ...]:
    """Whole numbers (`count` of them) from `smallest` to `largest`, both included; a single one is the smallest.

    Raises:
        ConfigurationError: no size, or fewer whole numbers in the range than sizes.
    """
    if count < 1 or largest - smallest + 1 < count:
        raise ConfigurationError(
            f"{count} different input sizes do not fit between {smallest} and {largest}; take fewer or a wider range"
        )
    if count == 1:
        return (smallest,)
    return tuple(smallest + round(place * (largest - smallest) / (count - 1)) for place in range(count))


def checked_sizes(sizes: tuple[int, ...], model: str, least: int) -> tuple[int, ...]:
    """Input sizes in ascending order, each once; raises ConfigurationError for one below what the network takes."""
    too_small = [size for size in sizes if size < least]
    if too_small:
        raise ConfigurationError(f"{model} takes inputs of {least} pixels and more, not {too_small[0]}")
    return tuple(sorted(set(sizes)))


Energy = Literal["off", "optional", "required"]
ENERGY: tuple[Energy, ...] = ("off", "optional", "required")
SANITY, QUICK, FULL = "1_sanity", "2_quick", "3_full"
_SIZES_OF_STAGE = {SANITY: 1, QUICK: 10, FULL: 100}
SMALLEST, LARGEST = 224, 512


@dataclass(frozen=True)
class ProfiledPair:
    """A model with an algorithm, and the input sizes in ascending order."""

    settings: ProfileSettings
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class ProfileConfig:
    """The values that a command requests."""

    combinations: tuple[ProfiledPair, ...]
    stage: str  #: folder of the results below `output_dir`
    output_dir: Path
    gpu: str | None  #: label that the device must have; None for whatever is there
    energy: Energy
    energy_window_s: float  #: least length of an energy window


def build_parser() -> argparse.ArgumentParser:
    """The flags of run_profile.py."""
    parser = OneLineParser(
        prog="run_profile.py",
        description="Profile convolutional networks by algorithm and input size.",
        examples=(
            "knobprof convolutions profile --model vgg16 --algorithm gemm --test",
            "knobprof convolutions profile --model all --algorithm all --on-unsupported fallback --output-dir results",
            "knobprof convolutions profile --list-models",
        ),
    )
    what = parser.add_argument_group("what")
    what.add_argument("--model", nargs="+", metavar="MODEL", help=f"networks: all, or some of {', '.join(MODELS)}")
    what.add_argument(
        "--algorithm", nargs="+", metavar="ALGORITHM", help=f"algorithms: all, or some of {', '.join(ALGORITHMS)}"
    )
    what.add_argument(
        "--on-unsupported",
        choices=ON_UNSUPPORTED,
        default="fail",
        help="what to do when a layer does not support the algorithm: end the combination, or run guess, which is "
        "recorded",
    )
    sizes = parser.add_argument_group("input sizes")
    stage = sizes.add_mutually_exclusive_group()
    stage.add_argument("--test", action="store_true", help=f"one input size, results in {SANITY}")
    stage.add_argument("--quick", action="store_true", help=f"10 input sizes, results in {QUICK}")
    sizes.add_argument(
        "--num-sizes",
        type=int,
        help="number of input sizes, evenly spread (default: 100, or as --test and --quick set)",
    )
    sizes.add_argument("--min-size", type=int, default=SMALLEST, metavar="PIXELS", help="side of the smallest input")
    sizes.add_argument("--max-size", type=int, default=LARGEST, metavar="PIXELS", help="side of the largest input")
    sizes.add_argument(
        "--sizes", type=int, nargs="+", metavar="PIXELS", help="input sizes to measure, instead of a range"
    )
    how = parser.add_argument_group("how")
    how.add_argument("--batch-size", type=int, default=1, help="batch size of an inference")
    how.add_argument("--precision", choices=PRECISIONS, default="fma", help="precision of matrix products")
    how.add_argument("--backend", choices=BACKENDS, default="own", help="own, or ai3 on the CPU")
    how.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device to run on")
    how.add_argument("--gpu", metavar="LABEL", help="label of the GPU to run on, such as h100; exit on any other GPU")
    how.add_argument("--warmup", type=int, default=5, help="fewest warm-up inferences; 0: none")
    how.add_argument("--measure", type=int, default=15, help="measured inferences of each pass")
    how.add_argument("--energy", choices=ENERGY, default="optional", help="whether energy is measured")
    how.add_argument(
        "--energy-window", type=float, default=2.0, metavar="SECONDS", help="shortest energy window in seconds"
    )
    how.add_argument("--seed", type=int, default=0, help="seed of weights and images")
    how.add_argument("--output-dir", type=Path, default=Path("results"), metavar="DIR", help="folder of the stages")
    lists = parser.add_argument_group("lists, and nothing else")
    lists.add_argument("--list-models", action="store_true", help="print the networks and their smallest inputs")
    lists.add_argument("--list-algorithms", action="store_true", help="print the algorithms")
    lists.add_argument(
        "--check-cuda", action="store_true", help="print what torch and cuDNN find; exit code 1 without a working GPU"
    )
    return parser


def profile_config(arguments: argparse.Namespace) -> ProfileConfig:
    """The configuration, with everything validated that can be before a model is built.

    Raises:
        ConfigurationError: what is unknown, missing, or does not go together.
    """
    if not arguments.model or not arguments.algorithm:
        raise ConfigurationError("--model and --algorithm are needed; --list-models and --list-algorithms name them")
    check_within("--batch-size", arguments.batch_size, 1, MOST_IMAGES)
    check_within("--measure", arguments.measure, 1, MOST_TIMES)
    check_within("--warmup", arguments.warmup, 0, MOST_TIMES)
    check_above("--energy-window", arguments.energy_window, 0)
    check_within("--energy-window", arguments.energy_window, 0, MOST_SECONDS)
    check_within("--seed", arguments.seed, 0, LARGEST_SEED)
    for size in (arguments.min_size, arguments.max_size, *(arguments.sizes or ())):
        check_within("input size", size, 1, MOST_PIXELS)
    if arguments.num_sizes is not None:
        check_within("--num-sizes", arguments.num_sizes, 1, MOST_PIXELS)
    device = choose_device(arguments.device)
    dtype = torch.float16 if arguments.precision == "half" else torch.float32
    placement = Placement(device, dtype, arguments.precision, arguments.backend)
    stage = SANITY if arguments.test else QUICK if arguments.quick else FULL
    shared = {name: getattr(arguments, name) for name in ("on_unsupported", "batch_size", "warmup", "measure", "seed")}
    combinations = tuple(
        ProfiledPair(
            ProfileSettings(model, algorithm_named(algorithm), placement, **shared), _sizes(arguments, stage, model)
        )
        for model in (MODELS if arguments.model == ["all"] else dict.fromkeys(arguments.model))
        for algorithm in (ALGORITHMS if arguments.algorithm == ["all"] else dict.fromkeys(arguments.algorithm))
    )
    return ProfileConfig(
        combinations, stage, arguments.output_dir, arguments.gpu, arguments.energy, arguments.energy_window
    )


def _sizes(arguments: argparse.Namespace, stage: str, model: str) -> tuple[int, ...]:
    least = model_named(model).smallest_input
    if arguments.sizes is not None:
        return checked_sizes(tuple(arguments.sizes), model, least)
    count = arguments.num_sizes if arguments.num_sizes is not None else _SIZES_OF_STAGE[stage]
    return evenly_spread(max(arguments.min_size, least), arguments.max_size, count)
