"""A task of lmms-eval from a local YAML file; runs where the package is installed."""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import pytest
from datasets import Dataset, Features, Value
from datasets import Image as Picture

from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.tasks import registry
from experiment_core_utils.tasks.interface import Scoring, Task, answer_to, check_scorable
from experiment_core_utils.tasks.registry import get_metric, load_task
from tests.tasks.datasets.layouts import GREEN, RED, plain, stored

TASK = """
task: colours
dataset_path: parquet
dataset_kwargs:
  data_files:
    validation: {folder}/colours.parquet
validation_split: validation
output_type: generate_until
doc_to_visual: !function colours.pictures
doc_to_text: "{{{{question}}}}\\nOne word."
doc_to_target: answer
generation_kwargs:
  max_new_tokens: 7
  until: ["\\n"]
process_results: !function colours.score
metric_list:
  - metric: right
    aggregation: mean
    higher_is_better: true
  - metric: letters
    aggregation: mean
    higher_is_better: true
"""
CODE = """
import json
import os

SEEN = {"red": 0}

def pictures(doc):
    return [] if doc["image"] is None else [doc["image"]] * doc["times"]

def score(doc, results):
    return {"right": float(results[0].lower() == doc["answer"]), "letters": len(results[0])}

def written(items, args):
    path = os.path.join(args.output_path, "submission.json")
    with open(path, "w") as file:
        json.dump(items, file)
    with open(os.path.join(HERE, "written.txt"), "a") as file:
        file.write(str(len(items)) + "\\n")

def counted(items):
    SEEN["red"] += len(items)
    return SEEN["red"]

def scored_by_a_judge(doc, results):
    from openai import OpenAI
    return {"right": OpenAI().score(results[0])}

def broken(doc, results):
    return {"right": doc["target"] == results[0]}

def broken_sometimes(doc, results):
    return {"right": 1 / (results[0] != "zero"), "letters": {"score": 1, "text": results[0]}}

def average(items):
    return {"mean": sum(each["score"] for each in items) / len(items), "texts": [each["text"] for each in items]}

def fails(items):
    return 1 / 0

def two(items, weights):
    return 1

HERE = os.path.dirname(os.path.abspath(__file__))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("lmms_eval", reason="the optional extra is not installed")
    monkeypatch.setattr(registry, "_registered_metrics", {})
    monkeypatch.setenv("LMMS_EVAL_DATASETS_CACHE", str(tmp_path / "cache"))
    features = Features(
        {"image": Picture(), "question": Value("string"), "answer": Value("string"), "times": Value("int64")}
    )
    rows = [
        {"image": stored(plain(RED)), "question": "What colour?", "answer": "red", "times": 1},
        {"image": None, "question": "The colour of grass?", "answer": "green", "times": 1},
        {"image": stored(plain(GREEN)), "question": "Which is it?", "answer": "green", "times": 2},
    ]
    Dataset.from_list(rows, features=features).to_parquet(str(tmp_path / "colours.parquet"))
    (tmp_path / "colours.yaml").write_text(TASK.format(folder=tmp_path))
    (tmp_path / "colours.py").write_text(CODE)
    return tmp_path


def test_its_prompts_limits_and_scores(folder: Path) -> None:
    task = load_task("lmms_eval:colours", data_dir=folder)
    assert (task.name, task.split, len(task), task.max_new_tokens) == ("lmms_eval_colours", "validation", 3, 7)
    red, text = task[0], task[1]
    assert task.prompt(red) == "What colour?\nOne word." and red.answers == ("red",)
    assert red.image is not None and red.image.getpixel((0, 0)) == RED and text.image is None
    assert [each.getpixel((0, 0)) for each in task[2].images] == [GREEN, GREEN]
    assert task.metric == "lmms_eval_colours.right"
    found = get_metric(task.metric).score([answer_to(red, "Red\nand more"), answer_to(text, "blue")])
    # Cut at the line break, "Red" is right and has 3 letters, "blue" is wrong and has 4.
    assert [score.value for score in found.scores] == [1.0, 0.0]
    assert found.overall == 0.5
    assert found.details == {"lmms_eval": {"right": 0.5, "letters": 3.5}}
    assert [score.details for score in found.scores] == [{"right": 1.0, "letters": 3.0}, {"right": 0.0, "letters": 4.0}]


def test_a_template_goes_around_its_text(folder: Path) -> None:
    task = load_task("lmms_eval:colours", data_dir=folder, prompt_template=" User: {question} Assistant:")
    assert task.prompt(task[0]) == " User: What colour?\nOne word. Assistant:"


def test_what_it_cannot_open(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="lmms-eval cannot open the task colors"):
        load_task("lmms_eval:colors", data_dir=folder)
    with pytest.raises(ConfigurationError, match="evaluates colours on validation, not on 'test'"):
        load_task("lmms_eval:colours", "test", data_dir=folder)


def test_without_the_package_one_line_says_how_to_get_it() -> None:
    try:
        import lmms_eval  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigurationError, match="needs lmms-eval, which cannot be imported .*pip install"):
            load_task("lmms_eval:mme")


def edited(folder: Path, **parts: str) -> None:
    """Another state of the task file: each named part of its text replaced."""
    text = TASK.format(folder=folder)
    for old, new in parts.items():
        before = {"letters": "letters\n    aggregation: mean", "score": "colours.score", "suffix": "One word."}[old]
        assert before in text
        text = text.replace(before, new)
    (folder / "colours.yaml").write_text(text)


def scored(task: Task, *predictions: str) -> Scoring:
    return get_metric(task.metric).score([answer_to(task[index], each) for index, each in enumerate(predictions)])


def test_aggregations_that_ask_for_arguments_run_once(folder: Path) -> None:
    edited(folder, letters="letters\n    aggregation: !function colours.written")
    task = load_task("lmms_eval:colours", data_dir=folder)
    assert not (folder / "written.txt").exists()
    assert scored(task, "red", "blue", "green").details == {"lmms_eval": {"right": 2 / 3, "letters": None}}
    assert (folder / "written.txt").read_text() == "3\n"


def test_each_scoring_begins_with_fresh_variables(folder: Path) -> None:
    edited(folder, letters="letters\n    aggregation: !function colours.counted")
    task = load_task("lmms_eval:colours", data_dir=folder)
    assert [scored(task, "red", "red").details["lmms_eval"]["letters"] for _ in range(3)] == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"score": "colours.broken"},
            r"sample 0: process_results fails: KeyError: 'target' \(in broken, colours.py line",
        ),
        ({"score": "colours.scored_by_a_judge"}, r"needs a server .*\(colours.scored_by_a_judge\) uses openai"),
        ({"letters": "letters\n    aggregation: !function colours.two"}, "cannot be scored: .*argument: 'weights'"),
        ({"suffix": '"\nrepeats: 3\ndescription: "'}, "asks each question 3 times"),
        ({"suffix": '"\nnum_fewshot: 2\ndescription: "'}, "begins each prompt with 2 examples"),
        ({"score": "absent.score"}, "cannot open the task colours .*No module named 'absent'"),
    ],
)
def test_what_cannot_be_scored_is_refused_at_once(folder: Path, parts: dict[str, str], message: str) -> None:
    edited(folder, **parts)
    with pytest.raises(ConfigurationError, match=message) as found:
        load_task("lmms_eval:colours", data_dir=folder)
    assert "\n" not in str(found.value)


def test_code_that_fails_later_leaves_a_reason(folder: Path) -> None:
    edited(folder, score="colours.broken_sometimes", letters="letters\n    aggregation: !function colours.fails")
    found = scored(load_task("lmms_eval:colours", data_dir=folder), "red", "zero")
    statuses = [(score.value, score.parsed, score.parse_status) for score in found.scores]
    assert statuses == [(1.0, True, "text"), (None, False, "scoring_failed")]
    assert (found.details["unscored"], found.details["scoring_failed"]) == (1, 1)
    assert found.overall == 1.0 and found.details["lmms_eval"] == {"right": 1.0, "letters": None}
    sample, figure = found.details["lmms_eval_failed"]
    assert sample.startswith("lmms_eval_colours sample 1: process_results fails: ZeroDivisionError: division by zero")
    assert figure.startswith("lmms_eval_colours: aggregation of letters fails: ZeroDivisionError: division by zero")


def test_figures_that_are_tables_are_kept(folder: Path) -> None:
    edited(folder, score="colours.broken_sometimes", letters="letters\n    aggregation: !function colours.average")
    found = scored(load_task("lmms_eval:colours", data_dir=folder), "red", "blue")
    assert found.details["lmms_eval"]["letters"] == {"mean": 1.0, "texts": ["red", "blue"]}


def test_every_filter_has_its_figures_and_the_first_gives_the_scores(folder: Path) -> None:
    filters = """
