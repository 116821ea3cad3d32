"""The interface of tasks and metrics: samples, their prompts and their scores."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from numbers import Real
from typing import Any, Literal, Protocol

from PIL import Image

from experiment_core_utils.primitives.errors import ConfigurationError, SampleError
from experiment_core_utils.primitives.texts import shown
from experiment_core_utils.records.requests import ScoredContinuation
from experiment_core_utils.records.settings import MeasuredSample
from experiment_core_utils.tasks.answers import answer_in, scored_text

# How a model is asked: `molmo`, in the words that Molmo was trained with; `chat`, by a user turn of its chat template;
# `plain`, by a text to continue, for base models; `paligemma`, by the prefixes of PaliGemma's training tasks.
PromptFamily = Literal["molmo", "chat", "plain", "paligemma"]


@dataclass(frozen=True)
class Sample:
    """One question with its picture and its reference answers."""

    sample_id: int  #: position in the task's split; stable for (task, split), so that a sample can be made again alone
    image_id: str  #: names the picture; several questions may share one
    question: str  #: the question's text, without the prompt template and the options around it
    #: reference answers (ten for VQA-style tasks, five captions, the text of the right option)
    answers: tuple[str, ...]
    image: Image.Image | None  #: RGB picture, EXIF orientation applied; None for a text-only question, else the first
    question_type: str  #: category for stratified sampling and reports, for example ``reading`` or ``count``
    #: anything else worth keeping beside the result (JSON values only)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    #: the choices of a multiple-choice question, in the order of their letters; empty for others
    options: tuple[str, ...] = ()
    answer_index: int | None = None  #: which of the options is right; None where there are none
    #: SHA-256 of the picture as it is stored, which a task that decodes it gives, of several joined by spaces; see
    #: `content.with_picture_digest`
    picture_sha256: str | None = None
    further_images: tuple[Image.Image, ...] = ()  #: the pictures after the first one, in the order of the question
    #: texts that are scored as continuations of the prompt, in place of an answer; () where the prompt itself is the
    #: text that is scored; None where an answer is generated
    continuations: tuple[str, ...] | None = None

    @property
    def images(self) -> tuple[Image.Image, ...]:
        """All pictures of the question, numbered from 1 where it names them as ``<image 1>``; mostly one or none."""
        return () if self.image is None else (self.image, *self.further_images)


class Task(Protocol):
    """A split of a dataset: sized, indexable, made of `Sample`s.

    A task may also have

    - `prompt_form`: its `style` and its templates, `open` and `choice`, which a result keeps;
    - `data_sha256(index)`: the `content.sample_digest` of the sample at `index` without decoding its picture, None for
      one that cannot be read; and `file_of(index)`, the path of its picture as the row has it, None without one. Of
      other tasks every drawn sample is made once before a run, to know its content;
    - `stop`: texts that end an answer, and `target_delimiter`, the text before an option that is scored;
    - `is_generated = True`, where samples follow from `source`, split and index: none is made before a run then.
    """

    name: str
    split: str
    metric: str
    max_new_tokens: int
    source: Mapping[str, str]  #: where its samples come from: hub id with the commit that it gave, files, or generator

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample:
        """The sample at `index`; raises IndexError outside the split and `SampleError` for an unreadable one."""

    def question_type(self, index: int) -> str:
        """The question type of the sample at `index`, without making or decoding its picture."""

    def prompt(self, sample: Sample) -> str:
        """The full prompt text for `sample`, without image tokens and chat template. Of the project's own tasks it is
        Molmo's, and `prompt_forms.prompt_for` asks other models; any other task's is used for every model.
        """


@dataclass(frozen=True)
class Answer:
    """A model's output beside what it is scored against; what a metric scores, and what a result file stores."""

    prediction: str  #: the decoded text, without thinking
    #: references, options, answer_index, question_type: as in `Sample` (references are its `answers`)
    references: tuple[str, ...]
    options: tuple[str, ...] = ()
    answer_index: int | None = None
    question_type: str = ""
    image_id: str = ""  #: captions of one picture are scored against the pictures of the whole run
    #: of the options in their order, or of the parts of a text, in place of an output; () with one
    scores: tuple[ScoredContinuation, ...] = ()


@dataclass(frozen=True)
class Score:
    """What one answer is worth."""

    #: from 0 to the metric's `best`; None where it has none (CIDEr of a run with fewer than two pictures)
    value: float | None
    parsed: bool = True  #: whether the output could be read as an answer at all; where not, `value` is 0
    #: how it was read, for example ``letter``, ``option_text``, ``unparsed``; ``text`` where any text is an answer
    parse_status: str = "text"
    #: further numbers of the same answer, for example ``{"anls": 0.8, "em": 0.0}``
    details: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Scoring:
    """A whole run's scores."""

    scores: tuple[Score, ...]  #: one for each answer, in their order
    #: the run's figure: the mean of the values, for every metric here; None where there is no value
    overall: float | None
    #: means of the scores' details, and what was used beside the answers, for example ``{"idf": "references of the
    #: run's 500 pictures"}`` (JSON values only)
    details: Mapping[str, Any] = field(default_factory=dict)


