"""In: a configuration; out: this process's place among all processes of the run, and the run's shared id."""

import atexit
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, is_initialized
from accelerate.utils import InitProcessGroupKwargs
from torch import distributed

from experiment_core_utils.config.parts import MachineConfig
from experiment_core_utils.config.profiling import ProfilingConfig
from experiment_core_utils.config.text import TextConfig, validated
from experiment_core_utils.models.hf.tensor_parallel import END
from experiment_core_utils.primitives.collectives import broadcast_from_main, lost_processes_named
from experiment_core_utils.primitives.device import choose_device
from experiment_core_utils.primitives.errors import ConfigurationError, WorkerLost, first_line
from experiment_core_utils.primitives.files import (
    IS_CHECKOUT,
    REPOSITORY,
    state_folder,
)
from experiment_core_utils.primitives.in_step import Crew, join_crew
from experiment_core_utils.primitives.private_apis import default_group, default_store
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.records.run_ids import next_run_id

ID_NAME = "experiment_id.txt"
# Of an installed package: those of the current folder.
RESULTS = (REPOSITORY if IS_CHECKOUT else Path()) / "results"
LEAVING_S = 5.0  # that a process which ends waits for the others


def setup_distributed(experiment_config: Any) -> Accelerator:
    """The `Accelerator` of this process; the processes wait `worker_timeout` seconds for each other, here and later.

    Without a GPU, or where the CPU is requested, accelerate gets a CPU state: under `torchrun` it would report
    one process to each of them, and every one would believe it was the main one.

    Args:
        experiment_config: a `MachineConfig`, or a text experiment in any form that `config.text.validated` takes. The
            `mixed_precision` of the latter acts on a model that goes through `Accelerator.prepare_model`.

    Raises:
        WorkerLost: the processes found differ in number from those launched (`WORLD_SIZE`) or requested, or not all
            came.
        ConfigurationError: more processes were launched on this machine than it has GPUs, a GPU is requested and there
            is none, or the device has no such mixed precision.
    """
    config = experiment_config if isinstance(experiment_config, MachineConfig) else validated(experiment_config)
    on_cpu = choose_device(config.device).type == "cpu"
    if not on_cpu:
        _refuse_shared_gpus(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count())
    mixed_precision = config.mixed_precision if isinstance(config, TextConfig) else None
    # Once, however often this is called; also where what follows is refused.
    atexit.unregister(leave_process_group)
    atexit.register(leave_process_group)
    accelerator = _new_accelerator(on_cpu, mixed_precision, config.worker_timeout)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    requested = config.num_processes or launched
    if accelerator.num_processes != launched or accelerator.num_processes != requested:
        raise WorkerLost(
            f"{requested} processes were requested and {launched} launched, but accelerate found "
            f"{accelerator.num_processes}; on the CPU launch several with torchrun --nproc-per-node=N "
            "(accelerate launch starts one there)"
        )
    return accelerator


def leave_process_group() -> None:
    """End this process's part in the process group; every end of a process that has called `setup_distributed` does.

    A process that ends with its group may be aborted by gloo's threads, and torch warns about NCCL's. To destroy NCCL's
    group waits for all other processes, without end where one was killed: here they wait `LEAVING_S` seconds at most,
    through the store in which they met, and each closes its own connections then.
    """
    if not distributed.is_initialized():
        return
    if distributed.get_backend() == "nccl":
        # The store ends with the process that holds it, and with it what is waited for.
        with suppress(RuntimeError):
            _wait_until_all_leave()
        default_group().abort()
    distributed.destroy_process_group()


def _wait_until_all_leave() -> None:
    store, deadline = default_store(), time.monotonic() + LEAVING_S
    leaving = store.add("leaving", 1)
    while leaving < distributed.get_world_size() and time.monotonic() < deadline:
        time.sleep(0.05)
        leaving = store.add("leaving", 0)


def _new_accelerator(on_cpu: bool, mixed_precision: str | None, timeout_s: float) -> Accelerator:
    """None takes the mixed precision of accelerate's own launcher."""
    if mixed_precision == "fp16" and on_cpu:
        raise ConfigurationError("mixed_precision fp16 needs a GPU; give bf16 or no on the CPU")
    if mixed_precision is not None and is_initialized() and AcceleratorState().mixed_precision != mixed_precision:
        # It is kept for the whole process and refuses another value; the process group stays.
        AcceleratorState._reset_state()
    timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=timeout_s))
    with lost_processes_named():
        try:
            return Accelerator(cpu=on_cpu, mixed_precision=mixed_precision, kwargs_handlers=[timeout])
        except ValueError as error:
            raise ConfigurationError(
                f"accelerate refuses this process (mixed_precision {mixed_precision}): {first_line(error)}"
            ) from error


def _refuse_shared_gpus(processes: int, gpus: int) -> None:
    if processes > gpus:
        raise ConfigurationError(
            f"{processes} processes were launched for {counted(gpus, 'GPU')}; latency is measured with one process a "
            f"GPU: launch {gpus}, or give --device cpu"
        )


def generate_unique_id(accelerator: Accelerator, id_file: Path | None = None, results_dir: Path | None = None) -> str:
    """The next run id, such as "0001", the same on every process.

    The main process takes it from the counter file under a lock, so that runs started together get different ids. A
    counter that is damaged, gone or too low is repaired, with one line of warning; `used_ids` says which ids
    of earlier runs are found.

    Args:
        id_file: the counter; None takes the project's, or the user's where the checkout cannot be written to.
        results_dir: whose ids are never given out again; None takes `results` beside the counter's folder, or in the
            checkout.

    Raises:
        ResultsNotSaved: (in all of them) the counter cannot be written.
    """
    results = results_dir or (RESULTS if id_file is None else id_file.parent.parent / "results")
    counter = id_file or state_folder(results) / ID_NAME
    return broadcast_from_main(lambda: next_run_id(counter, results), accelerator)


def crew_of(config: ProfilingConfig) -> Crew | None:
    """The processes that share one model, met; None where each process has its own. A collective call.

    Raises:
        ConfigurationError: another number of processes was launched.
    """
    size = config.model.tensor_parallel
    if size is None:
        return None
    device = choose_device(config.machine.device, int(os.environ.get("LOCAL_RANK", "0")))
    launcher = f"launch torchrun --nproc-per-node={size} -m knob_profiler profile"
    return join_crew(size, device, config.machine.worker_timeout, launcher)


@contextmanager
def leading(crew: Crew) -> Iterator[None]:
    """A context at whose end the others end, too."""
    try:
        yield
    finally:
        # One that is lost has ended, and the run's own error says more.
        with suppress(WorkerLost):
            crew.tell(END)
