"""The tables of the model card, as Markdown between two marks of its file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.primitives.files import write_text_atomically
from experiment_core_utils.primitives.knobs import OWN
from experiment_core_utils.tasks.interface import Answer, Metric
from experiments.reference_model.evaluation import Accuracy, Answered, accuracy_by_type, accuracy_of, best_constant

BEGIN = "<!-- tables: begin (scripts/evaluate_reference_model.py --write-card) -->"
END = "<!-- tables: end -->"


@dataclass(frozen=True)
class CardSetting:
    """A row of the card; the first `blocks` blocks are active."""

    tier: str  #: or `own`
    top_k: int
    blocks: int

    @property
    def title(self) -> str:
        """The name of the row."""
        return f"{self.tier}, top-{self.top_k}, {self.blocks} blocks"


# The answers of each family at each setting of the card.
Answers = Mapping[CardSetting, Mapping[str, Sequence[Answered]]]


def settings_of_card(top_k: int, blocks: int) -> list[CardSetting]:
    """The card's settings: the model as it is, and every tier, with all experts and blocks; at `high` each other knob
    alone, then both; the cheapest corner.

    Args:
        top_k, blocks: what the model has.
    """
    tiers = [CardSetting(tier, top_k, blocks) for tier in (OWN, "high", "medium", "low")]
    experts = [CardSetting("high", fewer, blocks) for fewer in (top_k * 3 // 4, top_k // 2, top_k // 4, 1)]
    skipped = [CardSetting("high", top_k, blocks - fewer) for fewer in (1, 2, 3, 4)]
    return [*tiers, *experts, *skipped, *(CardSetting(tier, top_k // 2, blocks - 4) for tier in ("high", "low"))]


def knob_table(answers: Answers, metrics: Mapping[str, Metric]) -> str:
    """The table with one row a setting and one column a family: its score with the 95 % interval."""
    first = next(iter(answers.values()))
    names = [f"{name}, {metrics[name].name} (n = {len(answered)})" for name, answered in first.items()]
    lines = [f"| setting | {' | '.join(names)} |", f"| --- |{' --- |' * len(names)}"]
    for plan, families in answers.items():
        cells = [
            with_interval(accuracy_of(_answers_of(answered), metrics[name])) for name, answered in families.items()
        ]
        lines.append(f"| {plan.title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def type_table(answers: Answers, metrics: Mapping[str, Metric]) -> str:
    """The table with one row a family and type of question: the best constant answer's score, and the model's in each
    tier and at the fewest blocks, other knobs at their largest.
    """
    most_k, most_blocks = max(plan.top_k for plan in answers), max(plan.blocks for plan in answers)
    fewest = min(plan.blocks for plan in answers if plan.top_k == most_k)
    columns = {plan.tier: plan for plan in answers if (plan.top_k, plan.blocks) == (most_k, most_blocks)}
    columns |= {
        f"high, {plan.blocks} blocks": plan for plan in answers if (plan.top_k, plan.blocks) == (most_k, fewest)
    }
    lines = [
        f"| family | question type | n | best constant | {' | '.join(columns)} |",
        f"| --- | --- | --- | --- |{' --- |' * len(columns)}",
    ]
    for name, metric in metrics.items():
        by_column = [accuracy_by_type(_answers_of(answers[plan][name]), metric) for plan in columns.values()]
        constant = best_constant(answers[next(iter(columns.values()))][name], metric)
        for kind, level in constant.items():
            cells = " | ".join(f"{scores[kind].mean:.3f}" for scores in by_column)
            lines.append(f"| {name} | {kind} | {by_column[0][kind].n} | {level:.3f} | {cells} |")
    return "\n".join(lines)


def write_into_card(card: Path, tables: str) -> None:
    """Replace the text between the two marks; raises ResultsError where they are not there."""
    text = card.read_text()
    if BEGIN not in text or END not in text:
        raise ResultsError(f"{card} has no place for the tables: it needs the lines {BEGIN} and {END}")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    write_text_atomically(f"{before}{BEGIN}\n\n{tables}\n{END}{after}", card)


def _answers_of(answered: Sequence[Answered]) -> list[Answer]:
    return [each.answer for each in answered]


def with_interval(value: Accuracy) -> str:
    """The mean with its interval."""
    return f"{value.mean:.3f} [{value.low:.3f}, {value.high:.3f}]"
