"""In: scored answers by setting; out: the tables of the model card, as Markdown between two marks of its file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiment_core_utils.primitives.errors import ResultsError
from experiments.reference_model.evaluation import Accuracy, ScoredAnswer, accuracy_by_type, accuracy_of

BEGIN = "<!-- tables: begin (scripts/evaluate_reference_model.py --write-card) -->"
END = "<!-- tables: end -->"


@dataclass(frozen=True)
class CardSetting:
    """One row of the card; the first `blocks` blocks run."""

    tier: str
    top_k: int
    blocks: int

    @property
    def title(self) -> str:
        """Names the row."""
        return f"{self.tier}, top-{self.top_k}, {self.blocks} blocks"


def settings_of_card(top_k: int, blocks: int) -> list[CardSetting]:
    """Every tier at full; at `high` each other knob alone, then both; and the cheapest corner.

    Args:
        top_k, blocks: what the model has.
    """
    tiers = [CardSetting(tier, top_k, blocks) for tier in ("high", "medium", "low")]
    experts = [CardSetting("high", fewer, blocks) for fewer in (top_k // 2, top_k // 4, 1)]
    skipped = [CardSetting("high", top_k, blocks - fewer) for fewer in (1, 2, 3, 4)]
    return [*tiers, *experts, *skipped, *(CardSetting(tier, top_k // 2, blocks - 4) for tier in ("high", "low"))]


def knob_table(scored: Mapping[CardSetting, Sequence[ScoredAnswer]]) -> str:
    """One row a setting: overall accuracy and that of each type."""
    types = _types(scored)
    lines = [f"| setting | all [95 %] | {' | '.join(types)} |", f"| --- |{' --- |' * (1 + len(types))}"]
    for plan, answers in scored.items():
        by_type = accuracy_by_type(answers)
        cells = [_with_interval(accuracy_of(answers)), *(f"{by_type[kind].mean:.3f}" for kind in types)]
        lines.append(f"| {plan.title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def type_table(scored: Mapping[CardSetting, Sequence[ScoredAnswer]], chance: Mapping[str, float]) -> str:
    """One row a type of question: its chance level and its accuracy in each tier, other knobs at full."""
    most = max((plan.top_k, plan.blocks) for plan in scored)
    tiers = {plan.tier: answers for plan, answers in scored.items() if (plan.top_k, plan.blocks) == most}
    lines = [f"| question type | chance | {' | '.join(tiers)} |", f"| --- | --- |{' --- |' * len(tiers)}"]
    for kind in _types(scored):
        cells = [_with_interval(accuracy_by_type(answers)[kind]) for answers in tiers.values()]
        number = next(accuracy_by_type(answers)[kind].n for answers in tiers.values())
        lines.append(f"| {kind} (n = {number}) | {chance[kind]:.3f} | {' | '.join(cells)} |")
    overall = [accuracy_of(answers) for answers in tiers.values()]
    lines.append(f"| all (n = {overall[0].n}) | | {' | '.join(_with_interval(value) for value in overall)} |")
    return "\n".join(lines)


def write_into_card(card: Path, tables: str) -> None:
    """Replace what stands between the two marks; raises ResultsError where they are not there."""
    text = card.read_text()
    if BEGIN not in text or END not in text:
        raise ResultsError(f"{card} has no place for the tables: it needs the lines {BEGIN} and {END}")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    card.write_text(f"{before}{BEGIN}\n\n{tables}\n{END}{after}")


def _types(scored: Mapping[CardSetting, Sequence[ScoredAnswer]]) -> list[str]:
    return sorted({answer.question_type for answers in scored.values() for answer in answers})


def _with_interval(value: Accuracy) -> str:
    return f"{value.mean:.3f} [{value.low:.3f}, {value.high:.3f}]"
