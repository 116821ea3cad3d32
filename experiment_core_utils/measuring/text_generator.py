"""Text generation by a causal language model, with the time of each token.

Single requests run by the stages of a knob run's timed samples where there are any; all others by `generate()`.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, StoppingCriteriaList

from experiment_core_utils.engines.answer_ends import AnswerEnds, stopping_criteria
from experiment_core_utils.engines.cuda_graphs import ADVICE
from experiment_core_utils.models.common.preferences import NO_PREFERENCES, Preferences
from experiment_core_utils.models.common.text_generation import TokenMarks, only_values_of
from experiment_core_utils.models.interface import StagedModel, own_setting
from experiment_core_utils.primitives.clock import Clock, HostClock
from experiment_core_utils.primitives.device import new_marks, out_of_memory_named, synchronize
from experiment_core_utils.primitives.errors import (
    EngineRefused,
    GenerationFailed,
    ProfilerError,
    described,
    raise_if_device_is_lost,
)
from experiment_core_utils.primitives.finite_logits import logits_watched
from experiment_core_utils.records.requests import TokenisedPrompts


@dataclass(frozen=True)
class GeneratedBatch:
    """The tokens and times of one batch."""

    token_ids: list[list[int]]  #: [B][n] as generated, what comes after an end-of-sequence included
    inference_time_s: float  #: prompts on the device -> all tokens on the host
    #: -> first token of every row; None where the model's own `generate()` does not report single tokens
    ttft_s: float | None
    inter_token_s: list[float]  #: from each token to the next
    #: started_s, ended_s: the same window by the host's clock, the device synchronised at both ends
    started_s: float
    ended_s: float
    #: rows of which the logits of a token were not finite, so that their text means nothing
    rows_not_finite: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class TextGenerator:
    """Generates text batch by batch, by the values of `generation` alone.

    Drawn tokens depend on `random_seed`, the index of the batch's first prompt, which prompts are in the batch and how
    far they are padded, the model with its precision, the kind of device and the versions of torch and transformers.
    They do not depend on the batches before or on warm-ups, and on the number of processes only where that changes
    which prompts are in one batch. The global random state is afterwards as it was before.

    Args:
        model: with `generate()`, not wrapped for distribution.
        clock: that of the power readings taken beside.
        ends: what ends an answer; see `text_ends`.
        preferences: of the checkpoint, applied to each row without its padding.
        staged: of the same model, what runs single requests by engines or graphs; None where `generate()` runs all.
        eager_reason: why it is None.
    """

    model: Any
    generation: GenerationConfig
    random_seed: int
    ends: AnswerEnds
    clock: Clock = field(default_factory=HostClock)
    preferences: Preferences = NO_PREFERENCES
    staged: StagedModel | None = None
    eager_reason: str | None = None

    @property
    def runs_stages(self) -> bool:
        """Whether engines or graphs run the requests, which are batches of one prompt."""
        return self.staged is not None and self.staged.has_next_way

    @property
    def execution(self) -> dict[str, str | None]:
        """`execution` as in a knob run, `eager` for the model's own `generate()`, and `execution_reason`."""
        if self.staged is None:
            return {"execution": "eager", "execution_reason": self.eager_reason}
        facts = self.staged.describe()
        return {name: facts[name] for name in ("execution", "execution_reason")}

    @property
    def device(self) -> torch.device:
        """The device of prompts: that of the input embeddings where a model is spread over devices."""
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    def generate(self, prompts: TokenisedPrompts, first_index: int, max_new_tokens: int) -> GeneratedBatch:
        """Tokens and times of one batch.

        Args:
            prompts: on the host; their way to the device is not timed.
            first_index: of the batch's first prompt among all.

        Raises:
            OutOfMemory: it does not fit.
            GenerationFailed: the model broke off.
        """
        if self.runs_stages:
            return self._by_stages(prompts, max_new_tokens)
        device, ends = self.device, self.ends
        ends_of_rows = [ends.after(row) for row in prompts["input_ids"].tolist()]
        with (
            self._values_in_force(max_new_tokens) as generation,
            _drawn_by(np.random.SeedSequence([self.random_seed, first_index]), device),
            logits_watched(self.model, repairs=bool(generation.do_sample)) as watch,
        ):
            ids, mask = prompts["input_ids"].to(device), prompts["attention_mask"].to(device)
            marks = new_marks(device)
            stops = stopping_criteria(ends_of_rows, ids.shape[1])
            criteria = StoppingCriteriaList([TokenMarks(marks.mark, len(ids), device), *stops])
            synchronize(device)
            started_s = self.clock.now_s()
            marks.mark()
            processors = self.preferences.processors(ids, mask, ends.token_ids)
            sequences = self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                generation_config=generation,
                stopping_criteria=criteria,
                **({"logits_processor": processors} if processors else {}),
            )
            tokens = sequences[:, ids.shape[1] :].cpu()
            marks.mark()
            spans = marks.seconds()
            ended_s, rows = self.clock.now_s(), tokens.tolist()
            lengths = [len(ends.generated(row)) for ends, row in zip(ends_of_rows, rows, strict=True)]
            return _generated(rows, spans, (started_s, ended_s), watch.rows_not_finite(lengths))

    def _by_stages(self, prompt: TokenisedPrompts, max_new_tokens: int) -> GeneratedBatch:
        """The same of one prompt by engines or graphs, which are warmed up before the clock starts."""
        with self._request(prompt, max_new_tokens) as (staged, inputs):
            marks = new_marks(self.device)
            synchronize(self.device)
            started_s = self.clock.now_s()
            token_ids, rows_not_finite = list[int](), list[int]()
            try:
                token_ids += staged.generate_timed(inputs, max_new_tokens, marks).token_ids
            except GenerationFailed:  # of its logits
                rows_not_finite = [0]
            # The last mark is set when the last token is on the host.
            spans = [*marks.seconds(), 0.0]
            return _generated([token_ids], spans, (started_s, self.clock.now_s()), rows_not_finite)

    def prove_stages(self, prompt: TokenisedPrompts, max_new_tokens: int) -> bool:
        """Hold engines or graphs against the model's modules and its `generate()`; where they are refused, the next way
        runs all requests, at last `generate()`.

        Returns:
            whether the logits are finite.

        Raises:
            KnobDidNotAct: tokens are not those of `generate()`.
        """
        while self.staged is not None and self.staged.has_next_way:
            try:
                with self._request(prompt, max_new_tokens) as (staged, inputs):
                    try:
                        staged.prove(own_setting(staged), inputs)
                    except GenerationFailed:  # of its logits
                        return False
                break
            except EngineRefused as error:
                reason = str(error).removesuffix(ADVICE)
            # Not in the handler: until its end the error keeps what was half made.
            self.staged.run_next_way(reason)
        if self.staged is not None:
            self.staged.fix_execution()
        return True

    @contextmanager
    def _request(
        self, prompt: TokenisedPrompts, max_new_tokens: int
    ) -> Iterator[tuple[StagedModel, Mapping[str, Any]]]:
        """A context with what runs one prompt, warmed up for it, and the prompt on its device."""
        assert self.staged is not None
        self.staged.ends = self.ends.after(prompt["input_ids"][0].tolist())
        with self._values_in_force(max_new_tokens):
            inputs = self.staged.to_device(prompt)
            self.staged.warm_up(inputs, max_new_tokens)
            yield self.staged, inputs

    @contextmanager
    def _values_in_force(self, max_new_tokens: int) -> Iterator[GenerationConfig]:
        """A context in which the model uses the values of `generation` only; failures are named."""
        generation = copy.copy(self.generation)
        generation.max_new_tokens = max_new_tokens
        if self.ends.are_ignored:
            generation.eos_token_id = None
        with (
            _failures_named(),
            out_of_memory_named(),
            # Marks are set on the current GPU's stream.
            torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext(),
            only_values_of(generation, self.model),
        ):
            yield generation


