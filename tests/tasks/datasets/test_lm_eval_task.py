"""Tasks of lm-eval from local YAML files."""

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from experiment_core_utils.primitives.errors import ConfigurationError, SampleError
from experiment_core_utils.tasks import registry
from experiment_core_utils.tasks.interface import Task, answer_to
from experiment_core_utils.tasks.prompt_forms import prompt_for, with_continuations
from experiment_core_utils.tasks.registry import get_metric, load_task

# A prompt with white space at its end, options of unequal number and length, of letters of two bytes.
ROWS = (
    {"question": "Which is a colour?", "options": ["red", "seventeen", "a dog"], "answer": 0, "word": "red"},
    {"question": "The sea is ", "options": ["dry", "wet"], "answer": 1, "word": "wet"},
    {"question": "Zürich liegt in", "options": ["Österreich", "der Schweiz"], "answer": 1, "word": "7"},
    {"question": "2 + 2 equals", "options": ["five", "three", "four", "two"], "answer": 2, "word": "four"},
)
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}, cache_dir: {folder}/cache}}
test_split: test
doc_to_text: "Q: {{{{question}}}}"
"""
OPTIONS = """
output_type: multiple_choice
doc_to_choice: options
doc_to_target: answer
metric_list: [{metric: acc_norm, aggregation: mean, higher_is_better: true}, {metric: acc, aggregation: mean, \
higher_is_better: true}]
"""
GENERATED = """
output_type: generate_until
doc_to_target: word
generation_kwargs: {until: ["\\n"], max_gen_toks: 7, do_sample: false, temperature: 0.5}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true, ignore_case: true}]
"""
TEXT = """
output_type: loglikelihood_rolling
doc_to_target: "{{question}}!"
metric_list: [{metric: byte_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(registry, "_registered_metrics", {})
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    return tmp_path


def opened(folder: Path, kind: str, more: str = "", **given: Any) -> Task:
    (folder / "asked.yaml").write_text(TASK.format(name="asked", folder=folder) + kind + more)
    return load_task("lm_eval:asked", data_dir=folder, **given)


def requests_of(folder: Path) -> list[list[tuple[Any, ...]]]:
    """The requests of each document, as lm-eval's runner makes them."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    task = manager.load(["asked"])["tasks"]["asked"]
    task.set_fewshot_seed(seed=1234)
    task.build_all_requests()
    return [[each.args for each in task.instances if each.doc_id == index] for index in range(len(ROWS))]


@pytest.mark.parametrize(
    "more",
    [
        "",
        'target_delimiter: "\\n"\ndescription: "Choose {{options | length}}.\\n"\ngen_prefix: "So:"',
        'num_fewshot: 2\nfewshot_split: test\nfewshot_delimiter: " | "',
    ],
)
def test_prompts_and_options_are_those_of_its_runner(folder: Path, more: str) -> None:
    task = opened(folder, OPTIONS, more)
    # Read in no order: what is shown before a question depends on those before it.
    found = {index: with_continuations(task, task[index], "plain") for index in (2, 0, 3, 1)}
    prompts = {index: prompt_for(task, sample, "plain") for index, sample in found.items()}
    asked = [[(prompts[index], each) for each in found[index].continuations or ()] for index in range(len(ROWS))]
    assert asked == requests_of(folder)
    assert [found[index].answers for index in range(4)] == [("red",), ("wet",), ("der Schweiz",), ("four",)]
    assert [found[index].answer_index for index in range(4)] == [0, 1, 1, 2]
    assert (task.name, task.split, task.metric, len(task)) == ("lm_eval_asked", "test", "acc_norm", 4)
    assert with_continuations(task, task[1], "chat").continuations == ("dry", "wet")


def test_right_options_may_be_texts(folder: Path) -> None:
    text = OPTIONS.replace("doc_to_target: answer", "doc_to_target: word")
    task = opened(folder, text)
    assert (task[3].answer_index, task[3].answers) == (2, ("four",))
    with pytest.raises(SampleError, match="lm_eval_asked sample 2: its right option is '7', which is none of its 2"):
        task[2]


def test_answers_are_scored_by_lm_eval(folder: Path) -> None:
    task = opened(folder, GENERATED)
    assert (task.metric, task.max_new_tokens, getattr(task, "stop", ())) == ("lm_eval_asked.exact_match", 7, ("\n",))
    assert task.prompt(task[3]) == "Q: 2 + 2 equals" and task[3].answers == ("four",)
    found = get_metric(task.metric).score([answer_to(task[3], "Four\nor"), answer_to(task[0], "blue")])
    assert [score.value for score in found.scores] == [1.0, 0.0]
    assert found.details == {"lm_eval": {"exact_match": 0.5}}
    assert opened(folder, GENERATED, prompt_template="<{question}>").prompt(task[0]) == "<Q: Which is a colour?>"


def test_a_text_is_scored_as_its_target(folder: Path) -> None:
    task = opened(folder, TEXT)
    assert (task.metric, task[2].question, task[2].answers) == ("perplexity", (text := "Zürich liegt in!"), (text,))
    assert with_continuations(task, task[2], "plain").continuations == ()
    asked = [(prompt_for(task, task[index], "plain"),) for index in range(4)]
    assert asked == [row[0] for row in requests_of(folder)]


def test_it_is_known_by_its_definition(folder: Path) -> None:
    def source(more: str = "") -> Mapping[str, str]:
        return opened(folder, GENERATED, more).source

    first = source()
    assert first == source() and first["lm_eval"] == version("lm_eval") and "left_out" not in first
    assert source('description: "Now: "')["definition"] != first["definition"]
    sampled = GENERATED.replace("do_sample: false", "do_sample: true")
    assert opened(folder, sampled).source["left_out"] == "do_sample True, temperature 0.5"


@pytest.mark.parametrize(
    ("kind", "more", "words"),
    [
        (GENERATED.replace("generate_until", "loglikelihood"), "", "is of output type loglikelihood, and only gen"),
        (OPTIONS, "process_results: !function code.score", r"by a function of its own \(code.score\)"),
        (OPTIONS.replace("acc_norm", "f1").replace("acc", "mcc"), "", "none of the metrics acc, acc_norm, acc_bytes"),
        (OPTIONS.replace("doc_to_target: answer", 'doc_to_target: "[0, 1]"'), "", "has several right options"),
        (OPTIONS, 'doc_to_text: "{{answer}}"', "compares prompts, and options are compared here"),
        (OPTIONS, "doc_to_image: [picture]", "shows pictures or plays sounds"),
        (OPTIONS, "filter_list: [{name: x, filter: [{function: take_first}]}]", "filters log-probabilities"),
        (GENERATED, "unsafe_code: true", "runs code that the model writes"),
        (GENERATED, "repeats: 3", "asks each question 3 times"),
        (GENERATED, "process_results: !function code.judged", r"needs a server for its .*code.judged\) uses openai"),
        (GENERATED, "process_results: !function code.broken", "process_results fails: KeyError: 'target'"),
        (OPTIONS, 'doc_to_text: "{{absent.part}}"', "cannot open the task asked"),
        (OPTIONS, "num_fewshot: 9", "fewshot_context fails: .*; correct the task"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(folder: Path, kind: str, more: str, words: str) -> None:
    (folder / "code.py").write_text(
        "def score(doc, results):\n    return {}\n"
        "def judged(doc, results):\n    from openai import OpenAI\n    return {'exact_match': OpenAI().ask(results)}\n"
        "def broken(doc, results):\n    return {'exact_match': doc['target'] == results[0]}\n"
    )
    with pytest.raises(ConfigurationError, match=words) as found:
        opened(folder, kind, f"\n{more}\n")
    assert "\n" not in str(found.value)


def test_what_it_cannot_open(folder: Path) -> None:
    (folder / "both.yaml").write_text("group: both\ntask: [asked]\n")
    with pytest.raises(ConfigurationError, match="evaluates asked on test, not on 'train'; drop --split"):
        opened(folder, OPTIONS, split="train")
    with pytest.raises(ConfigurationError, match="both of lm-eval is a group; `lm-eval ls subtasks` names its tasks"):
        load_task("lm_eval:both", data_dir=folder)
    with pytest.raises(ConfigurationError, match="lm-eval cannot open the task askd .*`lm-eval ls subtasks` names"):
        load_task("lm_eval:askd", data_dir=folder)


def test_without_the_package_one_line_says_how_to_get_it() -> None:
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigurationError, match="lm_eval:arc_easy needs lm-eval, which .*`pip install lm-eval`"):
            load_task("lm_eval:arc_easy")
