"""Text generation by a causal language model, with the time of each token.

Greedy decoding runs by the stages of a knob run's timed samples where there are any; all else by `generate()`.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from experiment_core_utils.engines.answer_ends import AnswerEnds
from experiment_core_utils.engines.cuda_graphs import engine_refused
from experiment_core_utils.measuring.batches import BatchProof
from experiment_core_utils.measuring.staged_runs import run_together, warm_up_batch
from experiment_core_utils.models.common.preferences import NO_PREFERENCES, Preferences
from experiment_core_utils.models.common.text_generation import generate_marked, only_values_of
from experiment_core_utils.models.interface import StagedModel, own_setting
from experiment_core_utils.primitives.clock import Clock, HostClock
from experiment_core_utils.primitives.device import new_marks, out_of_memory_named, synchronize
from experiment_core_utils.primitives.errors import (
    GenerationFailed,
    ProfilerError,
    described,
    raise_if_device_is_lost,
)
from experiment_core_utils.primitives.finite_logits import logits_watched
from experiment_core_utils.records.requests import PreparedRequest, RequestShape, TokenisedPrompts

# A prompt [1, T] without padding, and its mask.
Request = Mapping[str, Any]
# Of answers together that are compared with those alone.
PROOF_TOKENS = 16


@dataclass(frozen=True)
class GeneratedBatch:
    """The tokens and times of one batch."""

    #: of each row up to its end; those of `generate()` go on to the end of the longest one
    token_ids: list[list[int]]
    prompt_positions: int  #: that were computed, padding included: engines prefill prompts one by one, without any
    inference_time_s: float  #: prompts on the device -> all tokens on the host
    #: -> first token of every row; None where the model's own `generate()` does not report single tokens
    ttft_s: float | None
    inter_token_s: list[float]  #: from each token to the next
    #: started_s, ended_s: the same window by the host's clock, the device synchronised at both ends
    started_s: float
    ended_s: float


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
        staged: of the same model, what runs requests by engines or graphs; None where `generate()` runs all.
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
        """Whether engines or graphs run the requests."""
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
            LogitsNotFinite: logits of a row are not finite, so that its text means nothing.
        """
        if self.runs_stages:
            with self._requests(prompts, max_new_tokens) as (staged, requests):
                return self._by_stages(staged, requests, max_new_tokens)
        device, ends = self.device, self.ends
        ends_of_rows = [ends.after(row) for row in prompts["input_ids"].tolist()]
        with (
            self._values_in_force(max_new_tokens) as generation,
            _drawn_by(np.random.SeedSequence([self.random_seed, first_index]), device),
            logits_watched(self.model, repairs=bool(generation.do_sample)) as watch,
        ):
            ids, mask = prompts["input_ids"].to(device), prompts["attention_mask"].to(device)
            marks = new_marks(device)
            synchronize(device)
            started_s = self.clock.now_s()
            marks.mark()
            processors = self.preferences.processors(ids, mask, ends.token_ids)
            tokens = generate_marked(
                self.model,
                {"input_ids": ids, "attention_mask": mask},
                ends_of_rows,
                marks.mark,
                generation_config=generation,
                **({"logits_processor": processors} if processors else {}),
            ).cpu()
            marks.mark()
            spans = marks.seconds()
            ended_s, rows = self.clock.now_s(), tokens.tolist()
            watch.refuse_not_finite([len(ends.generated(row)) for ends, row in zip(ends_of_rows, rows, strict=True)])
        # start | first token | ... | last token | tokens on the host
        is_marked = len(spans) == tokens.shape[1] + 1
        return GeneratedBatch(
            token_ids=rows,
            prompt_positions=prompts["input_ids"].numel(),
            inference_time_s=sum(spans),
            ttft_s=spans[0] if is_marked else None,
            inter_token_s=spans[1:-1] if is_marked else [],
            started_s=started_s,
            ended_s=ended_s,
        )

    def _by_stages(self, staged: StagedModel, requests: Sequence[Request], max_new_tokens: int) -> GeneratedBatch:
        """The same by engines or graphs, which were warmed up before the clock starts."""
        synchronize(self.device)
        started_s = self.clock.now_s()
        run, answers = run_together(staged, requests, max_new_tokens)
        return GeneratedBatch(
            token_ids=list(map(list, answers)),
            prompt_positions=sum(each["input_ids"].shape[1] for each in requests),
            inference_time_s=run.total_s,
            ttft_s=run.ttft_s,
            inter_token_s=list(run.inter_token_s),
            started_s=started_s,
            ended_s=self.clock.now_s(),
        )

    def prove_stages(self, prompts: TokenisedPrompts, batch_size: int, max_new_tokens: int) -> None:
        """Hold the engines or graphs in force against the model's modules and its `generate()` on one prompt, or their
        answers to several together against those to each of them alone.

        Args:
            batch_size: of the largest batch from now on.

        Raises:
            EngineRefused: they do not run them, or compute something else than the modules, or than they do alone.
            KnobDidNotAct: tokens are not those of `generate()`.
            LogitsNotFinite: logits of a single prompt are not finite.
        """
        assert self.staged is not None
        setting = own_setting(self.staged).replaced(batch_size=batch_size)
        self.staged.apply(setting)
        with self._requests(prompts, max_new_tokens) as (staged, requests):
            if len(requests) == 1:
                staged.prove(setting, requests[0])
                return
            shapes = [RequestShape(None, None, 0, 0, each["input_ids"].shape[1], 0.0) for each in requests]
            proof = BatchProof(staged, min(PROOF_TOKENS, max_new_tokens), setting)
            proof.answer([PreparedRequest(*each) for each in zip(requests, shapes, strict=True)])
        if proof.reason is not None:
            raise engine_refused(f"requests cannot run together: {proof.reason}")

    @contextmanager
    def _requests(
        self, prompts: TokenisedPrompts, max_new_tokens: int
    ) -> Iterator[tuple[StagedModel, Sequence[Request]]]:
        """A context with what runs prompts together, warmed up for them, and each without padding on the device."""
        assert self.staged is not None
        self.staged.ends = self.ends.after(prompts["input_ids"][0].tolist())
        tensors: Mapping[str, Any] = {**prompts}
        lengths = prompts["attention_mask"].sum(dim=1).tolist()
        with self._values_in_force(max_new_tokens):
            requests = [
                self.staged.to_device({name: rows[row : row + 1, -length:] for name, rows in tensors.items()})
                for row, length in enumerate(lengths)
            ]
            warm_up_batch(self.staged, requests, max_new_tokens)
            yield self.staged, requests

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
