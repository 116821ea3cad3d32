"""What can be known of the code of a harness's task: its identity, whom it contacts, where and why it fails."""

import copy
import dis
import functools
import hashlib
import inspect
import json
import multiprocessing
import os
import re
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FunctionType, ModuleType, NoneType
from typing import Any

from experiment_core_utils.primitives.errors import described
from experiment_core_utils.primitives.texts import shown

# Packages by which scoring contacts a judge or another server, and lmms-eval's own layer above them.
_CLIENTS = (
    "openai",
    "anthropic",
    "requests",
    "httpx",
    "aiohttp",
    "litellm",
    "dashscope",
    "google.generativeai",
    "google.genai",
    "zhipuai",
    "urllib.request",
    "http.client",
    "lmms_eval.llm_judge",
)
_KEY_OF_A_SERVER = re.compile(r"(^|_)API_(KEY|URL|BASE)$")
# Where the data of a task and its file lie; what the data are is known by the samples.
_PLACES = ("dataset_path", "dataset_kwargs", "config_source")
_COPY_TIMEOUT_S = 120.0
# Beside the code of a task, what it may read: text of up to 1 MB.
_TEXT_FILES = ("", ".csv", ".jinja", ".json", ".jsonl", ".toml", ".tsv", ".txt", ".yaml", ".yml")
_MOST_BYTES = 1_000_000


def definition_digest(task: Any) -> str:
    """SHA-256 of the resolved configuration of a task and of the code of its functions, in hexadecimal digits.

    The code is that of the files in which its functions are, with all Python files beside them and all text files of up
    to 1 MB; of YAML files, in which other tasks may be, only those whose name the code contains.
    """
    config = _without_places(vars(task.config))
    functions = [type(task), *_callables(config)]
    files = {path for each in functions if (path := _file_of(each)) is not None}
    for folder in {path.parent for path in files}:
        files |= set(folder.glob("*.py")) | set(_read_files(folder))
    content = json.dumps(config, default=_as_text, sort_keys=True)
    code = sorted((path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files)
    return hashlib.sha256(json.dumps([content, code]).encode()).hexdigest()


def _without_places(config: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in config.items() if name not in _PLACES}
    for name, value in kept.items():
        if name == "metadata" and isinstance(value, Mapping):
            kept[name] = _without_places(value)
        elif is_dataclass(value):
            # Its text has the addresses of its functions.
            kept[name] = vars(value)
    return kept


def _read_files(folder: Path) -> Iterator[Path]:
    code = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in folder.glob("*.py"))
    for path in folder.iterdir():
        is_named = path.name in code or not ("yaml" in path.name or path.suffix == ".yml")
        if is_named and path.suffix in _TEXT_FILES and path.is_file() and path.stat().st_size <= _MOST_BYTES:
            yield path


def _callables(value: Any) -> Iterator[Callable[..., Any]]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _callables(each)
    elif callable(value):
        yield value


def _as_text(value: Any) -> str:
    # Not its representation, which contains an address.
    return str(getattr(_plain(value), "__qualname__", type(value).__qualname__)) if callable(value) else str(value)


