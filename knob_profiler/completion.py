"""Shell completion of `knobprof` by argcomplete: subcommands, flags, choices, tasks, metrics, tiers, folders.

It goes by what the help says is expected (the metavar), imports only the subcommand that is typed, and no torch.
"""

import argparse
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module

from argcomplete import autocomplete
from argcomplete.completers import DirectoriesCompleter
from argcomplete.lexers import split_line

from experiment_core_utils.config.command_line import PROGRAM, READER, OneLineParser
from experiment_core_utils.knobs.vision_tokens import OWN, TIERS
from experiment_core_utils.primitives.errors import ProfilerError
from knob_profiler.__main__ import Group, found_command, group_parser

# What a value may be, by its metavar; where none is named here, files are offered.
_FOLDERS = ("DIR", "RESULTS_DIR", "RUN", "MODEL")
_WORDS: Mapping[str, Callable[[], Sequence[str]]] = {
    "TASK": lambda: _registered("list_tasks"),
    "DATASET": lambda: _registered("list_tasks"),
    "METRIC": lambda: _registered("list_metrics"),
    "TIER": lambda: (*TIERS, OWN),
}


def _registered(listing: str) -> Sequence[str]:
    # Its import takes seconds, so it waits until a task is at the cursor.
    words: Sequence[str] = getattr(import_module("experiment_core_utils.tasks.registry"), listing)()
    return words


def complete() -> None:
    """Write what may stand at the cursor, and end the process; argcomplete's variables say where that is."""
    start = int(os.environ["_ARGCOMPLETE"])
    _, _, _, words, _ = split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))
    name, found, rest = found_command(words[start:])
    # To argcomplete the subcommand is the program.
    os.environ["_ARGCOMPLETE"] = str(start + len(name.split()) - 1)
    if isinstance(found, Group):
        _complete(group_parser(name, found))
    else:
        PROGRAM.set(name)
        READER.set(_complete)
        with suppress(ProfilerError):
            found.main(rest)
        # A flag that is read before the others has no value yet, or its file does not load.
        found.main([])


def _complete(parser: OneLineParser) -> None:
    READER.set(None)
    for each in _parsers(parser):
        for action in each._actions:
            if words := _WORDS.get(str(action.metavar)):
                action.completer = lambda words=words, **_: words()  # type: ignore[attr-defined]
            elif action.metavar in _FOLDERS:
                action.completer = DirectoriesCompleter()  # type: ignore[attr-defined]
    autocomplete(parser)


def _parsers(parser: argparse.ArgumentParser) -> Iterable[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _parsers(inner)
