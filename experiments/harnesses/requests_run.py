"""Requests of another harness, answered and measured by a profiling run at one setting of the knobs.

Each task of the harness becomes a task of this profiler, with its prompts, pictures, stop texts and limits. Its answers
go back unscored: the harness scores them. The run's result lies in a folder of the task's name.
"""

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from PIL import Image

from experiment_core_utils.b_model_loader import find_requested_model
from experiment_core_utils.config.profiling import ProfilingConfig, parts_of_flags
from experiment_core_utils.knobs.vision_tokens import VisionFlags
from experiment_core_utils.models.source import ModelSource
from experiment_core_utils.pipeline import run_profiling
from experiment_core_utils.planning.plan import plan_for
from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError
from experiment_core_utils.records.sample_result import SampleResult
from experiment_core_utils.records.setting_result import SettingResult
from experiment_core_utils.saved_results.harness_layout import own_content
from experiment_core_utils.tasks.datasets.harness_task import LIMITS
from experiment_core_utils.tasks.datasets.questions import check_template, fill
from experiment_core_utils.tasks.interface import Answer, Sample, Score, Scoring
from experiment_core_utils.tasks.registry import TaskSource, register_metric, register_task
from experiment_core_utils.tasks.scoring.likelihood import Scored
from experiments.analyses.sweeps import load_sweep
from experiments.core_exp.export import verdict_on

# Of the arguments of a generation: values by which an answer is greedy.
_GREEDY: Mapping[str, tuple[Any, ...]] = {
    "do_sample": (False, None),
    "temperature": (0, None),
    "num_beams": (1, None),
    "top_p": (1, None),
}


@dataclass(frozen=True)
class HarnessRequest:
    """A text to answer, with its pictures, or whose log-probability or that of its continuations is asked for."""

    task: str
    doc_id: int
    prompt: str
    generation: Mapping[str, Any] = field(default_factory=dict)  #: `until` and a limit of tokens, as the task has them
    images: tuple[Image.Image, ...] = ()
    continuations: tuple[str, ...] | None = None  #: as of `Sample`

    @property
    def scored(self) -> Scored | None:
        """What is scored by log-probability; None where an answer is generated."""
        if self.continuations is None:
            return None
        return "options" if self.continuations else "text"


@dataclass
class ScoredByHarness:
    """The metric of answers that are scored elsewhere: none has a score here. Implements `Metric`."""

    name: str = "scored_by_harness"
    best: float = 1.0
    scores_each_answer: bool = True
    scored: Scored | None = None

    def check(self, answer: Answer) -> None:
        """Any answer can be left unscored."""

    def score(self, answers: Sequence[Answer]) -> Scoring:
        """No score for any answer."""
        return Scoring(tuple(Score(None) for _ in answers), None)


_METRICS: Mapping[Scored | None, ScoredByHarness] = {
    None: ScoredByHarness(),
    "options": ScoredByHarness("options_scored_by_harness", scored="options"),
    "text": ScoredByHarness("text_scored_by_harness", scored="text"),
}


@dataclass
class RequestsTask:
    """Requests of one kind, with the same stop texts and limit. Implements `Task`."""

    name: str
    requests: Sequence[HarnessRequest]
    stop: tuple[str, ...]
    max_new_tokens: int
    source: Mapping[str, str]
    split: str = "requests"
    metric: str = ""  #: the name of one of `_METRICS`
    template: str = "{question}"  #: around the harness's text, which is its {question}

    def __len__(self) -> int:
        return len(self.requests)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name} has requests 0 to {len(self) - 1}, not {index}")
        request = self.requests[index]
        first, *further = (image.convert("RGB") for image in request.images) if request.images else (None,)
        return Sample(
            sample_id=index,
            image_id=f"{request.task} {request.doc_id}",
            question=request.prompt,
            answers=(request.prompt,) if request.scored == "text" else (),
            options=request.continuations or (),
            continuations=request.continuations,
            image=first,
            question_type=request.task,
            metadata={"doc_id": request.doc_id},
            further_images=tuple(image for image in further if image is not None),
        )

    def question_type(self, index: int) -> str:
        """The name of the harness's task."""
        return self.requests[index].task

    def prompt(self, sample: Sample) -> str:
        """The text as the harness made it, in the template."""
        return fill(self.template, "", sample.question, ())

    @property
    def prompt_form(self) -> Mapping[str, str]:
        """The template."""
        return {"open": self.template}


