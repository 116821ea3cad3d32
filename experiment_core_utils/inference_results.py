"""In: records of prompts and batches, of one process or of several; out: one `InferenceResults`. Pure.

One process and all of them go through the same sums: pooled first, computed after.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from experiment_core_utils.primitives.distributions import rate
from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.primitives.records import BatchRecord, InferenceResults, QueryRecord

_NAMED = 10


def results_of_records(
    queries: Iterable[QueryRecord],
    batches: Iterable[BatchRecord],
    decoding: dict[str, Any],
    process_index: int | None,
    num_processes: int,
) -> InferenceResults:
    """Counts, tokens and rates that the records come to; times are those of the process that took longest.

    Args:
        decoding: with `pad_token_id`, which fills the rows of `output_tokens`.
        process_index: None for the records of all processes.
    """
    queries = sorted(queries, key=lambda query: query["prompt_index"])
    batches = sorted(batches, key=lambda batch: (batch["process_index"], batch["batch_index"]))
    texts = [query["output_text"] for query in queries]
    output_tokens = sum(query["output_tokens"] for query in queries)
    time_s = _longest((batch["process_index"], batch["inference_time_s"]) for batch in batches)
    return InferenceResults(
        output_tokens=_padded([query["output_token_ids"] for query in queries], decoding["pad_token_id"]),
        output_text=None if None in texts else [text for text in texts if text is not None],
        total_inference_time_s=time_s,
        total_input_tokens=sum(query["input_tokens"] for query in queries),
        total_output_tokens=output_tokens,
        num_prompts_processed=len(queries),
        tokens_per_second=rate(output_tokens, time_s),
        queries_per_second=rate(len(queries), time_s),
        latency_per_query_s=rate(time_s, len(queries)),
        process_index=process_index,
        num_processes=num_processes,
        queries=queries,
        batches=batches,
        decoding=decoding,
        simulated_delay_s=_longest((batch["process_index"], batch["simulated_delay_s"]) for batch in batches),
    )


def pool_inference_results(results: Sequence[InferenceResults]) -> InferenceResults:
    """One whole of what every process generated; rates are computed after pooling.

    Counts are sums. Processes run side by side, so `total_inference_time_s` and `simulated_delay_s` are those of the
    process that ran or waited longest: the whole is as slow as its slowest part.

    Args:
        results: of every process once, in any order; also as read from JSON.

    Raises:
        ResultsError: a process is missing or there twice, processes decoded differently, or the prompts are not each
            there exactly once.
    """
    if not results:
        raise ResultsError("no inference results were given; give those of every process")
    first = results[0]
    _check_processes([result["process_index"] for result in results], first["num_processes"])
    if any(result["decoding"] != first["decoding"] for result in results):
        raise ResultsError("the processes' results differ in their decoding: they do not belong to one run")
    queries = [query for result in results for query in result["queries"]]
    _check_prompts([query["prompt_index"] for query in queries])
    batches = [batch for result in results for batch in result["batches"]]
    return results_of_records(queries, batches, first["decoding"], None, first["num_processes"])


def _check_processes(found: Sequence[int | None], num_processes: int) -> None:
    if Counter(found) != Counter(range(num_processes)):
        raise ResultsError(
            f"results of processes {list(found)} were given for a run of {num_processes}; give those of every process "
            "exactly once"
        )


def _check_prompts(found: Sequence[int]) -> None:
    counts = Counter(found)
    twice = sorted(index for index, count in counts.items() if count > 1)
    missing = sorted(set(range(max(found, default=-1) + 1)) - set(found))
    if twice or missing:
        raise ResultsError(f"prompts there twice {twice[:_NAMED]}, missing {missing[:_NAMED]}: not one run's results")


def _longest(seconds: Iterable[tuple[int, float]]) -> float:
    """The largest sum of one process; 0 where there is nothing."""
    sums: dict[int, float] = defaultdict(float)
    for process, duration in seconds:
        sums[process] += duration
    return max(sums.values(), default=0.0)


def _padded(rows: Sequence[Sequence[int]], pad_token_id: int) -> torch.Tensor:
    """[N, longest] on the host, filled to the right."""
    tokens = torch.full((len(rows), max(map(len, rows), default=0)), pad_token_id, dtype=torch.long)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = torch.tensor(row, dtype=torch.long)
    return tokens
