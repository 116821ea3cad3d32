"""Batches of one process by a scripted model: what is counted, what is halved, what is waited for."""

import time
from dataclasses import replace
from typing import Any

import pytest

from experiment_core_utils.config.text import validated
from experiment_core_utils.e_inference import WARM_UP_TOKENS, OwnPrompts, TextShard, run_shard
from experiment_core_utils.meters.instruments import Instruments
from experiment_core_utils.models.common.text_generation import TextGenerator, generation_values
from experiment_core_utils.primitives.errors import OutOfMemory, Stopped
from experiment_core_utils.primitives.interruption import StopRequest
from tests.scripted.simulated_energy import device_of, instruments_of, scripted_device
from tests.scripted.simulated_meters import ScriptedClock, SimulatedDevice
from tests.tiny_models.tiny_text_model import EOS, PAD, NumberTokenizer, ScriptedTextModel, left_padded

# The first id of a prompt chooses the answer.
SCRIPTS = {60: (1, 2, EOS), 61: (EOS,), 62: (1, 2, 3, 4), 63: (1, EOS, 5, EOS), 64: (6,)}
ROWS = [[60, 1], [61, 1, 1, 1], [62], [63, 1, 1], [64]]


def shard(model: ScriptedTextModel, first: int = 0, step: int = 1, rows: Any = ROWS, **values: Any) -> TextShard:
    batching = {"batch_size___fixed_batching": 2, **values.pop("batching_options", {})}
    config = validated({"max_output_tokens": 4, "num_warmup_batches": 0, "batching_options": batching, **values})
    prompts = left_padded(rows)
    indices = tuple(range(first, first + step * len(rows), step))
    generator = TextGenerator(model, generation_values(config, model, NumberTokenizer()), config.random_seed)
    own = OwnPrompts(indices, prompts["input_ids"], prompts["attention_mask"])
    return TextShard(generator, NumberTokenizer(), own, config, 0, 1)


def test_only_real_tokens_count() -> None:
    model = ScriptedTextModel(SCRIPTS)
    results = run_shard(shard(model, first=1, step=2), StopRequest())
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
    results = run_shard(shard(ScriptedTextModel(SCRIPTS), decode_token_to_text=False), StopRequest())
    assert results["output_text"] is None
    assert {query["output_text"] for query in results["queries"]} == {None}


def test_a_prompt_over_the_token_limit_runs_alone() -> None:
    options = {"adaptive_batching": True, "adaptive_max_tokens": 3}
    results = run_shard(shard(ScriptedTextModel(SCRIPTS), batching_options=options), StopRequest())
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
    results = run_shard(shard(model, batching_options=options, latency_simulation=waiting), StopRequest())
    # 5 -> 2 and 3; 3 -> 1 and 2.
    assert [rows for rows, _ in model.calls] == [5, 2, 3, 1, 2]
    found = [
        (batch["batch_index"], batch["prompt_indices"], batch["halvings"], batch["simulated_delay_s"])
        for batch in results["batches"]
    ]
    assert found == [(0, [0, 1], 1, 0.01), (1, [2], 2, 0.0), (2, [3, 4], 2, 0.0)]
    assert [query["batch_index"] for query in results["queries"]] == [0, 0, 1, 2, 2]
    whole = run_shard(shard(ScriptedTextModel(SCRIPTS)), StopRequest())
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
    results = run_shard(warmed, StopRequest())
    assert warm_calls == model.calls[number:][:number] and model.limits[number:] == [40] * 3
    assert results["num_prompts_processed"] == 5


def test_delays_are_waited_for_and_in_no_measured_time() -> None:
    waiting = {"simulate": True, "delay_min": 0.15, "delay_max": 0.15}
    started = time.perf_counter()
    results = run_shard(shard(ScriptedTextModel(SCRIPTS), latency_simulation=waiting), StopRequest())
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
    empty = TextShard(full.generator, NumberTokenizer(), own, full.config, 1, 2)
    empty.warm_up()
    results = run_shard(empty, StopRequest())
    assert model.calls == []
    assert (results["output_tokens"].shape, results["output_text"]) == ((0, 0), [])
    assert (results["total_inference_time_s"], results["num_prompts_processed"]) == (0.0, 0)
    assert results["tokens_per_second"] is results["queries_per_second"] is results["latency_per_query_s"] is None


