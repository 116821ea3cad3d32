"""Batches of one process by a scripted model: what is counted, what is halved, what is waited for."""

import time
from typing import Any

import pytest
import torch

from experiment_core_utils.config.text import validated
from experiment_core_utils.e_inference import run_shard
from experiment_core_utils.g_metrics_inference import combine_inference_metrics
from experiment_core_utils.measuring.text_shard import WARM_UP_TOKENS, OwnPrompts, TextShard
from experiment_core_utils.primitives.errors import GenerationFailed, OutOfMemory, Stopped
from experiment_core_utils.primitives.interruption import StopRequest
from tests.tiny_models.tiny_text_model import (
    EOS,
    PAD,
    NumberTokenizer,
    ScriptedTextModel,
    ThinkingTokenizer,
    left_padded,
    number_generator,
    tiny_text_model,
)

# The first id of a prompt chooses the answer.
SCRIPTS = {60: (1, 2, EOS), 61: (EOS,), 62: (1, 2, 3, 4), 63: (1, EOS, 5, EOS), 64: (6,)}
ROWS = [[60, 1], [61, 1, 1, 1], [62], [63, 1, 1], [64]]


def shard(
    model: ScriptedTextModel,
    first: int = 0,
    step: int = 1,
    rows: Any = ROWS,
    tokenizer: NumberTokenizer | None = None,
    **values: Any,
) -> TextShard:
    batching = {"batch_size___fixed_batching": 2, **values.pop("batching_options", {})}
    config = validated({"max_output_tokens": 4, "num_warmup_batches": 0, "batching_options": batching, **values})
    prompts = left_padded(rows)
    indices = tuple(range(first, first + step * len(rows), step))
    own = OwnPrompts(indices, prompts["input_ids"], prompts["attention_mask"])
    return TextShard(number_generator(model, config, tokenizer), own, config, 0, 1)


def test_only_real_tokens_count() -> None:
    model = ScriptedTextModel(SCRIPTS)
    results, _ = run_shard(shard(model, first=1, step=2), StopRequest())
    assert model.calls == [(2, 4), (2, 3), (1, 1)]  # each batch as long as its own longest prompt
    queries = [
        (query["prompt_index"], query["batch_index"], query["input_tokens"], query["output_tokens"], query["ended"])
        for query in results["queries"]
    ]
    assert queries == [
        (1, 0, 2, 3, True),
        (3, 0, 4, 1, True),
        (5, 1, 1, 4, False),
        (7, 1, 3, 2, True),
        (9, 2, 1, 1, False),
    ]
    assert results["output_tokens"].tolist() == [
        [1, 2, EOS, PAD],
        [EOS, PAD, PAD, PAD],
        [1, 2, 3, 4],
        [1, EOS, PAD, PAD],
        [6, PAD, PAD, PAD],
    ]
    assert results["output_text"] == ["1 2", "", "1 2 3 4", "1", "6"]
    assert results["total_input_tokens"] == 2 + 4 + 1 + 3 + 1
    assert results["total_output_tokens"] == 3 + 1 + 4 + 2 + 1
    assert results["num_prompts_processed"] == 5
    columns = ("prompt_indices", "input_tokens", "padded_input_tokens", "output_tokens", "computed_output_tokens")
    assert [[batch[name] for name in columns] for batch in results["batches"]] == [
        [[1, 3], 6, 8, 4, 6],
        [[5, 7], 4, 6, 6, 8],
        [[9], 1, 1, 1, 1],
    ]
    assert [len(batch["inter_token_s"]) for batch in results["batches"]] == [2, 3, 0]
    assert results["total_inference_time_s"] == pytest.approx(
        sum(batch["inference_time_s"] for batch in results["batches"])
    )


def test_text_is_decoded_only_on_request() -> None:
    results, _ = run_shard(shard(ScriptedTextModel(SCRIPTS), decode_token_to_text=False), StopRequest())
    assert results["output_text"] is None
    assert {query["output_text"] for query in results["queries"]} == {None}
    assert {(query["answer_text"], query["thinking_tokens"]) for query in results["queries"]} == {(None, None)}
    assert results["answer_text"] is None


def test_thinking_is_counted_and_no_part_of_the_answer() -> None:
    """The last prompt ends inside thinking; the stop text 1 ends nothing there, and nothing in other prompts' rows."""
    scripts = {
        60: (20, 1, 21, 2, EOS),
        61: (20, 1, 3, 4, 5),
        62: (2, EOS),
        63: (1, 21, 4, EOS),
    }
    rows = [[60], [61], [62], [63, 20]]
    model = ScriptedTextModel(scripts)
    thinking = shard(model, rows=rows, tokenizer=ThinkingTokenizer(), stop=["1"], max_output_tokens=5)
    results, _ = run_shard(thinking, StopRequest())
    found = [(query["output_text"], query["answer_text"], query["thinking_tokens"]) for query in results["queries"]]
    assert found == [
        ("<think> 1 </think> 2", "2", 3),
        ("<think> 1 3 4 5", "", 5),
        ("2", "2", 0),
        ("1 </think> 4", "4", 2),
    ]
    assert results["answer_text"] == ["2", "", "2", "4"]
    assert [query["ended"] for query in results["queries"]] == [True, False, True, True]
    assert combine_inference_metrics(results)["avg_thinking_tokens_per_prompt"] == (3 + 5 + 0 + 2) / 4


