"""Profile one dataset after the other, each by a separate run of the driver; the shell scripts here call it.

bash experiments/core_exp/run_multi_datasets_h100.sh [DATASET ...] [-- FLAG_OF_THE_DRIVER ...]

Starts the driver as a process for each dataset, so that whatever ends one leaves the others alone. Imports no torch.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiment_core_utils.config.command import ERRORS_FILE, reporting_errors, run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.primitives.errors import (
    EXIT_CODE_FAILED_SAMPLES,
    EXIT_CODE_INVALID,
    ConfigurationError,
    HubUnreachable,
)
from experiment_core_utils.primitives.texts import counted

DRIVER = Path(__file__).resolve().with_name("acc_lat_profiling.py")
# The published list with its limits of tokens; a dataset that is not in it has its task's own limit.
PUBLISHED_LIMITS: Mapping[str, int] = {
    "coco_2014_vqa": 16,
    "text_vqa": 64,
    "okvqa": 16,
    "science_qa_img": 16,
    "st_qa": 32,
    "doc_qa": 32,
    "tally_qa": 16,
    "coco_caption": 64,
}
STOPPED = 130
OUTCOMES = {
    0: "done",
    1: "FAILED",
    2: "NOT POSSIBLE",
    EXIT_CODE_FAILED_SAMPLES: "samples failed",
    EXIT_CODE_INVALID: "invalid",
    STOPPED: "stopped",
}


@dataclass(frozen=True)
class DatasetsRequest:
    """The validated request."""

    datasets: tuple[str, ...]
    output_dir: Path
    model_path: str | None  #: None leaves it to the driver
    num_samples: int | None  #: None leaves it to the driver
    num_processes: int  #: GPUs, or what overrides them; 1 without a GPU
    use_profiler: bool
    enable_memory_optimization: bool
    data_dir: Path | None  #: contains a folder for each dataset that has a local copy
    driver_flags: tuple[str, ...]  #: for every dataset, in place of the runner's own of the same name


@dataclass(frozen=True)
class Outcome:
    """The outcome of the run of one dataset; the exit code is None where it was not started."""

    dataset: str
    exit_code: int | None
    seconds: float
    error: str = ""  #: class of the driver's error


def parse_request(argv: Sequence[str], environment: Mapping[str, str], num_gpus: int) -> DatasetsRequest:
    """The request: arguments before environment before defaults.

    Raises:
        ConfigurationError: an unknown flag, or a variable with a value that cannot be.
    """
    own, driver_flags = split_at_dashes(argv)
    parser = OneLineParser(
        prog="multi_datasets.py",
        description="Profile datasets one after the other; what stands behind -- are flags of the profiler.",
        examples=(
            "knobprof datasets text_vqa doc_qa --output_dir results/several -- --model_path MODEL --num_samples 500",
            "NUM_SAMPLES=500 MODEL_PATH=MODEL knobprof datasets --output_dir results/published",
        ),
    )
    parser.add_argument(
        "datasets", nargs="*", metavar="DATASET", help="datasets to profile (default: $DATASETS, or the published list)"
    )
    parser.add_argument(
        "--output_dir", required=True, metavar="DIR", help="parent of the datasets' folders; OUTPUT_DIR overrides it"
    )
    parser.add_argument("--enable_memory_optimization", action="store_true", help="pass this flag to the profiler")
    given = parser.parse_args(own)
    datasets = given.datasets or environment.get("DATASETS", "").split() or list(PUBLISHED_LIMITS)
    processes = positive_number(environment, "NUM_GPUS_OVERRIDE")
    use_profiler = environment.get("USE_PROFILER", "") or "false"
    if use_profiler.lower() not in ("true", "false"):
        raise ConfigurationError(f"USE_PROFILER={use_profiler} is not possible; give true or false, or leave it out")
    return DatasetsRequest(
        datasets=tuple(dict.fromkeys(datasets)),
        output_dir=Path(environment.get("OUTPUT_DIR") or given.output_dir),
        model_path=environment.get("MODEL_PATH") or None,
        num_samples=positive_number(environment, "NUM_SAMPLES"),
        num_processes=processes if processes is not None else max(num_gpus, 1),
        use_profiler=use_profiler.lower() == "true",
        enable_memory_optimization=given.enable_memory_optimization,
        data_dir=Path(environment["DATA_DIR"]) if environment.get("DATA_DIR") else None,
        driver_flags=tuple(driver_flags),
    )


def split_at_dashes(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments before the first `--`, and those after it."""
    at = list(argv).index("--") if "--" in argv else len(argv)
    return list(argv[:at]), list(argv[at + 1 :])


