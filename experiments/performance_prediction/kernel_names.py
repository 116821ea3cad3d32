"""In: something to run on a GPU; out: the names of the kernels that ran, which prove the algorithm."""

from collections import Counter
from collections.abc import Callable, Sequence

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


def kernel_names_of_each(runs: Sequence[Callable[[], object]], device: torch.device) -> list[tuple[str, ...]] | None:
    """The same for several runs in one session, which takes long to begin and to end.

    None where there is no GPU, or where the session's list cannot be parted: a kernel that no run has, before each of
    them, is what it is parted at.
    """
    if device.type != "cuda":
        return None
    one = torch.ones(1, device=device)

    def all_runs() -> None:
        for run in runs:
            torch.nextafter(one, one)
            run()

    return parted(kernel_names(all_runs, device), len(runs))


def parted(names: Sequence[str], count: int) -> list[tuple[str, ...]] | None:
    """The names behind each occurrence of the first one; None where it does not occur `count` times."""
    if not names or names.count(names[0]) != count:
        return None
    parts: list[list[str]] = []
    for name in names:
        if name == names[0]:
            parts.append([])
        else:
            parts[-1].append(name)
    return [tuple(part) for part in parts]


def counted(names: Sequence[str]) -> str:
    """Each name once, in the order in which they are met, with how often it ran: "a x2 + b"."""
    return " + ".join(name if times == 1 else f"{name} x{times}" for name, times in Counter(names).items())


def without_arguments(name: str) -> str:
    """A C++ kernel's name with its template's arguments, without its result and the types of what it is called with.

    "void a::b<float, 3>(int, float*)" becomes "a::b<float, 3>".
    """
    depth = 0
    for place, character in enumerate(name):
        depth += {"<": 1, ">": -1}.get(character, 0)
        if character == "(" and depth == 0 and not name.startswith("(anonymous namespace)", place):
            name = name[:place]
            break
    return name.removeprefix("void ")
