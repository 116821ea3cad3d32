"""Score made-up rows of each importable image task of lmms-eval through our adapter and through lmms-eval's runner.

    python scripts/walk_lmms_eval_tasks.py [TASK ...] [--one_of_each_folder] [--output FILE]

Needs `pip install lmms-eval`, no data and no network. Each task gets rows whose columns and types are found by trying:
a column that its functions miss is added, one on which they fail gets a value of another type. The same rows and
answers then go through `LmmsEvalTask` and through what lmms-eval's evaluator calls (0.7.3: `build_all_requests`,
`apply_filters`, `_process_document_results`, `calculate_aggregate_metric`). Prints the outcomes with their counts,
writes those of each task to FILE, and ends with exit code 1 where a prompt, a picture or a score differs.
"""

import contextlib
import copy
import inspect
import io
import json
import linecache
import math
import os
import random
import re
import signal
import socket
import sys
import tempfile
import traceback
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import checkout  # noqa: F401
import numpy as np
from PIL import Image

from experiment_core_utils.config.command import run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.primitives.errors import ConfigurationError, SampleError, first_line
from experiment_core_utils.tasks.datasets import lmms_eval_task as adapter
from experiment_core_utils.tasks.datasets.lmms_eval_code import failure
from experiment_core_utils.tasks.interface import answer_to

COLOURS = ("red", "green", "blue", "yellow")
NUM_ROWS = 4
MOST_TRIES = 400
TIME_LIMIT_S = 60
ANSWERS = ("{target}", "A", "Yes, the square is red.", "I do not know")
Value = Callable[[int], Any]


class OutOfTime(BaseException):
    """A task took too long; no code of a task takes it for an error of its own."""


def picture(row: int) -> Image.Image:
    """A picture of one colour and another size in every row."""
    return Image.new("RGB", (40 + row, 30), COLOURS[row % 4])


