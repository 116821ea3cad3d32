"""What tasks of lm-eval and of lmms-eval have in common: their documents as samples, and scores by their own code.

Imports nothing of either.
"""

import inspect
import math
import tempfile
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from experiment_core_utils.primitives.errors import ConfigurationError, ProfilerError, SampleError, first_line
from experiment_core_utils.primitives.statistics import mean_of
from experiment_core_utils.primitives.texts import shown
from experiment_core_utils.tasks.answers import up_to_stop
from experiment_core_utils.tasks.datasets.harness_code import (
    CodeState,
    contacted_server,
    definition_digest,
    failure,
    failure_in_a_copy,
    where_defined,
)
from experiment_core_utils.tasks.datasets.questions import UNTYPED, check_template, fill
from experiment_core_utils.tasks.interface import Answer, Sample, Score, Scoring

# Of these first samples one at least must be readable and scorable.
_TRIED_SAMPLES = 3
# Of `generation_kwargs`: lm-eval's names of the limit of tokens, of which the first that is there counts
# (`normalize_gen_kwargs`), what only sampling uses, and values that change nothing.
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_OF_SAMPLING = ("do_sample", "temperature", "top_p", "top_k", "seed")
_NEUTRAL = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1, "top_p": 1}


class HarnessTask:
    """One task of another harness. Implements `Task`; who makes one sets the attributes.

    Args:
        harness: `lm_eval` or `lmms_eval`.
        name: as the harness knows it.
        split: "" or the one that the harness evaluates.
        task: opened by the harness.
        docs: the rows as its runner gives them to prompts and scoring.
        prompt_template: text around the harness's own text, which is its {question}; None for that text alone.

    Attributes:
        scorer: scores its answers, by the harness; None where a metric of the project does.
        stop: texts that end an answer.
        filters: those of each of its pipelines, by name.
        score_key: where a result that is a record has its score.
        state: of its code, before anything was scored.

    Raises:
        ConfigurationError: another split, or another template.
    """

    metric: str
    max_new_tokens: int
    source: Mapping[str, str]
    stop: tuple[str, ...] = ()
    filters: Mapping[str, Sequence[Any]]
    scorer: "HarnessMetric | None" = None
    score_key: str = "score"

    def __init__(
        self, harness: str, name: str, split: str, task: Any, docs: Sequence[Any], prompt_template: str | None
    ) -> None:
        if prompt_template is not None:
            check_template(prompt_template, ("question",))
        self.harness, self.name = harness, f"{harness}_{name}"
        self._template = prompt_template or "{question}"
        self.prompt_form: Mapping[str, str] = {"open": self._template}
        self._task, self._words = task, docs
        self.split = str(task.config.test_split or task.config.validation_split)
        if split not in ("", self.split):
            title = harness.replace("_", "-")
            raise ConfigurationError(f"{title} evaluates {name} on {self.split}, not on {split!r}; drop --split")
        self.state = CodeState(task)

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, index: int) -> Sample:
        """The sample at `index`; errors as of `Task`."""
        raise NotImplementedError

    def question_type(self, index: int) -> str:
        """Harnesses have no types."""
        return UNTYPED

    def prompt(self, sample: Sample) -> str:
        return fill(self._template, "", sample.question, ())

    def aggregation(self) -> Mapping[str, Callable[..., Any]]:
        """What makes a run's figure of the results of its samples, by metric."""
        found: Mapping[str, Any] = self._task.aggregation()
        return found

    def results_of(self, index: int, prediction: str) -> Mapping[str, Mapping[str, Any]]:
        """What the harness says of one answer, by filter and metric: cut at the task's stop texts, filtered, scored.

        Raises:
            SampleError: its code fails.
        """
        prediction = up_to_stop(prediction, self.stop)
        # Without lmms-eval's five attempts, two seconds apart, around it: nothing is contacted that may answer later.
        process_results = inspect.unwrap(type(self._task).process_results)
        found: dict[str, Mapping[str, Any]] = {}
        for name, filters in self.filters.items():
            with self._named(index, "its row"):
                # Its code may change it.
                doc = self._words[index]
            with self._named(index, f"filter {name}"):
                kept: Any = [[prediction]]
                for each in filters:
                    kept = list(each.apply(kept, [doc]))
                (answer,) = kept
                answer = self._without_reasoning(answer)
            with self._named(index, "process_results"):
                found[name] = dict(process_results(self._task, doc, [answer]))
        return found

    def _source_of(self, docs: Any, *further: Mapping[str, str]) -> dict[str, str]:
        """Where the samples come from, and which state of the task and of the harness made them."""
        config = self._task.config
        source = {
            "read_from": self.harness.replace("_", "-"),
            "path": str(config.dataset_path),
            "config": str(config.dataset_name or "default"),
            "split": self.split,
            "fingerprint": str(getattr(docs, "_fingerprint", "unknown")),
            self.harness: version(self.harness),
            "definition": definition_digest(self._task),
        }
        for each in further:
            source |= each
        return source

    def _without_reasoning(self, answer: Any) -> Any:
        """A filtered answer, or a list of them, without what the task calls reasoning."""
        return answer

    def _check_first_samples(self) -> None:
        """Raises ConfigurationError where none of the first samples can be read, or none can be scored.

        What the harness scores is scored in a copy of this process, with its own first target as the answer.
        """
        samples, reasons = [], []
        for index in range(min(_TRIED_SAMPLES, len(self))):
            try:
                samples.append(self[index])
            except SampleError as error:
                reasons.append(str(error))
        if reasons and not samples:
            raise ConfigurationError(f"{reasons[0]}; correct the task or choose another")

        def score() -> str | None:
            failures = []
            for sample in samples:
                try:
                    self.results_of(sample.sample_id, next(filter(None, sample.answers), "A"))
                except SampleError as error:
                    failures.append(str(error))
            return failures[0] if len(failures) == len(samples) else None

        reason = failure_in_a_copy(score) if samples and self.scorer is not None else None
        if reason is not None:
            raise ConfigurationError(f"{reason}; correct the task or choose another")

    @contextmanager
    def _named(self, index: int, function: str) -> Iterator[None]:
        """What the code of the task raises becomes a SampleError of one line that names task, function and error."""
        try:
            yield
        except ProfilerError:
            raise
        except (Exception, SystemExit) as error:
            raise SampleError(f"{self.name} sample {index}: {function} fails: {failure(error)}") from error


