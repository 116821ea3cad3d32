"""What a task's settings come to, as one record: every reader shows the sentences that are made from it here."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from experiment_core_utils.knobs.variant import reference_meaning
from experiment_core_utils.primitives.contrasts import ACCURACY_MARGIN, Word
from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.primitives.files import read_regular_file, write_json_atomically
from experiment_core_utils.primitives.notebook_html import block, field_table, folded, listed, paragraph
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.primitives.units import time_change_text, time_text
from experiment_core_utils.records.controls import Control, control_lines
from experiment_core_utils.records.price_list import ACCURACY, PriceList, change_number, change_text
from experiment_core_utils.records.result_files import (
    CONCLUSION_FILE,
    RESULT_FILES,
    content_digest,
    field_fault,
    read_json_object,
)

WORDS: tuple[Word, ...] = ("yes", "likely", "can't tell", "no")
# What the words mean, for every reader of a table or a sentence with one of them.
VERDICT_LEGEND = (
    "yes: 95 % sure, with all that is compared; likely: 80 % sure; can't tell: neither; no: the opposite is 95 % sure"
)
# What a column is about whose words say how sure it is that a setting is on the front of accuracy and mean latency.
FRONT_MEANING = "whether no other setting scores as high in less mean time, or higher in no more"
FRONT_OPPOSITE = f"no: one other is surely faster and not worse by {ACCURACY_MARGIN:g} of the best score"
Interval = tuple[float, float]


@dataclass(frozen=True)
class Comparison:
    """A setting against the one that it would replace, on the samples that all settings have."""

    setting: str  #: its key
    time_ms: float  #: its mean total time
    accuracy: float  #: its mean score
    faster: Word  #: whether it takes less time
    time_ratio: float  #: geometric mean over samples of its time over the other's
    time_ratio_ci95: Interval | None  #: holds together for all settings; None if there are too few pictures
    not_worse: Word  #: whether its accuracy is above the other's less `accuracy_margin`
    accuracy_difference: float  #: its accuracy less the other's
    accuracy_difference_ci95: Interval | None  #: holds together for all settings; None if there are too few pictures

    @property
    def word(self) -> Word:
        """Whether it is faster and not worse."""
        return max(self.faster, self.not_worse, key=WORDS.index)


@dataclass(frozen=True)
class TypeChange:
    """What a knob changes from its smallest value to its largest in the accuracy of one type of question."""

    question_type: str
    num_samples: int  #: of this type, that all settings have a score of
    accuracy: float  #: change of the accuracy
    #: holds together for all types and knobs; None if there are too few pictures
    accuracy_ci95: Interval | None
    accuracy_word: Word  #: whether the knob changes it, over all types and knobs together


@dataclass(frozen=True)
class KnobChange:
    """What a knob changes from its smallest value to its largest, the others averaged."""

    knob: str  #: its title
    first: str  #: smallest value
    last: str  #: largest value
    time_ms: float  #: change of the mean total time
    time_word: Word  #: whether the knob changes it
    accuracy: float | None  #: change of the accuracy; None if nothing can be said of it
    accuracy_word: Word | None  #: whether the knob changes it; None as `accuracy`
    #: the same by type of question; empty if all samples are of one type, of an incomplete grid, or as `accuracy`
    by_type: tuple[TypeChange, ...] = ()

    @property
    def most_in(self) -> TypeChange | None:
        """The type in which the accuracy surely changes, and most; None where it does in none."""
        sure = [each for each in self.by_type if each.accuracy_word == "yes"]
        return max(sure, key=lambda each: abs(each.accuracy), default=None)


@dataclass(frozen=True)
class Conclusion:
    """Which setting of a task to take, how sure that is, and what voids it."""

    task: str  #: name of the task
    why: str | None = None  #: why nothing is concluded; None if something is
    voided_by: tuple[str, ...] = ()  #: kinds of caveats that make the run INVALID; empty for a VALID one
    changes: tuple[KnobChange, ...] = ()  #: what each knob changes; empty without a verdict
    word: Word = "can't tell"  #: whether a setting is faster than `against` and not worse
    #: the cheapest setting that is surely faster than `against` and surely not worse, else `against`; None if nothing
    #: is concluded
    setting: str | None = None
    against: str | None = None  #: the reference, else the most accurate setting; None if nothing is concluded
    is_reference: bool | None = None  #: whether `against` is the reference; None if nothing is concluded
    against_time_ms: float | None = None  #: its mean total time; None if nothing is concluded
    against_accuracy: float | None = None  #: its mean score; None if nothing is concluded
    nearest: Comparison | None = None  #: `setting` against it, or what is nearest to a yes; None if nothing is compared
    as_fast: tuple[str, ...] = ()  #: settings that are surely not worse, and not surely slower than `setting`
    #: accuracy that may be lost, in the metric's scores; None if nothing is concluded
    accuracy_margin: float | None = None
    num_samples: int | None = None  #: samples that all settings have a score of; None if nothing is concluded
    num_pictures: int | None = None  #: pictures of these samples; None if nothing is concluded
    #: runs of samples that all settings have, each a round; None if they were measured one after another, or nothing is
    #: concluded
    num_rounds: int | None = None
    #: samples that would decide about `nearest`; None if it is decided, or none would
    samples_needed: int | None = None
    metric_best: float = 1.0  #: highest score of the metric
    score: str = ACCURACY  #: what the metric's scores are called in sentences; not there if `accuracy`
    #: ratios of times that are 1 if nothing but the knobs changed a time; empty if settings did not take turns
    controls: tuple[Control, ...] = ()
    prices: PriceList | None = None  #: what each accepted loss of accuracy saves; None if nothing is concluded

    @property
    def sentence(self) -> str:
        """Which setting to take, and how sure that is; of one to keep also what is saved at a larger loss."""
        if self.why is not None:
            return f"{'INVALID' if self.voided_by else 'no setting is named'}: {self.why}"
        headline = None if self.prices is None or self.word == "yes" else self.prices.headline
        return self._choice if headline is None else f"{headline}; else {self._choice}"

    @property
    def _choice(self) -> str:
        """The setting to take at a loss of `accuracy_margin`."""
        assert self.against_time_ms is not None and self.num_samples is not None
        assert self.against is not None
        reference = f"the reference, which is {reference_meaning(self.against)}"
        most = "most accurate setting" if self.score == ACCURACY else f"setting of the highest {self.score}"
        kind = reference if self.is_reference else f"the {most}"
        figures = f"{time_text(self.against_time_ms)} a request, {self.score} {self.against_accuracy:.3f}"
        other, found = f"{self.against} ({kind}: {figures})", self.nearest
        if found is None or self.word == "no":
            return (
                f"keep {other}: no other setting is faster and not worse by {self.accuracy_margin:g} "
                f"({counted(self.num_samples, 'sample')})"
            )
        verdict = (
            f"faster: {found.faster} ({time_text(found.time_ms)}, {found.time_ratio:.2f} times as long"
            f"{_ends(found.time_ratio_ci95, '.2f')}); not worse by {self.accuracy_margin:g}: {found.not_worse} "
            f"({found.accuracy:.3f}, {found.accuracy_difference + 0.0:+.3f}"
            f"{_ends(found.accuracy_difference_ci95, '+.3f')}; {counted(self.num_samples, 'sample')})"
        )
        if self.word == "yes":
            equal = f"; perhaps as fast: {', '.join(self.as_fast)}" if self.as_fast else ""
            return f"take {self.setting} instead of {other}: {verdict}{equal}"
        more = "" if self.samples_needed is None else f"; about {counted(self.samples_needed, 'sample')} would decide"
        if self.samples_needed is None and self.num_rounds is None:
            more = "; more samples would not decide, since settings were measured one after another: measure in rounds"
        return f"keep {other} until more is known: the nearest is {found.setting}: {verdict}{more}"

    @property
    def lines(self) -> list[str]:
        """The sentence, the prices, what each knob changes and the run's controls where these are known."""
        prices = [] if self.prices is None or self.prices.why is not None else self.prices.lines
        return [f"conclusion: {self.sentence}", *prices, *self.notes]

    @property
    def notes(self) -> list[str]:
        """What each knob changes, and the run's controls, where these are known."""
        changes = "; ".join(map(self._change, self.changes))
        return [*([f"knobs: {changes}"] if changes else []), *control_lines(self.controls)]

    def content(self) -> dict[str, Any]:
        """Its fields as a file has them."""
        # Files from before scores had a name are of accuracies.
        return asdict(self, dict_factory=lambda found: dict(each for each in found if each != ("score", ACCURACY)))

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def _repr_html_(self) -> str:
        """As a notebook shows it: the lines and the fields."""
        hidden = ("changes", "nearest", "metric_best", "score", "controls", "prices")
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in hidden}
        if self.nearest is not None:
            own |= {f"nearest.{name}": each for name, each in asdict(self.nearest).items()}
        return block(
            paragraph(self.sentence, bold=f"{self.task}:"),
            listed(self.lines[1:]),
            folded("fields of the conclusion", field_table(own)),
        )

    def _change(self, change: KnobChange) -> str:
        """Such as `top-k 4 → 8: +27 ms, accuracy +0.0 points (can't tell)`."""
        time = f"{time_change_text(change.time_ms)}{_unless_yes(change.time_word)}"
        text = f"{change.knob} {change.first} → {change.last}: {time}"
        if change.accuracy is None or change.accuracy_word is None:
            return text
        text += f", {self.score} {change_text(change.accuracy, self.metric_best)}{_unless_yes(change.accuracy_word)}"
        most = change.most_in
        if most is None:
            likely = [each.question_type for each in change.by_type if each.accuracy_word == "likely"]
            by_type = f"likely in {' and '.join(likely)}" if likely else "by type can't tell"
            return f"{text}, {by_type}" if change.by_type else text
        changes = [change_number(end, self.metric_best) for end in most.accuracy_ci95 or ()]
        ends = f" [{', '.join(changes)}]" if changes else ""
        return f"{text}, surely in {most.question_type} ({change_text(most.accuracy, self.metric_best)}{ends})"


