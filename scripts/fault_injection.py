"""Make one call that opens or changes a file fail, or kill the run there, and look at what is left and at the rerun.

python scripts/fault_injection.py --seed 1 --fraction 0.05

Commands on two samples: profile, the same resumed, text and report. Good is an error of one line, no half-written
file, and the results of an undisturbed run when the same command runs again. Exit code: 1 where any place is bad.
"""

import gc
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import checkout  # noqa: F401

from experiment_core_utils.config.command import run_command
from experiment_core_utils.config.command_line import OneLineParser
from tests.processes.fault_injection import inject, smallest_model
from tests.processes.forked_runs import RunServer


def main() -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fraction", type=float, default=0.05, help="of all places and faults")
    parser.add_argument("--part", choices=("profile", "resume", "text", "report"), help="one command alone")
    given = parser.parse_args()
    # The tests' own start switches it off.
    gc.enable()
    with TemporaryDirectory() as name:
        folder = Path(name)
        model = smallest_model(folder)
        with RunServer(model) as server:
            say = partial(print, flush=True)
            return 1 if inject(folder, server, model, given.seed, given.fraction, say, given.part) else 0


if __name__ == "__main__":
    sys.exit(run_command(main))