def positive_number(environment: Mapping[str, str], name: str) -> int | None:
    """The number of a variable, at least 1; None where it is not set or empty."""
    text = environment.get(name, "")
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigurationError(f"{name}={text} is not possible; give a whole number from 1, or leave it out")
    return int(text)


def visible_gpus(environment: Mapping[str, str]) -> int:
    """The number of GPUs that a process would see: those of CUDA_VISIBLE_DEVICES, else all that nvidia-smi lists."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return 0
    return len(listed.stdout.splitlines()) if listed.returncode == 0 else 0


def results_folder(dataset: str, request: DatasetsRequest) -> Path:
    """The folder of a dataset, since results of runs with different fingerprints are kept apart; the driver's flag
    names it for all of them.
    """
    flags = request.driver_flags
    for at, word in enumerate(flags):
        if word == "--output_dir" and at + 1 < len(flags):
            return Path(flags[at + 1])
        if word.startswith("--output_dir="):
            return Path(word.partition("=")[2])
    return request.output_dir / dataset.replace("_", "-")


def driver_command(dataset: str, request: DatasetsRequest) -> list[str]:
    """The driver's command line for one dataset: torchrun where there are several processes."""
    processes = request.num_processes
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    own = {
        "--dataset_name": dataset,
        "--output_dir": str(results_folder(dataset, request)),
        "--num_processes": str(processes),
        "--max_new_tokens": str(PUBLISHED_LIMITS[dataset]) if dataset in PUBLISHED_LIMITS else None,
        "--model_path": request.model_path,
        "--num_samples": None if request.num_samples is None else str(request.num_samples),
        "--data_dir": str(local_copy(dataset, request) or "") or None,
    }
    switches = {
        "--use_profiler": request.use_profiler,
        "--enable_memory_optimization": request.enable_memory_optimization,
    }
    given = {word.partition("=")[0] for word in request.driver_flags}
    command = [sys.executable, *(launcher if processes > 1 else []), str(DRIVER)]
    for flag, value in own.items():
        command += [flag, value] if value is not None and flag not in given else []
    command += [flag for flag, is_on in switches.items() if is_on and flag not in given]
    return [*command, *request.driver_flags]


def local_copy(dataset: str, request: DatasetsRequest) -> Path | None:
    """The folder below DATA_DIR; None where there is none."""
    folder = None if request.data_dir is None else request.data_dir / dataset
    return folder if folder is not None and folder.is_dir() else None


def needs_hub(dataset: str, request: DatasetsRequest) -> bool:
    """Whether a dataset is read from the hub: it is published, and no folder or file of it is given."""
    is_given = {word.partition("=")[0] for word in request.driver_flags} & {
        "--data_dir",
        "--data_file",
        "--task_module",
    }
    return not dataset.startswith("reference_") and local_copy(dataset, request) is None and not is_given


