"""Order of the stages, ends of a generation, which spans become which times; text runs against a plain loop."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForImageTextToText

from experiment_core_utils.a_distributed import setup_distributed
from experiment_core_utils.c_prompt_processing import sort_prompts_by_length, tokenise_prompts
from experiment_core_utils.config.text import TextConfig, published_form
from experiment_core_utils.e_inference import run_gen_inference
from experiment_core_utils.engines.answer_ends import AnswerEnds
from experiment_core_utils.engines.greedy import generate_greedily
from experiment_core_utils.k_results_aggregation import pool_inference_results
from experiment_core_utils.measuring.staged_runs import run_staged, staged_run
from experiment_core_utils.meters.energy_files import read_windows
from experiment_core_utils.models.interface import StagedModel
from experiment_core_utils.primitives.device import HostMarks
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import EMBEDDED_MODEL
from experiment_core_utils.records.requests import StagedRun, TimedTokens
from experiment_core_utils.records.text import InferenceResults
from tests.processes.forked_runs import Run, RunServer, of_rank
from tests.scripted.scripted_model import EOS, ScriptedModel
from tests.tiny_models.tiny_text_model import PROMPTS, ScriptedTextModel, left_padded, tiny_text_model, tiny_tokenizer

TEXT = {"input_ids": torch.zeros(1, 4, dtype=torch.long)}
PICTURE = {**TEXT, "pixel_values": torch.zeros(1, 2, 3, 4, 4)}


@dataclass
class MarksAmongCalls:
    """Writes each mark into the list of the model's calls."""

    calls: list[str]

    def mark(self) -> None:
        self.calls.append("|")

    def seconds(self) -> list[float]:
        return []


def test_the_order_of_the_stages_and_of_the_marks_between_them() -> None:
    model = ScriptedModel(script=(1, 2, 3, EOS))
    assert generate_greedily(model, PICTURE, 16, MarksAmongCalls(model.calls)) == TimedTokens(
        (1, 2, 3, EOS), ("vision", "prefill", "decode", "decode", "decode")
    )
    assert model.calls == [
        "|", "encode_image", "|", "prefill features", "|", "decode_step 1", "|", "decode_step 2", "|", "decode_step 3",
        "|",
    ]  # fmt: skip


def test_a_picture_encoded_inside_the_prefill_is_taken_out_of_it() -> None:
    generated = TimedTokens((5, 6), ("prefill", "vision", "prefill", "decode"))
    run = staged_run(generated, [0.25, 2.0, 1.0, 0.5], ended=False)
    assert (run.prefill_s, run.vision_s, run.decode_s, run.total_s) == (1.25, 2.0, 0.5, 3.75)
    assert run.ttft_s == 3.25


def test_without_a_picture_there_is_no_mark_after_the_vision_stage() -> None:
    model = ScriptedModel(script=(1, EOS))
    assert generate_greedily(model, TEXT, 16, MarksAmongCalls(model.calls)) == TimedTokens(
        (1, EOS), ("prefill", "decode")
    )
    assert model.calls == ["|", "encode_image", "prefill None", "|", "decode_step 1", "|"]


@pytest.mark.parametrize(
    ("limit", "tokens", "ended"),
    [(1, (1,), False), (2, (1, 2), False), (3, (1, 2, EOS), True), (4, (1, 2, EOS), True)],
)
def test_a_generation_ends_at_end_of_sequence_or_at_the_limit(limit: int, tokens: tuple[int, ...], ended: bool) -> None:
    model = ScriptedModel(script=(1, 2, EOS, 4))
    run = run_staged(model, TEXT, limit)
    assert (run.token_ids, run.ended) == (tokens, ended)
    # n tokens take n - 1 decode steps.
    assert sum(call.startswith("decode_step") for call in model.calls) == len(tokens) - 1 == len(run.inter_token_s)


def test_every_end_of_sequence_token_ends() -> None:
    model = ScriptedModel(script=(1, 7, 2), ends=AnswerEnds(frozenset({EOS, 7})))
    assert run_staged(model, TEXT, 16).token_ids == (1, 7)


@pytest.mark.parametrize("script", [(EOS, 1), (1, EOS)])
def test_one_token_has_no_decode(script: tuple[int, ...]) -> None:
    run = run_staged(ScriptedModel(script=script), PICTURE, 1)
    assert len(run.token_ids) == 1
    assert run.ended == (script[0] == EOS)
    assert (run.decode_s, run.tpot_s, run.inter_token_s) == (None, None, ())
    assert run.vision_s is not None
    assert run.total_s == run.vision_s + run.prefill_s == run.ttft_s


