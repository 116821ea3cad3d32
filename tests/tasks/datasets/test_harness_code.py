"""What is known of the code of a task, on modules written here; neither harness is needed."""

import functools
import os
import socket
import time
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from experiment_core_utils.tasks.datasets.harness_code import (
    CodeState,
    contacted_server,
    definition_digest,
    failure,
    failure_in_a_copy,
    where_defined,
)

CODE = """
import functools
import os
from collections import Counter

import http.client as wire
import urllib.request
from helper import ask

SEEN = {"red": 0}
ORDER = []
TOTAL = 0
KEY = os.getenv("OPENAI_API_KEY")

def plain(doc, results):
    return {"right": float(results[0] == doc["answer"])}

def counted(doc, results):
    global TOTAL
    TOTAL += 1
    SEEN["red"] += 1
    SEEN["new"] = 1
    ORDER.append(results[0])

def posts(doc, results):
    return urllib.request.urlopen("http://judge", data=results)

def imports(doc, results):
    from openai import OpenAI
    return OpenAI()

def by_a_layer(doc, results):
    from lmms_eval.llm_judge import get_server
    return get_server("openai")

def through_another(doc, results):
    return sorted(results, key=lambda each: through(each))

def through(text):
    return ask(text)

def by_a_key(doc, results):
    return os.environ["JUDGE_API_KEY"]

class Judge:
    def __init__(self):
        self.url = "x"
    def score(self, text):
        return wire.HTTPConnection(self.url)

JUDGE = Judge()

class Shared:
    wire = wire.HTTPConnection("judge")
    def score(self, text):
        return self.wire.request("GET", text)

SHARED = Shared()

def by_a_shared_client(doc, results):
    return SHARED.score(results[0])

def by_an_object(doc, results):
    return JUDGE.score(results[0])

decorated = functools.lru_cache(posts)

def by_parts(doc, results):
    from google import genai
    return genai

def of_its_row(doc, results):
    return doc.requests, doc.openai, doc.httpx

def makes_an_empty_cell():
    def inner(doc, results):
        return later
    return inner
    later = 1

empty_cell = makes_an_empty_cell()
"""
HELPER = "from urllib.request import urlopen\n\ndef ask(text):\n    return urlopen(text)\n"


def module_at(path: Path) -> ModuleType:
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def utils(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "helper", raising=False)
    (tmp_path / "helper.py").write_text(HELPER)
    (tmp_path / "utils.py").write_text(CODE)
    return module_at(tmp_path / "utils.py")


@dataclass
class Examples:
    process_docs: Any
    split: str


def task_of(**config: Any) -> Any:
    return SimpleNamespace(config=SimpleNamespace(**config))


@pytest.mark.parametrize(
    ("name", "client"),
    [
        ("plain", None),
        ("counted", None),
        ("posts", "urllib.request"),
        ("imports", "openai"),
        ("by_a_layer", "lmms_eval.llm_judge"),
        ("through_another", "urllib.request"),
        ("by_a_key", "JUDGE_API_KEY"),
        ("by_an_object", "http.client"),
        ("decorated", "urllib.request"),
        ("by_a_shared_client", "http.client"),
        ("by_parts", "google.genai"),
        ("of_its_row", None),
        ("empty_cell", None),
    ],
)
def test_whom_a_function_contacts(utils: ModuleType, name: str, client: str | None) -> None:
    assert contacted_server(getattr(utils, name)) == client
    assert contacted_server(functools.partial(getattr(utils, name), {})) == client


def test_what_is_no_function_of_a_task_contacts_nobody() -> None:
    assert [contacted_server(each) for each in (None, "mean", sum, sorted, json_dump)] == [None] * 5


json_dump = __import__("json").dumps


