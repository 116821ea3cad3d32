"""The hooks of mkdocs.yml: pages made from the code, and links out of docs/ that also work in the site.

mkdocs build --strict   # writes the site into site/, without a network
"""

import argparse
import os
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from experiment_core_utils.config.command_line import PROGRAM, READER, OneLineParser, default_metavar
from experiment_core_utils.primitives.files import REPOSITORY
from knob_profiler.__main__ import COMMANDS, Group

DOCS = REPOSITORY / "docs"
# The command whose flags have a section of their own on that page.
_PROFILER = "experiments.core_exp.acc_lat_profiling"
# Where a page gets the flags of all commands.
_COMMANDS = "<!-- commands -->"
#: where files from outside docs/ are in the site
SOURCES = "repository"
_LINK = re.compile(r"(?<=\]\()([^)\s#:]+)((?:#[^)\s]*)?)(?=\))")
# mermaid's own script, where `npm install mermaid` has put it; the theme would load it from a server.
_MERMAID = Path("node_modules/mermaid/dist/mermaid.min.js")


class _Found(BaseException):
    """Carries the parser of a command out of its `main`."""


def parser_of(module: str) -> OneLineParser:
    """The parser that the `main` of a module makes."""

    def caught(parser: OneLineParser) -> None:
        raise _Found(parser)

    token = READER.set(caught)
    try:
        import_module(module).main([])
    except _Found as found:
        parser: OneLineParser = found.args[0]
    finally:
        READER.reset(token)
    return parser


def subcommands(parser: OneLineParser) -> Iterator[tuple[str, OneLineParser]]:
    """The subcommands of a parser by name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def knobprof_parsers(group: Group = COMMANDS, above: str = "knobprof") -> Iterator[tuple[str, str, Any]]:
    """Name, module and parser of each subcommand of `knobprof`."""
    for name, each in group.commands.items():
        words = f"{above} {name}"
        if isinstance(each, Group):
            yield from knobprof_parsers(each, words)
            continue
        token = PROGRAM.set(words)
        try:
            yield words, each.module, parser_of(each.module)
        finally:
            PROGRAM.reset(token)


def _described(parser: OneLineParser) -> str:
    """The description of a parser, its examples and a table for each group of its flags, then its subcommands'."""
    parts, formatter = [parser.description or ""], parser._get_formatter()
    parts.append("\n".join(f"    {example}" for example in parser.examples))
    for group in parser._action_groups:
        rows = [
            f"| {_names(action)} | {_cell(formatter._expand_help(action) if action.help else '')} |"
            for action in group._group_actions
            if action.dest != "help" and not isinstance(action, argparse._SubParsersAction)
        ]
        if rows:
            title = (group.title or "").capitalize()
            parts.append("\n".join([f"| {title} | |", "| --- | --- |", *rows]))
    for name, inner in subcommands(parser):
        parts.append(f"### {name}\n\n{_described(inner)}")
    return "\n\n".join(part for part in parts if part)


def _names(action: argparse.Action) -> str:
    """The flag, or the name of a positional argument, with what it takes."""
    words = [", ".join(action.option_strings)] if action.option_strings else []
    if action.choices is not None:
        words += map(str, action.choices)
    elif action.nargs != 0:
        words.append(str(action.metavar or default_metavar(action)))
    if action.nargs in ("+", "*"):
        words.append("...")
    return f"`{' '.join(words)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Draw diagrams where mermaid's script is there; without it they stay text, and nothing is downloaded."""
    if (REPOSITORY / _MERMAID).is_file():
        config.extra_javascript.append("assets/mermaid.min.js")
    else:
        config.mdx_configs["pymdownx.superfences"].pop("custom_fences", None)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add mermaid's script, and every file outside docs/ that a page links to."""
    if (REPOSITORY / _MERMAID).is_file():
        files.append(File.generated(config, "assets/mermaid.min.js", abs_src_path=str(REPOSITORY / _MERMAID)))
    waiting = [DOCS / file.src_uri for file in files.documentation_pages() if file.abs_src_path]
    while waiting:
        page = waiting.pop()
        for target in _outside(page):
            if files.get_file_from_path(_in_site(target)) is not None:
                continue
            if target.is_dir():
                names = "\n".join(sorted(each.name for each in target.iterdir() if each.name != "__pycache__"))
                files.append(File.generated(config, _in_site(target), content=names + "\n"))
                continue
            files.append(File.generated(config, _in_site(target), abs_src_path=str(target)))
            if target.suffix == ".md":
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make the tables of commands, and lead links out of docs/ to their copies in the site."""
    if _COMMANDS in markdown:
        # Every flag of every command, but for the profiler's, to which a link leads.
        parts = []
        for name, module, parser in knobprof_parsers():
            of_its_own = "Its flags are the [flags of the profiler](#flags-of-the-profiler)."
            described = of_its_own if module == _PROFILER else _described(parser)
            parts.append(f"## {name}\n\n`python -m {module}`\n\n{described}")
        markdown = markdown.replace(_COMMANDS, "\n\n".join(parts))
    source = Path(page.file.abs_src_path or DOCS / page.file.src_uri)
    here = Path(page.file.src_uri).parent

    def led(found: re.Match[str]) -> str:
        target = Path(os.path.normpath(source.parent / found[1]))
        if target.is_relative_to(DOCS):
            place = str(target.relative_to(DOCS))
        elif target.exists():
            place = _in_site(target)
        else:
            return found[0]
        return os.path.relpath(place, here) + found[2]

    return _LINK.sub(led, markdown)


def _outside(page: Path) -> Iterator[Path]:
    """The files and folders outside docs/ that a page links to."""
    for link, _ in _LINK.findall(page.read_text(encoding="utf-8")):
        target = Path(os.path.normpath(page.parent / link))
        if target.exists() and target.is_relative_to(REPOSITORY) and not target.is_relative_to(DOCS):
            yield target


def _in_site(target: Path) -> str:
    """Where a file outside docs/ is in the site; sources as text, which every browser shows, a folder as a list."""
    place = f"{SOURCES}/{target.relative_to(REPOSITORY)}"
    if target.is_dir():
        return f"{place}/files.txt"
    return place if target.suffix in (".md", ".png", ".json", ".csv", ".txt") else f"{place}.txt"