@dataclass
class HarnessMetric:
    """The scoring of one task of a harness. Implements `Metric`.

    A sample's score is the first metric of the task, by the first of its filters, where that is a number from 0 to 1,
    or a record with such a number as its `score`; else it has none, and `unscored` counts it. Its details have the
    number of each metric by that filter. The figures of all metrics, aggregated as
    the harness does, are in the details. The task's code runs once for each answer, and aggregates once.
    """

    name: str
    task: HarnessTask
    best: float = 1.0
    scores_each_answer: bool = True
    runs_foreign_code: bool = True
    _known: dict[tuple[str, str], Score] = field(default_factory=dict)

    def score(self, answers: Sequence[Answer]) -> Scoring:
        """An answer whose scoring fails has no score, and the details say why, as of a figure that cannot be made."""
        self.task.state.restore()
        found = [self._results(answer) for answer in answers]
        failed = [each for each in found if isinstance(each, str)]
        scores = tuple(map(self._score, found))
        items: dict[tuple[str, str], list[Any]] = defaultdict(list)
        for results in found:
            for kind, by_metric in {} if isinstance(results, str) else results.items():
                for metric, value in by_metric.items():
                    items[metric, kind].append(value)
        first, figures = next(iter(self.task.filters)), dict[str, Any]()
        for (metric, kind), values in items.items():
            if (aggregate := self.task.aggregation().get(metric)) is None:
                continue
            key = metric if kind == first else f"{metric},{kind}"
            try:
                # What it writes is for a server that keeps the answers; those are in the results.
                with tempfile.TemporaryDirectory() as folder:
                    figures[key] = _figure(aggregate(values, **_arguments(aggregate, self.task.name, folder)))
            except (Exception, SystemExit) as error:
                figures[key] = None
                failed.append(f"{self.task.name}: aggregation of {metric} fails: {failure(error)}")
        details: dict[str, Any] = {self.task.harness: figures}
        if unscored := sum(each.value is None for each in scores):
            details["unscored"] = unscored
        if unparsed := sum(not each.parsed for each in scores):
            details["scoring_failed"] = unparsed
        if failed:
            details[f"{self.task.harness}_failed"] = failed
        return Scoring(scores, mean_of([score.value for score in scores]), details)

    def scores_of(self, answers: Sequence[Answer]) -> tuple[Score, ...]:
        """The scores of the answers alone; those of an answer that was given before are remembered."""
        for answer in answers:
            key = answer.image_id, answer.prediction
            if key not in self._known:
                self._known[key] = self._score(self._results(answer))
        return tuple(self._known[answer.image_id, answer.prediction] for answer in answers)

    def _score(self, results: Mapping[str, Mapping[str, Any]] | str) -> Score:
        if isinstance(results, str):
            return Score(None, parsed=False, parse_status="scoring_failed")
        first, by_first_filter = next(iter(self.task.aggregation())), next(iter(results.values()))
        numbers = {
            metric: number
            for metric, value in by_first_filter.items()
            if (number := _number_in(value, self.task.score_key)) is not None
        }
        value = numbers.get(first)
        return Score(value if value is not None and 0 <= value <= 1 else None, details=numbers)

    def _results(self, answer: Answer) -> Mapping[str, Mapping[str, Any]] | str:
        """By filter and metric; the reason where the code of the task fails."""
        try:
            return self.task.results_of(int(answer.image_id), answer.prediction)
        except SampleError as error:
            return str(error)


