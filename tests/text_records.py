"""Text runs written by hand, as results of one process."""

from collections.abc import Sequence

from experiment_core_utils.models.common.text_generation import results_of_records
from experiment_core_utils.records.text import BatchRecord, InferenceResults, QueryRecord


def text_run(
    batches: Sequence[Sequence[tuple[int, int]]], ttft_s: float | None = 0.5, step_s: float = 0.25
) -> InferenceResults:
    """One process's results.

    Args:
        batches: for each batch the prompt and output tokens of its rows; it runs as long as its longest answer.
    """
    queries: list[QueryRecord] = []
    records: list[BatchRecord] = []
    for index, rows in enumerate(batches):
        longest = max(output for _, output in rows)
        first = len(queries)
        for prompt, output in rows:
            queries.append(
                QueryRecord(
                    prompt_index=len(queries),
                    process_index=0,
                    batch_index=index,
                    input_tokens=prompt,
                    output_tokens=output,
                    ended=True,
                    output_token_ids=[3] * output,
                    output_text=None,
                )
            )
        records.append(
            BatchRecord(
                process_index=0,
                batch_index=index,
                prompt_indices=list(range(first, len(queries))),
                inference_time_s=(ttft_s or 0.0) + step_s * (longest - 1),
                ttft_s=ttft_s,
                inter_token_s=[step_s] * (longest - 1) if ttft_s is not None else [],
                input_tokens=sum(prompt for prompt, _ in rows),
                padded_input_tokens=len(rows) * max(prompt for prompt, _ in rows),
                output_tokens=sum(output for _, output in rows),
                computed_output_tokens=len(rows) * longest,
                simulated_delay_s=0.0,
                halvings=0,
                over_token_limit=False,
            )
        )
    return results_of_records(queries, records, {"pad_token_id": 0}, 0, 1)
