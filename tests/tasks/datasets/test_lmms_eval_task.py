"""A task of lmms-eval from a local YAML file; runs where the package is installed."""

from pathlib import Path

import pytest
from datasets import Dataset, Features, Value
from datasets import Image as Picture

from experiment_core_utils.primitives.errors import ConfigurationError, SampleError
from experiment_core_utils.tasks import registry
from experiment_core_utils.tasks.interface import answer_to
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
def pictures(doc):
    return [] if doc["image"] is None else [doc["image"]] * doc["times"]

def score(doc, results):
    return {"right": float(results[0].lower() == doc["answer"]), "letters": len(results[0])}
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
    with pytest.raises(SampleError, match="sample 2 shows .*, and the models here take one picture"):
        task[2]
    assert task.metric == "lmms_eval_colours.right"
    found = get_metric(task.metric).score([answer_to(red, "Red\nand more"), answer_to(text, "blue")])
    # Cut at the line break, "Red" is right and has 3 letters, "blue" is wrong and has 4.
    assert [score.value for score in found.scores] == [1.0, 0.0]
    assert found.overall == 0.5
    assert found.details == {"lmms_eval": {"right": 0.5, "letters": 3.5}}


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
