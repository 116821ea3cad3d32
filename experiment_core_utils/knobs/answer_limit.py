"""The knob of the largest number of tokens of an answer."""

from typing import Any

from pydantic import Field

from experiment_core_utils.knobs.interface import CannotBeSeen, Level, Turned
from experiment_core_utils.knobs.listed_knob import ListedKnob
from experiment_core_utils.primitives.flag_fields import CountInMemory, Listed, Part


class AnswerLimitFlags(Part):
    """The flags of the limit of an answer."""

    answer_limit_list: Listed[CountInMemory] | None = Field(
        default=None,
        description="largest numbers of tokens of an answer (default: --max_new_tokens alone)",
    )


class AnswerLimit(ListedKnob):
    """The largest number of tokens of an answer; `--max_new_tokens` still holds."""

    meaning = "largest number of tokens of an answer"
    name, title, plural, flags = "answer_limit", "answer limit", "answer limits", AnswerLimitFlags
    flag, prefix, at_rest = "answer_limit_list", "answer", "task"
    turned_by_run = True

    def prove(self, proof: Any, setting: Turned, model: Any) -> CannotBeSeen | None:
        """The loop over tokens has it, or the request to a server, where longer answers make a caveat."""
        return None


ANSWER_LIMIT = AnswerLimit()


def answer_limit_at(setting: Turned, max_new_tokens: int) -> int:
    """How many tokens an answer may have at a setting, of the limit of all answers."""
    return limited_answer(setting.value(ANSWER_LIMIT.name), max_new_tokens)


def limited_answer(limit: Level | None, max_new_tokens: int) -> int:
    """The same at a value of the knob."""
    return min(limit, max_new_tokens) if isinstance(limit, int) else max_new_tokens