filter_list:
  - name: last
    filter:
      - function: regex
        regex_pattern: "(\\\\w+)$"
      - function: take_first
  - name: whole
    filter:
      - function: take_first
"""
    edited(folder)
    with (folder / "colours.yaml").open("a") as file:
        file.write(filters)
    found = scored(load_task("lmms_eval:colours", data_dir=folder), "It is red", "green")
    assert found.details == {"lmms_eval": {"right": 1.0, "letters": 4.0, "right,whole": 0.5, "letters,whole": 7.0}}
    assert [score.value for score in found.scores] == [1.0, 1.0]


def test_it_is_known_by_its_definition(folder: Path) -> None:
    def source() -> Mapping[str, str]:
        return load_task("lmms_eval:colours", data_dir=folder).source

    first = source()
    assert source() == first and first["lmms_eval"] == version("lmms_eval")
    edited(folder, suffix="Two words.")
    prompt = source()
    (folder / "colours.py").write_text(CODE.replace("lower()", "upper()"))
    code = source()
    assert len({each["definition"] for each in (first, prompt, code)}) == 3


def test_nothing_is_scored_before_there_is_an_answer(folder: Path) -> None:
    task = load_task("lmms_eval:colours", data_dir=folder)
    metric = get_metric(task.metric)
    assert metric.scores_of([answer_to(task[0], "red")])[0].value == 1.0  # type: ignore[attr-defined]
    task.results_of = None  # type: ignore[attr-defined]
    check_scorable(task[0], metric)
    assert metric.scores_of([answer_to(task[0], "red")])[0].value == 1.0  # type: ignore[attr-defined]


def with_generation(folder: Path, *lines: str, more: str = "") -> Task:
    """The task with these lines as its `generation_kwargs`, asked by `qwen3_vl_moe`."""
    text = TASK.format(folder=folder)
    old = '  max_new_tokens: 7\n  until: ["\\n"]\n'
    assert old in text
    (folder / "colours.yaml").write_text(text.replace(old, "".join(f"  {line}\n" for line in lines)) + more)
    return load_task("lmms_eval:colours", data_dir=folder, model_type="qwen3_vl_moe")


@pytest.mark.parametrize(
    ("lines", "left_out"),
    [
        (("do_sample: false", "temperature: 0", "top_p: 1.0", "num_beams: 1", "repetition_penalty: 1.0"), None),
        # Wrappers sample by the temperature alone; of a greedy task nothing else is used.
        (("do_sample: true", "temperature: 0", "top_p: 0.9"), None),
        (("do_sample: false", "temperature: 0.7", "top_p: 1"), "temperature 0.7"),
        (("do_sample: true", "top_p: 0.9"), "do_sample True, top_p 0.9"),
        (("do_sample: false", "num_beams: 4", "image_aspect_ratio: pad"), "num_beams 4"),
    ],
)
def test_what_greedy_decoding_leaves_out_is_kept(folder: Path, lines: tuple[str, ...], left_out: str | None) -> None:
    assert with_generation(folder, *lines).source.get("left_out") == left_out


@pytest.mark.parametrize(
    ("lines", "limit", "stop"),
    [
        (("max_new_tokens: null", "until: null"), 128, ()),
        (("max_new_tokens: 5", "until: END"), 5, ("END",)),
        (("max_new_tokens: 5", 'until: ["Q:", "", "</s>"]'), 5, ("Q:", "</s>")),
    ],
)
def test_its_limits(folder: Path, lines: tuple[str, ...], limit: int, stop: tuple[str, ...]) -> None:
    task = with_generation(folder, *lines)
    assert (task.max_new_tokens, task.stop) == (limit, stop)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("max_new_tokens: 0",), "max_new_tokens is 0; give an integer from 1"),
        (("max_new_tokens: many",), "max_new_tokens is 'many'; give"),
        (("until: [1]",), r"until is \[1\]; give a text or a list of texts"),
        (("until: 1",), "until is 1; give a text"),
    ],
)
def test_limits_that_are_none(folder: Path, lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        with_generation(folder, *lines)


def test_the_words_for_a_model_are_those_that_lmms_eval_chooses(folder: Path) -> None:
    more = """
lmms_eval_specific_kwargs:
  default:
    post: " Default."
  qwen3_vl:
    post: " Qwen."
  llava:
    post: " Not for transformers' layout."
model_specific_generation_kwargs:
  qwen3_vl:
    max_new_tokens: 9
"""
    text = TASK.format(folder=folder).replace('"{{question}}\\nOne word."', "!function colours.text")
    assert "colours.text" in text
    (folder / "colours.yaml").write_text(text + more)
    (folder / "colours.py").write_text(CODE + "\ndef text(doc, words):\n    return doc['question'] + words['post']\n")
    known = {}
    for model_type in ("qwen3_vl", "qwen3_vl_moe", "llava", "molmoe", None):
        task = load_task("lmms_eval:colours", data_dir=folder, model_type=model_type)
        known[model_type] = task.prompt(task[0]), task.max_new_tokens, task.source["words_for"]
    qwen, default = ("What colour? Qwen.", 9, "qwen3_vl"), ("What colour? Default.", 7, "default")
    assert known == {"qwen3_vl": qwen, "qwen3_vl_moe": qwen, "llava": default, "molmoe": default, None: default}