class Metric(Protocol):
    """Scores the answers of a whole run at once; most metrics look at each answer alone, CIDEr at all together.

    A metric that runs code from elsewhere, which may write files, also has `runs_foreign_code = True` and
    `scores_of(answers)`: the scores alone. One of log-probabilities has `scored`, `options` or `text`, and
    `check(answer)`, which raises `SampleError` for what it cannot score. One whose `best` is not 1 may have `label`,
    what its score is called where it is shown; see `registry.score_name`.
    """

    name: str
    best: float  #: the highest score; the lowest is 0
    scores_each_answer: bool  #: whether an answer's score does not depend on which others are scored with it

    def score(self, answers: Sequence[Answer]) -> Scoring:
        """Pure: no file, clock or network. Raises `SampleError` for an answer without references."""


def check_scorable(sample: Sample, metric: Metric) -> None:
    """Score a sample's empty answer before the sample is measured; code from elsewhere runs only on real answers.

    Raises:
        SampleError: no answer could be scored.
        ConfigurationError: the score is none that the metric may give.
    """
    if getattr(metric, "scored", None) is not None:
        metric.check(answer_to(sample, ""))  # type: ignore[attr-defined]
    elif not getattr(metric, "runs_foreign_code", False):
        scored([answer_to(sample, "")], metric, f"sample {sample.sample_id}, of which the answer is empty")


def scored(answers: Sequence[Answer], metric: Metric, what: str = "") -> Scoring:
    """The scores of answers.

    Args:
        what: the only answer's name in a message; without it, it is the answer itself.

    Raises:
        SampleError: an answer has no references.
        ConfigurationError: the metric gives another number of scores, or one that is not finite or out of its range.
    """
    scoring = metric.score(answers)
    _check_scores(scoring.scores, answers, metric, what)
    return scoring


def scores_of(answers: Sequence[Answer], metric: Metric) -> Sequence[Score]:
    """The scores of answers, where the figure of the whole is not needed; errors as of `scored`."""
    alone: Callable[[Sequence[Answer]], Sequence[Score]] | None = getattr(metric, "scores_of", None)
    if alone is None:
        return scored(answers, metric).scores
    scores = alone(answers)
    _check_scores(scores, answers, metric)
    return scores


def _check_scores(scores: Sequence[Score], answers: Sequence[Answer], metric: Metric, what: str = "") -> None:
    if len(scores) != len(answers):
        raise ConfigurationError(f"metric {metric.name} gave {len(scores)} scores of {len(answers)} answers")
    for score, answer in zip(scores, answers, strict=True):
        to = f"to {what or repr(answer.prediction[:60])}"
        if score.value is not None and not (isinstance(score.value, Real) and 0 <= score.value <= metric.best):
            raise ConfigurationError(
                f"metric {metric.name} gave {score.value} {to}; a score is from 0 to {metric.best:g}, or None"
            )
        for name, figure in score.details.items():
            # The means of the details stand beside these.
            if not isinstance(name, str) or not name.isprintable() or name in ("unparsed", "few_references", "idf"):
                raise ConfigurationError(
                    f"metric {metric.name} gave a detail called {shown(name)} {to}; give it another name, of one line"
                )
            if not isinstance(figure, Real) or not math.isfinite(figure):
                raise ConfigurationError(f"metric {metric.name} gave {figure} as {name} {to}; give a finite number")


def require_references(metric: str, references: Sequence[str]) -> None:
    """Raises SampleError where an answer has nothing to be scored against."""
    if not references:
        raise SampleError(f"{metric} needs at least one reference answer, got none: check the sample's `answers`")


EitherOrder = Callable[[str | Sequence[str], str | Sequence[str]], float]


def in_either_order(score: Callable[[str, Sequence[str]], float]) -> EitherOrder:
    """A score of a prediction and its references that may also be given in the published order, references first.

    A text is the prediction, a list of texts the references.

    Raises:
        SampleError: (where it is called) both are texts, or neither is.
    """

    @wraps(score)
    def scored(prediction: str | Sequence[str], references: str | Sequence[str]) -> float:
        if isinstance(references, str):
            prediction, references = references, prediction
        if isinstance(references, str) or not isinstance(prediction, str):
            raise SampleError(f"{score.__name__} compares a text with a list of reference answers; give one of each")
        return score(prediction, references)

    return scored


def answer_to(sample: Sample, prediction: str, is_thinking_open: bool = False) -> Answer:
    """The answer in `prediction` beside what it is scored against.

    Args:
        is_thinking_open: whether the prompt ended inside thinking; see `AnswerEnds`.
    """
    return Answer(
        answer_in(prediction, is_thinking_open),
        sample.answers,
        sample.options,
        sample.answer_index,
        sample.question_type,
        sample.image_id,
    )


def answer_of(sample: MeasuredSample) -> Answer:
    """The answer of a sample that was measured."""
    return Answer(
        scored_text(sample.prediction, sample.scored_answer),
        sample.references,
        sample.options,
        sample.answer_index,
        sample.question_type,
        sample.image_id,
        sample.scores,
    )
