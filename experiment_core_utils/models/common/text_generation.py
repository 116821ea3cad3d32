"""Batched text generation by a causal language model, with the time of each token."""

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedConfig, StoppingCriteria, StoppingCriteriaList

from experiment_core_utils.config.text import Batching, DecoderConfig, TextConfig
from experiment_core_utils.engines.answer_ends import (
    AnswerEnds,
    EosSources,
    eos_sources,
    stopping_criteria,
    text_reader,
    with_stops,
)
from experiment_core_utils.models.common.preferences import NO_PREFERENCES, Preferences
from experiment_core_utils.primitives.clock import Clock, HostClock
from experiment_core_utils.primitives.device import Marks, new_marks, out_of_memory_named, synchronize
from experiment_core_utils.primitives.errors import (
    ConfigurationError,
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
    """The tokens and times of one `generate()` call."""

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
    """

    model: Any
    generation: GenerationConfig
    random_seed: int
    ends: AnswerEnds
    clock: Clock = field(default_factory=HostClock)
    preferences: Preferences = NO_PREFERENCES

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
        device, ends = self.device, self.ends
        ends_of_rows = [ends.after(row) for row in prompts["input_ids"].tolist()]
        generation = copy.copy(self.generation)
        generation.max_new_tokens = max_new_tokens
        if ends.are_ignored:
            generation.eos_token_id = None
        with (
            _failures_named(),
            out_of_memory_named(),
            _current(device),
            _drawn_by(np.random.SeedSequence([self.random_seed, first_index]), device),
            _only_values_of(generation, self.model),
            logits_watched(self.model, repairs=bool(generation.do_sample)) as watch,
        ):
            ids, mask = prompts["input_ids"].to(device), prompts["attention_mask"].to(device)
            marks = new_marks(device)
            stops = stopping_criteria(ends_of_rows, ids.shape[1])
            criteria = StoppingCriteriaList([TokenMarks(marks, len(ids), device), *stops])
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


class TokenMarks(StoppingCriteria):
    """Sets a mark after every token of a batch, and never stops it.

    `generate()` asks its stopping criteria once for each position that it adds, for any number of rows; its streamer
    would take one row only.
    """

    def __init__(self, marks: Marks, rows: int, device: torch.device) -> None:
        self._marks = marks
        self._stopped = torch.zeros(rows, dtype=torch.bool, device=device)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._marks.mark()
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
    requested = config.decoder_config
    used = {
        "greedy": (),
        "temperature": ("temperature",),
        "top_k": ("temperature", "top_k"),
        "top_p": ("temperature", "top_p"),
    }[requested.decoding_mode]
    given = {
        "temperature": requested.decoder_temperature,
        "top_k": requested.decoder_top_k,
        "top_p": requested.decoder_top_p,
    }
    return {
        "decoding_mode": requested.decoding_mode,
        "do_sample": generation.do_sample,
        **{name: vars(generation)[name] if name in used else None for name in given},
        "max_new_tokens": generation.max_new_tokens,
        "bos_token_id": generation.bos_token_id,
        "eos_token_id": generation.eos_token_id,
        "pad_token_id": generation.pad_token_id,
        "random_seed": config.random_seed,
        "ignored": {
            f"decoder_{name}": value for name, value in given.items() if value is not None and name not in used
        },
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
def _only_values_of(generation: GenerationConfig, model: Any) -> Iterator[None]:
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


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """A context with `device` as the current GPU, since marks are set on the current GPU's stream."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


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
