"""How many greedy answers change with the batch size: each size against size 1 in the same precision.

In float32 none should. In lower precision the last bits of a product depend on how many rows it has, so that two tokens
which are nearly equally likely can change places, and what follows is another text.

python -m experiments.benchmarks.batch_agreement --dtypes float32 bfloat16 --batch_sizes 4 16
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from experiment_core_utils.a_distributed import setup_distributed
from experiment_core_utils.b_model_loader import load_model_tokenizer
from experiment_core_utils.c_prompt_processing import filter_prompts_by_length, sort_prompts_by_length, tokenise_prompts
from experiment_core_utils.config.command import run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.config.text import PromptSource, validated
from experiment_core_utils.e_inference import run_gen_inference
from experiment_core_utils.primitives.device import set_cpu_threads
from experiment_core_utils.primitives.files import EMBEDDED_MODEL
from experiment_core_utils.primitives.statistics import bounded_mean_interval
from experiment_core_utils.tasks.prompts import read_prompts


@dataclass(frozen=True)
class Agreement:
    """Two runs over the same prompts, compared."""

    num_prompts: int  #: in each run
    #: of each prompt whose answers differ, the place of the first token that does, from 0; ascending
    places: tuple[int, ...]

    @property
    def flip_rate(self) -> float | None:
        """Fraction of the prompts whose answers differ; None for no prompt."""
        return len(self.places) / self.num_prompts if self.num_prompts else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of the flip rate over prompts such as these; None for no prompt."""
        agreeing = self.num_prompts - len(self.places)
        return bounded_mean_interval([1.0] * len(self.places) + [0.0] * agreeing)


def compare(answers: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> Agreement:
    """The agreement of each prompt's token ids in two runs; raises ValueError for unequal numbers."""
    places = [first_difference(one, other) for one, other in zip(answers, others, strict=True)]
    return Agreement(len(answers), tuple(sorted(place for place in places if place is not None)))


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Place of the first token that differs, or that only one of them has; None where they are equal."""
    return next((place for place, (left, right) in enumerate(zip_longest(one, other)) if left != right), None)


HEADER = (
    f"{'precision':10} {'batch':>5} {'prompts':>7} {'differ':>6} {'flip rate':>9}  {'95 % interval':17} first token"
)


def answers_by_size(
    arguments: argparse.Namespace, dtype: str, sizes: Sequence[int], prompts: Sequence[str]
) -> dict[int, list[list[int]]]:
    """Token ids of each prompt's greedy answer, by batch size; one model for all.

    Prompts are sorted by length, as a run sorts them.
    """
    values = {
        "model_name": arguments.model_path,
        "device": arguments.device,
        "fp_precision": dtype,
        "max_output_tokens": arguments.max_output_tokens,
        "num_warmup_batches": 0,
        "decode_token_to_text": False,
    }
    accelerator = setup_distributed(validated(values))
    model, tokenizer = load_model_tokenizer(values)
    short = filter_prompts_by_length(prompts, tokenizer, arguments.max_input_tokens)[: arguments.num_prompts]
    tokenised = tokenise_prompts(sort_prompts_by_length(short, tokenizer), tokenizer)
    answers = {}
    for size in sizes:
        batching = {"batching_options": {"batch_size___fixed_batching": size}}
        results = run_gen_inference(model, tokenizer, tokenised, {**values, **batching}, accelerator)
        answers[size] = [query["output_token_ids"] for query in results["queries"]]
    return answers


def row(dtype: str, size: int, agreement: Agreement) -> str:
    """A line of the table."""
    low, high = agreement.interval or (0.0, 1.0)
    places = agreement.places
    where = f"median {statistics.median(places):g}, earliest {places[0]}" if places else "-"
    return (
        f"{dtype:10} {size:5} {agreement.num_prompts:7} {len(places):6} {agreement.flip_rate:9.2%}  "
        f"{low:6.2%} to {high:6.2%}  {where}"
    )


def main() -> None:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--model_path", default=str(EMBEDDED_MODEL))
    parser.add_argument(
        "--prompts", metavar="FILE", help="file of prompts, text or JSONL (default: the embedded prompts)"
    )
    parser.add_argument("--max_input_tokens", type=int, default=512, help="longer prompts are left out")
    parser.add_argument("--num_prompts", type=int, help="number of first prompts (default: all)")
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--max_output_tokens", type=int, default=32)
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    prompts = read_prompts(PromptSource(path=arguments.prompts)).texts
    set_cpu_threads(None, 1)
    print(HEADER)
    for dtype in arguments.dtypes:
        answers = answers_by_size(arguments, dtype, [1, *arguments.batch_sizes], prompts)
        for size in arguments.batch_sizes:
            print(row(dtype, size, compare(answers[1], answers[size])), flush=True)


if __name__ == "__main__":
    sys.exit(run_command(main))
