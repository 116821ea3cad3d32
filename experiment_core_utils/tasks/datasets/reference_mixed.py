"""Questions of five embedded tasks in equal parts: a sample's type is the task that it is from, whose metric scores it.

So one run shows in which task a knob matters. Captions are no part: their scores go up to 10, and depend on each other.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from experiment_core_utils.primitives.errors import ConfigurationError, SampleError
from experiment_core_utils.primitives.statistics import mean_of
from experiment_core_utils.tasks.datasets.reference_choice import ReferenceChoice
from experiment_core_utils.tasks.datasets.reference_counting import ReferenceCounting
from experiment_core_utils.tasks.datasets.reference_knowledge import ReferenceKnowledge
from experiment_core_utils.tasks.datasets.reference_reading import ReferenceReading
from experiment_core_utils.tasks.datasets.reference_task import GeneratedTask
from experiment_core_utils.tasks.datasets.reference_vqa import ReferenceVQA
from experiment_core_utils.tasks.interface import Answer, Metric, Sample, Score, Scoring
from experiment_core_utils.tasks.scoring.metrics import METRICS

PARTS: Mapping[str, type[GeneratedTask]] = {
    part.name: part for part in (ReferenceVQA, ReferenceReading, ReferenceCounting, ReferenceChoice, ReferenceKnowledge)
}


@dataclass
class MixedMetric:
    """Scores each answer by the metric of the task that its sample is from."""

    name: str = "mixed"
    best: float = 1.0
    scores_each_answer: bool = True

    def score(self, answers: Sequence[Answer]) -> Scoring:
        """The scores of a run, their mean, and `unparsed`: how many could not be read.

        Raises:
            SampleError: an answer whose type is none of the tasks, or that its metric cannot score.
        """
        places: dict[str, list[int]] = defaultdict(list)
        for at, answer in enumerate(answers):
            places[answer.question_type].append(at)
        scores: dict[int, Score] = {}
        for part, own in places.items():
            scored = _metric_of(part).score([answers[at] for at in own])
            scores |= dict(zip(own, scored.scores, strict=True))
        ordered = tuple(scores[at] for at in range(len(answers)))
        unparsed = sum(not score.parsed for score in ordered)
        return Scoring(ordered, mean_of([score.value for score in ordered]), {"unparsed": unparsed})


def _metric_of(part: str) -> Metric:
    if part not in PARTS:
        raise SampleError(f"mixed scores the types {', '.join(PARTS)}, not {part!r}; give another --metric")
    return next(metric for metric in METRICS if metric.name == PARTS[part].metric)


class ReferenceMixed:
    """Sample n is sample n // 5 of task n % 5 of `PARTS`; implements `Task`.

    Args:
        split: `train` or `validation`.
        prompt_template: in place of the reference model's; its fields are {question}, {style} and {options}.

    Raises:
        ConfigurationError: another split, or a template that cannot be filled.
    """

    name = "reference_mixed"
    metric = "mixed"
    max_new_tokens = max(part.max_new_tokens for part in PARTS.values())
    question_types = tuple(PARTS)
    is_generated = True

    def __init__(self, split: str = "validation", prompt_template: str | None = None) -> None:
        if split not in ReferenceVQA.splits:
            raise ConfigurationError(
                f"{self.name} has no split {split!r}: choose one of {', '.join(ReferenceVQA.splits)}"
            )
        self.split: str = split
        self.prompt_template = prompt_template
        self._parts = tuple(part(split, prompt_template=prompt_template) for part in PARTS.values())
        self.source: Mapping[str, str] = {"read_from": "generated scenes", "seed": "0", "tasks": ", ".join(PARTS)}

    def __len__(self) -> int:
        return len(self._parts) * min(map(len, self._parts))

    def __getitem__(self, index: int) -> Sample:
        part, place = self._part_of(index)
        sample = part[place]
        metadata = {**sample.metadata, "type_in_task": sample.question_type}
        return replace(sample, sample_id=index, question_type=part.name, metadata=metadata)

    def question_type(self, index: int) -> str:
        return self._part_of(index)[0].name

    @property
    def prompt_form(self) -> Mapping[str, str]:
        """The template of an open question and of one with options."""
        return self._parts[0].prompt_form

    def prompt(self, sample: Sample) -> str:
        """All parts ask alike."""
        return self._parts[0].prompt(sample)

    def _part_of(self, index: int) -> tuple[GeneratedTask, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name} {self.split} has samples 0 to {len(self) - 1}, not {index}")
        place, part = divmod(index, len(self._parts))
        return self._parts[part], place
