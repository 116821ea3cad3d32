"""Pooling over processes, by hand."""

import pytest

from experiment_core_utils.k_results_aggregation import pool_inference_results, with_indices_of_source
from experiment_core_utils.models.common.text_generation import results_of_records
from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.records.text import BatchRecord, InferenceResults, QueryRecord

DECODING = {"pad_token_id": 8, "random_seed": 42}


def query(index: int, process: int, batch: int, output: list[int], input_tokens: int = 2) -> QueryRecord:
    return QueryRecord(
        prompt_index=index,
        process_index=process,
        batch_index=batch,
        input_tokens=input_tokens,
        output_tokens=len(output),
        ended=True,
        output_token_ids=output,
        output_text=f"text {index}",
    )


def batch_of(process: int, index: int, prompts: list[int], time_s: float, delay_s: float = 0.0) -> BatchRecord:
    return BatchRecord(
        process_index=process,
        batch_index=index,
        prompt_indices=prompts,
        inference_time_s=time_s,
        ttft_s=time_s / 4,
        inter_token_s=[time_s / 4],
        input_tokens=2 * len(prompts),
        padded_input_tokens=2 * len(prompts),
        output_tokens=2 * len(prompts),
        computed_output_tokens=2 * len(prompts),
        simulated_delay_s=delay_s,
        halvings=0,
        over_token_limit=False,
    )


def two_processes() -> list[InferenceResults]:
    """Prompts 0, 2 and 4 in 0.5 + 0.25 s, prompts 1 and 3 in 1.0 s."""
    first = results_of_records(
        [query(0, 0, 0, [5, 6]), query(2, 0, 0, [5]), query(4, 0, 1, [5, 6, 7])],
        [batch_of(0, 0, [0, 2], 0.5, 0.125), batch_of(0, 1, [4], 0.25, 0.125)],
        DECODING,
        0,
        2,
    )
    second = results_of_records(
        [query(1, 1, 0, [1]), query(3, 1, 0, [2, 3])], [batch_of(1, 0, [1, 3], 1.0, 0.125)], DECODING, 1, 2
    )
    return [first, second]


def test_one_process_is_the_sum_of_its_batches() -> None:
    first, _ = two_processes()
    assert first["total_inference_time_s"] == 0.75
    assert first["simulated_delay_s"] == 0.25
    assert (first["total_input_tokens"], first["total_output_tokens"]) == (6, 6)
    assert first["tokens_per_second"] == 6 / 0.75
    assert first["queries_per_second"] == 3 / 0.75
    assert first["latency_per_query_s"] == 0.75 / 3
    assert first["output_tokens"].tolist() == [[5, 6, 8], [5, 8, 8], [5, 6, 7]]


def test_prompts_have_the_indices_of_their_source_in_the_order_of_the_run() -> None:
    """Five of seven prompts, sorted by their length."""
    pooled = pool_inference_results(two_processes())
    found = with_indices_of_source(pooled, (6, 0, 3, 5, 2))
    assert [each["prompt_index"] for each in found["queries"]] == [6, 0, 3, 5, 2]
    assert [each["prompt_indices"] for each in found["batches"]] == [[6, 3], [2], [0, 5]]
    assert found["output_text"] == [each["output_text"] for each in pooled["queries"]]


def test_processes_are_pooled_first_and_rates_computed_after() -> None:
    pooled = pool_inference_results(two_processes()[::-1])
    assert [each["prompt_index"] for each in pooled["queries"]] == [0, 1, 2, 3, 4]
    assert pooled["output_text"] == [f"text {index}" for index in range(5)]
    assert pooled["output_tokens"].tolist() == [[5, 6, 8], [1, 8, 8], [5, 8, 8], [2, 3, 8], [5, 6, 7]]
    assert [(each["process_index"], each["batch_index"]) for each in pooled["batches"]] == [(0, 0), (0, 1), (1, 0)]
    assert (pooled["process_index"], pooled["num_processes"]) == (None, 2)
    assert pooled["num_prompts_processed"] == 5
    assert (pooled["total_input_tokens"], pooled["total_output_tokens"]) == (10, 9)
    # Side by side: the second takes 1.0 s, the first is done after 0.75 s, having waited 0.25 s.
    assert pooled["total_inference_time_s"] == 1.0
    assert pooled["simulated_delay_s"] == 0.25
    assert pooled["tokens_per_second"] == 9.0
    assert pooled["latency_per_query_s"] == 0.2


def test_one_process_pooled_is_itself() -> None:
    alone = results_of_records(
        [query(0, 0, 0, [5, 6]), query(1, 0, 0, [5])], [batch_of(0, 0, [0, 1], 0.5)], DECODING, 0, 1
    )
    pooled = pool_inference_results([alone])
    assert pooled["output_tokens"].tolist() == alone["output_tokens"].tolist() == [[5, 6], [5, 8]]
    assert {**pooled, "output_tokens": None} == {**alone, "process_index": None, "output_tokens": None}


def test_without_texts_there_are_none() -> None:
    results = two_processes()
    results[0]["queries"][1]["output_text"] = None
    assert pool_inference_results(results)["output_text"] is None


def test_what_is_not_one_run_is_refused() -> None:
    first, second = two_processes()
    with pytest.raises(ResultsError, match="no inference results"):
        pool_inference_results([])
    with pytest.raises(ResultsError, match=r"processes \[0\] were given for a run of 2"):
        pool_inference_results([first])
    with pytest.raises(ResultsError, match=r"processes \[0, 0\] were given"):
        pool_inference_results([first, first])
    with pytest.raises(ResultsError, match="differ in their decoding"):
        pool_inference_results([first, {**second, "decoding": {**DECODING, "random_seed": 1}}])  # type: ignore[typeddict-item]
    second["queries"][0]["prompt_index"] = 2
    with pytest.raises(ResultsError, match=r"given twice \[2\], missing \[1\]"):
        pool_inference_results([first, second])


def test_the_records_given_stay_as_they_were() -> None:
    results = two_processes()[::-1]
    pool_inference_results(results)
    assert [each["prompt_index"] for each in results[0]["queries"]] == [1, 3]