def test_a_definition_is_its_configuration_and_the_code_beside_it(utils: ModuleType, tmp_path: Path) -> None:
    def digest(**changed: Any) -> str:
        functions = module_at(tmp_path / "utils.py")
        given = {"post_prompt": "One word.", "process_results": functions.plain, "dataset_path": "a", **changed}
        given["fewshot_config"] = Examples(functions.plain, changed.get("split", "train"))
        return definition_digest(task_of(**given))

    first = digest(metadata={"version": 1, "config_source": "a"})
    # Where the data and its file lie is no part of it, and a function read again is the same.
    assert digest(dataset_path="b", metadata={"version": 1, "config_source": "b"}) == first
    parts = {"split": "test"}, {"metric_list": [{"metric": "right"}]}, {"metadata": {"version": 2}}
    changed = [digest(**each) for each in ({}, {"post_prompt": ""}, {"process_results": utils.posts}, *parts)]
    (tmp_path / "helper.py").write_text(HELPER + "# changed\n")
    changed.append(digest())
    (tmp_path / "utils.py").write_text(CODE.replace("float(", "1 - float("))
    changed.append(digest())
    assert len({first, *changed}) == 9


def test_text_that_its_code_may_read_is_part_of_a_definition(utils: ModuleType, tmp_path: Path) -> None:
    task = task_of(process_results=utils.plain)
    found = [definition_digest(task)]
    for name, content in (("rules.json", "{}"), ("rules.json", "[]"), ("words", "a"), ("big.txt", "a" * 1_000_000)):
        (tmp_path / name).write_text(content)
        found.append(definition_digest(task))
    assert len(set(found)) == 5
    # Too big, no text, and the files of other tasks.
    (tmp_path / "big.csv").write_text("a" * 1_000_001)
    (tmp_path / "picture.png").write_bytes(b"a")
    (tmp_path / "other.yaml").write_text("task: other")
    (tmp_path / "_default_template_yaml").write_text("a: 1")
    assert definition_digest(task) == found[-1]
    (tmp_path / "helper.py").write_text(HELPER + "open('_default_template_yaml')\n")
    named = definition_digest(task)
    (tmp_path / "_default_template_yaml").write_text("a: 2")
    assert len({*found, named, definition_digest(task)}) == 7


def test_its_variables_are_put_back(utils: ModuleType) -> None:
    state = CodeState(task_of(process_results=utils.counted, metric_list=[{"aggregation": utils.plain}]))
    also = utils.SEEN
    utils.counted({}, ["a"])
    utils.counted({}, ["b"])
    assert (utils.TOTAL, utils.SEEN, utils.ORDER) == (2, {"red": 2, "new": 1}, ["a", "b"])
    state.restore()
    assert (utils.TOTAL, utils.SEEN, utils.ORDER) == (0, {"red": 0}, [])
    assert also is utils.SEEN
    utils.counted({}, ["c"])
    state.restore()
    assert (utils.TOTAL, utils.ORDER) == (0, [])


def test_a_failure_names_its_place(utils: ModuleType) -> None:
    with pytest.raises(KeyError) as found:
        utils.plain({}, ["red"])
    assert failure(found.value) == "KeyError: 'answer' (in plain, utils.py line 16)"
    repeated = RuntimeError("RetryError[<Future>]")
    repeated.last_attempt = SimpleNamespace(exception=lambda: found.value)  # type: ignore[attr-defined]
    assert failure(repeated) == failure(found.value)
    assert where_defined(utils.plain) == where_defined(functools.partial(utils.plain, {})) == "utils.plain"
    assert where_defined(sum) == "sum"


def test_a_copy_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[str] = []

    def work() -> str:
        seen.append("here")
        Path("file.json").write_text("{}")
        return f"{len(seen)} in another folder: {Path.cwd() != tmp_path}"

    assert failure_in_a_copy(work) == "1 in another folder: True"
    assert seen == [] and list(tmp_path.iterdir()) == []
    assert failure_in_a_copy(lambda: None) is None


def test_a_copy_contacts_nobody_and_may_end() -> None:
    def contact() -> None:
        try:
            socket.create_connection(("127.0.0.1", 9))
        except OSError:  # as code that scores 0 where its judge does not answer
            time.sleep(60)

    assert "contacts a server" in str(failure_in_a_copy(contact))
    assert "ends its process" in str(failure_in_a_copy(lambda: os._exit(3)))
