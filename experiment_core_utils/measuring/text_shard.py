"""The part of a text run that one process does, batch by batch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

import numpy as np
import torch

from experiment_core_utils.config.text import Batching, LatencySimulation, TextConfig
from experiment_core_utils.engines.answer_ends import AnswerEnds
from experiment_core_utils.engines.cuda_graphs import ADVICE
from experiment_core_utils.measuring.text_generator import GeneratedBatch, TextGenerator
from experiment_core_utils.meters.power import NOT_REQUESTED, no_energy
from experiment_core_utils.models.common.describe import computing_dtype
from experiment_core_utils.primitives.device import release_cached_memory
from experiment_core_utils.primitives.errors import EngineRefused, GenerationFailed, OutOfMemory, first_line
from experiment_core_utils.primitives.finite_logits import LogitsNotFinite, remedy
from experiment_core_utils.primitives.interruption import StopRequest
from experiment_core_utils.records.requests import TokenisedPrompts
from experiment_core_utils.records.text import BatchRecord, QueryRecord

WARM_UP_TOKENS = 16
# When a batch began and ended, by its generator's clock.
Window = tuple[float, float]


@dataclass(frozen=True)
class PlannedBatch:
    """The prompts that run together."""

    places: tuple[int, ...]  #: of its prompts among those given, ascending
    over_token_limit: bool = False  #: a single prompt that is longer than `adaptive_max_tokens`: it runs alone
    halvings: int = 0  #: how often a larger batch ran out of memory before it

    def halves(self) -> tuple["PlannedBatch", "PlannedBatch"]:
        """The batch's first and second half, the first the smaller one of an odd number. At least 2 prompts."""
        middle = len(self.places) // 2
        parts = (self.places[:middle], self.places[middle:])
        first, second = (PlannedBatch(part, self.over_token_limit, self.halvings + 1) for part in parts)
        return first, second


def plan_batches(lengths: Sequence[int], options: Batching) -> tuple[PlannedBatch, ...]:
    """Batches of neighbouring prompts in the order given; every prompt is in one batch.

    Fixed batches contain `batch_size___fixed_batching` prompts, the last one the rest. An adaptive batch takes the next
    prompt as long as (prompts x longest of them) <= `adaptive_max_tokens` and it contains no more than
    `max_batch_size___adaptive_batching`. A prompt that is longer than the limit runs alone. Prompts in order of their
    length make the least padding.

    Args:
        lengths: true tokens of each prompt.
    """
    if not options.adaptive_batching:
        size = options.batch_size___fixed_batching
        starts = range(0, len(lengths), size)
        return tuple(PlannedBatch(tuple(range(start, min(start + size, len(lengths))))) for start in starts)
    limit = options.adaptive_max_tokens
    return tuple(
        PlannedBatch(places, over_token_limit=len(places) * max(lengths[place] for place in places) > limit)
        for places in _adaptive_places(lengths, limit, options.max_batch_size___adaptive_batching)
    )


def _adaptive_places(lengths: Sequence[int], most_tokens: int, most_prompts: int) -> Iterator[tuple[int, ...]]:
    places: list[int] = []
    longest = 0
    for place, length in enumerate(lengths):
        grown = max(longest, length)
        if places and (len(places) == most_prompts or (len(places) + 1) * grown > most_tokens):
            yield tuple(places)
            places, grown = [], length
        places.append(place)
        longest = grown
    if places:
        yield tuple(places)


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

    def stages_refusal(self) -> str | None:
        """Why engines or graphs that would run the prompts are refused, tried with the longest prompt and with the
        batch that takes the most memory; None where they are not, and where `generate()` runs all.

        Raises:
            KnobDidNotAct: their tokens are not those of `generate()`.
            GenerationFailed: the logits of the longest prompt are not finite.
        """
        lengths, most, generator = self.prompts.lengths, self.config.max_output_tokens, self.generator
        if not generator.runs_stages or not lengths:
            return None
        batches = [batch.places for batch in self._planned() if len(batch.places) > 1]
        if batches and generator.ends.stop:
            are_open = {self._ends_after(row).is_thinking_open for row in self.prompts.input_ids}
            if len(are_open) > 1:
                return "some of the prompts end inside thinking, where a stop text ends no answer"

        def positions(places: tuple[int, ...]) -> int:
            return len(places) * (max(lengths[place] for place in places) + most)

        longest, batch_size = int(np.argmax(lengths)), max(map(len, batches), default=1)
        try:
            for places in ((longest,), *sorted(batches, key=positions)[-1:]):
                generator.prove_stages(self.prompts.together(places), batch_size, most)
        except LogitsNotFinite:
            self._refuse_not_finite(longest)
        except (EngineRefused, OutOfMemory) as error:
            return str(error).removesuffix(ADVICE)
        return None

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
        except LogitsNotFinite as error:
            self._refuse_not_finite(batch.places[error.row])
        else:
            yield batch, generated
            return
        # Only here, after the handler, is nothing left that holds the memory of the attempt.
        release_cached_memory(self.generator.device)
        if len(batch.places) == 1 or not self.config.batching_options.halve_on_out_of_memory:
            raise OutOfMemory(self._too_large(batch, prompts["input_ids"].shape[1], out_of_memory_hint))
        for half in batch.halves():
            yield from self._generated(half, max_new_tokens)

    def _refuse_not_finite(self, place: int) -> NoReturn:
        advice = remedy(computing_dtype(self.generator.model), "fp_precision ")
        raise GenerationFailed(f"logits are not finite at prompt {self.prompts.name(place)} ({advice})")

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
            padded_input_tokens=generated.prompt_positions,
            output_tokens=sum(answer["output_tokens"] for answer in answers),
            computed_output_tokens=len(answers) * max(map(len, generated.token_ids)),
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
        for query in queries:
            ends, token_ids = self._ends_after(prompts[query["prompt_index"]]), query["output_token_ids"]
            query["output_text"], query["answer_text"] = ends.raw_text(token_ids), ends.answer(token_ids)
            query["thinking_tokens"] = ends.thinking_tokens(token_ids)
        return queries

    def _ends_after(self, prompt_ids: torch.Tensor) -> AnswerEnds:
        return self.generator.ends.after(prompt_ids.tolist())