def test_a_prompt_over_the_token_limit_runs_alone() -> None:
    options = {"adaptive_batching": True, "adaptive_max_tokens": 3}
    results, _ = run_shard(shard(ScriptedTextModel(SCRIPTS), batching_options=options), StopRequest())
    found = [(batch["prompt_indices"], batch["over_token_limit"]) for batch in results["batches"]]
    assert found == [([0], False), ([1], True), ([2], False), ([3], False), ([4], False)]


def test_a_batch_without_room_is_an_error_that_names_the_option() -> None:
    wanted = (
        r"the batch of 2 prompts x 4 tokens \(prompts 0 to 1\) does not fit: CUDA out of memory; make batches smaller "
        r"or set batching_options.halve_on_out_of_memory"
    )
    with pytest.raises(OutOfMemory, match=wanted):
        run_shard(shard(ScriptedTextModel(SCRIPTS, largest_batch=1)), StopRequest())


def test_halving_is_recorded_and_loses_nothing() -> None:
    options = {"batch_size___fixed_batching": 5, "halve_on_out_of_memory": True}
    model = ScriptedTextModel(SCRIPTS, largest_batch=2)
    waiting = {"simulate": True, "delay_min": 0.01, "delay_max": 0.01}
    results, _ = run_shard(shard(model, batching_options=options, latency_simulation=waiting), StopRequest())
    # 5 -> 2 and 3; 3 -> 1 and 2.
    assert [rows for rows, _ in model.calls] == [5, 2, 3, 1, 2]
    found = [
        (batch["batch_index"], batch["prompt_indices"], batch["halvings"], batch["simulated_delay_s"])
        for batch in results["batches"]
    ]
    assert found == [(0, [0, 1], 1, 0.01), (1, [2], 2, 0.0), (2, [3, 4], 2, 0.0)]
    assert [query["batch_index"] for query in results["queries"]] == [0, 0, 1, 2, 2]
    whole, _ = run_shard(shard(ScriptedTextModel(SCRIPTS)), StopRequest())
    assert results["output_text"] == whole["output_text"]
    assert results["simulated_delay_s"] == 0.01


def test_a_prompt_that_does_not_fit_alone_is_an_error() -> None:
    options = {"halve_on_out_of_memory": True}
    with pytest.raises(OutOfMemory, match="prompt 0 of 2 tokens does not fit even alone: CUDA out of memory"):
        run_shard(shard(ScriptedTextModel(SCRIPTS, largest_batch=0), batching_options=options), StopRequest())


@pytest.mark.parametrize(("wanted", "number"), [(None, 1), (0, 0), (2, 2), (7, 3)])
def test_warm_ups_take_the_first_batches_and_leave_no_trace(wanted: int | None, number: int) -> None:
    model = ScriptedTextModel({**SCRIPTS, 60: [1] * 40})
    warmed = shard(model, num_warmup_batches=wanted, max_output_tokens=40)
    warmed.warm_up()
    warm_calls = list(model.calls)
    assert len(warm_calls) == number and model.limits == [WARM_UP_TOKENS] * number
    results, _ = run_shard(warmed, StopRequest())
    assert warm_calls == model.calls[number:][:number] and model.limits[number:] == [40] * 3
    assert results["num_prompts_processed"] == 5


def test_delays_are_waited_for_and_in_no_measured_time() -> None:
    waiting = {"simulate": True, "delay_min": 0.15, "delay_max": 0.15}
    started = time.perf_counter()
    results, _ = run_shard(shard(ScriptedTextModel(SCRIPTS), latency_simulation=waiting), StopRequest())
    wall_s = time.perf_counter() - started
    assert results["simulated_delay_s"] == pytest.approx(3 * 0.15)
    assert [batch["simulated_delay_s"] for batch in results["batches"]] == [0.15] * 3
    assert wall_s >= 3 * 0.15 + results["total_inference_time_s"]


def test_a_stop_is_heeded_between_two_batches() -> None:
    stop = StopRequest()

    class Interrupted(ScriptedTextModel):
        def generate(self, *arguments: Any, **keywords: Any) -> Any:
            stop.note(2, None)
            return super().generate(*arguments, **keywords)

    model = Interrupted(SCRIPTS)
    with pytest.raises(Stopped, match="SIGINT between two batches"):
        run_shard(shard(model), stop)
    assert len(model.calls) == 1


def test_a_process_without_prompts_has_empty_results() -> None:
    model = ScriptedTextModel(SCRIPTS)
    full = shard(model)
    own = OwnPrompts((), full.prompts.input_ids[:0], full.prompts.attention_mask[:0])
    empty = TextShard(full.generator, own, full.config, 1, 2)
    empty.warm_up()
    results, _ = run_shard(empty, StopRequest())
    assert model.calls == []
    assert (results["output_tokens"].shape, results["output_text"]) == ((0, 0), [])
    assert (results["total_inference_time_s"], results["num_prompts_processed"]) == (0.0, 0)
    assert results["tokens_per_second"] is results["queries_per_second"] is results["latency_per_query_s"] is None


def test_a_prompt_with_logits_that_are_not_finite_ends_the_experiment() -> None:
    """It is the third of the process's own five prompts, and has index 9 among all."""
    model: Any = tiny_text_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[62] = float("nan")
    with pytest.raises(GenerationFailed) as caught:
        run_shard(shard(model, first=5, step=2), StopRequest())
    assert str(caught.value) == (
        "logits are not finite at prompt 9 (float32; check the weights and how they were converted)"
    )