OPTIONS: Value = lambda row: list(COLOURS)  # noqa: E731
# What a column may contain, by row: the first kind whose pattern its name matches comes first, then all others.
BY_NAME: Sequence[tuple[str, Sequence[Value]]] = (
    (r"images$|pictures|visuals|frames", (lambda row: [picture(row)], picture)),
    (r"image|picture|photo|img|visual|screenshot|diagram|decoded", (picture, lambda row: [picture(row)])),
    (r"^(choices|options|candidates)$|option_list|choices", (OPTIONS, lambda row: str(list(COLOURS)))),
    (r"^(answers|references|gt_answers|captions?|labels|targets)$", (lambda row: [COLOURS[row]] * 10,)),
    (
        r"^(answer|label|gt|target|correct|solution|ground_truth|gt_answer)$|answer",
        (lambda row: "ABCA"[row], lambda row: COLOURS[row], lambda row: ["yes", "no"][row % 2], lambda row: row),
    ),
    (r"^[A-Z]$|option|choice", (lambda row: COLOURS[row],)),
    (
        r"(^|_)(id|idx|index|number|num|count|qid|pid)$",
        (lambda row: str(row), lambda row: row, lambda row: str(row // 2)),
    ),
    (r"question|query|prompt|instruction|text|problem|caption", (lambda row: f"Which colour is square {row}?",)),
    (r"width|height|size|year", (lambda row: 40 + row,)),
    (r"bbox|box|point|coord|polygon", (lambda row: [0.1, 0.2, 0.5, 0.6], lambda row: [1, 2, 30, 20])),
)
OTHERS: Sequence[Value] = (
    lambda row: COLOURS[row],
    lambda row: row,
    lambda row: [COLOURS[row], "green"],
    lambda row: "A",
    lambda row: "yes",
    lambda row: 0.5,
    lambda row: True,
    lambda row: None,
    lambda row: [0.1, 0.2, 0.5, 0.6],
    lambda row: json.dumps(list(COLOURS)),
    lambda row: json.dumps({"A": "red", "B": "green"}),
    lambda row: {"A": "red", "B": "green"},
    lambda row: [{"answer": COLOURS[row], "answer_id": 1, "answer_confidence": "yes"}] * 10,
    lambda row: [{"from": "human", "value": "Which colour?"}, {"from": "gpt", "value": COLOURS[row]}],
    picture,
    lambda row: [picture(row)],
    lambda row: "1, 2",
    lambda row: [["red", "green"]],
    lambda row: "3",
    lambda row: base64_picture(row),
    lambda row: {"bytes": base64_picture(row), "path": "picture.png"},
    lambda row: [1, 2],
)


def base64_picture(row: int) -> str:
    """A picture as some rows have it."""
    import base64

    with io.BytesIO() as stream:
        picture(row).save(stream, "PNG")
        return base64.b64encode(stream.getvalue()).decode()


class Rows:
    """Made-up rows of one task: which columns there are, and which of its possible values each contains.

    A change is kept where the task's functions get further with it, by the steps done and the line reached.
    """

    def __init__(self, code: str) -> None:
        self._code = code
        self._values: dict[str, list[Value]] = {}
        self._chosen: dict[str, int] = {}
        self._best: tuple[int, int] = (-1, -1)
        self._before: dict[str, int] = {}
        self._waiting: list[tuple[str, int]] = []
        compared = re.findall(r"""(?:==|!=|\bin)\s*\(?\[?["']([^"'\n]{1,40})["']""", code)
        texts = dict.fromkeys([*compared, *re.findall(r"""["']([\w -]{3,25})["']""", code)])
        self._texts: list[Value] = [partial(_same_in_every_row, text) for text in list(texts)[:60]]
        for pattern in (r"""\[["']([^"'\n]{1,40})["']\]""", r"""\.get\(\s*["']([^"'\n]{1,40})["']"""):
            for name in re.findall(r"(?:doc|x|row|example|sample|item|d)" + pattern, code):
                self.add(name)

    def add(self, name: str) -> None:
        """Give the rows one more column."""
        likely = next((values for pattern, values in BY_NAME if re.search(pattern, name)), ())
        # Of a value that has columns itself.
        inner = sorted(set(re.findall(rf"""["']{re.escape(name)}["']\]\[["'](\w+)["']\]""", self._code)))
        nested: list[Value] = [lambda row: dict.fromkeys(inner, COLOURS[row])] if inner else []
        self._values.setdefault(name, [*nested, *likely, *OTHERS, *self._texts])
        self._chosen.setdefault(name, 0)

    def content(self) -> list[dict[str, Any]]:
        """The rows themselves."""
        return [{name: self._values[name][kind](row) for name, kind in self._chosen.items()} for row in range(NUM_ROWS)]

    def change_after(self, error: BaseException, steps: int) -> bool:
        """Other rows, after the code of the task failed on these; False where all has been tried."""
        missing = _missing_column(error)
        if missing is not None and missing not in self._values:
            held = [name for name, kind in self._chosen.items() if missing in _texts_of(self._values[name][kind])]
            keys = _keys_missed(error) if held else []
            if keys:
                # A value is looked up: one of those that the code knows, in every row another.
                self._values[held[0]].append(partial(_one_of, keys))
                self._chosen[held[0]] = len(self._values[held[0]]) - 1
                self._waiting = []
                return True
            if not held:
                self.add(missing)
                return True
        reached = steps, max((line for _, line in traceback.walk_tb(error.__traceback__)), default=0)
        if steps > self._best[0] or (steps == self._best[0] and reached > self._best) or self._best[0] < 0:
            self._best, self._before = reached, dict(self._chosen)
            suspects = self._suspects(error)
            names = [*suspects, *(name for name in self._chosen if name not in suspects)]
            self._waiting = [
                (name, kind) for name in names for kind in range(len(self._values[name])) if kind != self._chosen[name]
            ]
        if not self._waiting:
            return False
        name, kind = self._waiting.pop(0)
        self._chosen = {**dict.fromkeys(self._chosen, 0), **self._before, name: kind}
        return True

    def _suspects(self, error: BaseException) -> list[str]:
        row = self.content()[0]
        for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
            text = linecache.getline(frame.f_code.co_filename, line)
            named = [name for name in row if re.search(rf"""["']{re.escape(name)}["']""", text)]
            used = [each for each in re.findall(r"\w+", text) if each in frame.f_locals]
            held = [name for name in row for each in used if _same(frame.f_locals[each], row[name])]
            if named or held:
                return list(dict.fromkeys([*named, *held]))
        return []


def _same_in_every_row(value: Any, row: int) -> Any:
    return value


def _one_of(values: Sequence[Any], row: int) -> Any:
    return values[row % len(values)]


def _texts_of(value: Value) -> list[str]:
    return [each for each in map(value, range(NUM_ROWS)) if isinstance(each, str)]


def _keys_missed(error: BaseException) -> list[str]:
    """The keys of the tables that are named where a key was missed."""
    frame, line = list(traceback.walk_tb(error.__traceback__))[-1]
    text = linecache.getline(frame.f_code.co_filename, line)
    for name in re.findall(r"\w+", text):
        table = frame.f_locals.get(name, frame.f_globals.get(name))
        if isinstance(table, dict) and table and all(isinstance(each, str) for each in table):
            return list(table)
    return []


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and isinstance(one, str | list | dict) and one == other


def _missing_column(error: BaseException) -> str | None:
    text = str(error)
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], str):
        found = re.search(r"Column '?(\w+)'? (?:not|doesn)", error.args[0])
        return error.args[0] if found is None else found[1]
    found = re.match(r"'(\w+)' is undefined", text)
    return None if found is None else found[1]


