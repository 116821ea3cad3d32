"""What a prediction costs: median milliseconds for a setting, in batches of several sizes.

python -m experiments.benchmarks.estimator ESTIMATOR_JSON
"""

import sys
from pathlib import Path

import numpy as np

from experiment_core_utils.config.command import reporting_errors, run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiments.analyses.latency.estimator import LatencyEstimator
from experiments.analyses.latency.features import KNOBS, RequestColumns
from experiments.benchmarks.shared import median_seconds

BATCHES = (1, 48, 1000, 100_000)
REPEATS = 50


def drawn_requests(estimator: LatencyEstimator, number: int) -> RequestColumns:
    """Requests spread over the ranges of the model's samples."""
    generator = np.random.default_rng(0)
    ends = {name: [round(end) for end in estimator.fitted.ranges[name]] for name in KNOBS}
    crops, top_k, blocks = (generator.integers(low, high + 1, number) for low, high in ends.values())
    shortest, longest = estimator.fitted.ranges["prompt_tokens"]
    vision_tokens = generator.uniform(shortest, longest, number)
    return RequestColumns(vision_tokens, crops, np.full(number, 20.0), top_k, blocks, generator.integers(1, 65, number))


@reporting_errors
def main() -> None:
    """Print the table. Exit code: 0 printed, 1 no estimator there."""
    parser = OneLineParser(description=__doc__)
    parser.add_argument("estimator", type=Path, metavar="ESTIMATOR_JSON")
    estimator = LatencyEstimator.load(parser.parse_args().estimator)
    for number in BATCHES:
        requests = drawn_requests(estimator, number)
        seconds = median_seconds(lambda: estimator.predict(requests), REPEATS)  # noqa: B023
        print(f"{number:>7} settings at once: {1e3 * seconds / number:.5f} ms each, intervals included")


if __name__ == "__main__":
    sys.exit(run_command(main))
