"""The knobs that there are, in the order in which keys name them, and the door for others."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from experiment_core_utils.knobs.active_blocks import ACTIVE_BLOCKS
from experiment_core_utils.knobs.answer_limit import ANSWER_LIMIT
from experiment_core_utils.knobs.batch_size import BATCH_SIZE
from experiment_core_utils.knobs.expert_mass import EXPERT_MASS
from experiment_core_utils.knobs.interface import Knob
from experiment_core_utils.knobs.loading import ATTENTION, ENGINE, NUMBER_FORMAT, QUANTIZED
from experiment_core_utils.knobs.picture_side import PICTURE_SIDE
from experiment_core_utils.knobs.placebo import PLACEBO
from experiment_core_utils.knobs.reasoning_effort import REASONING_EFFORT
from experiment_core_utils.knobs.request_knobs import field_knob
from experiment_core_utils.knobs.thinking_budget import THINKING_BUDGET
from experiment_core_utils.knobs.top_k import TOP_K
from experiment_core_utils.knobs.variant import VARIANT
from experiment_core_utils.knobs.vision_tokens import VISION_TOKENS
from experiment_core_utils.knobs.visual_token_keep import VISUAL_TOKEN_KEEP
from experiment_core_utils.primitives.errors import (
    ConfigurationError,
    LibraryFault,
    ProfilerError,
    SettingError,
    library_faults_named,
)
from experiment_core_utils.primitives.files import read_given, run_python_file
from experiment_core_utils.primitives.texts import did_you_mean, shown

_KNOBS: dict[str, Knob[Any]] = {
    knob.name: knob
    for knob in (
        VISION_TOKENS, VISUAL_TOKEN_KEEP, TOP_K, EXPERT_MASS, ACTIVE_BLOCKS,
        BATCH_SIZE, PICTURE_SIDE, ANSWER_LIMIT, THINKING_BUDGET, REASONING_EFFORT, VARIANT,
        NUMBER_FORMAT, QUANTIZED, ENGINE, ATTENTION, PLACEBO,
    )
}
# Fields of requests to servers that flags or results have named, by the knob's name.
_FIELDS: dict[str, Knob[Any]] = {}
# Content of the files that `load_knob_module` ran, by path.
_LOADED: dict[Path, bytes] = {}


def all_knobs() -> tuple[Knob[Any], ...]:
    """Every knob, in the order in which keys name them."""
    return (*_KNOBS.values(), *(_FIELDS[name] for name in sorted(_FIELDS)))


def is_knob(name: str) -> bool:
    """Whether there is a knob of a name; one such as `request.top_k` is there from now on."""
    if name not in _KNOBS and name not in _FIELDS and (field := field_knob(name)) is not None:
        _FIELDS[name] = field
    return name in _KNOBS or name in _FIELDS


def knob_named(name: str) -> Knob[Any]:
    """The knob of a name; raises ConfigurationError where there is none."""
    if is_knob(name):
        return _KNOBS.get(name) or _FIELDS[name]
    raise ConfigurationError(f"there is no knob {name}{did_you_mean(name, _KNOBS)}; known are {', '.join(_KNOBS)}")


def register_knob(knob: Knob[Any]) -> None:
    """Add a knob behind those that there are; one of the same class and name is replaced, as a module is loaded again.

    Raises:
        ConfigurationError: another knob has its name, its title or one of its flags, a table or a file of results has
            one of these, or it cannot be written in one.
    """
    _check_names(knob)
    before = _KNOBS.get(knob.name)
    if before is not None and type(before).__qualname__ != type(knob).__qualname__:
        raise ConfigurationError(f"there is a knob {knob.name} already; give this one another name")
    if any(knob.title == other.title for other in all_knobs() if other is not before):
        raise ConfigurationError(f"knob {knob.name}: another one has the title {knob.title!r}; give it another one")
    taken = {flag for other in all_knobs() if other is not before for flag in other.flags.model_fields}
    twice = sorted(taken & knob.flags.model_fields.keys())
    if twice:
        raise ConfigurationError(f"knob {knob.name}: there is a flag --{twice[0]} already; give it another name")
    _KNOBS[knob.name] = knob


def _check_names(knob: Knob[Any]) -> None:
    """Raises ConfigurationError for what is no knob, or one whose columns, keys or sentences would not be its own."""
    # Results name the knobs of a setting, and so are imported behind them.
    from experiment_core_utils.records.columns import HEADINGS, SLOPE_KEYS
    from experiment_core_utils.records.setting_result import published_names

    if not isinstance(knob, Knob):
        raise ConfigurationError(f"register_knob got {shown(knob)}; give an object of a class that is made from Knob")
    texts = {what: getattr(knob, what, None) for what in ("name", "title", "plural", "meaning")}
    wrong = next((what for what, text in texts.items() if not isinstance(text, str) or not text.isprintable()), None)
    if wrong is not None:
        raise ConfigurationError(f"{type(knob).__name__}.{wrong} is {shown(texts[wrong])}; give a text of one line")
    if not re.fullmatch("[A-Za-z][A-Za-z0-9_]{0,49}", knob.name):
        raise ConfigurationError(
            f"a knob is called {shown(knob.name)!r}; use letters, digits and _, a letter first, 50 at most"
        )
    # Where the name is a knob's own, `register_knob` says so.
    reserved = {name.casefold() for name in published_names() | _KNOBS.keys()}
    if knob.name not in _KNOBS and (knob.name.casefold() in reserved or knob.name.startswith(SLOPE_KEYS)):
        raise ConfigurationError(f"knob {knob.name}: results have a column or key of that name; give it another one")
    if not knob.title.strip() or knob.title.strip() in HEADINGS | published_names() - {knob.name}:
        raise ConfigurationError(f"knob {knob.name}: the title {knob.title!r} is another column's; give it another one")
    if knob.published:
        raise ConfigurationError(
            f"knob {knob.name}: `published` names fields of results, {', '.join(knob.published)}, which are those of "
            "the project's own knobs; leave it empty, and a column has the knob's name"
        )


def unregister_knob(name: str) -> None:
    """Take a knob away that `register_knob` added."""
    del (_KNOBS if name in _KNOBS else _FIELDS)[name]
    _LOADED.clear()


def knob_file(given: Path | str) -> Path:
    """The Python file that `--knob_module` names, by its path or as a module, such as `knob_profiler.head_fraction`.

    A module whose package cannot be imported is taken for a path.
    """
    name = str(given)
    if Path(given).exists() or name.endswith(".py") or not all(part.isidentifier() for part in name.split(".")):
        return Path(given)
    try:
        found = find_spec(name)
    except ImportError:
        found = None
    return Path(given if found is None or found.origin is None else found.origin)


def load_knob_module(path: Path) -> None:
    """Run a Python file that registers knobs, once as long as it does not change.

    Args:
        path: as `knob_file` reads it.

    Raises:
        ConfigurationError: it cannot be run, or registers what `register_knob` refuses.
    """
    path = knob_file(path)
    content, place = read_given(path, "--knob_module"), path.resolve()
    if _LOADED.get(place) != content:
        before = dict(_KNOBS)
        run_python_file(path, "--knob_module")
        if before == _KNOBS:
            raise ConfigurationError(f"--knob_module {path} registers no knob; call register_knob with one in it")
        for knob in all_knobs():
            if before.get(knob.name) is not knob:
                _name_faults(knob, path)
        _LOADED[place] = content


def _name_faults(knob: Knob[Any], path: Path) -> None:
    """Make errors in the methods of a user's knob name it and its file.

    One in a run at a setting becomes a SettingError, which the setting fails with, any other a ConfigurationError.
    """
    of_setting = ("prove", "shape", "flops", "step_bytes")
    of_request = ("own", "requested", "fingerprint", "full_grid", "order", "cell", "listed", "request_fields")
    of_names = ("label", "parsed", "level", "of_level", "read", "published_fields")
    for name in (*of_setting, *of_request, *of_names):
        kind = SettingError if name in of_setting else ConfigurationError
        object.__setattr__(knob, name, _named(getattr(knob, name), f"knob {knob.name} of {path}, {name}", kind))
    enter = _named(ExitStack.enter_context, f"knob {knob.name} of {path}, applied", SettingError)
    applied = _named(knob.applied, f"knob {knob.name} of {path}, applied", SettingError)

    @contextmanager
    def entered(model: Any, value: Any) -> Iterator[None]:
        with ExitStack() as stack:
            enter(stack, applied(model, value))
            yield

    object.__setattr__(knob, "applied", entered)


def _named(method: Callable[..., Any], what: str, kind: type[ProfilerError]) -> Callable[..., Any]:
    @wraps(method)
    def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            with library_faults_named(what):
                return method(*arguments, **keywords)
        except LibraryFault as fault:
            raise kind(f"{fault}; correct the file") from fault.__cause__

    return call
