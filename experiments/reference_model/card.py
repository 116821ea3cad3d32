"""The tables of the model card, as Markdown between two marks of its file."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiment_core_utils.knobs.active_blocks import RunningBlocks, num_blocks_of
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.top_k import experts_of
from experiment_core_utils.knobs.vision_tokens import OWN, tier_target, vision_of
from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.primitives.files import write_text_atomically
from experiment_core_utils.tasks.interface import Answer, Metric
from experiments.reference_model.evaluation import Accuracy, Answered, accuracy_by_type, accuracy_of, best_constant

BEGIN = "<!-- tables: begin (scripts/evaluate_reference_model.py --write-card) -->"
END = "<!-- tables: end -->"


# The answers of each family at each setting of the card.
Answers = Mapping[Setting, Mapping[str, Sequence[Answered]]]


def card_setting(tier: str, top_k: int, blocks: int) -> Setting:
    """A setting of the card, at which the first blocks run.

    Args:
        tier: or `own`.
    """
    return Setting.of(vision=tier_target(tier), top_k=top_k, num_active_blocks=RunningBlocks.of(range(blocks)))


def title_of(setting: Setting) -> str:
    """The name of a row."""
    return f"{vision_of(setting).value}, top-{experts_of(setting)}, {num_blocks_of(setting)} blocks"


def settings_of_card(top_k: int, blocks: int) -> list[Setting]:
    """The card's settings: the model as it is, and every tier, with all experts and blocks; at `high` each other knob
    alone, then both; the cheapest corner.

    Args:
        top_k, blocks: what the model has.
    """
    tiers = [card_setting(tier, top_k, blocks) for tier in (OWN, "high", "medium", "low")]
    experts = [card_setting("high", fewer, blocks) for fewer in (top_k * 3 // 4, top_k // 2, top_k // 4, 1)]
    skipped = [card_setting("high", top_k, blocks - fewer) for fewer in (1, 2, 3, 4)]
    return [*tiers, *experts, *skipped, *(card_setting(tier, top_k // 2, blocks - 4) for tier in ("high", "low"))]


def knob_table(answers: Answers, metrics: Mapping[str, Metric]) -> str:
    """The table with one row a setting and one column a family: its score with the 95 % interval."""
    first = next(iter(answers.values()))
    names = [f"{name}, {metrics[name].name} (n = {len(answered)})" for name, answered in first.items()]
    lines = [f"| setting | {' | '.join(names)} |", f"| --- |{' --- |' * len(names)}"]
    for setting, families in answers.items():
        cells = [
            with_interval(accuracy_of(_answers_of(answered), metrics[name])) for name, answered in families.items()
        ]
        lines.append(f"| {title_of(setting)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def type_table(answers: Answers, metrics: Mapping[str, Metric]) -> str:
    """The table with one row a family and type of question: the best constant answer's score, and the model's in each
    tier and at the fewest blocks, other knobs at their largest.
    """
    decoders = {setting: setting.replaced(vision=None) for setting in answers}
    most = max(decoders.values(), key=lambda each: (experts_of(each) or 0, num_blocks_of(each)))
    fewest = min(
        (each for each in decoders.values() if experts_of(each) == experts_of(most)), key=num_blocks_of
    )  # fmt: skip
    columns = {vision_of(setting).value: setting for setting in answers if decoders[setting] == most}
    columns |= {f"high, {num_blocks_of(setting)} blocks": setting for setting in answers if decoders[setting] == fewest}
    lines = [
        f"| family | question type | n | best constant | {' | '.join(columns)} |",
        f"| --- | --- | --- | --- |{' --- |' * len(columns)}",
    ]
    for name, metric in metrics.items():
        by_column = [accuracy_by_type(_answers_of(answers[setting][name]), metric) for setting in columns.values()]
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
