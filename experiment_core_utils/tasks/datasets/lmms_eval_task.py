"""A task of lmms-eval, by its task API: its prompts, limits and scoring; see docs/datasets.md.

With `lmms_eval_code`, which looks into the code of a task, the only module that imports lmms-eval, an optional extra.
Prompts and scores are those of lmms-eval's own runner (version 0.7.3: `Task.build_all_requests`,
`evaluator._process_document_results`, `TaskOutput.calculate_aggregate_metric`) for the same rows and answers.
"""

import inspect
import math
import sys
import tempfile
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import version
from typing import Any

from lmms_eval.api.reasoning import parse_reasoning_tags_config, strip_reasoning_tags
from lmms_eval.filters.transformation import StripThinkingFilter
from lmms_eval.tasks import TaskManager, get_task_dict
from loguru import logger
from PIL import Image

from experiment_core_utils.primitives.errors import ConfigurationError, ProfilerError, SampleError, first_line
from experiment_core_utils.primitives.statistics import mean_of
from experiment_core_utils.primitives.texts import is_text, shown
from experiment_core_utils.tasks.answers import up_to_stop
from experiment_core_utils.tasks.datasets.lmms_eval_code import (
    CodeState,
    contacted_server,
    definition_digest,
    failure,
    failure_in_a_copy,
    where_defined,
)
from experiment_core_utils.tasks.datasets.questions import UNTYPED, check_template, fill
from experiment_core_utils.tasks.interface import Answer, Sample, Score, Scoring

# Where a task names no limit of its own.
MAX_NEW_TOKENS = 128
# What lmms-eval calls the wrapper of a family, where that is not transformers' `model_type`. Its own `llava` and
# `llava_onevision` are for checkpoints of another layout.
_WRAPPERS = {
    "llava": "llava_hf",
    "llava_next": "llava_hf",
    "llava_onevision": "llava_hf",
    "perception_lm": "plm",
    "phi3_v": "phi3v",
    "qwen3_vl_moe": "qwen3_vl",
}
_BY_MODEL = ("lmms_eval_specific_kwargs", "model_specific_generation_kwargs", "model_specific_target_kwargs")
# Of `generation_kwargs`: what is followed, what only sampling uses, and what only wrappers of other models read.
_FOLLOWED = ("max_new_tokens", "until")
_OF_SAMPLING = ("do_sample", "temperature", "top_p", "top_k", "seed")
_OF_OTHER_MODELS = ("image_aspect_ratio", "visual_cot")
# Values that change nothing.
_NEUTRAL = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1, "top_p": 1}
# Of these first samples one at least must be readable and scorable.
_TRIED_SAMPLES = 3

# loguru's own sink, number 0, shows lmms-eval's debugging lines.
try:
    logger.remove(0)
except ValueError:  # not counted: who imports this has set up sinks of their own
    pass
else:
    logger.add(sys.stderr, level="WARNING")