def test_no_picture_has_no_vision_time() -> None:
    run = run_staged(ScriptedModel(), TEXT, 16)
    assert run.vision_s is None
    assert run.decode_s is not None
    assert run.total_s == pytest.approx(run.prefill_s + run.decode_s)
    assert run.ttft_s == run.prefill_s


def write_cuda_down(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's events, 250 ms apart, and its wait are written into the list."""

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            calls.append("|")

        def synchronize(self) -> None:
            calls.append("wait for the last mark")

        def elapsed_time(self, _later: object) -> float:
            return 250.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append(f"wait for {device}"))


def test_on_a_gpu_earlier_work_is_waited_for_before_the_first_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is still running there would count for the first stage. CUDA's events and its wait are written down."""
    model = ScriptedModel(device=torch.device("cuda"))

    write_cuda_down(model.calls, monkeypatch)
    run = run_staged(model, PICTURE, 2)
    assert model.calls == [
        "wait for cuda", "|", "encode_image", "|", "prefill features", "|", "decode_step 1", "|",
        "wait for the last mark",
    ]  # fmt: skip
    # Three spans of 250 ms.
    assert (run.vision_s, run.prefill_s, run.decode_s, run.total_s) == (0.25, 0.25, 0.25, 0.75)


def test_a_mark_of_a_model_on_two_gpus_waits_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that the second GPU was given belongs to the stage before the mark; the host waits for neither."""
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    model = ScriptedModel(device=first)
    model.devices = (first, second)  # type: ignore[attr-defined]

    class Stream:
        def __init__(self, device: object = "first") -> None:
            self.device = device

        def record_event(self) -> str:
            return f"{self.device} so far"

        def wait_event(self, event: str) -> None:
            model.calls.append(f"{self.device} after {event}")

    write_cuda_down(model.calls, monkeypatch)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    run_staged(model, TEXT, 1)
    mark = ["first after cuda:1 so far", "|"]
    assert model.calls == [
        "wait for cuda:0", "wait for cuda:1", *mark, "encode_image", "prefill None", *mark,
        "wait for the last mark",
    ]  # fmt: skip


def test_each_stage_gets_its_own_time_and_the_stages_add_up() -> None:
    model = ScriptedModel(script=(1, 2, 3, EOS), vision_s=0.06, prefill_s=0.04, decode_s=0.01)
    run = run_staged(model, PICTURE, 16)
    assert run.vision_s is not None and run.decode_s is not None and run.tpot_s is not None
    # Sleeps last at least as long as requested; how much longer depends on who else is at work.
    assert run.vision_s >= 0.06
    assert run.prefill_s >= 0.04
    assert len(run.inter_token_s) == 3
    assert all(gap >= 0.01 for gap in run.inter_token_s)
    assert run.decode_s == pytest.approx(sum(run.inter_token_s))
    assert run.tpot_s == pytest.approx(run.decode_s / 3)
    assert run.total_s == pytest.approx(run.vision_s + run.prefill_s + run.decode_s)


def test_times_of_a_run_by_hand() -> None:
    run = StagedRun((5, 6, 7), 0.25, 0.5, 0.125, 0.875, (0.0625, 0.0625), ended=False)
    assert run.tpot_s == 0.0625  # 0.125 over 2 steps
    assert run.ttft_s == 0.75


def test_generation_keeps_no_graph() -> None:
    weight = torch.ones(1, requires_grad=True)

    class Trainable(ScriptedModel):
        def _logits(self, token: int) -> torch.Tensor:
            logits = super()._logits(token) * weight
            assert not logits.requires_grad
            return logits

    model: StagedModel = Trainable()
    assert generate_greedily(model, TEXT, 2, HostMarks()) == TimedTokens((1, 2), ("prefill", "decode"))


# --- text runs ------------------------------------------------------------------------------------------------------

MAX_OUTPUT_TOKENS = 12


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return setup_distributed(TextConfig(device="cpu"))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


def plain_answers(model: Any, tokenizer: Any) -> list[list[int]]:
    """What `generate()` says to one prompt at a time; ends with end-of-sequence or after the limit."""
    answers = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        ids = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        row = model.generate(**ids, max_new_tokens=MAX_OUTPUT_TOKENS, do_sample=False)[0]
        answers.append(row[ids["input_ids"].shape[1] :].tolist())
    return answers


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    """One whose answers end early for some prompts: end-of-sequence is a token from the midst of an answer."""
    model = tiny_text_model()
    first_answers = plain_answers(model, tokenizer)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, first_answers[0][4]]
    lengths = {len(answer) for answer in plain_answers(model, tokenizer)}
    assert min(lengths) < MAX_OUTPUT_TOKENS == max(lengths)
    return model


def generated(
    model: Any, tokenizer: Any, accelerator: Accelerator, options: Mapping[str, Any], **values: Any
) -> InferenceResults:
    config = {"max_output_tokens": MAX_OUTPUT_TOKENS, "batching_options": options, "num_warmup_batches": 0, **values}
    return run_gen_inference(model, tokenizer, tokenise_prompts(PROMPTS, tokenizer), config, accelerator)


def answers_in(results: InferenceResults) -> list[list[int]]:
    return [query["output_token_ids"] for query in results["queries"]]


def test_a_text_run_ignores_ends_or_ends_at_stop_texts(model: Any, tokenizer: Any, accelerator: Accelerator) -> None:
    options = {"batch_size___fixed_batching": 5}
    natural = generated(model, tokenizer, accelerator, options)
    ignoring = generated(model, tokenizer, accelerator, options, ignore_eos=True)
    assert {query["output_tokens"] for query in ignoring["queries"]} == {MAX_OUTPUT_TOKENS}
    assert ignoring["output_text"] == natural["output_text"]
    assert [query["ended"] for query in ignoring["queries"]] == [query["ended"] for query in natural["queries"]]
    texts = natural["output_text"]
    assert texts is not None
    stop = max(texts, key=len)[2:4]
    stopped = generated(model, tokenizer, accelerator, options, stop=[stop])
    assert stopped["output_text"] == [text.partition(stop)[0] for text in texts]
    assert stopped["total_output_tokens"] < natural["total_output_tokens"]
    assert all(query["ended"] for query, text in zip(stopped["queries"], texts, strict=True) if stop in text)
    assert (stopped["decoding"]["stop"], ignoring["decoding"]["ignore_eos"]) == ([stop], True)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size___fixed_batching": 1},
        {"batch_size___fixed_batching": 2},
        {"batch_size___fixed_batching": 5},
        {"batch_size___fixed_batching": 16},
        {"adaptive_batching": True, "adaptive_max_tokens": 40},
        {"adaptive_batching": True, "adaptive_max_tokens": 1},
        {"adaptive_batching": True, "max_batch_size___adaptive_batching": 3},
    ],
)
def test_any_batches_generate_what_a_plain_loop_generates(
    model: Any, tokenizer: Any, accelerator: Accelerator, options: Mapping[str, Any]
) -> None:
    results = generated(model, tokenizer, accelerator, options)
    expected = plain_answers(model, tokenizer)
    assert answers_in(results) == expected
    assert results["output_text"] == [tokenizer.decode(answer, skip_special_tokens=True) for answer in expected]
    assert results["total_output_tokens"] == sum(map(len, expected))
    assert results["total_input_tokens"] == sum(len(tokenizer(prompt)["input_ids"]) for prompt in PROMPTS)
    assert [query["prompt_index"] for query in results["queries"]] == list(range(len(PROMPTS)))
    ended = [answer[-1] in model.generation_config.eos_token_id for answer in expected]
    assert [query["ended"] for query in results["queries"]] == ended


def test_the_embedded_model_generates_alone_what_it_generates_in_a_batch(
    accelerator: Accelerator, tokenizer: Any
) -> None:
    from_config = published_form(max_output_tokens=4, num_warmup_batches=0)
    model = AutoModelForImageTextToText.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32).eval()
    prompts = tokenise_prompts(sort_prompts_by_length(PROMPTS[:4], tokenizer), tokenizer)
    together = run_gen_inference(model, tokenizer, prompts, from_config, accelerator)
    from_config.batching_options["batch_size___fixed_batching"] = 1
    alone = run_gen_inference(model, tokenizer, prompts, from_config, accelerator)
    assert answers_in(together) == answers_in(alone)
    assert (len(together["batches"]), len(alone["batches"])) == (1, 4)


def test_warm_ups_change_nothing(model: Any, tokenizer: Any, accelerator: Accelerator) -> None:
    cold = generated(model, tokenizer, accelerator, {}, num_warmup_batches=0)
    warm = generated(model, tokenizer, accelerator, {}, num_warmup_batches=2)
    assert answers_in(warm) == answers_in(cold)
    assert len(warm["batches"]) == len(cold["batches"]) == 1


def test_drawing_is_repeatable(model: Any, tokenizer: Any, accelerator: Accelerator) -> None:
    options = {"batch_size___fixed_batching": 3}
    sampling = {"decoding_mode": "top_p", "decoder_top_p": 0.95, "decoder_temperature": 1.5}
    one, again, other = (
        generated(model, tokenizer, accelerator, options, decoder_config=sampling, random_seed=seed, **more)
        for seed, more in ((1, {}), (1, {"num_warmup_batches": 2}), (2, {}))
    )
    assert answers_in(one) == answers_in(again) != answers_in(other)
    assert one["decoding"]["random_seed"] == 1


def test_what_does_not_fit_the_context_is_refused_before_anything_runs(accelerator: Accelerator) -> None:
    model = ScriptedTextModel({})
    prompts = left_padded([[1], [1] * 60, [1]])
    fault = "prompt 1 of 60 tokens with max_output_tokens 5 is longer than the model's context of 64; lower"
    with pytest.raises(ConfigurationError, match=fault):
        run_gen_inference(model, tiny_tokenizer(), prompts, {"max_output_tokens": 5}, accelerator)  # type: ignore[arg-type]
    assert model.calls == []


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ({"input_ids": torch.ones(1, 2)}, "have no 'attention_mask'"),
        ({"input_ids": torch.ones(2), "attention_mask": torch.ones(2)}, r"input_ids \[2\] and attention_mask \[2\]"),
        ({"input_ids": torch.ones(0, 2), "attention_mask": torch.ones(0, 2)}, "at least one prompt"),
        ({"input_ids": torch.ones(1, 3), "attention_mask": torch.tensor([[1, 1, 0]])}, "not padded on the left"),
        ({"input_ids": torch.ones(1, 3), "attention_mask": torch.tensor([[1, 0, 1]])}, "not padded on the left"),
        ({"input_ids": torch.ones(1, 3), "attention_mask": torch.tensor([[0, 0, 0]])}, "not padded on the left"),
    ],
)
def test_prompts_of_another_form_are_refused(prompts: Any, message: str, accelerator: Accelerator) -> None:
    with pytest.raises(ConfigurationError, match=message):
        run_gen_inference(ScriptedTextModel({}), tiny_tokenizer(), prompts, {}, accelerator)


def test_two_processes_give_what_one_gives(
    tmp_path: Path, run_server: RunServer, accelerator: Accelerator, tokenizer: Any
) -> None:
    logs = [tmp_path / f"log{rank}" for rank in (0, 1)]
    ended = run_server.run(
        *(
            Run([str(tmp_path)], str(log), of_rank(rank, 29518), program="text_run_in_processes.py")
            for rank, log in enumerate(logs)
        )
    )
    assert [each.code for each in ended] == [0, 0], [log.read_text() for log in logs]
    two = json.loads((tmp_path / "pooled.json").read_text())
    options = {"batch_size___fixed_batching": 2}
    one = pool_inference_results([generated(tiny_text_model(), tokenizer, accelerator, options)])
    for count in ("total_input_tokens", "total_output_tokens", "num_prompts_processed", "output_text", "decoding"):
        assert two[count] == one[count], count
    assert two["output_tokens"] == one["output_tokens"].tolist()
    per_prompt = ("prompt_index", "input_tokens", "output_tokens", "ended", "output_token_ids", "output_text")
    assert [[query[key] for key in per_prompt] for query in two["queries"]] == [
        [query[key] for key in per_prompt] for query in one["queries"]
    ]
    assert [query["process_index"] for query in two["queries"]] == [0, 1, 0, 1, 0, 1, 0]
    assert [(batch["process_index"], batch["prompt_indices"]) for batch in two["batches"]] == [
        (0, [0, 2]), (0, [4, 6]), (1, [1, 3]), (1, [5]),
    ]  # fmt: skip
    times = [sum(b["inference_time_s"] for b in two["batches"] if b["process_index"] == rank) for rank in (0, 1)]
    assert two["total_inference_time_s"] == pytest.approx(max(times))
    # Each sees a GPU of its own: the first one tracks both.
    (row,) = read_windows(tmp_path / "emissions_0001.csv")
    first, second = (json.loads((tmp_path / f"energy{rank}.json").read_text()) for rank in (0, 1))
    devices = [each["origin"]["device"] for each in first["instruments"] if each["origin"]["basis"] == "counter"]
    assert (row["gpus_in_use"], devices) == (2, ["GPU-0", "GPU-1", "all"])
    assert second["gpu_counter_j"] is None and "the first process there tracks for all" in second["reason"]
    # More processes than prompts: the second has none, nothing is lost or doubled.
    assert json.loads((tmp_path / "one_prompt.json").read_text())["num_prompts_processed"] == 1
    # Only the second process had no room for its batch: all stop, with the same class of error.
    assert [(tmp_path / f"error{rank}.txt").read_text() for rank in (0, 1)] == [
        "OutOfMemory: process 1: prompt 1 of 2 tokens does not fit even alone: CUDA out of memory",
        "OutOfMemory: prompt 1 of 2 tokens does not fit even alone: CUDA out of memory",
    ]
