"""The interface of tasks and metrics: samples that can be asked and scored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from PIL import Image

from experiment_core_utils.primitives.errors import SampleError
from experiment_core_utils.records.settings import MeasuredSample


@dataclass(frozen=True)
class Sample:
    """One question with its picture and its reference answers.

    Attributes:
        sample_id: position in the task's split; stable for (task, split), so that a sample can be made again alone.
        image_id: names the picture; several questions may share one.
        question: the text as it is asked, without the prompt template and the options around it.
        answers: reference answers (ten for VQA-style tasks, five captions, the text of the right option).
        image: RGB picture, EXIF orientation applied; None for a text-only question.
        question_type: category for stratified sampling and reports, for example ``reading`` or ``count``.
        metadata: anything else worth keeping beside the result (JSON values only).
        options: the choices of a multiple-choice question, in the order of their letters; empty for others.
        answer_index: which of the options is right; None where there are none.
    """

    sample_id: int
    image_id: str
    question: str
    answers: tuple[str, ...]
    image: Image.Image | None
    question_type: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    answer_index: int | None = None


class Task(Protocol):
    """A split of a dataset: sized, indexable, made of `Sample`s.

    Attributes:
        source: where its samples come from: hub id with the commit that it gave, files, or generator.

    A task may also have `prompt_form`: its `style` and its templates, `open` and `choice`, which a result keeps.
    """

    name: str
    split: str
    metric: str
    max_new_tokens: int
    source: Mapping[str, str]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample:
        """The sample at `index`; raises IndexError outside the split and `SampleError` for an unreadable one."""
        ...

    def question_type(self, index: int) -> str:
        """The question type of the sample at `index`, without making or decoding its picture."""
        ...

    def prompt(self, sample: Sample) -> str:
        """The full prompt text for `sample`, without image tokens."""
        ...


@dataclass(frozen=True)
class Answer:
    """A model's output beside what it is scored against; what a metric scores, and what a result file stores.

    Attributes:
        prediction: the decoded text, as the model gave it.
        references, options, answer_index, question_type: as in `Sample` (references are its `answers`).
        image_id: captions of one picture are scored against the pictures of the whole run.
    """

    prediction: str
    references: tuple[str, ...]
    options: tuple[str, ...] = ()
    answer_index: int | None = None
    question_type: str = ""
    image_id: str = ""


@dataclass(frozen=True)
class Score:
    """What one answer is worth.

    Attributes:
        value: from 0 to the metric's `best`; None where it has none (CIDEr of a run with fewer than two pictures).
        parsed: whether the output could be read as an answer at all; where not, `value` is 0.
        parse_status: how it was read, for example ``letter``, ``option_text``, ``unparsed``; ``text`` where any text is
            an answer.
        details: further numbers of the same answer, for example ``{"anls": 0.8, "em": 0.0}``.
    """

    value: float | None
    parsed: bool = True
    parse_status: str = "text"
    details: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Scoring:
    """A whole run's scores.

    Attributes:
        scores: one for each answer, in their order.
        overall: the run's figure: the mean of the values, for every metric here; None where there is no value.
        details: means of the scores' details, and what was used beside the answers, for example
            ``{"idf": "references of the run's 500 pictures"}`` (JSON values only).
    """

    scores: tuple[Score, ...]
    overall: float | None
    details: Mapping[str, Any] = field(default_factory=dict)


class Metric(Protocol):
    """Scores the answers of a whole run at once; most metrics look at each answer alone, CIDEr at all together.

    Attributes:
        best: the highest score; the lowest is 0.
        scores_each_answer: whether an answer's score does not depend on which others are scored with it.
    """

    name: str
    best: float
    scores_each_answer: bool

    def score(self, answers: Sequence[Answer]) -> Scoring:
        """Pure: no file, clock or network. Raises `SampleError` for an answer without references."""
        ...


def require_references(metric: str, references: Sequence[str]) -> None:
    """Raises SampleError where an answer has nothing to be scored against."""
    if not references:
        raise SampleError(f"{metric} needs at least one reference answer, got none: check the sample's `answers`")


def answer_to(sample: Sample, prediction: str) -> Answer:
    """`prediction` beside what it is scored against."""
    return Answer(
        prediction, sample.answers, sample.options, sample.answer_index, sample.question_type, sample.image_id
    )


def answer_of(sample: MeasuredSample) -> Answer:
    """The answer of a sample that was measured."""
    return Answer(
        sample.prediction,
        sample.references,
        sample.options,
        sample.answer_index,
        sample.question_type,
        sample.image_id,
    )
