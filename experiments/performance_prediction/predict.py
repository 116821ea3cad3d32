"""Predict latency and energy of convolutional networks: fit to profiles and validate, or predict from what was fitted.

knobprof convolutions predict fit results --output latency_model.json
knobprof convolutions predict predict vgg16 --from latency_model.json --input-size 300
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiment_core_utils.config.command import reporting_errors, run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiments.performance_prediction.prediction.lines import fit, predict

DEFAULT_FILE = Path("latency_model.json")


def build_parser() -> argparse.ArgumentParser:
    """The flags of predict.py."""
    parser = OneLineParser(
        prog="predict.py",
        description="Predict latency and energy of convolutional networks from their profiles.",
        examples=(
            "knobprof convolutions predict fit results --output latency_model.json",
            "knobprof convolutions predict predict resnet50 --from latency_model.json --input-size 300 384",
        ),
    )
    commands = parser.add_subparsers(dest="command", required=True)
    fitting = commands.add_parser("fit", help="fit to profiles, and validate")
    fitting.add_argument(
        "results", nargs="+", type=Path, metavar="RESULTS", help="result folders, or *_overall.csv files"
    )
    fitting.add_argument("--output", type=Path, default=DEFAULT_FILE, metavar="FILE", help="file of the fitted model")
    fitting.add_argument(
        "--held-out-sizes",
        type=int,
        nargs="+",
        default=[],
        metavar="PIXELS",
        help="input sizes for validation (default: every third)",
    )
    fitting.add_argument(
        "--without-launch-bound",
        action="store_true",
        help="leave out inferences that the timer marked: their times may contain waits for the host",
    )
    fitting.add_argument("--figures", type=Path, metavar="DIR", help="draw pictures into this folder")
    predicting = commands.add_parser("predict", help="predict a network")
    predicting.add_argument(
        "model", metavar="MODEL", help="name of a network; `knobprof convolutions profile --list-models` prints all"
    )
    predicting.add_argument("--from", dest="file", type=Path, default=DEFAULT_FILE, metavar="FILE", help="fitted model")
    predicting.add_argument(
        "--input-size", type=int, nargs="+", required=True, metavar="PIXELS", help="sides of the input in pixels"
    )
    predicting.add_argument(
        "--algorithm", nargs="+", default=["all"], metavar="ALGORITHM", help="algorithms (default: all)"
    )
    predicting.add_argument("--device", help="device in the fitted model, if that has several")
    predicting.add_argument("--batch-size", type=int, default=1, help="batch size of an inference")
    predicting.add_argument("--layers", action="store_true", help="also print every layer")
    return parser


@reporting_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Fit or predict. Exit code: 0 done, 1 unreadable or unwritable files, 2 it cannot be done."""
    arguments = build_parser().parse_args(argv)
    if arguments.command == "fit":
        fit(
            arguments.results,
            arguments.output,
            arguments.held_out_sizes,
            arguments.figures,
            arguments.without_launch_bound,
        )
    else:
        predict(
            arguments.file,
            arguments.model,
            arguments.input_size,
            arguments.algorithm,
            arguments.device,
            arguments.batch_size,
            arguments.layers,
        )


if __name__ == "__main__":
    sys.exit(run_command(main))
