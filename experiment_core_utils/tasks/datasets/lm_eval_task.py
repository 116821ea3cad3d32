"""A task of lm-eval, by its task API: its prompts, options, limits and scoring; see docs/datasets.md.

The only module that imports lm-eval, an optional extra, for tasks. Prompts and scores are those of lm-eval's own runner
(version 0.4.13: `Task.build_all_requests`, `ConfigurableTask.process_results`) for the same rows and answers, without a
chat template. Options and texts are scored by log-probability, with the metrics of `scoring.likelihood`.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from lm_eval.api.task import ConfigurableTask
from lm_eval.defaults import DEFAULT_MAX_GEN_TOKS, DEFAULT_OTHER_SEED
from lm_eval.tasks import TaskManager

from experiment_core_utils.primitives.errors import ConfigurationError, SampleError
from experiment_core_utils.primitives.files import check_file_name_part
from experiment_core_utils.primitives.texts import is_text, shown
from experiment_core_utils.tasks.datasets.harness_code import failure, where_defined
from experiment_core_utils.tasks.datasets.harness_task import (
    LIMITS,
    HarnessMetric,
    HarnessTask,
    left_out,
    limits_of,
    unscorable_reason,
)
from experiment_core_utils.tasks.datasets.questions import UNTYPED
from experiment_core_utils.tasks.interface import Sample

GENERATED, OPTIONS, TEXT = "generate_until", "multiple_choice", "loglikelihood_rolling"
# Of a task whose log-probabilities are scored, the metrics that are computed; the details have all of them.
_METRICS: Mapping[str, Sequence[str]] = {
    OPTIONS: ("acc", "acc_norm", "acc_bytes"),
    TEXT: ("word_perplexity", "byte_perplexity", "bits_per_byte"),
}


class LmEvalTask(HarnessTask):
    """One task of lm-eval. Implements `Task`.

    Args:
        name: as lm-eval knows it; not of a group.
        split: "" or the one that lm-eval evaluates: its test split, else its validation split.
        include_path: folder of further task files (YAML); None for none.
        prompt_template: text around lm-eval's own text, which is its {question}.

    Attributes:
        target_delimiter: what stands between a prompt and an option.

    Raises:
        ConfigurationError: no such task, a group, another split, one that cannot be run here or needs a judge, or its
            data or its code fail.
    """

    def __init__(self, name: str, split: str, include_path: str | None, prompt_template: str | None) -> None:
        task = _open(name, include_path)
        reason = _unsupported_reason(task)
        if reason is not None:
            raise ConfigurationError(f"{name} of lm-eval {reason}; choose another task")
        super().__init__("lm_eval", name, split, task, task.task_docs, prompt_template)
        check_file_name_part(self.name, "task")
        config = task.config
        self._kind, self.target_delimiter = config.output_type, str(config.target_delimiter)
        generation: Mapping[str, Any] = config.generation_kwargs or {}
        self.max_new_tokens, self.metric = 1, "perplexity"
        if self._kind == OPTIONS:
            self.metric = next(each for each in task.aggregation() if each in _METRICS[OPTIONS])
        elif self._kind == GENERATED:
            self.filters = {each.name: [make() for make in each.filters] for each in task._filters}
            self.max_new_tokens, self.stop = limits_of(f"{name} of lm-eval", generation, LIMITS, DEFAULT_MAX_GEN_TOKS)
            self.scorer = HarnessMetric(f"{self.name}.{next(iter(task.aggregation()))}", self)
            self.metric = self.scorer.name
        further = left_out(generation, (*LIMITS, "until"), is_greedy=_is_greedy(generation))
        self.source = self._source_of(self._words, further)
        self._contexts: Sequence[str] | None = None
        if config.num_fewshot and self._kind != TEXT:
            # Examples are drawn one prompt after the other, from the first on, with the seed of its runner.
            task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
            try:
                self._contexts = [self._context(index, config.num_fewshot) for index in range(len(self))]
            except SampleError as error:
                raise ConfigurationError(f"{error}; correct the task or choose another") from error
        self._check_first_samples()

    def __getitem__(self, index: int) -> Sample:
        """The sample at `index`; its question is lm-eval's whole prompt, or the text that is scored."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name} has samples 0 to {len(self) - 1}, not {index}")
        with self._named(index, "its row"):
            doc = self._words[index]
        with self._named(index, "doc_to_target"):
            target = self._task.doc_to_target(doc)
        options, right = self._options(index, doc, target) if self._kind == OPTIONS else ((), None)
        if self._kind == TEXT:
            text = target
        else:
            text = self._context(index, 0) if self._contexts is None else self._contexts[index]
        # Options may follow no prompt at all.
        if not is_text(text) or not (text or options):
            raise SampleError(f"{self.name} sample {index}: its text is {shown(repr(text))}")
        targets = target if isinstance(target, list | tuple) else [target]
        return Sample(
            sample_id=index,
            image_id=str(index),
            question=text,
            answers=tuple(map(str, targets)) if right is None else (options[right],),
            image=None,
            question_type=UNTYPED,
            options=options,
            answer_index=right,
        )

    def _context(self, index: int, num_fewshot: int) -> str:
        """The prompt with its description and examples, up to where an answer begins."""
        with self._named(index, "fewshot_context"):
            doc = self._words[index]
            context: str = self._task.fewshot_context(doc, num_fewshot, gen_prefix=self._task.doc_to_prefix(doc))
        return context

    def _options(self, index: int, doc: Any, target: Any) -> tuple[tuple[str, ...], int]:
        """The options of a question, and which is right."""
        with self._named(index, "doc_to_choice"):
            options = tuple(self._task.doc_to_choice(doc))
        if not all(map(is_text, options)):
            raise SampleError(f"{self.name} sample {index}: its options are {shown(repr(options))}, which are no texts")
        right = options.index(target) if target in options else target
        if not isinstance(right, int) or not 0 <= right < len(options):
            raise SampleError(
                f"{self.name} sample {index}: its right option is {shown(repr(target))}, which is none of its "
                f"{len(options)}"
            )
        return options, int(right)


