"""Score a model's transformer blocks, or choose sets of them: see `experiments/block_importance/score_blocks.py`."""

import sys

import checkout  # noqa: F401

from experiment_core_utils.config.command import run_command
from experiments.block_importance.score_blocks import main

if __name__ == "__main__":
    sys.exit(run_command(main))