@contextlib.contextmanager
def made_up(rows: Rows, splits: Sequence[str]) -> Iterator[None]:
    """lmms-eval reads these rows in place of any dataset."""
    from datasets import Dataset, DatasetDict
    from lmms_eval.api import task as api

    original = api.datasets.load_dataset

    def load_dataset(*arguments: object, **named: object) -> Any:
        return DatasetDict({split: Dataset.from_list(rows.content()) for split in splits})

    api.datasets.load_dataset = load_dataset
    try:
        yield
    finally:
        api.datasets.load_dataset = original


class Walk:
    """All tasks, one after the other."""

    def __init__(self) -> None:
        from lmms_eval.api.task import ConfigurableTask

        # Without five attempts, two seconds apart.
        for name in ("download", "process_results"):
            setattr(ConfigurableTask, name, inspect.unwrap(getattr(ConfigurableTask, name)))
        self.manager = adapter._own_tasks()

    def names(self, one_of_each_folder: bool) -> list[str]:
        """Of all single tasks, or of the first one in each folder of task files."""
        index = self.manager.task_index
        names = [name for name in self.manager.all_tasks if index[name]["type"] in ("task", "python_task")]
        folders = {str(Path(index[name]["yaml_path"]).parent): name for name in reversed(names)}
        return sorted(folders.values()) if one_of_each_folder else names

    def outcome(self, name: str) -> tuple[str, str]:
        """What became of one task: the kind, and how."""
        try:
            config = self.manager._get_config(name)
        except (Exception, SystemExit) as error:
            return "not importable", failure(error)
        if "class" in config:
            return "not tried", "a Python class reads its data itself"
        if config.get("output_type", "generate_until") != "generate_until":
            return "another output type", str(config["output_type"])
        if (config.get("dataset_kwargs") or {}).get("video"):
            return "not of pictures", "video or sound"
        splits = [
            config[f"{each}_split"]
            for each in ("training", "validation", "test", "fewshot")
            if config.get(f"{each}_split")
        ]
        rows = Rows(_code_of(config))
        shows, error = self._learn(config, rows, list(dict.fromkeys(splits)))
        if shows == "video or sound":
            return "not of pictures", "video or sound"
        with made_up(rows, splits):
            return self._compared(name, error, shows)

    def _learn(self, config: Mapping[str, Any], rows: Rows, splits: Sequence[str]) -> tuple[str, BaseException | None]:
        """Change the rows until the functions of the task take them; what it shows, and the error that remained."""
        from lmms_eval.api.task import ConfigurableTask

        error: BaseException | None = None
        shows = "nothing"
        for tries in range(MOST_TRIES):
            if tries > MOST_TRIES // 5 and shows != "pictures":
                break
            steps = 0
            try:
                with made_up(rows, splits):
                    task = ConfigurableTask(config=copy.deepcopy(dict(config)))
                    if adapter._unsupported_reason(task) is not None and task.config.process_results:
                        task.process_results = lambda doc, results: {}
                    found = []
                    for index in range(len(task.eval_docs)):
                        doc, words = task.eval_docs[index], task.eval_docs_no_media[index]
                        steps += 1
                        text = task.fewshot_context(words, 0)
                        visuals = list(task.doc_to_visual(doc) or [])
                        kinds = {type(each).__name__ for each in visuals if not isinstance(each, Image.Image)}
                        steps += 1
                        if shows != "pictures":
                            shows = "video or sound" if kinds else "pictures" if visuals else shows
                        if kinds:
                            raise TypeError(f"shows {kinds}")
                        steps += 1
                        if not isinstance(text, str) or not text.strip():
                            raise ValueError(f"the prompt is {text!r}")
                        task.doc_to_target(words)
                        steps += 1
                        for answer in ("red", "A"):
                            scored = task.process_results(task.eval_docs_no_media[index], [answer])
                        found.append(scored)
                    for metric, aggregate in task.aggregation().items() if any(found) else ():
                        items = [each[metric] for each in found if metric in each]
                        if items:
                            adapter._aggregated(aggregate, items, "walk")
                        steps += 1
                    return shows, None
            except (Exception, SystemExit) as raised:
                error = raised
                if not rows.change_after(raised, steps):
                    break
        return shows, error

    def _compared(self, name: str, error: BaseException | None, shows: str) -> tuple[str, str]:
        try:
            ours = adapter.LmmsEvalTask(name, "", None, None)
        except ConfigurationError as refusal:
            if "\n" in str(refusal):
                return "differs", "refused in several lines"
            if error is None or "of lmms-eval " in str(refusal):
                return "refused", _reason(str(refusal))
            return "not tried", f"no rows were found: {failure(error)}"
        if error is not None and shows != "pictures":
            return "not tried", f"no rows were found: {failure(error)}"
        if shows != "pictures":
            return "not of pictures", "text only"
        for kind in ANSWERS:
            samples = [ours[index] for index in range(len(ours))]
            answers = [
                kind.format(target=sample.answers[0].split("\n")[0] if sample.answers else "") for sample in samples
            ]
            try:
                theirs = their_figures(self.manager, name, answers)
            except (Exception, SystemExit) as raised:
                mine = _scored(ours, samples, answers)
                if mine.details.get("lmms_eval_failed"):
                    return "not tried", f"its code fails on made-up rows in both: {failure(raised)}"
                return "differs", f"only lmms-eval fails: {failure(raised)}"
            problem = _difference(ours, samples, theirs, _scored(ours, samples, answers))
            if problem is not None:
                return "differs", problem
        return "equal", "more than one picture" if any(len(each.images) > 1 for each in samples) else "one picture"


