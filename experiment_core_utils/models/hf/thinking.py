"""Thoughts that are closed at a number of tokens: by the next tokens that a model writes, or at 0 in its prompt."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import LogitsProcessor

from experiment_core_utils.engines.answer_ends import AnswerEnds, ThinkingLimit
from experiment_core_utils.knobs.interface import Level
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.thinking_budget import THINKING_BUDGET
from experiment_core_utils.models.common.turned_knobs import CountingAdapter
from experiment_core_utils.models.hf.requests import ALONG_THE_PROMPT, HFRequests
from experiment_core_utils.models.interface import Stages
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.records.requests import StageFlops


class ClosedThinking(LogitsProcessor):
    """Leaves the model no other choice than the tokens that close its thought, from the limit on.

    Args:
        ends: with the limit.
        prompt_tokens: of the whole batch, padding among them.
    """

    def __init__(self, ends: AnswerEnds, prompt_tokens: int) -> None:
        assert ends.thinking is not None
        self._ends, self._limit, self._prompt_tokens = ends, ends.thinking, prompt_tokens
        self._forced: list[tuple[int, ...]] = []  # of each row

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = input_ids.shape[1] - self._prompt_tokens - self._limit.tokens
        if place == 0:
            answers = input_ids[:, self._prompt_tokens :].tolist()
            self._forced = [self._ends.forced_tokens(answer) for answer in answers]
        for row, forced in enumerate(self._forced):
            if place < len(forced):
                # Finite, and what is not stays so that it is found.
                least = torch.finfo(scores.dtype).min
                scores[row] = torch.where(scores[row].isfinite(), least, scores[row])
                scores[row, forced[place]] = 0.0
        return scores


def closed_thinking(ends: AnswerEnds, prompt_tokens: int) -> list[ClosedThinking]:
    """What `generate()` has to apply for the limit of thinking; nothing without one."""
    return [] if ends.thinking is None else [ClosedThinking(ends, prompt_tokens)]


class ThinkingCloser(CountingAdapter):
    """The adapter of the budget of thinking.

    Args:
        requests: of the checkpoint, which know its marks of thinking.
        changed: is called with the limit that is in force from then on; None for none.
    """

    def __init__(self, requests: HFRequests, changed: Callable[[ThinkingLimit | None], None] | None = None) -> None:
        self._requests, self.changed = requests, changed
        self.value: Level = THINKING_BUDGET.at_rest
        if requests.thinking is None:
            self.unsupported_reason = "its tokenizer and its chat template have no marks of thinking"

    @property
    def engines_unsupported_reason(self) -> str | None:
        if self.value == THINKING_BUDGET.at_rest:
            return None
        return "a thought is closed between the logits and the choice of a token, which modules alone allow"

    def put(self, value: Level) -> None:
        marks, is_free = self._requests.thinking, value == THINKING_BUDGET.at_rest
        if marks is None and not is_free:
            raise ConfigurationError(f"a budget of thinking cannot be set: {self.unsupported_reason}")
        self.value = value
        is_limited = marks is not None and not is_free and not self._is_in_prompt
        if self.changed is not None:
            self.changed(ThinkingLimit(int(value), marks.closing, marks.empty) if marks and is_limited else None)

    @property
    def _is_in_prompt(self) -> bool:
        marks = self._requests.thinking
        return self.value == 0 and marks is not None and bool(marks.in_prompt)

    def asked(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The tensors of a request with an empty thought behind its prompt, where that closes thinking at once."""
        marks, ids = self._requests.thinking, inputs["input_ids"]
        if marks is None or not self._is_in_prompt or ids[0, -len(marks.in_prompt) :].tolist() == list(marks.in_prompt):
            return inputs
        more = ids.new_tensor([marks.in_prompt])
        beside = {"input_ids": more, **dict.fromkeys(ALONG_THE_PROMPT, more * 0), "attention_mask": more * 0 + 1}
        longer = {name: torch.cat([inputs[name], beside[name]], dim=1) for name in beside if name in inputs}
        return {**inputs, **longer}

    def counted(self, setting: Setting, stages: Stages, inputs: Mapping[str, Any]) -> None:
        """What is closed shows in the samples."""

    def flops(self, setting: Setting, flops_at: Callable[[Setting], StageFlops | None]) -> StageFlops | None:
        return flops_at(setting)

    def step_bytes(self, setting: Setting, bytes_at: Callable[[Setting], float | None]) -> float | None:
        return bytes_at(setting)
