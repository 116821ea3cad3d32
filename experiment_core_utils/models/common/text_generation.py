"""Text generation by a causal language model, with the time of each token.

Single requests run by the stages of a knob run's timed samples where there are any; all others by `generate()`.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedConfig, StoppingCriteria, StoppingCriteriaList

from experiment_core_utils.config.text import USED_BY_MODE, DecoderConfig, TextConfig
from experiment_core_utils.engines.answer_ends import (
    AnswerEnds,
    EosSources,
    eos_sources,
    stopping_criteria,
    text_reader,
    with_stops,
)
from experiment_core_utils.engines.cuda_graphs import ADVICE
from experiment_core_utils.models.common.preferences import NO_PREFERENCES, Preferences
from experiment_core_utils.models.interface import StagedModel, own_setting
from experiment_core_utils.primitives.clock import Clock, HostClock
from experiment_core_utils.primitives.device import new_marks, out_of_memory_named, synchronize
from experiment_core_utils.primitives.errors import (
    ConfigurationError,
    EngineRefused,
    GenerationFailed,
    ProfilerError,
    described,
    raise_if_device_is_lost,
)
from experiment_core_utils.primitives.finite_logits import logits_watched
from experiment_core_utils.primitives.statistics import rate
from experiment_core_utils.records.requests import TokenisedPrompts
from experiment_core_utils.records.text import BatchRecord, InferenceResults, QueryRecord


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


class TokenMarks(StoppingCriteria):
    """Calls `mark` after every token of a batch, and never stops it.

    `generate()` asks its stopping criteria once for each position that it adds, for any number of rows; its streamer
    would take one row only.
    """

    def __init__(self, mark: Callable[[], None], rows: int, device: torch.device) -> None:
        self._mark = mark
        self._stopped = torch.zeros(rows, dtype=torch.bool, device=device)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._mark()
        return self._stopped


def generation_values(
    config: TextConfig, model: Any, tokeniser: Any, preferences: Preferences = NO_PREFERENCES
) -> GenerationConfig:
    """Greedy decoding or sampling as requested, made anew: of the model's own values the ids are kept, with the
    end-of-sequence tokens of `text_ends`; the preferences are applied beside it.

    Where the model has no other id, the tokeniser's is taken. A mode uses the temperature (1 where none is given) and
    the number of its own name; the others are switched off, transformers' default top-k of 50 too.

    Raises:
        ConfigurationError: neither has a pad token.
    """
    own, requested = model.generation_config, config.decoder_config
    ids = {
        name: getattr(tokeniser if getattr(own, name) is None else own, name)
        for name in ("bos_token_id", "pad_token_id")
    } | {"eos_token_id": text_ends(config, model, tokeniser, preferences)[1].eos_token_id}
    if ids["pad_token_id"] is None:
        raise ConfigurationError("neither the model nor the tokeniser has a pad token; set tokeniser.pad_token")
    return GenerationConfig(
        max_new_tokens=config.max_output_tokens, use_cache=True, num_beams=1, **ids, **_choice_of_tokens(requested)
    )


def text_ends(
    config: TextConfig, model: Any, tokeniser: Any, preferences: Preferences
) -> tuple[AnswerEnds, EosSources]:
    """What ends the answers of a text experiment, and where its end-of-sequence tokens are from."""
    template = getattr(tokeniser, "chat_template", None)
    eos = eos_sources(model.generation_config, model.config, tokeniser, template, preferences.stop_token_ids)
    ends = AnswerEnds(frozenset(eos.token_ids), text_of=text_reader(tokeniser))
    return with_stops(ends, eos, config.stop, config.ignore_eos, tokeniser)


def _choice_of_tokens(requested: DecoderConfig) -> dict[str, Any]:
    if requested.decoding_mode == "greedy":
        return {"do_sample": False}
    return {
        "do_sample": True,
        "temperature": 1.0 if requested.decoder_temperature is None else requested.decoder_temperature,
        "top_k": requested.decoder_top_k if requested.decoding_mode == "top_k" else 0,
        "top_p": requested.decoder_top_p if requested.decoding_mode == "top_p" else 1.0,
    }


def describe_decoding(config: TextConfig, generation: GenerationConfig) -> dict[str, Any]:
    """The decoding values in force, for the record: None for values that the mode does not use; `ignored` contains
    those that were given.

    The seed is there for greedy decoding too, which does not draw.
    """
    mode, given = config.decoder_config.decoding_mode, config.decoder_config.model_dump(exclude={"decoding_mode"})
    used = USED_BY_MODE[mode]
    in_force = {name.removeprefix("decoder_"): name in used for name in given}
    return {
        "decoding_mode": mode,
        "do_sample": generation.do_sample,
        **{name: vars(generation)[name] if is_used else None for name, is_used in in_force.items()},
        "max_new_tokens": generation.max_new_tokens,
        "bos_token_id": generation.bos_token_id,
        "eos_token_id": generation.eos_token_id,
        "pad_token_id": generation.pad_token_id,
        "random_seed": config.random_seed,
        "ignored": {name: value for name, value in given.items() if value is not None and name not in used},
    }


def context_length(config: PreTrainedConfig) -> int | None:
    """Positions that a model was made for; None where its config does not say (no learned limit).

    `dynamic` rotary positions stretch the length that the model was trained with as far as their factor, and so do
    those of `yarn`, whose config may give either length as the whole. Configs of other kinds give the whole.
    """
    text = config.get_text_config()
    # Configs of transformers name it so where they have one; not all do.
    length: int | None = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    if length is None:
        return None
    return max([length, *(_stretched(kind, length) for kind in (rope, *rope.values()) if isinstance(kind, dict))])


def _stretched(rope: Mapping[str, Any], length: int) -> int:
    """The length as far as rotary positions of one kind stretch it."""
    kind, factor = rope.get("rope_type"), rope.get("factor")
    if kind not in ("dynamic", "yarn") or not factor:
        return length
    trained = rope.get("original_max_position_embeddings") if kind == "yarn" else None
    return int((trained or length) * factor)


def context_fault(prompt_tokens: int, model_config: PreTrainedConfig, max_output_tokens: int = 0) -> str | None:
    """Why a prompt does not fit the model's context, as what follows `prompt`; None where it does.

    Args:
        max_output_tokens: of an answer that has to fit as well; 0 where an answer may end before the context does.
    """
    limit = context_length(model_config)
    if limit is None or prompt_tokens + max_output_tokens <= limit:
        return None
    answer = f" with max_output_tokens {max_output_tokens}" if max_output_tokens else ""
    return f"of {prompt_tokens} tokens{answer} is longer than the model's context of {limit}"


# Of ordinary texts four; a text of more than so many for each token allowed is looked at part by part.
_CHARACTERS_A_TOKEN = 8
# By so many tokens the first part of a text may differ from the beginning of the whole.
_AT_THE_CUT = 16


def is_surely_longer(text: str, most_tokens: int, tokenizer: Any) -> bool:
    """Whether a part at the beginning of a text has more tokens than allowed, so that the rest need not be looked at.

    A tokenizer works on megabytes for minutes, which nothing can interrupt. False for a text that is short enough to be
    tokenised as a whole.
    """
    end = _CHARACTERS_A_TOKEN * max(most_tokens, 1)
    while end < len(text):
        if len(tokenizer(text[:end], add_special_tokens=False)["input_ids"]) > most_tokens + _AT_THE_CUT:
            return True
        end *= 2
    return False


def check_context(prompts: TokenisedPrompts, max_output_tokens: int, model_config: PreTrainedConfig) -> None:
    """Raises ConfigurationError where the longest prompt with its answer exceeds the model's context."""
    lengths = prompts["attention_mask"].sum(dim=1).tolist()
    longest = max(lengths)
    if fault := context_fault(longest, model_config, max_output_tokens):
        raise ConfigurationError(
            f"prompt {lengths.index(longest)} {fault}; lower max_output_tokens or max_input_tokens"
        )


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
def only_values_of(generation: GenerationConfig, model: Any) -> Iterator[None]:
    """A context in which `generate()` uses these values only: it would fill others from the model's own values."""
    before = model.generation_config
    try:
        model.generation_config = generation
        yield
    finally:
        model.generation_config = before


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


