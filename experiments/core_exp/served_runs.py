"""Runs at the servers of `--serve`, one at a time and each twice: in the order of `--set`, then backwards."""

import os
from collections.abc import Callable

from experiment_core_utils.config.profiling import ProfilingConfig
from experiment_core_utils.models.endpoint.model import API_KEY
from experiment_core_utils.models.endpoint.server_process import running_server
from experiments.core_exp.compare_runs import main as compare

LOG = "serve.log"


def run_at_servers(config: ProfilingConfig, measured: Callable[[ProfilingConfig], int]) -> int:
    """Measure every server, in folders `NAME-VALUE/1` and `/2` of the output, compare them, and return the first exit
    code that is not 0.

    What the two loads of a server differ by is in the comparison: each side has two runs.

    Args:
        measured: makes one run, says what it found, and returns its exit code.
    """
    commands, folder = config.model.serve_commands, config.machine.output_dir
    (served,) = config.model.served
    codes = list[int]()
    for number, order in enumerate((commands, commands[::-1]), 1):
        for command in order:
            into = folder / command.name / str(number)
            one = config.replaced(serve=None, set=None, serve_timeout=None, output_dir=into)
            with running_server(command, served, os.environ.get(API_KEY), into / LOG, config.model.serve_timeout):
                codes.append(measured(one))
    if len(commands) > 1:
        codes.append(compare([str(folder / each.name) for each in commands]))
    return next((code for code in codes if code), 0)