class LmmsEvalTask:
    """One task of lmms-eval. Implements `Task`.

    Args:
        name: as lmms-eval knows it; not of a group.
        split: "" or the one that lmms-eval evaluates: its test split, else its validation split.
        include_path: folder of further task files (YAML); None for none.
        prompt_template: text around lmms-eval's own text, which is its {question}.
        model_type: of the model that will be asked, as transformers calls it: some tasks have other words for some
            models. None for a task's default.

    Attributes:
        scorer: scores its answers, by lmms-eval.
        stop: texts that end an answer.
        filters: those of each of its pipelines, by name.
        score_key: where a result that is a record has its score.
        state: of its code, before anything was scored.

    Raises:
        ConfigurationError: no such task, a group, another split, one that cannot be run here or needs a judge, or its
            data or its code fail.
    """

    def __init__(
        self,
        name: str,
        split: str,
        include_path: str | None,
        prompt_template: str | None,
        model_type: str | None = None,
    ) -> None:
        if prompt_template is not None:
            check_template(prompt_template, ("question",))
        self._template = prompt_template or "{question}"
        self.prompt_form: Mapping[str, str] = {"open": self._template}
        self._task = _open(name, include_path, _WRAPPERS.get(model_type or "", model_type))
        config = self._task.config
        self.split = str(config.test_split or config.validation_split)
        if split not in ("", self.split):
            raise ConfigurationError(f"lmms-eval evaluates {name} on {self.split}, not on {split!r}; drop --split")
        reason = _unsupported_reason(self._task)
        if reason is not None:
            raise ConfigurationError(f"{name} of lmms-eval {reason}; choose another task")
        self._docs = self._task.eval_docs
        # The rows as its runner gives them to prompts and scoring.
        self._words = getattr(self._task, "eval_docs_no_media", self._docs)
        self._generation: Mapping[str, Any] = config.generation_kwargs or {}
        self.filters = _filters(self._task)
        self.score_key = str(config.score_key)
        self.state = CodeState(self._task)
        self.max_new_tokens, self.stop = _limits(name, self._generation)
        self.name = f"lmms_eval_{name}"
        self.scorer = LmmsEvalMetric(f"{self.name}.{next(iter(self._task.aggregation()))}", self)
        self.metric = self.scorer.name
        self.source: Mapping[str, str] = {
            "read_from": "lmms-eval",
            "path": str(config.dataset_path),
            "config": str(config.dataset_name or "default"),
            "split": self.split,
            "fingerprint": str(getattr(self._docs, "_fingerprint", "unknown")),
            "lmms_eval": version("lmms_eval"),
            "definition": definition_digest(self._task),
            **_words_for(self._task),
            **_left_out(self._generation),
        }
        self._check_first_samples()

    def __len__(self) -> int:
        return len(self._docs)

    def __getitem__(self, index: int) -> Sample:
        """See `Task`; the question is lmms-eval's whole text.

        Its pictures are as its functions make them, turned by EXIF where `datasets` decoded them, then
        `.convert("RGB")` as in lmms-eval's wrappers, which drops transparency.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name} has samples 0 to {len(self) - 1}, not {index}")
        with self._named(index, "its row"):
            doc, words = self._docs[index], self._words[index]
        with self._named(index, "doc_to_text"):
            text = self._task.fewshot_context(words, 0)
        with self._named(index, "doc_to_visual"):
            pictures = list(self._task.doc_to_visual(doc) or [])
        with self._named(index, "doc_to_target"):
            target = self._task.doc_to_target(words)
        if not is_text(text) or not text.strip():
            raise SampleError(f"{self.name} sample {index}: its text is {shown(repr(text))}")
        if not all(isinstance(picture, Image.Image) for picture in pictures):
            kinds = ", ".join(sorted({type(each).__name__ for each in pictures}))
            raise SampleError(f"{self.name} sample {index} shows {shown(kinds)}, and the models here take pictures")
        with self._named(index, "its pictures"):
            first, *others = [each.convert("RGB") for each in pictures] or [None]
        return Sample(
            sample_id=index,
            # Which samples share a picture is not known.
            image_id=str(index),
            question=text,
            answers=tuple(map(str, target if isinstance(target, list | tuple) else [target])),
            image=first,
            further_images=tuple(filter(None, others)),
            question_type=UNTYPED,
        )

    def question_type(self, index: int) -> str:
        """In lmms-eval there are no types."""
        return UNTYPED

    def prompt(self, sample: Sample) -> str:
        return fill(self._template, "", sample.question, ())

    def aggregation(self) -> Mapping[str, Callable[..., Any]]:
        """What makes a run's figure of the results of its samples, by metric."""
        found: Mapping[str, Any] = self._task.aggregation()
        return found

    def results_of(self, index: int, prediction: str) -> Mapping[str, Mapping[str, Any]]:
        """What lmms-eval says of one answer, by filter and metric: cut at the task's stop texts, filtered, scored.

        Raises:
            SampleError: its code fails.
        """
        prediction = up_to_stop(prediction, self.stop)
        tags = parse_reasoning_tags_config(task_value=self._task.config.reasoning_tags)
        # Without the five attempts, two seconds apart, around it: nothing is contacted that may answer later.
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
                if tags is not None and isinstance(answer, str):
                    answer = strip_reasoning_tags(answer, tags)
                elif tags is not None:
                    answer = [strip_reasoning_tags(each, tags) if isinstance(each, str) else each for each in answer]
            with self._named(index, "process_results"):
                found[name] = dict(process_results(self._task, doc, [answer]))
        return found

    def _check_first_samples(self) -> None:
        """Raises ConfigurationError where none of the first samples can be read, or none can be scored.

        They are scored in a copy of this process, with their own first target as the answer.
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

        reason = failure_in_a_copy(score) if samples else None
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
class LmmsEvalMetric:
    """The scoring of one task of lmms-eval. Implements `Metric`.

    A sample's score is the first metric of the task, by the first of its filters, where that is a number from 0 to 1,
    or a record with such a number as its `score`; else it has none, and `unscored` counts it. Its details have the
    number of each metric by that filter. The figures of all metrics, aggregated as
    lmms-eval does, are in the details. The task's code runs once for each answer, and aggregates once.
    """

    name: str
    task: LmmsEvalTask
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
                figures[key] = _figure(_aggregated(aggregate, values, self.task.name))
            except (Exception, SystemExit) as error:
                figures[key] = None
                failed.append(f"{self.task.name}: aggregation of {metric} fails: {failure(error)}")
        details: dict[str, Any] = {"lmms_eval": figures}
        if unscored := sum(each.value is None for each in scores):
            details["unscored"] = unscored
        if unparsed := sum(not each.parsed for each in scores):
            details["scoring_failed"] = unparsed
        if failed:
            details["lmms_eval_failed"] = failed
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
        return Score(_from_0_to_1(by_first_filter.get(first), self.task.score_key), details=numbers)

    def _results(self, answer: Answer) -> Mapping[str, Mapping[str, Any]] | str:
        """By filter and metric; the reason where the code of the task fails."""
        try:
            return self.task.results_of(int(answer.image_id), answer.prediction)
        except SampleError as error:
            return str(error)


@lru_cache(maxsize=1)
def _own_tasks() -> TaskManager:
    # Its two thousand take long to list.
    return TaskManager("ERROR")


def _open(name: str, include_path: str | None, wrapper: str | None) -> Any:
    try:
        manager = None
        if include_path is not None:
            manager = TaskManager("ERROR", include_path=include_path, include_defaults=False)
        if manager is None or name not in manager.all_tasks:
            manager = _own_tasks()
        # As `lmms_eval --model WRAPPER`; the list of tasks is the same for all models.
        manager.model_name = wrapper
        (found,) = get_task_dict([name], manager).items()
    except (Exception, SystemExit) as error:  # KeyError for an unknown name, and whatever its data and code raise
        raise ConfigurationError(
            f"lmms-eval cannot open the task {name} ({failure(error)}); "
            "`python -m lmms_eval --tasks list` names those that there are, and --data_dir a folder of further ones"
        ) from error
    if isinstance(found[1], Mapping):
        members = ", ".join(map(str, found[1]))
        raise ConfigurationError(f"{name} of lmms-eval is a group; give one of its tasks: {shown(members)}")
    return found[1]


def _unsupported_reason(task: Any) -> str | None:
    """Why a task cannot be run here as lmms-eval runs it; None where it can."""
    config = task.config
    if config.output_type != "generate_until":
        return f"is of output type {config.output_type}, and only generate_until can be run here"
    if config.num_fewshot:
        return f"begins each prompt with {config.num_fewshot} examples, drawn in the order of its requests"
    if (config.repeats or 1) > 1:
        return f"asks each question {config.repeats} times with sampling, and decoding is greedy here"
    if not task.aggregation():
        return "has no metric"
    functions = {"process_results": config.process_results}
    functions |= {f"aggregation of {name}": each for name, each in task.aggregation().items()}
    for name, function in functions.items():
        client = contacted_server(function)
        if client is not None:
            return f"needs a server for its scores: {name} ({where_defined(function)}) uses {client}"
        if name != "process_results" and (problem := _call_problem(function)) is not None:
            return f"cannot be scored: {name} ({where_defined(function)}): {problem}"
    return None


def _limits(name: str, generation: Mapping[str, Any]) -> tuple[int, tuple[str, ...]]:
    """The limit of tokens and the texts that end an answer; raises ConfigurationError for other values."""
    limit, until = generation.get("max_new_tokens"), generation.get("until") or ()
    limit = MAX_NEW_TOKENS if limit is None else limit
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise ConfigurationError(f"{name} of lmms-eval: max_new_tokens is {shown(repr(limit))}; give an integer from 1")
    stop = [until] if isinstance(until, str) else until
    if not isinstance(stop, list | tuple) or not all(isinstance(text, str) for text in stop):
        raise ConfigurationError(f"{name} of lmms-eval: until is {shown(repr(until))}; give a text or a list of texts")
    return limit, tuple(text for text in stop if text)


def _words_for(task: Any) -> Mapping[str, str]:
    """The entry that lmms-eval took of a task's tables by model: the model's, else the default; {} without tables."""
    tables = [set(table) for each in _BY_MODEL if (table := getattr(task.config, each))]
    known = [each for each in (task.model_name, "default") if any(each in table for table in tables)]
    return {"words_for": [*known, "all"][0]} if tables else {}


def _left_out(generation: Mapping[str, Any]) -> Mapping[str, str]:
    """What a task requests of decoding that greedy decoding here leaves out; {} for nothing.

    A temperature of 0 is greedy, as in lmms-eval's wrappers, whatever `do_sample` says.
    """
    temperature = generation.get("temperature")
    is_greedy = not generation.get("do_sample") if temperature is None else temperature in (0, False)
    names = [each for each in generation if each not in (*_FOLLOWED, *_OF_OTHER_MODELS)]
    names = [name for name in names if name not in _OF_SAMPLING or not is_greedy]
    texts = [f"{each} {generation[each]}" for each in names if generation[each] not in (None, _NEUTRAL.get(each))]
    return {"left_out": shown(", ".join(texts))} if texts else {}


def _call_problem(aggregate: Callable[..., Any]) -> str | None:
    """Why an aggregation of a task's own cannot be called; None where it can."""
    if str(getattr(aggregate, "__module__", "")).startswith("lmms_eval.api"):
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


def _aggregated(aggregate: Callable[..., Any], values: list[Any], task_name: str) -> Any:
    # What it writes is for a server that keeps the answers; those are in the results.
    with tempfile.TemporaryDirectory() as folder:
        return aggregate(values, **_arguments(aggregate, task_name, folder))


def _filters(task: Any) -> Mapping[str, Sequence[Any]]:
    """The filters of each pipeline of a task, the first first, as lmms-eval's evaluator prepares them."""
    config = task.config
    strips = config.auto_strip_thinking and parse_reasoning_tags_config(task_value=config.reasoning_tags) is None
    first = [StripThinkingFilter()] if strips else []
    return {each.name: [*first, *each.filters] for each in task._filters}


def _from_0_to_1(value: Any, score_key: str) -> float | None:
    number = _number_in(value, score_key)
    return number if number is not None and 0 <= number <= 1 else None


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
