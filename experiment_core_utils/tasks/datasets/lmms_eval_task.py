"""A task of lmms-eval, by its task API: its prompts, limits and scoring; see docs/datasets.md.

The only file that imports lmms-eval, which is an optional extra.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmms_eval.tasks import TaskManager, get_task_dict
from PIL import Image

from experiment_core_utils.primitives.errors import ConfigurationError, SampleError, first_line
from experiment_core_utils.primitives.statistics import mean_of
from experiment_core_utils.primitives.texts import is_text, shown
from experiment_core_utils.tasks.answers import up_to_stop
from experiment_core_utils.tasks.datasets.questions import UNTYPED, check_template, fill
from experiment_core_utils.tasks.interface import Answer, Sample, Score, Scoring

# Where a task names no limit of its own.
MAX_NEW_TOKENS = 128


class LmmsEvalTask:
    """One task of lmms-eval. Implements `Task`.

    Args:
        name: as lmms-eval knows it; not of a group.
        split: "" or the one that lmms-eval evaluates: its test split, else its validation split.
        include_path: folder of further task files (YAML); None for none.
        prompt_template: text around lmms-eval's own text, which is its {question}.

    Attributes:
        scorer: scores its answers, by lmms-eval.

    Raises:
        ConfigurationError: no such task, a group, another split, answers that are not generated, or it cannot be read.
    """

    def __init__(self, name: str, split: str, include_path: str | None, prompt_template: str | None) -> None:
        if prompt_template is not None:
            check_template(prompt_template, ("question",))
        self._template = prompt_template or "{question}"
        self.prompt_form: Mapping[str, str] = {"open": self._template}
        self._task = _open(name, include_path)
        config = self._task.config
        self.split = str(config.test_split or config.validation_split)
        if split not in ("", self.split):
            raise ConfigurationError(f"lmms-eval evaluates {name} on {self.split}, not on {split!r}; drop --split")
        if config.output_type != "generate_until":
            raise ConfigurationError(
                f"{name} of lmms-eval is of output type {config.output_type}; only generate_until can be run here"
            )
        self._docs = self._task.eval_docs
        self._generation: Mapping[str, Any] = config.generation_kwargs or {}
        self.max_new_tokens = int(self._generation.get("max_new_tokens", MAX_NEW_TOKENS))
        until = self._generation.get("until") or ()
        self.stop = tuple(text for text in ([until] if isinstance(until, str) else until) if text)
        self.name = f"lmms_eval_{name}"
        self.scorer = LmmsEvalMetric(f"{self.name}.{next(iter(self._task.aggregation()))}", self)
        self.metric = self.scorer.name
        self.source: Mapping[str, str] = {
            "read_from": "lmms-eval",
            "path": str(config.dataset_path),
            "config": str(config.dataset_name or "default"),
            "split": self.split,
            "fingerprint": str(getattr(self._docs, "_fingerprint", "unknown")),
        }

    def __len__(self) -> int:
        return len(self._docs)

    def __getitem__(self, index: int) -> Sample:
        """See `Task`; the question is lmms-eval's whole text."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name} has samples 0 to {len(self) - 1}, not {index}")
        try:
            doc = self._docs[index]
            text = self._task.fewshot_context(doc, 0)
            pictures = list(self._task.doc_to_visual(doc) or [])
            target = self._task.doc_to_target(doc)
        except Exception as error:  # whatever the code of a task raises
            raise SampleError(f"{self.name} sample {index}: {type(error).__name__}: {first_line(error)}") from error
        if not is_text(text) or not text.strip():
            raise SampleError(f"{self.name} sample {index}: its text is {shown(repr(text))}")
        if len(pictures) > 1 or not all(isinstance(each, Image.Image) for each in pictures):
            kinds = ", ".join(type(each).__name__ for each in pictures)
            raise SampleError(f"{self.name} sample {index} shows {shown(kinds)}, and the models here take one picture")
        return Sample(
            sample_id=index,
            # Which samples share a picture is not known.
            image_id=str(index),
            question=text,
            answers=tuple(map(str, target if isinstance(target, list | tuple) else [target])),
            image=pictures[0].convert("RGB") if pictures else None,
            question_type=UNTYPED,
        )

    def question_type(self, index: int) -> str:
        """See `Task`: lmms-eval has no types."""
        return UNTYPED

    def prompt(self, sample: Sample) -> str:
        """See `Task`."""
        return fill(self._template, "", sample.question, ())

    def aggregation(self) -> Mapping[str, Any]:
        """What makes a run's figure of the results of its samples, by metric."""
        found: Mapping[str, Any] = self._task.aggregation()
        return found

    def results_of(self, index: int, prediction: str) -> Mapping[str, Any]:
        """What lmms-eval says of one answer, by metric: cut at the task's stop texts, filtered, scored.

        Raises:
            SampleError: its code fails.
        """
        prediction = up_to_stop(prediction, self.stop)
        try:
            doc = self._docs[index]
            kept: Any = [[prediction]]
            # The first of several pipelines, as each would be a score of its own.
            for each in self._task._filters[0].filters:
                kept = list(each.apply(kept, [doc]))
            found: Mapping[str, Any] = self._task.process_results(doc, kept)
        except Exception as error:  # whatever the code of a task raises
            raise SampleError(f"{self.name} sample {index}: {type(error).__name__}: {first_line(error)}") from error
        return found


@dataclass
class LmmsEvalMetric:
    """The scoring of one task of lmms-eval. Implements `Metric`.

    A sample's score is the first metric of the task where that is a number from 0 to 1; else it has none. The figures
    of all its metrics, aggregated as lmms-eval does, are in the details.
    """

    name: str
    task: LmmsEvalTask
    best: float = 1.0
    scores_each_answer: bool = True

    def score(self, answers: Sequence[Answer]) -> Scoring:
        """Raises SampleError where the code of the task fails."""
        found = [self.task.results_of(int(answer.image_id), answer.prediction) for answer in answers]
        first = next(iter(self.task.aggregation()))
        scores = tuple(Score(_from_0_to_1(each.get(first))) for each in found)
        figures = {
            name: _number(aggregate([each[name] for each in found if name in each]))
            for name, aggregate in self.task.aggregation().items()
            if found
        }
        return Scoring(scores, mean_of([score.value for score in scores]), {"lmms_eval": figures})


def _open(name: str, include_path: str | None) -> Any:
    try:
        manager = None
        if include_path is not None:
            # Its own two thousand take long to list.
            manager = TaskManager("ERROR", include_path=include_path, include_defaults=False)
        if manager is None or name not in manager.all_tasks:
            manager = TaskManager("ERROR", include_path=include_path)
        (found,) = get_task_dict([name], manager).items()
    except Exception as error:  # KeyError for an unknown name, and whatever reading its data raises
        raise ConfigurationError(
            f"lmms-eval cannot open the task {name} ({type(error).__name__}: {shown(first_line(error))}); "
            "`python -m lmms_eval --tasks list` names those that there are, and --data_dir a folder of further ones"
        ) from error
    if isinstance(found[1], Mapping):
        members = ", ".join(map(str, found[1]))
        raise ConfigurationError(f"{name} of lmms-eval is a group; give one of its tasks: {shown(members)}")
    return found[1]


def _from_0_to_1(value: Any) -> float | None:
    number = _number(value)
    return number if number is not None and 0 <= number <= 1 else None


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
