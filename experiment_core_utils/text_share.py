"""In: one process's prompts and a generator; out: what it generated, batch after batch, with every batch's record."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from experiment_core_utils.apportioned_energy import (
    NOT_ASKED,
    energy_of_part,
    no_energy,
    share_of_query,
    why_no_power,
)
from experiment_core_utils.meters.instruments import Instruments
from experiment_core_utils.primitives.arrivals import simulated_delays
from experiment_core_utils.primitives.device import release_cached_memory
from experiment_core_utils.primitives.energy_records import PowerTrace
from experiment_core_utils.primitives.errors import OutOfMemory, first_line
from experiment_core_utils.primitives.interruption import StopRequest
from experiment_core_utils.primitives.records import BatchRecord, QueryRecord, TokenisedPrompts
from experiment_core_utils.primitives.text_batches import PlannedBatch, plan_batches, up_to_end
from experiment_core_utils.primitives.text_config import TextConfig
from experiment_core_utils.text_generation import GeneratedBatch, TextGenerator, describe_decoding

WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class OwnPrompts:
    """Prompts of one process.

    Attributes:
        indices: their places among all prompts, ascending.
        input_ids, attention_mask: [N, T] on the host, padded on the left.
    """

    indices: tuple[int, ...]
    input_ids: torch.Tensor
    attention_mask: torch.Tensor

    @cached_property
    def lengths(self) -> list[int]:
        """True tokens of each."""
        return [int(length) for length in self.attention_mask.sum(dim=1)]

    def together(self, places: Sequence[int]) -> TokenisedPrompts:
        """Some of them, padded no further than to the longest."""
        mask = self.attention_mask[list(places)]
        longest = int(mask.sum(dim=1).max())
        return TokenisedPrompts(input_ids=self.input_ids[list(places)][:, -longest:], attention_mask=mask[:, -longest:])


@dataclass(frozen=True)
class TextShare:
    """The part of a text run that one process does.

    Attributes:
        power: read beside the run, for the energy of its batches, on the generator's clock; None where energy was not
            asked for.
    """

    generator: TextGenerator
    tokeniser: Any
    prompts: OwnPrompts
    config: TextConfig
    process_index: int
    num_processes: int
    power: Instruments | None = None

    def warm_up(self) -> None:
        """As many batches as asked for, from the first on, without a trace in the results.

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

    @property
    def decoding(self) -> dict[str, Any]:
        """The decoding in force, for the record."""
        return describe_decoding(self.config, self.generator.generation)

    def run(self, stop: StopRequest) -> tuple[list[QueryRecord], list[BatchRecord]]:
        """Run every batch once, each after its simulated delay; a thread reads power beside them.

        Raises:
            OutOfMemory: a batch does not fit.
            Stopped: someone asked for it.
        """
        sampler = None
        if self.power is not None and self.power.probes:
            sampler = self.power.power_sampler()
            sampler.start()
        try:
            batches, queries, windows = self._run(stop)
        finally:
            traces = sampler.stop() if sampler is not None else ()
        self._apportion(traces, batches, queries, windows)
        return self._in_words(queries), batches

    def _run(self, stop: StopRequest) -> tuple[list[BatchRecord], list[QueryRecord], list[tuple[float, float]]]:
        """The records, without energy, and the window of each batch."""
        planned = self._planned()
        simulation, seed = self.config.latency_simulation, self.config.random_seed
        delays = simulated_delays(len(planned), simulation, seed, self.process_index)
        batches: list[BatchRecord] = []
        queries: list[QueryRecord] = []
        windows: list[tuple[float, float]] = []
        for wanted, delay_s in zip(planned, delays, strict=True):
            stop.raise_if_asked("between two batches")
            stop.sleep(delay_s)
            for part, (batch, generated) in enumerate(self._generated(wanted, self.config.max_output_tokens)):
                answers = self._queries(batch, generated, batch_index=len(batches))
                batches.append(self._record(batch, generated, answers, 0.0 if part else delay_s))
                queries.extend(answers)
                windows.append((generated.begun_s, generated.ended_s))
        return batches, queries, windows

    def _apportion(
        self,
        traces: Sequence[PowerTrace],
        batches: list[BatchRecord],
        queries: list[QueryRecord],
        windows: Sequence[tuple[float, float]],
    ) -> None:
        """Fill in the energies."""
        reason = NOT_ASKED if self.power is None else why_no_power(self.power)
        for batch, window in zip(batches, windows, strict=True):
            batch.update(energy_of_part(traces, *window, reason))
        for query in queries:
            batch = batches[query["batch_index"]]
            tokens = query["input_tokens"] + query["output_tokens"]
            query["energy_j"] = share_of_query(
                batch["energy_j"], tokens, batch["input_tokens"] + batch["output_tokens"]
            )

    def _planned(self) -> tuple[PlannedBatch, ...]:
        return plan_batches(self.prompts.lengths, self.config.batching_options)

    def _generated(self, batch: PlannedBatch, max_new_tokens: int) -> Iterator[tuple[PlannedBatch, GeneratedBatch]]:
        """The batch, or, where that is allowed and needed, its parts that fit."""
        prompts = self.prompts.together(batch.places)
        try:
            generated = self.generator.generate(prompts, self.prompts.indices[batch.places[0]], max_new_tokens)
        except OutOfMemory as error:
            no_room = first_line(error)
        else:
            yield batch, generated
            return
        # Only here, after the handler, is nothing left that holds the memory of the attempt.
        release_cached_memory(self.generator.device)
        if len(batch.places) == 1 or not self.config.batching_options.halve_on_out_of_memory:
            raise OutOfMemory(self._too_large(batch, prompts["input_ids"].shape[1], no_room))
        for half in batch.halves():
            yield from self._generated(half, max_new_tokens)

    def _too_large(self, batch: PlannedBatch, longest: int, no_room: str) -> str:
        first, last = (self.prompts.indices[batch.places[end]] for end in (0, -1))
        if len(batch.places) == 1:
            return f"prompt {first} of {longest} tokens does not fit even alone: {no_room}"
        return (
            f"the batch of {len(batch.places)} prompts x {longest} tokens (prompts {first} to {last}) does not fit: "
            f"{no_room}; make batches smaller or set batching_options.halve_on_out_of_memory"
        )

    def _queries(self, batch: PlannedBatch, generated: GeneratedBatch, batch_index: int) -> list[QueryRecord]:
        lengths = self.prompts.lengths
        answers = [up_to_end(row, self.generator.eos_token_ids) for row in generated.token_ids]
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
            **no_energy(None),
        )

    def _in_words(self, queries: list[QueryRecord]) -> list[QueryRecord]:
        """With their texts, without special tokens, where that was asked for."""
        if not self.config.decode_token_to_text or not queries:
            return queries
        texts = self.tokeniser.batch_decode([query["output_token_ids"] for query in queries], skip_special_tokens=True)
        return [{**query, "output_text": text} for query, text in zip(queries, texts, strict=True)]
