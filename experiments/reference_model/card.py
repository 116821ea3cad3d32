"""The tables of the model card, as Markdown between two marks of its file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiment_core_utils.knobs.active_blocks import ACTIVE_BLOCKS, RunningBlocks, num_blocks_of
from experiment_core_utils.knobs.interface import KnobLimits
from experiment_core_utils.knobs.setting import Setting, reference_setting
from experiment_core_utils.knobs.top_k import TOP_K, experts_of
from experiment_core_utils.knobs.vision_tokens import VISION_TOKENS, tier_target, vision_of
from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.primitives.files import write_text_atomically
from experiment_core_utils.tasks.interface import Answer, Metric
from experiments.reference_model.evaluation import Accuracy, Answered, accuracy_by_type, accuracy_of, best_constant

BEGIN = "<!-- tables: begin (scripts/evaluate_reference_model.py --write-card) -->"
END = "<!-- tables: end -->"


# The answers of each family at each setting of the card.
Answers = Mapping[Setting, Mapping[str, Sequence[Answered]]]


def title_of(setting: Setting) -> str:
    """The name of a row."""
    return f"{vision_of(setting).value}, top-{experts_of(setting)}, {num_blocks_of(setting)} blocks"


def settings_of_card(limits: KnobLimits) -> list[Setting]:
    """The card's settings: the model as it is, and every tier; at `high` fewer experts, then fewer blocks, the first
    ones, alone; both together; the cheapest corner.
    """
    own = reference_setting(limits)
    high, medium, low = (own.replaced(**{VISION_TOKENS.name: tier_target(name)}) for name in ("high", "medium", "low"))
    experts, blocks = TOP_K.own(limits) or 1, limits.num_total_blocks
    assert blocks is not None  # its own decoder is in this process
    fewer: dict[str, tuple[Any, ...]] = {
        TOP_K.name: (experts * 3 // 4, experts // 2, experts // 4, 1),
        ACTIVE_BLOCKS.name: tuple(RunningBlocks.of(range(blocks - left_out)) for left_out in (1, 2, 3, 4)),
    }
    alone = [high.replaced(**{name: value}) for name, values in fewer.items() for value in values]
    both = {TOP_K.name: experts // 2, ACTIVE_BLOCKS.name: fewer[ACTIVE_BLOCKS.name][-1]}
    return [own, high, medium, low, *alone, high.replaced(**both), low.replaced(**both)]


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
    decoders = {setting: setting.replaced(**{VISION_TOKENS.name: None}) for setting in answers}
    most = max(decoders.values(), key=lambda each: each.order)
    others = [each for each in decoders.values() if _without_blocks(each) == _without_blocks(most)]
    fewest = min(others, key=num_blocks_of)
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


def _without_blocks(setting: Setting) -> Setting:
    return setting.replaced(**{ACTIVE_BLOCKS.name: None})


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
