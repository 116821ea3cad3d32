"""The published name of the command in `saved_results/tasks_command.py`, which reads results, a floor above tasks."""

from runpy import run_module

if __name__ == "__main__":
    run_module("experiment_core_utils.saved_results.tasks_command", run_name="__main__")