def _scored(ours: Any, samples: Sequence[Any], answers: Sequence[str]) -> Any:
    random.seed(0)
    np.random.seed(0)
    return ours.scorer.score([answer_to(sample, answer) for sample, answer in zip(samples, answers, strict=True)])


def their_figures(manager: Any, name: str, answers: Sequence[str]) -> dict[str, Any]:
    """Prompts, pictures, results by sample and figures of lmms-eval's own runner, for these answers."""
    from lmms_eval.api.reasoning import parse_reasoning_tags_config
    from lmms_eval.evaluator import _process_document_results
    from lmms_eval.evaluator_utils import TaskOutput
    from lmms_eval.filters.transformation import StripThinkingFilter
    from lmms_eval.tasks import get_task_dict

    task = get_task_dict([name], manager)[name]
    output = TaskOutput.from_taskdict(name, task)
    with tempfile.TemporaryDirectory() as folder:
        task.args = Namespace(output_path=folder, tasks=name, model="", log_samples_suffix="", limit=None)
        task.build_all_requests()
        instances = sorted(task.instances, key=lambda each: each.doc_id)
        cut = [_cut(answer, instances[0].args[1].get("until")) for answer in answers]
        for instance, answer in zip(instances, cut, strict=True):
            instance.resps = [answer]
        tags = parse_reasoning_tags_config(task_value=task.config.reasoning_tags)
        if task.config.auto_strip_thinking and tags is None:
            for ensemble in task._filters:
                ensemble.filters.insert(0, StripThinkingFilter())
        task.apply_filters()
        random.seed(0)
        np.random.seed(0)
        # Its evaluator goes filter by filter.
        for kind in instances[0].filtered_resps:
            for instance, doc in zip(instances, task.eval_docs_no_media, strict=True):
                done = _process_document_results(
                    (instance.doc_id, doc, [instance]),
                    task=task,
                    filter_key=kind,
                    reasoning_tags=tags,
                    log_samples=False,
                )
                for metric, value in done.metrics.items():
                    output.sample_metrics[metric, kind].append(value)
        output.calculate_aggregate_metric(bootstrap_iters=0)
    return {
        "prompts": [each.args[0] for each in instances],
        "pictures": [[one.convert("RGB") for one in task.doc_to_visual(doc) or []] for doc in task.eval_docs],
        "samples": dict(output.sample_metrics),
        "figures": {key: value for key, value in output.agg_metrics.items() if "_stderr," not in key},
        "first": (next(iter(task.aggregation())), next(iter(instances[0].filtered_resps))),
    }


