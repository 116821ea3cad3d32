"""What a checkpoint prefers of decoding (`generation_config.json`): what is kept, and what is left out.

Kept is what decides between the logits of a step by the tokens before it, in the same way for `generate()`, single
stages and batches, padded or not: `KEPT`, and stop strings that are one special token, which end an answer as an
end-of-sequence does. The rest is left out: sampling and beams, because decoding is greedy; lengths, because the run
sets them; and what needs more than logits and tokens.
"""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from experiment_core_utils.engines.answer_ends import AnswerEnds, EosSources, split_stops
from experiment_core_utils.models.common.vendor_errors import vendor_errors_named
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.records.caveats import Caveat, caveat

# In the order in which `generate()` applies them.
KEPT = (
    "sequence_bias",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "min_length",
    "min_new_tokens",
    "suppress_tokens",
    "begin_suppress_tokens",
)
# Left out by what greedy decoding and the run's own limit are; a reader expects no less.
EXPECTED_LEFT_OUT = frozenset(
    {
        "do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff",
        "max_new_tokens", "max_length", "renormalize_logits",
    }
)  # fmt: skip
# Not about which tokens come.
_TECHNICAL = frozenset(
    {
        "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "use_cache", "cache_implementation",
        "cache_config", "return_legacy_cache", "return_dict_in_generate", "output_attentions", "output_hidden_states",
        "output_scores", "output_logits", "transformers_version", "compile_config", "disable_compile",
        "prefill_chunk_size", "num_return_sequences", "_from_model_config",
    }
)  # fmt: skip
_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "no_repeat_ngram_size": (0,), "encoder_no_repeat_ngram_size": (0,), "min_length": (0,), "min_new_tokens": (0,),
    "diversity_penalty": (0,), "epsilon_cutoff": (0,), "eta_cutoff": (0,),
    **dict.fromkeys(
        ("repetition_penalty", "encoder_repetition_penalty", "length_penalty", "guidance_scale", "temperature", "top_p",
         "typical_p", "num_beams", "num_beam_groups"),
        (1,),
    ),
}  # fmt: skip
_STOP = "stop_strings"


@dataclass(frozen=True)
class Preferences:
    """The preferences of one checkpoint; without any, nothing is applied."""

    kept: Mapping[str, Any] = field(default_factory=dict)  #: name -> value
    left_out: Mapping[str, Any] = field(default_factory=dict)  #: name -> value
    stop_token_ids: tuple[int, ...] = ()  #: of stop strings that are one special token

    @property
    def change_logits(self) -> bool:
        """Whether anything is applied between the logits and the choice of a token."""
        return any(name in self.kept for name in KEPT)

    def lines(self, name: str) -> list[str]:
        """What is kept and what is left out, for a plan; none where the checkpoint `name` prefers nothing."""
        parts = [
            f"{verb} {', '.join(f'{name} {short_value(value)}' for name, value in values.items())}"
            for verb, values in (("kept", self.kept), ("left out", self.left_out))
            if values
        ]
        warnings = [f"warning: {each.sentence}" for each in decoding_caveats(self.left_out)]
        return [f"decoding: of {name}'s generation_config.json {'; '.join(parts)}", *warnings] if parts else []

    def nothing_kept(self) -> "Preferences":
        """The same of a model whose engines choose the likeliest token by themselves."""
        return Preferences({}, {**self.kept, **self.left_out})

    def processors(
        self, ids: torch.Tensor, mask: torch.Tensor | None, eos_token_ids: Collection[int]
    ) -> LogitsProcessorList:
        """What `generate()` is to apply to the logits of each step, empty where nothing is.

        Args:
            ids: [B, T] of the prompts, padded on the left.
            mask: [B, T], 0 where there is padding, which counts as no token of the prompt; None without padding.
        """
        if not self.change_logits:
            return LogitsProcessorList()
        padding = [0] * len(ids) if mask is None else (mask == 0).sum(dim=1).tolist()
        return LogitsProcessorList(
            [
                _RowByRow(
                    padding,
                    [self._of_row(ids.shape[1] - padded, sorted(eos_token_ids), ids.device) for padded in padding],
                )
            ]
        )

    def _of_row(self, prompt_tokens: int, eos: list[int], device: torch.device) -> LogitsProcessorList:
        makers: dict[str, Any] = {
            "sequence_bias": SequenceBiasLogitsProcessor,
            "repetition_penalty": RepetitionPenaltyLogitsProcessor,
            "no_repeat_ngram_size": NoRepeatNGramLogitsProcessor,
            "bad_words_ids": lambda words: NoBadWordsLogitsProcessor(words, eos or None),
            "min_length": lambda least: MinLengthLogitsProcessor(least, eos, device=str(device)),
            "min_new_tokens": lambda least: MinNewTokensLengthLogitsProcessor(
                prompt_tokens, least, eos, device=str(device)
            ),
            "suppress_tokens": lambda tokens: SuppressTokensLogitsProcessor(tokens, device=str(device)),
            "begin_suppress_tokens": lambda tokens: SuppressTokensAtBeginLogitsProcessor(
                tokens, prompt_tokens, device=str(device)
            ),
        }
        needs_end = {"min_length", "min_new_tokens"}
        return LogitsProcessorList(
            [makers[name](self.kept[name]) for name in KEPT if name in self.kept and (eos or name not in needs_end)]
        )