class Runner:
    """Runs the driver dataset by dataset, until a stop is requested."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._hub_is_away, self._model_is_away = False, False

    def run_all(self, request: DatasetsRequest) -> list[Outcome]:
        """Run every dataset in turn, whatever the outcome of those before it; once the hub did not answer, only those
        that need nothing from it.
        """
        outcomes = []
        for number, dataset in enumerate(request.datasets, 1):
            is_from_hub = needs_hub(dataset, request)
            if self._stopped or self._model_is_away or (self._hub_is_away and is_from_hub):
                outcomes.append(Outcome(dataset, None, 0.0))
                continue
            print(f"== {number}/{len(request.datasets)} {dataset}", flush=True)
            outcomes.append(self._run(dataset, driver_command(dataset, request)))
            if outcomes[-1].error == HubUnreachable.__name__:
                self._hub_is_away, self._model_is_away = True, not is_from_hub
        return outcomes

    def _run(self, dataset: str, command: Sequence[str]) -> Outcome:
        started = time.monotonic()
        with tempfile.NamedTemporaryFile("r", encoding="utf-8") as errors:
            self._child = subprocess.Popen(command, env=os.environ | {ERRORS_FILE: errors.name})
            if self._stopped:  # by a signal that came before the child was known
                self.stop(signal.SIGTERM, None)
            exit_code = self._child.wait()
            names = errors.read().split()
        self._stopped = self._stopped or exit_code == STOPPED
        code = STOPPED if self._stopped else exit_code
        return Outcome(dataset, code, time.monotonic() - started, names[0] if names else "")

    def stop(self, number: int, _frame: FrameType | None) -> None:
        """Stop, as a signal handler: the current dataset stops cleanly, no other is started. Where a terminal's Ctrl-C
        has reached the driver already, the same signal again at once changes nothing.
        """
        self._stopped = True
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)


def closing_lines(outcomes: Sequence[Outcome], request: DatasetsRequest) -> list[str]:
    """The line of each dataset, and what to do where not all is measured."""
    width = max(len("dataset"), *(len(each.dataset) for each in outcomes))
    lines = [f"{'dataset':<{width}}  {'outcome':<14}  {'seconds':>8}  results"]
    for each in outcomes:
        seconds, outcome = "-", "not started"
        if each.exit_code is not None:
            seconds, outcome = f"{each.seconds:.0f}", OUTCOMES.get(each.exit_code, f"FAILED ({each.exit_code})")
        folder = results_folder(each.dataset, request)
        lines.append(f"{each.dataset:<{width}}  {outcome:<14}  {seconds:>8}  {folder}")
    left = [outcome for outcome in outcomes if outcome.exit_code != 0]
    lines.append(f"{len(outcomes) - len(left)} of {counted(len(outcomes), 'dataset')} done")
    without_hub = [each for each in outcomes if each.error == HubUnreachable.__name__]
    if any(not needs_hub(each.dataset, request) for each in without_hub):
        lines.append(
            f"the hub cannot be reached for the model {request.model_path}: nothing was started after that; give "
            "MODEL_PATH the folder of a model, or one that is in the cache"
        )
    elif without_hub:
        lines.append(
            "the hub cannot be reached: datasets from it were not started after the first; give DATA_DIR with copies, "
            "or name those that are in the cache"
        )
    elif left:
        lines.append(
            "the reason is shown above, at the end of each one's output; run the same command again to measure the rest"
        )
    return lines


def worst(outcomes: Sequence[Outcome]) -> int:
    """The exit code of all: 0 all measured, 3 of some samples failed, 4 one is INVALID, 130 stopped, 1 any other."""
    codes = {outcome.exit_code for outcome in outcomes}
    if STOPPED in codes:
        return STOPPED
    if codes <= {0, EXIT_CODE_FAILED_SAMPLES, EXIT_CODE_INVALID}:
        return max(code for code in codes if code is not None)
    return 1


@reporting_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 all datasets measured, 1 some were not, 2 it cannot be done, 3 samples failed, 4 one is INVALID and
    --strict was given, 130 stopped.
    """
    arguments = sys.argv[1:] if argv is None else argv
    request = parse_request(arguments, os.environ, visible_gpus(os.environ))
    runner = Runner()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, runner.stop)
    outcomes = runner.run_all(request)
    print("\n".join(closing_lines(outcomes, request)))
    return worst(outcomes)


if __name__ == "__main__":
    sys.exit(run_command(main))