def results_of_records(
    queries: Iterable[QueryRecord],
    batches: Iterable[BatchRecord],
    decoding: dict[str, Any],
    process_index: int | None,
    num_processes: int,
) -> InferenceResults:
    """Counts, tokens and rates that the records come to; times are those of the process that took longest.

    Args:
        decoding: with `pad_token_id`, which fills the rows of `output_tokens`.
        process_index: None for the records of all processes.
    """
    queries = sorted(queries, key=lambda query: query["prompt_index"])
    batches = sorted(batches, key=lambda batch: (batch["process_index"], batch["batch_index"]))
    output_tokens = sum(query["output_tokens"] for query in queries)
    time_s = _longest((batch["process_index"], batch["inference_time_s"]) for batch in batches)
    return InferenceResults(
        output_tokens=_padded([query["output_token_ids"] for query in queries], decoding["pad_token_id"]),
        output_text=_unless_missing([query["output_text"] for query in queries]),
        answer_text=_unless_missing([query.get("answer_text") for query in queries]),
        total_inference_time_s=time_s,
        total_input_tokens=sum(query["input_tokens"] for query in queries),
        total_output_tokens=output_tokens,
        num_prompts_processed=len(queries),
        tokens_per_second=rate(output_tokens, time_s),
        queries_per_second=rate(len(queries), time_s),
        latency_per_query_s=rate(time_s, len(queries)),
        process_index=process_index,
        num_processes=num_processes,
        queries=queries,
        batches=batches,
        decoding=decoding,
        simulated_delay_s=_longest((batch["process_index"], batch["simulated_delay_s"]) for batch in batches),
    )


def _unless_missing(texts: Sequence[str | None]) -> list[str] | None:
    return None if None in texts else [text for text in texts if text is not None]


def _longest(seconds: Iterable[tuple[int, float]]) -> float:
    """The largest sum of one process; 0 where there is nothing."""
    sums: dict[int, float] = defaultdict(float)
    for process, duration in seconds:
        sums[process] += duration
    return max(sums.values(), default=0.0)


def _padded(rows: Sequence[Sequence[int]], pad_token_id: int) -> torch.Tensor:
    """[N, longest] on the host, filled to the right."""
    if not rows:
        return torch.empty((0, 0), dtype=torch.long)
    tensors = [torch.tensor(row, dtype=torch.long) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=pad_token_id)
