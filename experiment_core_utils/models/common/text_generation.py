"""What a text run generates by: the values of `generate()`, the ends of answers, the context; and what its records come
to.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

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
from experiment_core_utils.models.common.preferences import NO_PREFERENCES, Preferences
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.statistics import rate
from experiment_core_utils.records.requests import TokenisedPrompts
from experiment_core_utils.records.text import BatchRecord, InferenceResults, QueryRecord


class TokenMarks(StoppingCriteria):
    """Calls `mark` when the next token of each row of a batch is on the host, and never stops it.

    `generate()` asks its stopping criteria once for each position that it adds, for any number of rows; its streamer
    would take one row only.
    """

    def __init__(self, mark: Callable[[], None], rows: int, device: torch.device) -> None:
        self._mark = mark
        self._stopped = torch.zeros(rows, dtype=torch.bool, device=device)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        input_ids[:, -1].tolist()
        self._mark()
        return self._stopped


def generate_marked(
    model: Any, inputs: Mapping[str, Any], ends: Sequence[AnswerEnds], mark: Callable[[], None], **options: Any
) -> torch.Tensor:
    """Ids [B, n] that `generate()` adds to the prompts of a batch, with a mark after each position.

    Args:
        inputs: tensors of the batch on the model's device, as `generate()` takes them.
        ends: of each row, of which the stop texts are looked for here.
        options: of `generate()`.
    """
    ids = inputs["input_ids"]
    criteria = [TokenMarks(mark, len(ids), ids.device), *stopping_criteria(ends, ids.shape[1])]
    answered: torch.Tensor = model.generate(**inputs, stopping_criteria=StoppingCriteriaList(criteria), **options)
    return answered[:, ids.shape[1] :]


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


@contextmanager
def only_values_of(generation: GenerationConfig, model: Any) -> Iterator[None]:
    """A context in which `generate()` uses these values only: it would fill others from the model's own values."""
    before = model.generation_config
    try:
        model.generation_config = generation
        yield
    finally:
        model.generation_config = before


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
