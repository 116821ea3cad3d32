"""In: the runs of a sample, or what a text run generated; out: the sample's record, or counts, rates and spreads."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from experiment_core_utils.engines.likelihood import scored_lengths
from experiment_core_utils.h_metrics_compute import request_flops
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.thinking_budget import THINKING_BUDGET
from experiment_core_utils.models.interface import Runnable
from experiment_core_utils.primitives.statistics import fraction_of, mean_of, rate, spread_of
from experiment_core_utils.records.requests import BatchedAnswer, PreparedRequest, StagedRun
from experiment_core_utils.records.settings import MeasuredSample
from experiment_core_utils.records.text import InferenceMetrics, InferenceResults
from experiment_core_utils.tasks.content import digest_of
from experiment_core_utils.tasks.interface import Sample
from experiment_core_utils.tasks.scoring.likelihood import likeliest

# Of every batch, and added up over all.
_SUMMED = ("input_tokens", "padded_input_tokens", "output_tokens", "computed_output_tokens")


def combine_inference_metrics(inference_results: InferenceResults) -> InferenceMetrics:
    """Counts, rates and spreads of a text run, over one process or, pooled before, over all.

    `tokens_per_second` counts output tokens. Rates are None where the time or the count under them is 0.

    Args:
        inference_results: the published keys are enough; what comes from `batches` and `queries` is None without.
    """
    inputs, outputs = inference_results["total_input_tokens"], inference_results["total_output_tokens"]
    prompts, time_s = inference_results["num_prompts_processed"], inference_results["total_inference_time_s"]
    batches: Sequence[Mapping[str, Any]] = inference_results.get("batches", [])
    has_batches = "batches" in inference_results
    sums = {name: sum(batch[name] for batch in batches) for name in _SUMMED}
    positions = sums["padded_input_tokens"]
    gaps = [batch["inter_token_s"] for batch in batches if batch["inter_token_s"]]
    decoding = inference_results.get("decoding", {})
    thinking = [query.get("thinking_tokens") for query in inference_results.get("queries", [])]
    return InferenceMetrics(
        total_input_tokens=inputs,
        total_output_tokens=outputs,
        total_tokens=inputs + outputs,
        num_prompts=prompts,
        total_time_s=time_s,
        tokens_per_second=rate(outputs, time_s),
        queries_per_second=rate(prompts, time_s),
        latency_per_query_s=rate(time_s, prompts),
        avg_input_tokens_per_prompt=rate(inputs, prompts),
        avg_output_tokens_per_prompt=rate(outputs, prompts),
        num_batches=len(batches) if has_batches else None,
        mean_batch_size=mean_of([len(batch["prompt_indices"]) for batch in batches]),
        padding_share=fraction_of(positions - sums["input_tokens"], positions),
        batch_efficiency=rate(sums["output_tokens"], sums["computed_output_tokens"]),
        share_truncated=mean_of([not query["ended"] for query in inference_results.get("queries", [])]),
        ttft_s=spread_of([batch["ttft_s"] for batch in batches if batch["ttft_s"] is not None]),
        time_per_output_token_s=spread_of([sum(each) / len(each) for each in gaps]),
        inter_token_s=spread_of(list(chain(*gaps))),
        simulated_delay_s=inference_results.get("simulated_delay_s"),
        num_halved_batches=sum(batch["halvings"] > 0 for batch in batches) if has_batches else None,
        most_halvings=max((batch["halvings"] for batch in batches), default=None),
        avg_thinking_tokens_per_prompt=mean_of([tokens for tokens in thinking if tokens is not None]),
        execution=decoding.get("execution"),
        execution_reason=decoding.get("execution_reason"),
    )


def _output_of(model: Runnable, run: StagedRun) -> tuple[object, ...]:
    """What is the same in runs of one output: its ids, or where a server sends none its text, length and end."""
    if run.scores:
        return likeliest(run.scores), *(score.is_greedy for score in run.scores)
    if run.first_token_s is None:
        return run.token_ids
    return model.decode_text(run.token_ids), len(run.token_ids), run.ended


def _thinking_forced(model: Runnable, setting: Setting, token_ids: Sequence[int]) -> int | None:
    """1 where an answer's thought was closed at the setting's budget, as each is at 0; None without a budget."""
    budget = setting.value(THINKING_BUDGET.name)
    if not isinstance(budget, int):
        return None
    return int(budget == 0 or model.ends.thinks_after(token_ids, budget))


def sample_record(
    model: Runnable,
    setting: Setting,
    sample: Sample,
    request: PreparedRequest,
    runs: tuple[StagedRun, ...] = (),
    transfer_s: float | None = None,
    answer: BatchedAnswer | None = None,
    scored_ids: tuple[int, ...] | None = None,
) -> MeasuredSample:
    """The record of a sample that was run alone and measured, or that was answered in a batch and has no times.

    Args:
        scored_ids: of the answer that is scored where it is none of the runs'.
    """
    first = runs[0] if runs else answer
    assert first is not None
    read_ids = first.token_ids if scored_ids is None else scored_ids
    shape = setting.shape(request.shape)
    if runs and runs[0].prompt_tokens is not None:
        shape = shape.counted_by_server(runs[0].prompt_tokens)
    prediction, scored = model.decode_text(read_ids), model.ends.answer(read_ids)
    if first.scores:
        # Of a text that is scored, that text is all that there is.
        prediction = scored = sample.options[likeliest(first.scores)] if sample.options else sample.answers[0]
    return MeasuredSample(
        sample_id=sample.sample_id,
        shape=shape,
        runs=runs,
        outputs_identical=len({_output_of(model, run) for run in runs}) == 1 if runs else None,
        host_s={} if transfer_s is None else {"transfer_s": transfer_s},
        prediction=prediction,
        flops=request_flops(model, setting, shape, len(first.token_ids), scored_lengths(request.inputs)),
        question_type=sample.question_type,
        image_id=sample.image_id,
        references=sample.answers,
        options=sample.options,
        answer_index=sample.answer_index,
        metadata={**sample.metadata, "question": sample.question},
        answer=answer,
        data_sha256=digest_of(sample),
        picture_sha256=sample.picture_sha256,
        scored_answer=None if scored == prediction else scored,
        thinking_tokens=model.ends.thinking_tokens(read_ids),
        thinking_forced=_thinking_forced(model, setting, read_ids),
    )
