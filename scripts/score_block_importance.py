"""Score a model's transformer blocks, or choose sets of them: see `experiments/block_importance/score_blocks.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiment_core_utils.config.command import run_command
from experiment_core_utils.primitives.errors import ProfilerError
from experiments.block_importance.score_blocks import main

if __name__ == "__main__":
    try:
        sys.exit(run_command(main))
    except ProfilerError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
