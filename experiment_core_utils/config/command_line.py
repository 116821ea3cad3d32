"""Command lines: a parser that reports in one line, and flags made from the fields of a configuration."""

import argparse
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

from experiment_core_utils.knobs.registry import load_knob_module
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.flag_fields import Part, metavar_of
from experiment_core_utils.primitives.texts import did_you_mean

# How a value of each type is written in the help where nothing says it better.
_METAVARS: Mapping[Any, str] = {int: "N", float: "NUMBER", Path: "PATH"}
# Flags that may be given several times.
_GATHERING = (argparse._AppendAction, argparse._AppendConstAction, argparse._CountAction)
# The name that a command's parser goes by where another command runs it; None: its own.
PROGRAM: ContextVar[str | None] = ContextVar("PROGRAM", default=None)
# What gets a command's parser in place of the words that it would read: the site's pages, the completion of a shell.
READER: "ContextVar[Callable[[OneLineParser], None] | None]" = ContextVar("READER", default=None)


class HelpWithDefaults(argparse.RawDescriptionHelpFormatter):
    """The help of a flag ends in its default, unless its text says it; a description of several lines stays as it is
    written.
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return super()._fill_text(text, width, indent)
        return argparse.HelpFormatter._fill_text(self, text, width, indent)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if not action.help or "default" in action.help or default in (None, []) or isinstance(default, bool):
            return action.help
        return action.help if default == argparse.SUPPRESS else f"{action.help} (default: %(default)s)"

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return default_metavar(action)


def default_metavar(action: argparse.Action) -> str:
    """What the help writes for the value of a flag without a metavar of its own."""
    return _METAVARS.get(action.type, action.dest.upper())


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the whole usage, and names the nearest flag or choice there is.

    A flag is written in full and given once, unless it is one that gathers (`append`). Its help ends in `examples`.
    """

    def __init__(self, prog: str | None = None, examples: Sequence[str] = (), **options: Any) -> None:
        runner = PROGRAM.get()
        # Parsers of subcommands are given the name of their command already.
        is_own = runner is None or (prog or "").startswith(f"{runner} ")
        defaults: dict[str, Any] = {"formatter_class": HelpWithDefaults, "allow_abbrev": False}
        self.examples = tuple(examples)
        if examples:
            defaults["epilog"] = "\n".join(["examples:", *(f"  {each}" for each in examples)])
        super().__init__(prog=prog if is_own else runner, **defaults | options)
        self._words: Sequence[str] = ()
        self.register("type", Path, _path)

    def add_subparsers(self, **options: Any) -> Any:
        """As argparse does, with the words that all commands of the project have."""
        return super().add_subparsers(**{"title": "commands", "metavar": "COMMAND"} | options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Raises ConfigurationError also for a flag that is given twice, of which argparse would keep the last one."""
        reader = READER.get()
        # What is read before the flags are made has no help of its own.
        if reader is not None and self.add_help:
            reader(self)
        self._words = list(sys.argv[1:] if args is None else args)
        own = self._words[: self._words.index("--")] if "--" in self._words else self._words
        given = [self._option_string_actions.get(word.partition("=")[0]) for word in own]
        for action in dict.fromkeys(given):
            if action is not None and given.count(action) > 1 and not isinstance(action, _GATHERING):
                several = " with all its values" if action.nargs in ("+", "*") else ""
                self.error(f"{action.option_strings[-1]} is given twice; give it once{several}")
        return super().parse_known_args(self._words, namespace)

    def error(self, message: str) -> NoReturn:
        """Raises ConfigurationError."""
        raise ConfigurationError(f"{message}{self._nearest(message)}; see --help")

    def _nearest(self, message: str) -> str:
        if "COMMAND" in message and self._words and self._words[0].startswith("-"):
            return f"; write the command before {self._words[0]}"
        if missing := re.search(r"arguments are required: (.*)$", message):
            words = [word.partition("=")[0] for word in self._words if word.startswith("--") and word != "--"]
            others = [word for word in words if word not in self._option_string_actions]
            hints = [(word, did_you_mean(word, missing[1].split(", "))) for word in others]
            return next((f"; {word} is unknown{hint}" for word, hint in hints if hint), "")
        if unknown := re.search(r"unrecognized arguments: .*?(--[\w-]+)", message):
            hint = did_you_mean(unknown[1], sorted(set(_flags(self))))
            may_be_of_own = "--knob_module" in self._option_string_actions and "--knob_module" not in self._words
            return hint or ("; a flag of a knob of your own needs --knob_module, too" if may_be_of_own else "")
        if choice := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)$", message, re.DOTALL):
            return did_you_mean(choice[1], [each.strip("' ") for each in choice[2].split(",")])
        return ""


def _path(text: str) -> Path:
    """The path that was given; raises ArgumentTypeError for an empty one, which `Path` takes for the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("a path is missing; write . for the current folder")
    return Path(text)


def _flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Flags of the parser and of its subcommands, whose unknown flags it reports."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _flags(inner)


def add_flags(parser: argparse.ArgumentParser, part: "type[Part]", title: str | None) -> None:
    """One flag for each field of `part`, under `title`; a flag that is not given leaves no value behind."""
    group = parser.add_argument_group(title)
    exclusive = {each: group.add_mutually_exclusive_group() for each in part.alternatives}
    for name, field in part.model_fields.items():
        place = next((exclusive[each] for each in part.alternatives if name in each), group)
        text = field.description or ""
        if "(default" not in text and field.default not in (None, False) and not field.default_factory:
            text += f" (default: {field.default})"
        reading = dict(_reading(field.annotation))
        if metavar := metavar_of(field):
            reading["metavar"] = metavar
        if name in part.repeated:
            reading["action"] = "extend"
        place.add_argument(f"--{name}", default=argparse.SUPPRESS, help=text.replace("%", "%%"), **reading)


class _LoadKnobs(argparse.Action):
    """Runs the file of a `--knob_module` as soon as it is read."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        load_knob_module(values)
        setattr(namespace, self.dest, values)


def add_knob_module(parser: argparse.ArgumentParser) -> None:
    """The flag of a command that reads results: the file that registers the knobs that they were measured with."""
    text = "Python file that registers the knobs of your own that the results have"
    parser.add_argument("--knob_module", type=Path, action=_LoadKnobs, metavar="PATH", help=text)


def _reading(annotation: Any) -> Mapping[str, Any]:
    """How argparse reads a value of this type."""
    kind, arguments = plain_type(annotation), get_args(plain_type(annotation))
    if kind is bool:
        return {"action": "store_true"}
    if get_origin(kind) is Literal:
        return {"choices": arguments}
    if get_origin(kind) is tuple:
        return {"nargs": "+", **_reading(arguments[0])}
    # A path is made by the part, which refuses an empty one.
    return {"type": str, "metavar": _METAVARS[kind]} if kind is Path else {"type": kind}


def plain_type(annotation: Any) -> Any:
    """The type below `Annotated[...]` and `... | None`."""
    while get_origin(annotation) in (Annotated, Union, types.UnionType):
        annotation = next(each for each in get_args(annotation) if each is not types.NoneType)
    return annotation