class SettingRunner:
    """A model at one setting of its knobs.

    Args:
        harness: whose requests they are, for the default folder.
        limit: of tokens of an answer, where a task names none.
        is_bare: whether prompts are given as they are where `no_chat_template` is not among the arguments; else the
            model's chat template is put around each, where it has one.
        arguments: `pretrained`; a value of a knob by the name of its flag without `_list`, such as `top_k`; and other
            flags of `knobprof profile`. A knob that is not named stays as the model has it.

    Raises:
        ConfigurationError: no such model or flag, or more than one process or request at a time.
    """

    def __init__(self, harness: str, limit: int, arguments: Mapping[str, Any], *, is_bare: bool) -> None:
        self._harness, self._limit = harness, limit
        options = {name: value for name, value in arguments.items() if value is not None}
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigurationError("the model knobprof answers in one process; start the harness without a launcher")
        if str(options.pop("batch_size", 1)) not in ("1", "auto") or "pretrained" not in options:
            raise ConfigurationError(
                "the model knobprof takes pretrained=MODEL and one request at a time: batch_size=1"
            )
        options.pop("max_batch_size", None)
        # What lm-eval and lmms-eval give where nothing is asked for.
        if options.get("device") == "cuda:0":
            options["device"] = "auto"
        self.folder = Path(str(options.pop("output_dir", Path("results") / harness)))
        defaults = {"num_runs_per_sample": 1, "accuracy_batch_size": 1, "no_reference": True}
        self._flags = defaults | _flags_of({"model_path": str(options.pop("pretrained")), **options})
        config = ProfilingConfig.of(**self._flags)
        source = find_requested_model(config)
        self._flags = _as_it_is(source, is_bare, self._flags) | self._flags
        settings = plan_for(ProfilingConfig.of(**self._flags), source)
        if len(settings) > 1:
            keys = ", ".join(setting.key for setting in settings)
            raise ConfigurationError(
                f"the model knobprof runs at one setting, and these are {keys}; name one value each"
            )
        # Of each task that was run, in order, with the verdict on its run.
        self._results: dict[str, tuple[SettingResult, dict[str, Any]]] = {}
        for metric in _METRICS.values():
            register_metric(metric)

    def answers(self, requests: Sequence[HarnessRequest]) -> list[SampleResult]:
        """What was measured of each request, in order: `pred` is its greedy answer up to a stop text, or
        `continuations` has log-probabilities.

        Raises:
            ConfigurationError: a request asks for something else than a greedy answer.
            ResultsError: the setting or one of the requests failed.
        """
        groups: dict[tuple[str, Scored | None, tuple[str, ...], int], list[int]] = {}
        for place, request in enumerate(requests):
            ends = _ends_of(request, self._limit)
            groups.setdefault((request.task, request.scored, *ends), []).append(place)
        answered: dict[int, SampleResult] = {}
        for key, places in groups.items():
            task, scored, stop, limit = key
            names = (_name_of(f"{self._harness}_{task}", number) for number in itertools.count())
            name = next(each for each in names if each not in self._results)
            group, source = [requests[place] for place in places], {"read_from": f"requests of {task}"}
            samples = self._measured(RequestsTask(name, group, stop, limit, source, metric=_METRICS[scored].name))
            answered |= dict(zip(places, samples, strict=True))
        return [answered[place] for place in range(len(requests))]

    def figures(self) -> dict[str, dict[str, Any]]:
        """By task, what was measured; see `own_content`."""
        return {task: verdict | own_content(result) for task, (result, verdict) in self._results.items()}

    def _measured(self, task: RequestsTask) -> list[SampleResult]:
        def opened(split: str, source: TaskSource) -> RequestsTask:
            if source.prompt_template is None:
                return task
            return replace(task, template=check_template(source.prompt_template, ("question",)))

        register_task(task.name, opened, metric=task.metric, default_split=task.split)
        folder = self.folder / task.name
        report = run_profiling(
            ProfilingConfig.of(**self._flags, dataset_name=task.name, num_samples=len(task), output_dir=folder)
        )
        for key, failure in report.failed.items():
            raise ResultsError(f"{key} failed: {failure.error}: {failure.reason}")
        (result,) = report.results
        for failed in result.failed_samples:
            raise ResultsError(f"request {failed.sample_id} of {task.name} failed: {failed.error}: {failed.reason}")
        self._results[task.name] = result, verdict_on(load_sweep(folder).settings)
        return list(result.per_sample_results)


def _flags_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of a profiling run: a knob's value becomes a list of one."""
    known = {name for part in parts_of_flags().values() for name in part.model_fields}
    listed = {f"{name}_list": [value] for name, value in given.items() if f"{name}_list" in known}
    return listed | {name: value for name, value in given.items() if f"{name}_list" not in known}


def _as_it_is(source: ModelSource, is_bare: bool, given: Mapping[str, Any]) -> dict[str, Any]:
    """The flags by which knobs whose default is several values stay as the model has them, and so do prompts."""
    limits = source.limits
    own: dict[str, Any] = {}
    if limits.default_top_k is not None:
        own["top_k_list"] = [limits.default_top_k]
    if limits.num_total_blocks is not None:
        own["num_active_blocks_list"] = [limits.num_total_blocks]
    if source.takes_pictures and not given.keys() & VisionFlags.model_fields.keys():
        own["vision_fraction_list"] = [1.0]
    if is_bare and source.has_chat_template:
        own["no_chat_template"] = True
    return own


def _ends_of(request: HarnessRequest, default_limit: int) -> tuple[tuple[str, ...], int]:
    """Stop texts and the limit of tokens of a request."""
    options = request.generation
    # Without sampling its temperature changes nothing.
    looked_at = [name for name in _GREEDY if name != "temperature" or options.get("do_sample") is None]
    for name in looked_at:
        if options.get(name) not in _GREEDY[name]:
            raise ConfigurationError(
                f"{request.task} asks for {name}={options[name]}, and answers here are greedy; drop it"
            )
    limit = next((options[name] for name in LIMITS if options.get(name) is not None), default_limit)
    until = options.get("until") or ()
    stop = (until,) if isinstance(until, str) else tuple(until)
    return tuple(filter(None, stop)), int(limit)


def _name_of(task: str, number: int) -> str:
    """A name for folders and files; requests whose name is taken have a number behind it."""
    name = re.sub(r"\W", "_", task, flags=re.ASCII)
    return f"{name}-{number}" if number else name
