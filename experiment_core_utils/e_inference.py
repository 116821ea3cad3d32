"""In: a request and a setting in force, or all prompts of a text run; out: tokens and times from marks of the run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from experiment_core_utils.config.text import LatencySimulation, TextConfig, validated
from experiment_core_utils.engines.answer_ends import AnswerEnds
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.meters.power import NOT_REQUESTED, no_energy
from experiment_core_utils.models.common.describe import computing_dtype
from experiment_core_utils.models.common.preferences import preferences_of, values_of
from experiment_core_utils.models.common.text_generation import (
    GeneratedBatch,
    PlannedBatch,
    TextGenerator,
    check_context,
    describe_decoding,
    generation_values,
    plan_batches,
    results_of_records,
    text_ends,
)
from experiment_core_utils.models.interface import Runnable, devices_of
from experiment_core_utils.primitives.clock import Clock, HostClock
from experiment_core_utils.primitives.collectives import all_or_raise
from experiment_core_utils.primitives.device import Marks, new_marks, release_cached_memory, synchronize
from experiment_core_utils.primitives.errors import ConfigurationError, GenerationFailed, OutOfMemory, first_line
from experiment_core_utils.primitives.finite_logits import remedy
from experiment_core_utils.primitives.interruption import StopRequest
from experiment_core_utils.records.requests import (
    BatchedAnswer,
    PreparedRequest,
    SpanName,
    StagedRun,
    TimedTokens,
    TokenisedPrompts,
)
from experiment_core_utils.records.settings import MeasuredSample
from experiment_core_utils.records.text import BatchRecord, InferenceResults, QueryRecord
from experiment_core_utils.tasks.content import digest_of
from experiment_core_utils.tasks.interface import Sample
from experiment_core_utils.tasks.sampling import shard_of_process


def simulated_delays(num_batches: int, simulation: LatencySimulation, seed: int, process_index: int) -> list[float]:
    """Seconds to wait before each batch.

    Each batch waits a uniform time in [`delay_min`, `delay_max`]. With `simulate_burst`, the first batch of every burst
    of `burst_size` but the first waits `burst_interval` longer. All 0 where nothing is simulated.

    The n-th delay depends on the seed, the process and n only: `numpy.random.RandomState([seed, process_index])`,
    whose stream numpy keeps for ever.
    """
    if not simulation.simulate:
        return [0.0] * num_batches
    draws = np.random.RandomState([seed, process_index])
    delays = draws.uniform(simulation.delay_min, simulation.delay_max, num_batches)
    if simulation.simulate_burst:
        delays[simulation.burst_size :: simulation.burst_size] += simulation.burst_interval
    return delays.tolist()


WARM_UP_TOKENS = 16
# When a batch began and ended, by its generator's clock.
Window = tuple[float, float]


@dataclass(frozen=True)
class OwnPrompts:
    """Prompts of one process."""

    indices: tuple[int, ...]  #: their places among all prompts, ascending
    #: input_ids, attention_mask: [N, T] on the host, padded on the left
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    names: Sequence[int] | None = None  #: what messages call each of all prompts; None for its place

    def name(self, place: int) -> int:
        """What messages call the prompt at this place among those of the process."""
        return self.indices[place] if self.names is None else self.names[self.indices[place]]

    @cached_property
    def lengths(self) -> list[int]:
        """True tokens of each."""
        return [int(length) for length in self.attention_mask.sum(dim=1)]

    def together(self, places: Sequence[int]) -> TokenisedPrompts:
        """Some of the prompts, padded no further than to the longest."""
        mask = self.attention_mask[list(places)]
        longest = int(mask.sum(dim=1).max())
        return TokenisedPrompts(input_ids=self.input_ids[list(places)][:, -longest:], attention_mask=mask[:, -longest:])


@dataclass(frozen=True)
class TextShard:
    """The part of a text run that one process does."""

    generator: TextGenerator
    prompts: OwnPrompts
    config: TextConfig
    process_index: int
    num_processes: int

    def warm_up(self) -> None:
        """Run the requested number of batches, from the first on, without a trace in the results.

        On a GPU they run to their end, by default all of them: libraries choose and build kernels for every new shape,
        and each token's is new. On the CPU the first batch's first tokens are enough.
        """
        is_gpu = self.generator.device.type == "cuda"
        planned, wanted = self._planned(), self.config.num_warmup_batches
        number = (len(planned) if is_gpu else 1) if wanted is None else wanted
        most = self.config.max_output_tokens
        for batch in planned[:number]:
            for _unmeasured in self._generated(batch, most if is_gpu else min(WARM_UP_TOKENS, most)):
                pass

    def run(self, stop: StopRequest) -> tuple[list[QueryRecord], list[BatchRecord], list[Window]]:
        """Run every batch once, each after its simulated delay; the records, without energy, and each batch's window.

        Raises:
            OutOfMemory: a batch does not fit.
            GenerationFailed: the model broke off, or the logits of a prompt are not finite.
            Stopped: a stop was requested.
        """
        planned = self._planned()
        simulation, seed = self.config.latency_simulation, self.config.random_seed
        delays = simulated_delays(len(planned), simulation, seed, self.process_index)
        batches: list[BatchRecord] = []
        queries: list[QueryRecord] = []
        windows: list[Window] = []
        for wanted, delay_s in zip(planned, delays, strict=True):
            stop.raise_if_requested("between two batches")
            stop.sleep(delay_s)
            for part, (batch, generated) in enumerate(self._generated(wanted, self.config.max_output_tokens)):
                answers = self._queries(batch, generated, batch_index=len(batches))
                batches.append(self._record(batch, generated, answers, 0.0 if part else delay_s))
                queries.extend(answers)
                windows.append((generated.started_s, generated.ended_s))
        return self._in_words(queries), batches, windows

    def _planned(self) -> tuple[PlannedBatch, ...]:
        return plan_batches(self.prompts.lengths, self.config.batching_options)

    def _generated(self, batch: PlannedBatch, max_new_tokens: int) -> Iterator[tuple[PlannedBatch, GeneratedBatch]]:
        """The batch, or, where that is allowed and needed, its parts that fit."""
        prompts = self.prompts.together(batch.places)
        try:
            generated = self.generator.generate(prompts, self.prompts.indices[batch.places[0]], max_new_tokens)
        except OutOfMemory as error:
            out_of_memory_hint = first_line(error)
        else:
            self._refuse_not_finite(batch, generated)
            yield batch, generated
            return
        # Only here, after the handler, is nothing left that holds the memory of the attempt.
        release_cached_memory(self.generator.device)
        if len(batch.places) == 1 or not self.config.batching_options.halve_on_out_of_memory:
            raise OutOfMemory(self._too_large(batch, prompts["input_ids"].shape[1], out_of_memory_hint))
        for half in batch.halves():
            yield from self._generated(half, max_new_tokens)

    def _refuse_not_finite(self, batch: PlannedBatch, generated: GeneratedBatch) -> None:
        if generated.rows_not_finite:
            prompt = self.prompts.name(batch.places[generated.rows_not_finite[0]])
            advice = remedy(computing_dtype(self.generator.model), "fp_precision ")
            raise GenerationFailed(f"logits are not finite at prompt {prompt} ({advice})")

    def _too_large(self, batch: PlannedBatch, longest: int, out_of_memory_hint: str) -> str:
        first, last = (self.prompts.name(batch.places[end]) for end in (0, -1))
        if len(batch.places) == 1:
            return f"prompt {first} of {longest} tokens does not fit even alone: {out_of_memory_hint}"
        return (
            f"the batch of {len(batch.places)} prompts x {longest} tokens (prompts {first} to {last}) does not fit: "
            f"{out_of_memory_hint}; make batches smaller or set batching_options.halve_on_out_of_memory"
        )

    def _queries(self, batch: PlannedBatch, generated: GeneratedBatch, batch_index: int) -> list[QueryRecord]:
        lengths = self.prompts.lengths
        ends_of_rows = [self._ends_after(self.prompts.input_ids[place]) for place in batch.places]
        answers = [
            (ends.generated(row), ends.up_to_end(row)[1])
            for ends, row in zip(ends_of_rows, generated.token_ids, strict=True)
        ]
        return [
            QueryRecord(
                prompt_index=self.prompts.indices[place],
                process_index=self.process_index,
                batch_index=batch_index,
                input_tokens=lengths[place],
                output_tokens=len(token_ids),
                ended=ended,
                output_token_ids=token_ids,
                output_text=None,
                answer_text=None,
                thinking_tokens=None,
                energy_j=None,
            )
            for place, (token_ids, ended) in zip(batch.places, answers, strict=True)
        ]

    def _record(
        self, batch: PlannedBatch, generated: GeneratedBatch, answers: Sequence[QueryRecord], delay_s: float
    ) -> BatchRecord:
        return BatchRecord(
            process_index=self.process_index,
            batch_index=answers[0]["batch_index"],
            prompt_indices=[answer["prompt_index"] for answer in answers],
            inference_time_s=generated.inference_time_s,
            ttft_s=generated.ttft_s,
            inter_token_s=generated.inter_token_s,
            input_tokens=sum(answer["input_tokens"] for answer in answers),
            padded_input_tokens=len(answers) * max(answer["input_tokens"] for answer in answers),
            output_tokens=sum(answer["output_tokens"] for answer in answers),
            computed_output_tokens=len(answers) * len(generated.token_ids[0]),
            simulated_delay_s=delay_s,
            halvings=batch.halvings,
            over_token_limit=batch.over_token_limit,
            # Until i puts in what was measured; `run_gen_inference` alone measures no energy.
            **no_energy(NOT_REQUESTED),
        )

    def _in_words(self, queries: list[QueryRecord]) -> list[QueryRecord]:
        """Records with their texts up to their ends, where that was requested."""
        if not self.config.decode_token_to_text:
            return queries
        prompts = dict(zip(self.prompts.indices, self.prompts.input_ids, strict=True))
        return [_in_words(query, self._ends_after(prompts[query["prompt_index"]])) for query in queries]

    def _ends_after(self, prompt_ids: torch.Tensor) -> AnswerEnds:
        return self.generator.ends.after(prompt_ids.tolist())


def _in_words(query: QueryRecord, ends: AnswerEnds) -> QueryRecord:
    token_ids = query["output_token_ids"]
    return {
        **query,
        "output_text": ends.raw_text(token_ids),
        "answer_text": ends.answer(token_ids),
        "thinking_tokens": ends.thinking_tokens(token_ids),
    }


def run_staged(
    model: Runnable, inputs: Mapping[str, Any], max_new_tokens: int, marks: Marks | None = None
) -> StagedRun:
    """Greedy decoding of one request, with a mark between the stages.

    Marks: request handed over | features ready | first token | second token | … | last token. The choice of a token
    and its copy to the host belong to the interval that it ends. The knobs must be in force already. A model that
    encodes pictures somewhere inside its prefill has marks around that; its prefill is what lies before and behind.

    Args:
        inputs: tensors on the model's device.
        marks: the first of which stands for the hand-over; None for new ones.
    """
    devices = devices_of(model)
    synchronize(*devices)
    marks = new_marks(*devices) if marks is None else marks
    generated = model.generate_timed(inputs, max_new_tokens, marks)
    return staged_run(generated, marks.seconds(), model.ends.up_to_end(generated.token_ids)[1])


def staged_run(generated: TimedTokens, seconds: Sequence[float], ended: bool) -> StagedRun:
    """Name the intervals between the marks; their sum is the total by construction."""
    spans = list(zip(generated.spans, seconds, strict=True))

    def of(stage: SpanName) -> list[float]:
        return [span_s for name, span_s in spans if name == stage]

    def whole(stage: SpanName) -> float | None:
        return sum(of(stage)) if stage in generated.spans else None

    return StagedRun(
        token_ids=generated.token_ids,
        vision_s=whole("vision"),
        prefill_s=whole("prefill"),
        decode_s=whole("decode"),
        total_s=sum(seconds),
        inter_token_s=tuple(of("decode")) if generated.is_by_token else (),
        ended=ended,
        first_token_s=whole("first_token"),
        prompt_tokens=generated.prompt_tokens,
        hidden_tokens=generated.hidden_tokens,
        served=generated.served,
    )


def run_gen_inference(
    model: Any,
    tokeniser: Any,
    tokenised_prompts: TokenisedPrompts,
    experiment_config: Any,
    accelerator: Accelerator,
    stop: StopRequest | None = None,
) -> InferenceResults:
    """What this process generates: of all prompts every `num_processes`-th one from its own rank on, batch by batch.

    The processes wait for each other before the first measured batch (warm-ups are done by then) and after the last
    one; an error in one of them is raised in all. Batches contain neighbours in the order given, each padded to its own
    longest prompt. Measured is `generate()`, from the prompts on the device to the tokens on the host: neither
    simulated waiting, nor decoding to text, nor attempts that ran out of memory. Only real tokens count: no padding,
    nothing after the first end-of-sequence, which itself counts. See `TextGenerator` for what drawn tokens depend on.

    Before, batches are warmed up as `TextShard.warm_up` says.

    Args:
        model: with transformers' `generate()`; what `accelerator.prepare` made of it will do.
        tokenised_prompts: all prompts, the same in every process, padded on the left.
        experiment_config: anything that `validated` takes.
        stop: checked between two batches and while waiting; None never stops.

    Raises:
        ConfigurationError: a value is not allowed, the prompts are not as above, or one of them together with
            `max_output_tokens` is longer than the model's context; nothing has run then.
        OutOfMemory: a batch does not fit (one prompt alone, with `halve_on_out_of_memory`).
        GenerationFailed: the model broke off, or the logits of a prompt are not finite.
        Stopped: a stop was requested.
        WorkerLost: another process is gone or late.
    """
    shard = prepare_gen_inference(model, tokeniser, tokenised_prompts, experiment_config, accelerator)
    return run_prepared(shard, accelerator, stop)[0]


def prepare_gen_inference(
    model: Any,
    tokeniser: Any,
    tokenised_prompts: TokenisedPrompts,
    experiment_config: Any,
    accelerator: Accelerator,
    clock: Clock | None = None,
    names: Sequence[int] | None = None,
) -> TextShard:
    """Validate and warm up everything that `run_gen_inference` runs, so that a meter may open its window.

    Args:
        clock: of the batches' windows; None takes the host's.
        names: what messages call the prompts; None for their places.
    """

    def warmed_up() -> TextShard:
        config = validated(experiment_config)
        ids, mask = _checked_prompts(tokenised_prompts)
        own = accelerator.unwrap_model(model)
        check_context(TokenisedPrompts(input_ids=ids, attention_mask=mask), config.max_output_tokens, own.config)
        places = shard_of_process(range(len(ids)), accelerator.process_index, accelerator.num_processes)
        preferences = preferences_of(values_of(own.generation_config), tokeniser, config.model_name)
        values = generation_values(config, own, tokeniser, preferences)
        ends = text_ends(config, own, tokeniser, preferences)[0]
        generator = TextGenerator(own, values, config.random_seed, ends, clock or HostClock(), preferences)
        prompts = OwnPrompts(places, ids[list(places)], mask[list(places)], names)
        shard = TextShard(generator, prompts, config, accelerator.process_index, accelerator.num_processes)
        shard.warm_up()
        return shard

    return all_or_raise(warmed_up, accelerator)


def run_prepared(
    shard: TextShard, accelerator: Accelerator, stop: StopRequest | None = None
) -> tuple[InferenceResults, list[Window]]:
    """Measure every batch of a prepared shard; the results, without energy, and the window of each batch."""
    return all_or_raise(lambda: run_shard(shard, stop or StopRequest()), accelerator)


def run_shard(shard: TextShard, stop: StopRequest) -> tuple[InferenceResults, list[Window]]:
    """What one process generates of its own prompts, and when its batches ran; errors as `TextShard.run`."""
    queries, batches, windows = shard.run(stop)
    generator, preferences = shard.generator, shard.generator.preferences
    decoding = {
        **describe_decoding(shard.config, generator.generation),
        "stop": list(generator.ends.stop),
        "ignore_eos": generator.ends.are_ignored,
        "preferences_kept": dict(preferences.kept),
        "preferences_left_out": dict(preferences.left_out),
    }
    return results_of_records(queries, batches, decoding, shard.process_index, shard.num_processes), windows


def _checked_prompts(tokenised_prompts: TokenisedPrompts) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask on the host; raises ConfigurationError unless they are [N, T] with the padding on the left."""
    try:
        ids, mask = (torch.as_tensor(tokenised_prompts[name]).cpu() for name in ("input_ids", "attention_mask"))
    except KeyError as error:
        raise ConfigurationError(f"the tokenised prompts have no {error}; make them with tokenise_prompts") from None
    if ids.dim() != 2 or ids.shape != mask.shape or not ids.numel():
        raise ConfigurationError(
            f"input_ids {list(ids.shape)} and attention_mask {list(mask.shape)} must both be [prompts, tokens] and "
            "contain at least one prompt; make them with tokenise_prompts"
        )
    if not (mask[:, 1:] >= mask[:, :-1]).all() or not mask[:, -1].all():
        raise ConfigurationError("the prompts are not padded on the left; make them with tokenise_prompts")
    return ids, mask


def _output_of(model: Runnable, run: StagedRun) -> tuple[object, ...]:
    """What is the same in runs of one output: its ids, or where a server sends none its text, length and end."""
    if run.first_token_s is None:
        return run.token_ids
    return model.decode_text(run.token_ids), len(run.token_ids), run.ended


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
    return MeasuredSample(
        sample_id=sample.sample_id,
        shape=shape,
        runs=runs,
        outputs_identical=len({_output_of(model, run) for run in runs}) == 1 if runs else None,
        host_s={} if transfer_s is None else {"transfer_s": transfer_s},
        prediction=prediction,
        flops=model.count_flops(setting, shape, len(first.token_ids)),
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
    )