@lru_cache(maxsize=1)
def _own_tasks() -> TaskManager:
    # Its thousands take long to list.
    return TaskManager()


def _open(name: str, include_path: str | None) -> Any:
    try:
        manager = None if include_path is None else TaskManager(include_path=include_path, include_defaults=False)
        if manager is None or name not in manager.all_tasks:
            manager = _own_tasks()
        is_group = name in manager.all_tasks and name not in manager.all_subtasks
        found = [] if is_group else list(manager.load([name])["tasks"].values())
    except (Exception, SystemExit) as error:  # KeyError for an unknown name, and whatever its data and code raise
        raise ConfigurationError(
            f"lm-eval cannot open the task {name} ({failure(error)}); `lm-eval ls subtasks` names those that there "
            "are, and --data_dir a folder of further ones"
        ) from error
    if is_group:
        raise ConfigurationError(f"{name} of lm-eval is a group; `lm-eval ls subtasks` names its tasks: give one")
    return found[0]


def _unsupported_reason(task: Any) -> str | None:
    """Why a task cannot be run here as lm-eval runs it; None where it can."""
    if type(task) is not ConfigurableTask:
        return f"is the class {type(task).__name__}, and only tasks of YAML files alone can be run here"
    config, kind = task.config, task.config.output_type
    if kind != GENERATED and kind not in _METRICS:
        return f"is of output type {kind}, and only {', '.join((GENERATED, *_METRICS))} can be run here"
    if config.doc_to_image or config.doc_to_audio:
        return "shows pictures or plays sounds, which lmms-eval has the tasks for"
    if config.unsafe_code:
        return "runs code that the model writes, and none is run here"
    return unscorable_reason(task, "lm_eval") if kind == GENERATED else _unscored_likelihood_reason(task)


def _unscored_likelihood_reason(task: Any) -> str | None:
    """The same of a task of log-probabilities, for how it compares them."""
    config, metrics = task.config, _METRICS[task.config.output_type]
    if config.process_results is not None:
        return f"scores log-probabilities by a function of its own ({where_defined(config.process_results)})"
    if config.filter_list is not None:
        return "filters log-probabilities"
    if task.multiple_input:
        return "compares prompts, and options are compared here"
    if task.multiple_target:
        return "has several right options for a question, and one is compared here"
    if not set(metrics) & set(task.aggregation()):
        return f"has none of the metrics {', '.join(metrics)}, but {', '.join(task.aggregation())}"
    return None


def _is_greedy(generation: Mapping[str, Any]) -> bool:
    """Whether a task asks for greedy answers: its temperature counts only where `do_sample` is not given."""
    do_sample = generation.get("do_sample")
    return not (generation.get("temperature") if do_sample is None else do_sample)
