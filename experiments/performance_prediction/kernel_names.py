"""In: something to run on a GPU; out: the names of the kernels that ran, which prove the algorithm."""

from collections.abc import Callable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from experiment_core_utils.primitives.device import synchronize


def kernel_names(run: Callable[[], object], device: torch.device) -> tuple[str, ...]:
    """Names of the kernels, copies and fills of one run in the order of their start; nothing where there is no GPU.

    The run is slowed down: it is never one that is timed.
    """
    if device.type != "cuda":
        return ()
    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], acc_events=True) as session:
        run()
        synchronize(device)
    found = [event for event in session.events() if event.device_type == DeviceType.CUDA]
    return tuple(event.name for event in sorted(found, key=lambda event: event.time_range.start))
