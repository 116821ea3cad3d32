"""In: a task's name and split; out: samples that can be asked and scored. What every task looks like from outside."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from PIL import Image


@dataclass(frozen=True)
class Sample:
    """One question with its picture and its reference answers.

    Attributes:
        sample_id: position in the task's split; stable for (task, split), so that a sample can be made again alone.
        image_id: names the picture; several questions may share one.
        question: the text as it is asked, without the prompt template around it.
        answers: reference answers (ten for VQA-style tasks).
        image: RGB picture, EXIF orientation applied; None for a text-only question.
        question_type: category for stratified reports, for example ``reading`` or ``count``.
        metadata: anything else worth keeping beside the result (JSON values only).
    """

    sample_id: int
    image_id: str
    question: str
    answers: tuple[str, ...]
    image: Image.Image | None
    question_type: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Task(Protocol):
    """A split of a dataset: sized, indexable, made of `Sample`s."""

    name: str
    split: str
    metric: str
    max_new_tokens: int

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample:
        """The sample at `index`; raises IndexError outside the split and `SampleError` for an unreadable one."""
        ...

    def prompt(self, sample: Sample) -> str:
        """The full prompt text for `sample`, without image tokens."""
        ...


class Metric(Protocol):
    """Scores one answer: `prediction` against `references`, a number in [0, 1]."""

    def __call__(self, prediction: str, references: Sequence[str]) -> float: ...