def _ends(interval: Interval | None, form: str) -> str:
    return "" if interval is None else f" [{interval[0]:{form}}, {interval[1]:{form}}]"


def _unless_yes(word: Word) -> str:
    return "" if word == "yes" else f" ({word})"


def save_conclusion(conclusion: Conclusion, experiment_id: str | None, folder: Path) -> None:
    """Write `conclusion.json`: the record with its sentence, the run that it is of, and the digest of both and the
    results beside it.

    Raises:
        ResultsNotSaved: the disk refuses.
    """
    head = {"schema_version": 1, "experiment_id": experiment_id, "sentence": conclusion.sentence}
    content = head | conclusion.content()
    write_json_atomically({**content, "sha256": _digest(content, folder)}, folder / CONCLUSION_FILE)


def saved_conclusion(folder: Path, experiment_id: str | None) -> "Conclusion | str | None":
    """The conclusion of this run that is saved in its folder, or why it is not shown; None where another run, or none,
    wrote the file.
    """
    try:
        content = read_json_object(folder / CONCLUSION_FILE)
    except ResultsError:
        return None
    if content.get("experiment_id") != experiment_id:
        return None
    if content.pop("sha256", None) != _digest(content, folder):
        return f"not shown: {CONCLUSION_FILE} is not of the results beside it; the same command writes it again"
    try:
        return TypeAdapter(Conclusion).validate_python(content)
    except ValidationError as error:
        return f"not shown: {CONCLUSION_FILE} {field_fault(error)}; the same command writes it again"


def _digest(content: Mapping[str, Any], folder: Path) -> str:
    """SHA-256 of the names and bytes of the result files in a folder, and of what is concluded from them."""
    found = hashlib.sha256(content_digest(content).encode())
    for path in sorted(folder.glob(RESULT_FILES)):
        found.update(os.fsencode(path.name) + hashlib.sha256(read_regular_file(path)).digest())
    return found.hexdigest()
