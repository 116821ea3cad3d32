"""Counts, rates and padding of a text run, by hand."""

from typing import Any

import pytest

from experiment_core_utils.g_metrics_inference import combine_inference_metrics
from experiment_core_utils.models.common.text_generation import results_of_records
from experiment_core_utils.records.provenance import Variables
from experiment_core_utils.records.setting_result import FixedLengthTime
from experiment_core_utils.records.text import BatchRecord, InferenceResults, QueryRecord
from experiment_core_utils.saved_results.result_caveats import text_answer_caveats
from experiment_core_utils.saved_results.terminal import fixed_length_line

# --- text runs ------------------------------------------------------------------------------------------------------


def text_results() -> InferenceResults:
    """Two batches: prompts of 3 and 1 tokens, answers of 3 (ended) and 1 (ended); a prompt of 2, 2 tokens, cut off."""
    shared = {"process_index": 0, "simulated_delay_s": 0.125, "over_token_limit": False}
    first = BatchRecord(
        batch_index=0, prompt_indices=[0, 1], inference_time_s=1.0, ttft_s=0.5, inter_token_s=[0.25, 0.125],
        input_tokens=4, padded_input_tokens=6, output_tokens=4, computed_output_tokens=6, halvings=1, **shared,
    )  # fmt: skip
    second = BatchRecord(
        batch_index=1, prompt_indices=[2], inference_time_s=0.5, ttft_s=0.25, inter_token_s=[0.25],
        input_tokens=2, padded_input_tokens=2, output_tokens=2, computed_output_tokens=2, halvings=2, **shared,
    )  # fmt: skip
    queries = [
        QueryRecord(
            prompt_index=index, process_index=0, batch_index=batch, input_tokens=inputs, output_tokens=outputs,
            ended=ended, output_token_ids=[5] * outputs, output_text=None,
        )
        for index, batch, inputs, outputs, ended in ((0, 0, 3, 3, True), (1, 0, 1, 1, True), (2, 1, 2, 2, False))
    ]  # fmt: skip
    return results_of_records(queries, [first, second], {"pad_token_id": 1}, 0, 1)


def test_the_published_metrics_of_a_text_run() -> None:
    metrics = combine_inference_metrics(text_results())
    published = dict(list(metrics.items())[:10])
    assert published == {
        "total_input_tokens": 6,
        "total_output_tokens": 6,
        "total_tokens": 12,
        "num_prompts": 3,
        "total_time_s": 1.5,
        "tokens_per_second": 6 / 1.5,  # output tokens
        "queries_per_second": 3 / 1.5,
        "latency_per_query_s": 1.5 / 3,
        "avg_input_tokens_per_prompt": 2.0,
        "avg_output_tokens_per_prompt": 2.0,
    }


def test_padding_efficiency_and_spreads_of_a_text_run() -> None:
    metrics = combine_inference_metrics(text_results())
    assert (metrics["num_batches"], metrics["mean_batch_size"]) == (2, 1.5)
    assert metrics["padding_share"] == 2 / 8
    assert metrics["batch_efficiency"] == 6 / 8
    assert metrics["share_truncated"] == pytest.approx(1 / 3)
    assert metrics["simulated_delay_s"] == 0.25
    assert (metrics["num_halved_batches"], metrics["most_halvings"]) == (2, 2)
    ttft, per_token, gaps = metrics["ttft_s"], metrics["time_per_output_token_s"], metrics["inter_token_s"]
    assert ttft is not None and per_token is not None and gaps is not None
    assert (ttft["n"], ttft["mean"], ttft["min"], ttft["max"]) == (2, 0.375, 0.25, 0.5)
    # Batches: (0.25 + 0.125) / 2 and 0.25.
    assert (per_token["n"], per_token["mean"]) == (2, (0.1875 + 0.25) / 2)
    assert (gaps["n"], gaps["mean"]) == (3, pytest.approx(0.625 / 3))


def test_a_text_run_without_work_has_no_rates() -> None:
    metrics = combine_inference_metrics(results_of_records([], [], {"pad_token_id": 1}, 0, 1))
    assert {name for name, value in metrics.items() if value is not None} == {
        "total_input_tokens", "total_output_tokens", "total_tokens", "num_prompts", "total_time_s", "num_batches",
        "simulated_delay_s", "num_halved_batches",
    }  # fmt: skip
    assert (metrics["num_batches"], metrics["total_time_s"]) == (0, 0.0)


def test_the_published_keys_of_a_text_run_are_enough() -> None:
    published: Any = {
        "total_input_tokens": 6,
        "total_output_tokens": 3,
        "num_prompts_processed": 2,
        "total_inference_time_s": 0.5,
    }
    metrics = combine_inference_metrics(published)
    assert (metrics["tokens_per_second"], metrics["latency_per_query_s"]) == (6.0, 0.25)
    assert all(metrics[name] is None for name in list(metrics)[10:])  # type: ignore[literal-required]


def test_a_model_that_does_not_report_single_tokens_has_no_token_times() -> None:
    results = text_results()
    for batch in results["batches"]:
        batch["ttft_s"], batch["inter_token_s"] = None, []
    metrics = combine_inference_metrics(results)
    assert metrics["ttft_s"] is metrics["time_per_output_token_s"] is metrics["inter_token_s"] is None


def test_a_text_run_whose_answers_end_at_once_measures_prefills() -> None:
    results = text_results()
    own = [{**query, "ended": True, "output_tokens": 1} for query in results["queries"]]
    kinds = [each.kind for each in text_answer_caveats({**results, "queries": own}, 4)]
    assert kinds == ["answers_ended_at_once"]
    assert [each.kind for each in text_answer_caveats(results, 4)] == ["answers_cut"]


STATS = {"T_first_token_mean": 100.0, "T_decode_per_token_mean": 5.0, "T_total_mean": 250.0}


@pytest.mark.parametrize(
    ("stats", "limit", "ignore_eos", "expected"),
    [
        (STATS, 64, False, (16, 175.0, "computed")),
        (STATS, 4, None, (4, 115.0, "computed")),
        (STATS, 30, True, (30, 250.0, "measured")),
        ({"T_first_token_mean": 100.0, "T_total_mean": 100.0}, 64, False, None),
        (STATS, None, False, None),
    ],
)
def test_the_time_of_an_answer_of_fixed_length(
    stats: dict[str, Any], limit: int | None, ignore_eos: bool | None, expected: tuple[int, float, str] | None
) -> None:
    found = FixedLengthTime.from_stats(stats, Variables(max_new_tokens=limit, ignore_eos=ignore_eos))
    assert (None if found is None else (found.num_tokens, found.mean, found.how)) == expected


def test_the_line_of_the_fixed_length_names_the_fastest_and_the_slowest() -> None:
    slow, fast = (FixedLengthTime(num_tokens=16, mean=mean, how="computed") for mean in (20.0, 10.25))
    assert fixed_length_line({"a": slow, "b": fast}) == (
        "answers of 16 tokens, computed (TTFT + 15 x ms/token): 10.2 ms (b) to 20.0 ms (a)"
    )
    assert fixed_length_line({"a": slow}) == "answers of 16 tokens, computed (TTFT + 15 x ms/token): 20.0 ms"
    assert fixed_length_line({}) is None