def _generated(
    token_ids: list[list[int]], spans: list[float], window: tuple[float, float], rows_not_finite: list[int]
) -> GeneratedBatch:
    """A batch with its times by name: start | first token | ... | last token | tokens on the host."""
    num_tokens = len(token_ids[0])
    is_marked = len(spans) == num_tokens + 1
    return GeneratedBatch(
        token_ids=token_ids,
        inference_time_s=sum(spans),
        ttft_s=spans[0] if is_marked else None,
        inter_token_s=spans[1:num_tokens] if is_marked else [],
        started_s=window[0],
        ended_s=window[1],
        rows_not_finite=rows_not_finite,
    )


@contextmanager
def _failures_named() -> Iterator[None]:
    """A context in which whatever running a model raises becomes one line: GenerationFailed, or DeviceLost."""
    try:
        yield
    except ProfilerError:
        raise
    except Exception as error:
        raise_if_device_is_lost(error)
        raise GenerationFailed(f"generate() failed: {described(error)}") from error


@contextmanager
def _drawn_by(seeds: np.random.SeedSequence, device: torch.device) -> Iterator[None]:
    """A context in which random numbers of the host and of `device`, the current one, follow from this seed; restored
    afterwards.
    """
    seed = int(seeds.generate_state(1, np.uint64)[0])
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        # torch.manual_seed would reach the generators of every GPU, which are not kept here.
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.manual_seed(seed)
        yield