def _cut(answer: str, until: Any) -> str:
    for stop in [until] if isinstance(until, str) else until or ():
        answer = answer.split(stop)[0] if stop else answer
    return answer


def _difference(ours: Any, samples: Sequence[Any], theirs: Mapping[str, Any], mine: Any) -> str | None:
    for sample, prompt, pictures in zip(samples, theirs["prompts"], theirs["pictures"], strict=True):
        if ours.prompt(sample) != prompt:
            return f"prompt of sample {sample.sample_id}"
        if [each.tobytes() for each in sample.images] != [each.tobytes() for each in pictures]:
            return f"pictures of sample {sample.sample_id}"
    metric, first = theirs["first"]
    expected = {}
    for key, value in theirs["figures"].items():
        name, kind = key.rsplit(",", 1)
        expected[name if kind == first else key] = adapter._figure(value)
    found = mine.details["lmms_eval"]
    if mine.details.get("lmms_eval_failed"):
        return f"only here fails: {mine.details['lmms_eval_failed'][0]}"
    if expected.keys() != found.keys() or not all(_equal(expected[key], found[key]) for key in expected):
        return f"figures {expected} became {found}"
    values = theirs["samples"].get((metric, first), [])
    if len(values) == len(samples):
        alone = [adapter._from_0_to_1(each, "score") for each in values]
        if not all(map(_equal, alone, [each.value for each in mine.scores])):
            return f"scores {alone} became {[each.value for each in mine.scores]}"
    return None


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-12, abs_tol=1e-12)
    return bool(one == other)


