"""Write a folder with the config of a full-size MolmoE-1B and the embedded tokenizer, to be run with random weights.

python scripts/make_random_checkpoint.py --output /tmp/molmoe_1b
knobprof profile --model_path /tmp/molmoe_1b --random_weights
"""

import sys
from pathlib import Path

import checkout  # noqa: F401
from transformers import AutoTokenizer

from experiment_core_utils.config.command import run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.models.molmoe import MolmoeConfig, MolmoeImageProcessor, MolmoeProcessor
from experiment_core_utils.models.molmoe.processing_molmoe import ImageTokens
from experiment_core_utils.primitives.files import EMBEDDED_MODEL


def main() -> None:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args().output
    config = MolmoeConfig(head_vocab_size=50304)
    config.save_pretrained(output)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    MolmoeProcessor(MolmoeImageProcessor(), tokenizer, ImageTokens.from_config(config)).save_pretrained(output)
    print(f"wrote the config of MolmoE-1B to {output}; run it with --random_weights")


if __name__ == "__main__":
    sys.exit(run_command(main))
