"""Convert a MolmoE of the original training code (config.yaml, model.pt) into the published layout, to be profiled.

python scripts/convert_checkpoint.py --input /data/original --tokenizer /data/tokenizer --output /data/molmoe
knobprof profile --model_path /data/molmoe
"""

import sys
from pathlib import Path

import checkout  # noqa: F401

from experiment_core_utils.config.command import reporting_errors, run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.models.molmoe.checkpoint.original import DTYPES, convert_original_checkpoint
from experiment_core_utils.primitives.texts import counted


@reporting_errors
def main() -> None:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--input", type=Path, required=True, help="folder with config.yaml and model.pt")
    parser.add_argument("--output", type=Path, required=True, help="folder to write, which must not exist")
    parser.add_argument("--dtype", help=f"precision of the output: {', '.join(DTYPES)} (default: each tensor's own)")
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json and tokenizer_config.json of MolmoE")
    arguments = parser.parse_args()
    done = convert_original_checkpoint(arguments.input, arguments.output, arguments.dtype, arguments.tokenizer)
    print(
        f"wrote {counted(done.num_tensors, 'tensor')} ({done.weights_bytes / 1e9:.2f} GB, "
        f"{counted(done.num_files, 'file')}) to {done.folder}"
    )


if __name__ == "__main__":
    sys.exit(run_command(main))