def _code_of(config: Mapping[str, Any]) -> str:
    """The code of the files of its functions, and its templates."""
    from experiment_core_utils.tasks.datasets.lmms_eval_code import _callables, _file_of

    files = {path for each in _callables(dict(config)) if (path := _file_of(each)) is not None}
    templates = [str(config.get(each)) for each in ("doc_to_text", "doc_to_target", "doc_to_visual", "doc_to_choice")]
    fields = [f"doc['{name}']" for text in templates for name in re.findall(r"\{\{\s*(\w+)", text)]
    fields += [f"doc['{text}']" for text in templates if re.fullmatch(r"\w+", text) and text != "None"]
    return "\n".join([*fields, *(path.read_text(errors="replace") for path in sorted(files))])


def _reason(refusal: str) -> str:
    """Its kind, without what is of this task alone."""
    kinds = (
        "needs a server",
        "contacts a server",
        "is of output type",
        "begins each prompt",
        "cannot open",
        "times with sampling",
        "cannot be scored",
        "take pictures",
    )
    return next((kind for kind in kinds if kind in refusal), refusal)


@contextlib.contextmanager
def quiet() -> Iterator[TextIO]:
    """Nothing that the code of tasks prints is seen but here, nothing that it writes stays, and it contacts nobody."""

    def refuse(*arguments: object, **named: object) -> None:
        raise OSError("no network")

    for name in ("getaddrinfo", "create_connection"):
        setattr(socket, name, refuse)
    # So that code which makes the client of a judge when it is imported can be imported.
    os.environ.update({"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "OPENAI_API_KEY": "none"})
    before = Path.cwd()
    # Of programs that tasks start, too.
    streams = os.dup(1), os.dup(2)
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere, os.fdopen(os.dup(2), "w") as screen:
        os.chdir(folder)
        for each in (1, 2):
            os.dup2(nowhere.fileno(), each)
        try:
            yield screen
        finally:
            sys.stdout.flush()
            for each in (1, 2):
                os.dup2(streams[each - 1], each)
            os.chdir(before)


def main() -> int:
    parser = OneLineParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tasks", nargs="*", metavar="TASK", help="names of tasks (default: all)")
    parser.add_argument("--one_of_each_folder", action="store_true", help="only the first task of each folder")
    parser.add_argument(
        "--part", metavar="K/N", help="of the tasks, every N-th from the K-th on, for several processes"
    )
    parser.add_argument("--output", type=Path, help="JSON file for the outcome of each task")
    arguments = parser.parse_args()

    def expire(*_: object) -> None:
        raise OutOfTime

    signal.signal(signal.SIGALRM, expire)
    adapter.logger.remove()
    outcomes: dict[str, tuple[str, str]] = {}
    output = None if arguments.output is None else arguments.output.resolve()
    with quiet() as screen:
        walk = Walk()
        first, every = map(int, (arguments.part or "0/1").split("/"))
        for name in (arguments.tasks or walk.names(arguments.one_of_each_folder))[first::every]:
            signal.alarm(TIME_LIMIT_S)
            try:
                outcomes[name] = walk.outcome(name)
            except OutOfTime:
                outcomes[name] = "not tried", f"took longer than {TIME_LIMIT_S} s"
            except SampleError as error:
                outcomes[name] = "not tried", first_line(error)
            finally:
                signal.alarm(0)
            print(f"{name}: {': '.join(outcomes[name])}", file=screen, flush=True)
    if output is not None:
        output.write_text(json.dumps(outcomes, indent=1) + "\n", encoding="utf-8")
    counts = Counter(kind if kind != "refused" else ": ".join((kind, how)) for kind, how in outcomes.values())
    for kind, number in sorted(counts.items()):
        print(f"{number:6} {kind}", flush=True)
    return int("differs" in {kind for kind, _ in outcomes.values()})


if __name__ == "__main__":
    sys.exit(run_command(main))