def unscorable_reason(task: Any, harness: str) -> str | None:
    """Why the code of a task whose answers are generated cannot score them here; None where it can."""
    if (task.config.repeats or 1) > 1:
        return f"asks each question {task.config.repeats} times with sampling, and decoding is greedy here"
    if not task.aggregation():
        return "has no metric"
    first = next(iter(task.aggregation()))
    if task.higher_is_better().get(first) is False:
        return f"is scored by {first}, of which less is better, and of a score here more is"
    aggregations = {f"aggregation of {name}": each for name, each in task.aggregation().items()}
    metrics = [each.get("metric") for each in task.config.metric_list or ()]
    functions = {"process_results": task.config.process_results, **aggregations}
    functions |= {f"metric {each.__name__}": each for each in metrics if callable(each)}
    for name, function in functions.items():
        client = contacted_server(function)
        if client is not None:
            return f"needs a server for its scores: {name} ({where_defined(function)}) uses {client}"
        if name in aggregations and (problem := _call_problem(function, harness)) is not None:
            return f"cannot be scored: {name} ({where_defined(function)}): {problem}"
    return None


def limits_of(
    name: str, generation: Mapping[str, Any], limits: Sequence[str], default: int
) -> tuple[int, tuple[str, ...]]:
    """The limit of tokens and the texts that end an answer.

    Args:
        name: of the task and its harness, for a message.
        limits: names of the limit in `generation_kwargs`; the first that is there counts.
        default: the limit where none is there.

    Raises:
        ConfigurationError: another limit than an integer from 1, or something else than texts.
    """
    key = next((each for each in limits if generation.get(each) is not None), limits[0])
    limit, until = generation.get(key), generation.get("until") or ()
    limit = default if limit is None else limit
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise ConfigurationError(f"{name}: {key} is {shown(repr(limit))}; give an integer from 1")
    stop = [until] if isinstance(until, str) else until
    if not isinstance(stop, list | tuple) or not all(isinstance(text, str) for text in stop):
        raise ConfigurationError(f"{name}: until is {shown(repr(until))}; give a text or a list of texts")
    return limit, tuple(text for text in stop if text)


def left_out(generation: Mapping[str, Any], followed: Sequence[str], *, is_greedy: bool) -> Mapping[str, str]:
    """What a task requests of decoding that greedy decoding here leaves out; {} for nothing.

    Args:
        followed: names in `generation_kwargs` that are followed, or that other models read.
        is_greedy: whether the task asks for greedy answers, so that names of sampling change nothing.
    """
    names = [each for each in generation if each not in followed]
    names = [name for name in names if name not in _OF_SAMPLING or not is_greedy]
    texts = [f"{each} {generation[each]}" for each in names if generation[each] not in (None, _NEUTRAL.get(each))]
    return {"left_out": shown(", ".join(texts))} if texts else {}


def _call_problem(aggregate: Callable[..., Any], harness: str) -> str | None:
    """Why an aggregation of a task's own cannot be called; None where it can."""
    if str(getattr(aggregate, "__module__", "")).startswith(f"{harness}.api"):
        # Of a metric that no result has, where it does not fit.
        return None
    try:
        inspect.signature(aggregate).bind([], **_arguments(aggregate, "", ""))
    except TypeError as error:
        return first_line(error)
    except ValueError:  # not counted: a built-in function without a signature
        return None
    return None


def _arguments(aggregate: Callable[..., Any], task_name: str, folder: str) -> Mapping[str, Any]:
    """The command line of lmms-eval, for an aggregation that asks for it, as lmms-eval's evaluator gives it."""
    if "args" not in inspect.signature(aggregate).parameters:
        return {}
    args = Namespace(output_path=folder, tasks=task_name, model="", model_args="", log_samples_suffix="", limit=None)
    return {"args": args}


def _number_in(value: Any, score_key: str) -> float | None:
    return _number(value.get(score_key) if isinstance(value, Mapping) else value)


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) and not isinstance(value, str) else None


def _figure(value: Any) -> Any:
    """An aggregated figure as JSON: most are numbers, some are tables of numbers."""
    if isinstance(value, Mapping):
        return {str(name): _figure(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_figure(each) for each in value]
    return shown(value) if isinstance(value, str) else _number(value)