NO_PREFERENCES = Preferences()


class _RowByRow(LogitsProcessor):
    """Processors of each row of a batch, which see the row without its padding."""

    def __init__(self, padding: Sequence[int], rows: Sequence[LogitsProcessorList]) -> None:
        self._padding, self._rows = padding, rows

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        rows = [
            processors(input_ids[row : row + 1, self._padding[row] :], scores[row : row + 1])
            for row, processors in enumerate(self._rows)
        ]
        found = torch.cat(rows)
        # Finite, so that logits which the model itself makes infinite are still told from forbidden tokens.
        least = torch.finfo(found.dtype).min
        forbidden = torch.isneginf(found) & torch.isfinite(scores)
        return torch.where(forbidden, least, found)


def preferences_of(values: Mapping[str, Any], tokenizer: Any, name: str) -> Preferences:
    """The preferences among the values of a generation config.

    Args:
        tokenizer: of the same checkpoint; None where stop strings cannot be looked up, which are then left out.

    Raises:
        ConfigurationError: a value that cannot be used; the message begins with `name`.
    """
    chosen = {key: value for key, value in values.items() if _has_effect(key, value)}
    kept = {key: value for key, value in chosen.items() if key in KEPT}
    left_out = {key: value for key, value in chosen.items() if key not in KEPT}
    stops, ids = _stop_tokens(left_out.get(_STOP), tokenizer)
    if stops:
        kept[_STOP] = stops
        others = [text for text in _as_list(left_out.pop(_STOP)) if text not in stops]
        left_out |= {_STOP: others} if others else {}
    found = Preferences(kept, left_out, ids)
    with vendor_errors_named(f"generation_config.json of {name} has a value that cannot be used"):
        found.processors(torch.zeros(1, 1, dtype=torch.long), None, [0])
    return found


def preferences_in(folder: Path, tokenizer: Any, name: str) -> Preferences:
    """The preferences in a checkpoint's `generation_config.json`; none where it has no such file.

    Raises:
        ConfigurationError: the file cannot be read, or see `preferences_of`.
    """
    file = folder / "generation_config.json"
    if not file.is_file():
        return NO_PREFERENCES
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{file} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ConfigurationError(f"{file} is not an object of names and values; take the checkpoint's own file")
    return preferences_of(values, tokenizer, name)


def values_of(generation: GenerationConfig | None) -> Mapping[str, Any]:
    """The values that a model's generation config sets itself."""
    return {} if generation is None else generation.to_diff_dict()


def decoding_in_force(
    preferences: Preferences,
    generation: GenerationConfig,
    ends: AnswerEnds,
    eos: EosSources,
    template: str | None,
) -> dict[str, Any]:
    """What decides about prompts and ends, for the record; `template` is the chat template, None without one."""
    return {
        "kept": dict(preferences.kept),
        "left_out": dict(preferences.left_out),
        "bos_token_id": generation.bos_token_id,
        "eos_token_ids": sorted(ends.token_ids),
        "eos_sources": eos.content(),
        "stop": list(ends.stop),
        "ignore_eos": ends.are_ignored,
        "pad_token_id": generation.pad_token_id,
        "chat_template_sha256": None if template is None else hashlib.sha256(template.encode()).hexdigest(),
    }


def decoding_caveats(left_out: Mapping[str, Any]) -> list[Caveat]:
    """The caveat where what is left out may change greedy answers; none for sampling and lengths."""
    names = [name for name in left_out if name not in EXPECTED_LEFT_OUT]
    return [caveat("decoding_left_out", names=names)] if names else []


def short_value(value: Any) -> str:
    """A value for one line: of a long list or object its number of entries."""
    if isinstance(value, list | tuple | dict) and len(value) > 3:
        return f"({len(value)} entries)"
    return str(value)


def _has_effect(name: str, value: Any) -> bool:
    if name in _TECHNICAL or value is None or value is False or value in ("", [], {}, ()):
        return False
    return value not in _WITHOUT_EFFECT.get(name, ())


def _as_list(value: Any) -> list[Any]:
    return [value] if isinstance(value, str) else list(value)


def _stop_tokens(texts: Any, tokenizer: Any) -> tuple[list[str], tuple[int, ...]]:
    """The stop strings that are special tokens, and their ids."""
    if texts is None or tokenizer is None:
        return [], ()
    given = _as_list(texts)
    others, ids = split_stops(given, tokenizer)
    return [text for text in given if text not in others], ids
