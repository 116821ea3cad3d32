"""Profile convolution algorithms in whole networks: parse, check what is covered, measure size after size.

knobprof convolutions profile --model vgg16 --algorithm gemm --quick
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from experiment_core_utils.config.command import reporting_errors, run_command
from experiment_core_utils.primitives.device import visible_gpus
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.interruption import StopRequest, signals_stop
from experiments.performance_prediction.algorithms.convolution import ALGORITHMS
from experiments.performance_prediction.algorithms.cudnn_library import loaded_cudnn
from experiments.performance_prediction.networks.registry import LAYER_SETS, MODELS
from experiments.performance_prediction.profiling.config import build_parser, profile_config
from experiments.performance_prediction.profiling.records import device_label
from experiments.performance_prediction.profiling.sweep import run_profiles


def cuda_check() -> tuple[bool, list[str]]:
    """Whether there is a GPU with a cuDNN that can be called, and a description of both."""
    gpus = visible_gpus()
    lines = [f"torch {torch.__version__}, CUDA {torch.version.cuda or '-'}"]
    if not gpus:
        return False, [*lines, "no GPU that torch sees: algorithms run on the CPU as torch operations"]
    for gpu in gpus:
        properties = torch.cuda.get_device_properties(gpu)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        capability = f"compute capability {properties.major}.{properties.minor}"
        lines.append(f"{gpu}: {properties.name} ({device_label(gpu)}), {memory}, {capability}")
    try:
        loaded_cudnn().handle(gpus[0])
    except ConfigurationError as error:
        return False, [*lines, f"cuDNN does not work: {error}"]
    return True, [*lines, f"cuDNN {torch.backends.cudnn.version()}"]


@reporting_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Profile. Exit code: 0 every size has its row, 1 broke off, 2 it cannot be done or is not covered, 130 stopped."""
    arguments = build_parser().parse_args(argv)
    if arguments.list_models:
        for name, model in {**MODELS, **LAYER_SETS}.items():
            print(f"{name} (inputs of {model.smallest_input} pixels and more)")
        return 0
    if arguments.list_algorithms:
        print("\n".join(ALGORITHMS))
        return 0
    if arguments.check_cuda:
        works, lines = cuda_check()
        print("\n".join(lines))
        return 0 if works else 1
    stop = StopRequest()
    with signals_stop(stop):
        return run_profiles(profile_config(arguments), stop)


if __name__ == "__main__":
    sys.exit(run_command(main))
