"""The knob of how many tokens a model may think before it answers."""

from dataclasses import replace
from typing import Any

from pydantic import Field

from experiment_core_utils.knobs.interface import CannotBeSeen, KnobRequest, Level, Turned
from experiment_core_utils.knobs.listed_knob import ListedKnob
from experiment_core_utils.primitives.flag_fields import CountOrZero, Listed, Part

_OF_A_SERVER = (
    "each kind of server has a field of its own for it; give --request_knob thinking_token_budget=0,256 (vLLM), "
    "chat_template_kwargs.enable_thinking=false or --reasoning_effort_list"
)


class ThinkingBudgetFlags(Part):
    """The flags of the budget of thinking."""

    thinking_tokens_list: Listed[CountOrZero] | None = Field(
        default=None,
        description="numbers of tokens after which a thought is closed and the answer follows, 0 at once "
        "(default: as long as the model thinks)",
    )


class ThinkingBudget(ListedKnob):
    """The number of tokens of an answer after which a thought that still goes on is closed."""

    meaning = "tokens after which a thought is closed"
    name, title, plural, flags = "thinking_budget", "thinking budget", "thinking budgets", ThinkingBudgetFlags
    flag, prefix, at_rest = "thinking_tokens_list", "think", "free"
    neutral: Level = at_rest

    def no_knob_reason(self, request: KnobRequest) -> str | None:
        return _OF_A_SERVER if request.limits.variants else request.limits.unsupported.get(self.name)

    def read_level(self, text: str) -> Level | None:
        return 0 if text == "0" else super().read_level(text)

    def shape(self, shape: Any, value: Level) -> Any:
        """The prompt has an empty thought more at 0, where the chat template writes one."""
        more = shape.closed_thought_tokens if value == 0 else 0
        return shape if not more else replace(shape, text_tokens=shape.text_tokens + more)

    def prove(self, proof: Any, setting: Turned, model: Any) -> CannotBeSeen | None:
        """At 0 the first token shows it, or the prompt; else only an answer that is long enough does."""
        budget = setting.value(self.name)
        if budget == self.at_rest or (budget == 0 and self.name not in proof.knobs_not_seen):
            return None
        return CannotBeSeen("a proof is shorter than a thought; thinking_forced says how many were closed")


THINKING_BUDGET = ThinkingBudget()
