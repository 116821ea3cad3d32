"""The knob of the largest number of tokens of an answer in the request to a server."""

from pydantic import Field

from experiment_core_utils.knobs.interface import Level, Turned
from experiment_core_utils.knobs.request_knobs import ServerKnob
from experiment_core_utils.primitives.flag_fields import CountInMemory, Listed, Part


class AnswerLimitFlags(Part):
    """The flags of the limit of an answer."""

    answer_limit_list: Listed[CountInMemory] | None = Field(
        default=None,
        description="with --endpoint: largest numbers of tokens of an answer (default: --max_new_tokens alone)",
    )


class AnswerLimit(ServerKnob):
    """The largest number of tokens of an answer; `--max_new_tokens` still holds."""

    meaning = "largest number of tokens of an answer"
    name, title, plural, flags = "answer_limit", "answer limit", "answer limits", AnswerLimitFlags
    flag, prefix, at_rest = "answer_limit_list", "answer", "task"
    neutral: Level = at_rest


ANSWER_LIMIT = AnswerLimit()


def answer_limit_at(setting: Turned, max_new_tokens: int) -> int:
    """How many tokens an answer may have at a setting, of the limit of all answers."""
    limit = setting.value(ANSWER_LIMIT.name)
    return min(limit, max_new_tokens) if isinstance(limit, int) else max_new_tokens
