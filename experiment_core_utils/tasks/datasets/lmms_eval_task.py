"""A task of lmms-eval, by its task API: its prompts, limits and scoring; see docs/datasets.md.

The only module that imports lmms-eval, an optional extra. Prompts and scores are those of lmms-eval's own runner
(version 0.7.3: `Task.build_all_requests`, `evaluator._process_document_results`,
`TaskOutput.calculate_aggregate_metric`) for the same rows and answers.
"""

import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from lmms_eval.api.reasoning import parse_reasoning_tags_config, strip_reasoning_tags
from lmms_eval.filters.transformation import StripThinkingFilter
from lmms_eval.tasks import TaskManager, get_task_dict
from loguru import logger
from PIL import Image

from experiment_core_utils.primitives.errors import ConfigurationError, SampleError
from experiment_core_utils.primitives.texts import is_text, shown
from experiment_core_utils.tasks.datasets.harness_code import failure
from experiment_core_utils.tasks.datasets.harness_task import (
    HarnessMetric,
    HarnessTask,
    left_out,
    limits_of,
    unscorable_reason,
)
from experiment_core_utils.tasks.datasets.questions import UNTYPED
from experiment_core_utils.tasks.interface import Sample

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
# Of `generation_kwargs`: what is followed, and what only wrappers of other models read.
_LIMIT = "max_new_tokens"
_FOLLOWED = (_LIMIT, "until", "image_aspect_ratio", "visual_cot")

# loguru's own sink, number 0, shows lmms-eval's debugging lines.
try:
    logger.remove(0)
except ValueError:  # not counted: who imports this has set up sinks of their own
    pass
else:
    logger.add(sys.stderr, level="WARNING")


class LmmsEvalTask(HarnessTask):
    """One task of lmms-eval. Implements `Task`.

    Args:
        name: as lmms-eval knows it; not of a group.
        split: "" or the one that lmms-eval evaluates: its test split, else its validation split.
        include_path: folder of further task files (YAML); None for none.
        prompt_template: text around lmms-eval's own text, which is its {question}.
        model_type: of the model that will be asked, as transformers calls it: some tasks have other words for some
            models. None for a task's default.

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
        task = _open(name, include_path, _WRAPPERS.get(model_type or "", model_type))
        self._docs = task.eval_docs
        words = getattr(task, "eval_docs_no_media", self._docs)
        super().__init__("lmms_eval", name, split, task, words, prompt_template)
        reason = _unsupported_reason(task)
        if reason is not None:
            raise ConfigurationError(f"{name} of lmms-eval {reason}; choose another task")
        generation: Mapping[str, Any] = task.config.generation_kwargs or {}
        self.filters, self.score_key = _filters(task), str(task.config.score_key)
        self.max_new_tokens, self.stop = limits_of(f"{name} of lmms-eval", generation, (_LIMIT,), MAX_NEW_TOKENS)
        self.scorer = HarnessMetric(f"{self.name}.{next(iter(task.aggregation()))}", self)
        self.metric = self.scorer.name
        further = _words_for(task), left_out(generation, _FOLLOWED, is_greedy=_is_greedy(generation))
        self.source = self._source_of(self._docs, *further)
        self._check_first_samples()

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

    def _without_reasoning(self, answer: Any) -> Any:
        tags = parse_reasoning_tags_config(task_value=self._task.config.reasoning_tags)
        if tags is None:
            return answer
        if isinstance(answer, str):
            return strip_reasoning_tags(answer, tags)
        return [strip_reasoning_tags(each, tags) if isinstance(each, str) else each for each in answer]


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
    return unscorable_reason(task, "lmms_eval")


def _words_for(task: Any) -> Mapping[str, str]:
    """The entry that lmms-eval took of a task's tables by model: the model's, else the default; {} without tables."""
    tables = [set(table) for each in _BY_MODEL if (table := getattr(task.config, each))]
    known = [each for each in (task.model_name, "default") if any(each in table for table in tables)]
    return {"words_for": [*known, "all"][0]} if tables else {}


def _is_greedy(generation: Mapping[str, Any]) -> bool:
    """Whether a task asks for greedy answers: a temperature of 0 is greedy, as in lmms-eval's wrappers, whatever
    `do_sample` says.
    """
    temperature = generation.get("temperature")
    return not generation.get("do_sample") if temperature is None else temperature in (0, False)


def _filters(task: Any) -> Mapping[str, Sequence[Any]]:
    """The filters of each pipeline of a task, the first first, as lmms-eval's evaluator prepares them."""
    config = task.config
    strips = config.auto_strip_thinking and parse_reasoning_tags_config(task_value=config.reasoning_tags) is None
    first = [StripThinkingFilter()] if strips else []
    return {each.name: [*first, *each.filters] for each in task._filters}
