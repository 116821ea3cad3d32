"""In: this machine; out: what torch and cuDNN find on it, in lines, and whether algorithms run on a GPU here."""

import torch

from experiment_core_utils.primitives.device import visible_gpus
from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.performance_prediction.cudnn_library import loaded_cudnn
from experiments.performance_prediction.profile_provenance import device_label


def cuda_check() -> tuple[bool, list[str]]:
    """Whether there is a GPU with a cuDNN that can be called, and what there is."""
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