class ModelOnDevice(ScriptedTextModel):
    """Each batch runs for 0.5 s at 300 W on a simulated device, whose clock stands still otherwise."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__(SCRIPTS)
        self.gpu = device

    def generate(self, *arguments: Any, **keywords: Any) -> Any:
        self.gpu.run(0.5, 300.0)
        return super().generate(*arguments, **keywords)


def with_power(using: Instruments, model: ScriptedTextModel) -> TextShard:
    plain = shard(model)
    return replace(plain, generator=replace(plain.generator, clock=using.clock), power=using)


def test_a_batch_has_its_energy_from_the_power_trace_and_a_query_its_part_by_tokens() -> None:
    device = scripted_device()
    results = run_shard(with_power(instruments_of(device, sample_every_s=0.01), ModelOnDevice(device)), StopRequest())
    for batch in results["batches"]:
        assert batch["energy_j"] == pytest.approx(150.0, rel=0.02)
        assert batch["energy_bound_j"] is not None and abs(batch["energy_j"] - 150.0) <= batch["energy_bound_j"]
        assert (batch["energy_method"], batch["energy_basis"], batch["energy_reason"]) == (
            "apportioned", "instant_power", None,
        )  # fmt: skip
    first, second, third, fourth, fifth = (query["energy_j"] or 0.0 for query in results["queries"])
    joules = [float(batch["energy_j"] or 0.0) for batch in results["batches"]]
    # Tokens in and out: 2 + 3 and 4 + 1; 1 + 4 and 3 + 2; 1 + 1.
    assert (first, second) == (joules[0] * 5 / 10, joules[0] * 5 / 10)
    assert third + fourth == pytest.approx(joules[1]) and third == joules[1] * 5 / 10
    assert fifth == joules[2]


def test_two_gpus_of_one_process_add_up() -> None:
    device = scripted_device()
    other = device_of(device.clock, 50.0, "GPU-34")
    using = instruments_of(device, other, sample_every_s=0.01)
    results = run_shard(with_power(using, ModelOnDevice(device)), StopRequest())
    # 0.5 s at 300 W and at 50 W.
    assert results["batches"][0]["energy_j"] == pytest.approx(175.0, rel=0.02)


def test_without_a_power_reading_there_is_no_energy_and_a_reason() -> None:
    for power, output in (
        (None, "energy was not requested"),
        (Instruments(ScriptedClock(), (), (), missing={"GPU energy": "torch sees no GPU"}), "torch sees no GPU"),
    ):
        results = run_shard(replace(shard(ScriptedTextModel(SCRIPTS)), power=power), StopRequest())
        assert {batch["energy_j"] for batch in results["batches"]} == {None}
        assert {query["energy_j"] for query in results["queries"]} == {None}
        assert all(output in str(batch["energy_reason"]) for batch in results["batches"])


def test_a_gpu_that_vanishes_leaves_a_reason() -> None:
    device = scripted_device(vanishes_at_s=5.5)
    results = run_shard(with_power(instruments_of(device), ModelOnDevice(device)), StopRequest())
    assert results["batches"][-1]["energy_j"] is None
    assert "GPU is lost" in str(results["batches"][-1]["energy_reason"])


def test_power_is_read_no_more_after_a_failure() -> None:
    device = scripted_device()
    using = instruments_of(device)
    plain = with_power(using, ScriptedTextModel(SCRIPTS, largest_batch=1))
    with pytest.raises(OutOfMemory):
        run_shard(plain, StopRequest())
    readings = device.num_readings
    device.clock.sleep(1.0)
    assert device.num_readings == readings