def _plain(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.unwrap(function)


def _file_of(function: Any) -> Path | None:
    try:
        path = Path(inspect.getsourcefile(_plain(function)) or "")
    except (TypeError, OSError):  # not counted: built in, or a class of a module that is known no more
        return None
    return path if path.is_file() else None


def where_defined(function: Any) -> str:
    """A function by its file and name, such as `utils.score`."""
    path, name = _file_of(function), _as_text(function)
    return name if path is None else f"{path.stem}.{name}"


def contacted_server(function: Any) -> str | None:
    """Through what a function may contact a judge or another server: a package or the name of a key; None for nothing.

    Looks at the names that it, and functions of task files that it reaches, use. So a judge that only some answers need
    counts, and one behind a name that is made while it runs is not seen.
    """
    waiting, seen = [function], set[int]()
    while waiting:
        value = _plain(waiting.pop())
        if id(value) in seen:
            continue
        seen.add(id(value))
        origin = value.__name__ if isinstance(value, ModuleType) else str(getattr(value, "__module__", None) or "")
        if (client := _client_of(origin) or _client_of(type(value).__module__)) is not None:
            return client
        if isinstance(value, type):
            held = [each for part in value.__mro__ for each in vars(part).values()]
            waiting.extend(each for each in held if callable(each) or _client_of(type(each).__module__) is not None)
        elif isinstance(value, FunctionType):
            if not _of_a_task(value):
                continue
            names, texts, modules = _names_in(value.__code__)
            if (name := next(filter(_KEY_OF_A_SERVER.search, sorted(names | texts)), None)) is not None:
                return name
            if (client := next(filter(None, map(_client_of, sorted(modules))), None)) is not None:
                return client
            waiting.extend(_reached(value, names))
        elif inspect.ismethod(value):
            waiting.append(value.__func__)
        elif type(value).__module__ not in ("builtins", "re"):
            waiting.append(type(value))
    return None


def _client_of(name: str) -> str | None:
    return next((each for each in _CLIENTS if name == each or name.startswith(f"{each}.")), None)


def _of_a_task(value: Any) -> bool:
    """Whether it is of a file of tasks: one of a harness's, or one that no package contains."""
    path = _file_of(value)
    if path is None:
        return False
    parts = path.parts
    return "site-packages" not in parts or ("tasks" in parts and not {"lm_eval", "lmms_eval"}.isdisjoint(parts))


def _names_in(code: CodeType) -> tuple[set[str], set[str], set[str]]:
    """The names that code uses, the texts in it and the modules it imports, with those of the functions inside it."""
    names, texts = set(code.co_names), {each for each in code.co_consts if isinstance(each, str)}
    modules, package = set[str](), ""
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME":
            package = str(step.argval)
            modules.add(package)
        elif step.opname == "IMPORT_FROM":
            modules.add(f"{package}.{step.argval}")
    for each in code.co_consts:
        if isinstance(each, CodeType):
            inner = _names_in(each)
            names, texts, modules = names | inner[0], texts | inner[1], modules | inner[2]
    return names, texts, modules


def _reached(function: FunctionType, names: set[str]) -> Iterator[Any]:
    found = [function.__globals__[name] for name in names if name in function.__globals__]
    yield from found
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty cell: of a name that has no value yet, or no more
            yield cell.cell_contents
    for module in found:
        if isinstance(module, ModuleType):
            inner = [vars(module)[each] for each in names if each in vars(module)]
            # Of other modules, the modules in them: `urllib.request` is known as `urllib`.
            yield from (each for each in inner if _of_a_task(module) or isinstance(each, ModuleType))


class CodeState:
    """The variables of the files of a task's functions, to begin each scoring with: some tasks count in them.

    Numbers, texts, lists, sets and tables are put back, in place; nothing else.
    """

    def __init__(self, task: Any) -> None:
        functions = [each for each in map(_plain, _callables(vars(task.config))) if isinstance(each, FunctionType)]
        found = {id(each.__globals__): each.__globals__ for each in functions}
        inner = [value for names in found.values() for value in names.values() if isinstance(value, ModuleType)]
        found |= {id(vars(each)): vars(each) for each in inner if _of_a_task(each)}
        self._before = [(names, {name: copy.deepcopy(each) for name, each in _data(names)}) for names in found.values()]

    def restore(self) -> None:
        """Give all of them the values that they had when this was made."""
        for names, before in self._before:
            for name, value in before.items():
                now = names.get(name)
                if now == value and type(now) is type(value):
                    continue
                if type(now) is type(value) and isinstance(now, list | dict | set):
                    # Functions may have it under another name, too.
                    now.clear()
                    getattr(now, "extend" if isinstance(now, list) else "update")(copy.deepcopy(value))
                else:
                    names[name] = copy.deepcopy(value)


def _data(names: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in names.items():
        if not name.startswith("__") and _is_data(value):
            yield name, value


def _is_data(value: Any) -> bool:
    if isinstance(value, Mapping):
        return isinstance(value, dict) and all(map(_is_data, (*value, *value.values())))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_data, value))
    return isinstance(value, int | float | str | NoneType)


def failure(error: BaseException) -> str:
    """Why code failed, in one line, and in which function of which file; of repeated attempts the last one."""
    attempt = getattr(error, "last_attempt", None)
    cause = attempt.exception() if attempt is not None else error
    cause = cause or error
    while cause.__cause__ is not None and isinstance(cause, ImportError):
        cause = cause.__cause__
    frames = traceback.extract_tb(cause.__traceback__)
    own = Path(__file__).name, "harness_task.py", "lm_eval_task.py", "lmms_eval_task.py"
    place = next((each for each in reversed(frames) if Path(each.filename).name not in own), None)
    if place is None:
        return described(cause)
    return f"{described(cause)} (in {place.name}, {shown(Path(place.filename).name)} line {place.lineno})"


def failure_in_a_copy(work: Callable[[], str | None]) -> str | None:
    """Why some work fails, tried in a copy of this process: what it changes, prints or writes into its folder is lost.

    It contacts nobody: opening a connection is a failure.

    Returns:
        what the work returns, a reason where it ended its process; None also where it takes longer than two minutes or
        the system copies no processes.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        return None
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=_in_the_copy, args=(work, folder, sender), daemon=True)
        process.start()
        sender.close()
        try:
            found: str | None = receiver.recv() if receiver.poll(_COPY_TIMEOUT_S) else None
        except EOFError:
            found = "the code of the task ends its process"
        finally:
            process.kill()
            process.join()
    return found


def _in_the_copy(work: Callable[[], str | None], folder: str, sender: Connection) -> None:
    def refuse(*arguments: object, **named: object) -> None:
        sender.send("the code of the task contacts a server while it scores, and no judge is asked here")
        os._exit(1)

    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    for name in ("getaddrinfo", "create_connection"):
        setattr(socket, name, refuse)
    os.chdir(folder)
    sender.send(work())
