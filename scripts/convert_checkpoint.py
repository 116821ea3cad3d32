"""Convert a MolmoE of the original training code (config.yaml, model.pt) into the published layout, to be profiled.

python scripts/convert_checkpoint.py --input /data/original --tokenizer /data/tokenizer --output /data/molmoe
python experiments/core_exp/acc_lat_profiling.py --model_path /data/molmoe
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiment_core_utils.config.command import run_command
from experiment_core_utils.models.molmoe.checkpoint.original import DTYPES, convert_original_checkpoint
from experiment_core_utils.primitives.errors import ProfilerError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, required=True, help="folder with config.yaml and model.pt")
    parser.add_argument("--output", type=Path, required=True, help="folder to write, which must not exist")
    parser.add_argument("--dtype", help=f"precision of the output: {', '.join(DTYPES)} (default: each tensor's own)")
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json and tokenizer_config.json of MolmoE")
    arguments = parser.parse_args()
    try:
        done = convert_original_checkpoint(arguments.input, arguments.output, arguments.dtype, arguments.tokenizer)
    except ProfilerError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(
        f"wrote {done.num_tensors} tensors ({done.weights_bytes / 1e9:.2f} GB, {done.num_files} files) to {done.folder}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
