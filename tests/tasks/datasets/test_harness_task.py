"""What tasks of harnesses have in common, on a task that is written here; neither harness is needed."""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from experiment_core_utils.primitives.errors import ConfigurationError, SampleError
from experiment_core_utils.tasks.datasets.harness_task import (
    LIMITS,
    HarnessMetric,
    HarnessTask,
    left_out,
    limits_of,
    unscorable_reason,
)
from experiment_core_utils.tasks.interface import Answer, Sample

DOCS = ({"answer": "red"}, {"answer": "blue"}, {"answer": "green"})


class First:
    def apply(self, replies: Sequence[Sequence[str]], docs: Sequence[Any]) -> list[str]:
        return [each[0] for each in replies]


class LastWord:
    def apply(self, replies: Sequence[str], docs: Sequence[Any]) -> list[str]:
        return [each.split()[-1] for each in replies]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def largest(values: Sequence[float]) -> float:
    return max(values)


def of_two(values: Sequence[float], weights: Sequence[float]) -> float:
    return 0.0


def asks_a_judge(*_: Any) -> float:
    import openai

    return float(bool(openai.OpenAI()))


class Opened:
    """A task as a harness opens it."""

    def __init__(self, **parts: Any) -> None:
        self.config = SimpleNamespace(test_split=None, validation_split="validation", repeats=1, process_results=None)
        vars(self.config).update({"metric_list": None, **parts})

    def higher_is_better(self) -> Mapping[str, bool]:
        return {"right": True, "letters": False}

    def aggregation(self) -> Mapping[str, Callable[..., float]]:
        return {"right": mean, "letters": largest}

    def process_results(self, doc: Mapping[str, str], results: Sequence[str]) -> Mapping[str, float]:
        return {"right": float(results[0] == doc["answer"]), "letters": len(results[0]) / (results[0] != "zero")}


class Colours(HarnessTask):
    def __init__(self, split: str = "", template: str | None = None, task: Any = None) -> None:
        super().__init__("lm_eval", "colours", split, Opened() if task is None else task, DOCS, template)
        self.filters, self.stop = {"last": [First(), LastWord()], "whole": [First()]}, ("\n",)
        self.scorer: HarnessMetric = HarnessMetric(f"{self.name}.right", self)

    def __getitem__(self, index: int) -> Sample:
        if self._words[index]["answer"] == "blue":
            raise SampleError(f"{self.name} sample {index}: it cannot be read")
        return Sample(index, str(index), f"Which is colour {index}?", (self._words[index]["answer"],), None, "")


def test_answers_are_cut_filtered_and_scored_and_failing_code_leaves_a_reason() -> None:
    """Whole, the first answer is "It is green" of 11 letters; the second fails in both filters, the third is wrong."""
    task = Colours()
    replies = (("2", "It is green\nor red"), ("0", "zero"), ("1", "red"))
    found = task.scorer.score([Answer(text, (), image_id=place) for place, text in replies])
    assert [(each.value, each.parse_status) for each in found.scores] == [
        (1.0, "text"),
        (None, "scoring_failed"),
        (0.0, "text"),
    ]
    right, wrong = {"right": 1.0, "letters": 5.0}, {"right": 0.0, "letters": 3.0}
    assert [each.details for each in found.scores] == [right, {}, wrong]
    (failed,) = found.details["lm_eval_failed"]
    assert failed.startswith("lm_eval_colours sample 0: process_results fails: ZeroDivisionError")
    assert found.overall == 0.5 and {**found.details, "lm_eval_failed": None} == {
        "lm_eval": {"right": 0.5, "letters": 5.0, "right,whole": 0.0, "letters,whole": 11.0},
        "unscored": 1,
        "scoring_failed": 1,
        "lm_eval_failed": None,
    }


def test_a_task_has_one_split_and_its_own_words() -> None:
    task = Colours(template=" User: {question} Assistant:")
    assert (task.name, task.split, len(task)) == ("lm_eval_colours", "validation", 3)
    assert task.prompt(task[2]) == " User: Which is colour 2? Assistant:"
    assert Colours().prompt(task[0]) == "Which is colour 0?"
    with pytest.raises(ConfigurationError, match="lm-eval evaluates colours on validation, not on 'test'; drop"):
        Colours("test")


def test_of_the_first_samples_one_must_be_scorable() -> None:
    Colours()._check_first_samples()

    class Broken(Opened):
        def process_results(self, doc: Mapping[str, str], results: Sequence[str]) -> Mapping[str, float]:
            return {"right": float(doc["target"] == results[0])}

    with pytest.raises(ConfigurationError, match="sample 0: process_results fails: KeyError: 'target'.*; correct the"):
        Colours(task=Broken())._check_first_samples()


@pytest.mark.parametrize(
    ("given", "limit", "stop"),
    [
        ({}, 256, ()),
        ({"max_new_tokens": 9, "max_gen_toks": 5, "until": "END"}, 5, ("END",)),
        ({"max_gen_toks": None, "max_tokens": 4, "until": ["Q:", "", "</s>"]}, 4, ("Q:", "</s>")),
    ],
)
def test_limits_are_the_first_that_is_there(given: dict[str, Any], limit: int, stop: tuple[str, ...]) -> None:
    assert limits_of("colours of lm-eval", given, LIMITS, 256) == (limit, stop)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_completion_tokens": 0}, "colours of lm-eval: max_completion_tokens is 0; give an integer from 1"),
        ({"max_gen_toks": 5, "until": [1]}, r"until is \[1\]; give a text or a list of texts"),
    ],
)
def test_limits_that_are_none(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        limits_of("colours of lm-eval", given, LIMITS, 256)


def test_what_greedy_decoding_leaves_out() -> None:
    given = {"max_gen_toks": 5, "temperature": 0.7, "top_p": 1.0, "num_beams": 4, "seed": None}
    assert left_out(given, LIMITS, is_greedy=False) == {"left_out": "temperature 0.7, num_beams 4"}
    assert left_out(given, LIMITS, is_greedy=True) == {"left_out": "num_beams 4"}
    assert left_out({"do_sample": False, "num_beams": 1}, LIMITS, is_greedy=False) == {}


def test_what_cannot_be_scored_has_a_reason() -> None:
    assert unscorable_reason(Opened(), "lm_eval") is None
    assert unscorable_reason(Opened(repeats=3), "lm_eval") == (
        "asks each question 3 times with sampling, and decoding is greedy here"
    )
    task = Opened()
    task.aggregation = lambda: {"right": of_two}  # type: ignore[method-assign]
    found = unscorable_reason(task, "lm_eval") or ""
    assert found.startswith("cannot be scored: aggregation of right") and "argument: 'weights'" in found
    task.aggregation = lambda: {"letters": largest}  # type: ignore[method-assign]
    assert unscorable_reason(task, "lm_eval") == (
        "is scored by letters, of which less is better, and of a score here more is"
    )
    judged = Opened(metric_list=[{"metric": "right"}, {"metric": asks_a_judge}])
    assert (unscorable_reason(judged, "lm_eval") or "").startswith("needs a server for its scores: metric asks_a_judge")
    task.aggregation = dict  # type: ignore[method-assign]
    assert unscorable_reason(task, "lm_eval") == "has no metric"
