"""The generated parts of the documentation: records, columns, the driver's flags, the knobs, families, and the study.

python -m tests.documents.schema_docs --check   # exit code 1 where a page differs from the code
python -m tests.documents.schema_docs --write

The text between `<!-- from NAME -->` and `<!-- end -->` is made here; the rest of the pages is written by hand. A
record's field has its meaning in a `#:` comment, on its line or above; its last part "; None ..." says when it is null.
"""

import argparse
import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints, is_typeddict

from pydantic import BaseModel

from experiment_core_utils.config.command import reporting_errors, run_command
from experiment_core_utils.config.command_line import OneLineParser, plain_type
from experiment_core_utils.config.profiling import ProfilingConfig, build_parser, parts_of_flags
from experiment_core_utils.config.text import TextConfig
from experiment_core_utils.knobs.interface import Knob
from experiment_core_utils.knobs.registry import all_knobs
from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.primitives.files import REPOSITORY, write_text_atomically
from experiment_core_utils.primitives.flag_fields import Part
from experiment_core_utils.records import (
    caveats,
    columns,
    compute,
    conclusion,
    controls,
    energy,
    ledger,
    provenance,
    requests,
    sample_result,
    setting_result,
    text,
)
from experiment_core_utils.records.journal import LINE_KINDS
from experiments.benchmarks.transfer_study import study_tables
from tests.models.family_table import read_rows

PAGES = (
    REPOSITORY / "docs" / "results_schema.md",
    *(REPOSITORY / "docs" / "reference" / name for name in ("command_line.md", "knobs.md", "families.md")),
    REPOSITORY / "docs" / "evidence" / "study.md",
    REPOSITORY / "README.md",
)
EVIDENCE = REPOSITORY / "docs" / "evidence"
# Knobs of a kind of families, and what runs their decoders, where that was tried.
FAMILY_TABLES = {
    "causal_families": ("causal_knobs.csv", "causal_families.csv"),
    "image_text_families": ("image_text_knobs.csv", "image_text_families.csv"),
}
_FAMILY_KNOBS = {"vision": "vision", "kept": "kept", "top_k": "top-k", "expert_mass": "expert mass", "blocks": "blocks"}
# Objects of the provenance, whose keys are in its own table.
DOTTED = (
    "TaskDescription",
    "Decoding",
    "ExecutionStages",
    "FinalPrompt",
    "Hardware",
    "Model",
    "Preparation",
    "Variables",
)
RECORDS: dict[str, type] = {
    name: each
    for module in (
        caveats,
        compute,
        conclusion,
        controls,
        energy,
        ledger,
        provenance,
        requests,
        sample_result,
        setting_result,
        text,
    )
    for name, each in vars(module).items()
    if isinstance(each, type) and each.__module__ == module.__name__
}
_BEFORE_REASON = {"captured": "no own kernels", "eager": "no graph", "not built": "not built"}
_study_tables = cache(study_tables)
_GENERATED = re.compile(r"(<!-- from (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
# The `#:` comment above a field, its name, and the comment beside it.
_FIELD = re.compile(r"((?:^    #: .*\n)*)^    (\w+): .*?(?:  #: (.*))?$", re.MULTILINE)
# The default at the end of a flag's help text.
_DEFAULT = re.compile(r" \(default: (.*)\)$")
_KINDS = {str: "text", int: "whole number", float: "number", bool: "true or false"}


def documented(page: str) -> str:
    """The page with every generated table made anew.

    Raises:
        ResultsError: a table that nobody makes, or a record with a field that is not explained.
    """

    def made(found: re.Match[str]) -> str:
        return f"{found[1]}\n{table_of(found[2])}\n\n{found[3]}"

    return _GENERATED.sub(made, page)


def table_of(name: str) -> str:
    """The table of a record, or of `flags`, `knobs`, `journal`, a CSV file …; raises ResultsError otherwise."""
    if name == "flags":
        return _flag_tables()
    if name == "knobs":
        return _knob_list()
    if name == "knob_pages":
        return "\n\n".join(_knob_page(knob) for knob in _knobs())
    if name in FAMILY_TABLES:
        return _family_table(*FAMILY_TABLES[name])
    if name.startswith("study_"):
        return _study_tables()[name]
    if name == "text_config":
        return _table(("key", "default", "meaning"), list(_text_keys(TextConfig)))
    if name == "journal":
        return _table(("line", "what it is", "its keys"), _journal_lines())
    if name == "settings_csv":
        settings = (*columns.SETTING_COLUMNS, *columns.LAST_COLUMNS)
        return _table(("column", "from"), [(column.name, column.origin) for column in settings])
    if name == "samples_csv":
        return _table(
            ("column", "kind", "from"),
            [(each.name, _KINDS[each.kind], _source(each)) for each in columns.SAMPLE_COLUMNS],
        )
    if name == "aggregate_stats":
        summarised = [each for each in sample_result.QUANTITIES.values() if each.figures is not None]
        return _table(("name", "unit"), [(each.spread, each.unit) for each in summarised])
    if name not in RECORDS:
        raise ResultsError(f"the page asks for a table from {name!r}, which is the name of no record; give a record's")
    return _table(("key", "meaning", "null when"), record_rows(RECORDS[name]))


def record_rows(record: type) -> list[tuple[str, str, str]]:
    """Field, meaning and when it is null, of a dataclass or a TypedDict, in the order of the fields.

    Raises:
        ResultsError: a field without a meaning, or one that may be None of which the meaning does not say when.
    """
    meanings = _meanings(record)
    later = {name for name, field in getattr(record, "model_fields", {}).items() if not field.is_required()}
    rows = []
    for field, kind in _fields(record).items():
        if field not in meanings:
            raise ResultsError(f"{record.__name__}.{field} is not explained; write `#: MEANING` beside it")
        meaning, _, absent = meanings[field].partition("; None ")
        may_be_null = type(None) in getattr(kind, "__args__", ())
        # A key that a record need not have is None where it is absent, of which nothing is said.
        if kind is not Any and may_be_null != bool(absent) and not (may_be_null and field in later):
            raise ResultsError(f"{record.__name__}.{field}: its type and its meaning differ on whether it may be None")
        rows.append((field, meaning.rstrip("."), absent.rstrip(".").removeprefix("if ") or "always there"))
        inner = [each for each in (kind, *getattr(kind, "__args__", ())) if getattr(each, "__name__", None) in DOTTED]
        rows += [(f"{field}.{name}", what, when) for each in inner for name, what, when in record_rows(each)]
    return rows


def _fields(record: type) -> dict[str, Any]:
    """Field -> type, in order; a model has those of its parts first, a TypedDict only its own."""
    if issubclass(record, BaseModel):
        return {name: field.annotation for name, field in record.model_fields.items()}
    hints = get_type_hints(record)
    own = [name for _, name, _ in _FIELD.findall(inspect.getsource(record))] if is_typeddict(record) else hints
    return {name: hints[name] for name in own}


def _source(column: columns.SampleColumn) -> str:
    if column.meaning:
        return column.meaning
    return "the top level" if column.source.startswith("(") else f"`{column.source}`"


def _flag_tables() -> str:
    """A table for each group of the driver's flags: flag, default, meaning."""
    actions = {action.dest: action for action in build_parser()._actions}
    tables = []
    for group, part in parts_of_flags().items():
        rows = []
        for name, field in part.model_fields.items():
            text = (actions[name].help or "").replace("%%", "%")
            default, stated = field.default, _DEFAULT.search(text)
            if isinstance(default, str | int | float | Path) and name != "model_path":
                shown = "off" if default is False else f"`{default}`"
            else:
                shown = stated[1] if stated else "none"
            choices = ", ".join(f"`{each}`" for each in actions[name].choices or ())
            rows.append((f"--{name}", shown, _DEFAULT.sub("", text) + (f"; one of {choices}" if choices else "")))
        title = (ProfilingConfig.model_fields[group].title or "").capitalize()
        tables.append(f"**{title}**\n\n" + _table(("flag", "default", "meaning"), rows))
    return "\n\n".join(tables)


def _knobs() -> list[Knob[Any]]:
    """The knobs of the project."""
    return [knob for knob in all_knobs() if type(knob).__module__.startswith("experiment_core_utils.")]


def _knob_flags(knob: Knob[Any], *, lists_only: bool = False) -> str:
    fields = knob.flags.model_fields.items()
    listed = [name for name, field in fields if not lists_only or get_origin(plain_type(field.annotation)) is tuple]
    return ", ".join(f"`--{name}`" for name in listed)


def _knob_list() -> str:
    """README's list: title, flags of values, and what a value is; without the placebo, which turns nothing."""
    rows = ["| knob | flag | what it sets |", "| --- | --- | --- |"]
    for knob in _knobs():
        title = f"[{knob.title}](docs/{knob.page})" if knob.page else knob.title
        if flags := _knob_flags(knob, lists_only=True):
            rows.append(f"| {title} | {flags} | {_first_paragraph(type(knob))} |")
    return "\n".join(rows)


def _first_paragraph(of: object) -> str:
    return " ".join((inspect.getdoc(of) or "").partition("\n\n")[0].split()).rstrip(".")


def _knob_page(knob: Knob[Any]) -> str:
    """A knob's heading, docstring, and what it says of itself."""
    kind, base = type(knob), Knob
    rest = "every value is named" if knob.neutral is None else f"`{knob.level(knob.neutral)}`"
    names = ", ".join(f"`{name}`" for name in (f"knobs.{knob.name}", *knob.published))
    is_stated = knob.keeps_costs or kind.applied is base.applied or kind.flops is not base.flops
    is_proven = kind.prove is not base.prove
    untouched = ", ".join(f"`{stage}`" for stage in knob.untouched_stages) or "none is known"
    rows = {
        "flags": _knob_flags(knob) or "none",
        "in results": names,
        "the model as it is": rest,
        "FLOPs and bytes": "by the formulas of the model at the value" if is_stated else "null",
        "what proves it": _first_paragraph(kind.prove) if is_proven else "nothing that is counted shows it",
        "stages that it cannot change": untouched,
        **({"more": f"[{Path(knob.page.partition('#')[0]).name}](../{knob.page})"} if knob.page else {}),
    }
    table = "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {text} |" for name, text in rows.items())])
    return f"## {knob.title[0].upper()}{knob.title[1:]}\n\n{inspect.getdoc(kind)}\n\n{table}"


def _family_table(knobs: str, executions: str) -> str:
    """Each family, what runs its stages, its knobs, and why it lacks others, a reason of several once."""
    tried = read_rows(EVIDENCE / executions) if (EVIDENCE / executions).is_file() else []
    ways = {row["family"]: row for row in tried}
    rows, made = [], set[str]()
    for family in read_rows(EVIDENCE / knobs):
        way = ways.get(family["family"], {"way": "not tried", "reason": ""})
        has = [shown for name, shown in _FAMILY_KNOBS.items() if family[name] == "yes"]
        lacking: dict[str, list[str]] = {}
        for name, shown in _FAMILY_KNOBS.items():
            if family[name] not in ("yes", ""):
                lacking.setdefault(family[name], []).append(shown)
        reasons = [f"{', '.join(names)}: {reason}" for reason, names in lacking.items()]
        if way["reason"]:
            reasons.insert(0, f"{_BEFORE_REASON[way['way']]}: {way['reason']}")
        told = "; ".join(reasons).replace("|", "\\|")
        rows.append((family["family"], way["way"], ", ".join(has) or "none", told))
        made |= {each["made_with"] for each in (family, way) if each.get("made_with")}
    table = _table(("family", "execution on a GPU", "knobs", "why not more"), rows)
    return f"Tried with {' and with '.join(sorted(made))}.\n\n{table}"


def _journal_lines() -> list[tuple[str, str, str]]:
    """The kinds of lines in a journal, each with the first line of its record's docstring and its keys."""
    return [
        (
            name,
            (inspect.getdoc(kind) or "").splitlines()[0].rstrip("."),
            ", ".join(f"`{each.name}`" for each in dataclasses.fields(kind)),
        )
        for name, kind in LINE_KINDS.items()
    ]


def _text_keys(part: type[Part], above: str = "") -> Iterator[tuple[str, str, str]]:
    """Dotted key, default and meaning, with the allowed words, of a text experiment's configuration."""
    meanings = _meanings(part)
    for name, field in part.model_fields.items():
        kind = field.annotation
        if inspect.isclass(kind) and issubclass(kind, Part):
            yield from _text_keys(kind, f"{above}{name}.")
        elif name != "further":
            meaning = meanings.get(name) or field.description or ""
            words = [f"`{each}`" for each in get_args(plain_type(kind)) if get_origin(plain_type(kind)) is Literal]
            unsaid = ", ".join(words) if any(word not in meaning for word in words) else ""
            yield above + name, _default_of(name, field.default), meaning + (f"; one of {unsaid}" if unsaid else "")


def _default_of(name: str, default: Any) -> str:
    """A key's default as YAML says it."""
    if name == "model_name":
        return "the embedded model"
    return f"`{default}`" if isinstance(default, str) else json.dumps(default)


def _meanings(record: type) -> dict[str, str]:
    """Field -> what the source of a record, or of those that it is made from, says of it behind `#:`."""
    found = {}
    for each in reversed(record.__mro__[:-1] if not is_typeddict(record) else (record,)):
        for above, name, beside in _FIELD.findall(inspect.getsource(each)):
            found[name] = beside or " ".join(above.replace("#: ", "").split())
    return {name: meaning for name, meaning in found.items() if meaning}


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [f"| `{first}` | {' | '.join(others)} |" for first, *others in rows]
    return "\n".join([f"| {' | '.join(heading)} |", f"|{' --- |' * len(heading)}", *cells])


@reporting_errors
def main(argv: Sequence[str] | None = None, pages: Sequence[Path] = PAGES) -> None:
    """Exit code: 0 done or in order, 1 a page differs from what the code says, 2 a wrong flag."""
    program = "python -m tests.documents.schema_docs"
    parser = OneLineParser(prog=program, description="Generated tables of the documentation.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true", help="check whether the pages match the code")
    what.add_argument("--write", action="store_true", help="write the tables into the pages")
    given: argparse.Namespace = parser.parse_args(argv)
    for page in pages:
        before = page.read_text(encoding="utf-8")
        after = documented(before)
        if given.write:
            write_text_atomically(after, page)
        elif after != before:
            raise ResultsError(f"{page.name} does not match the code; run with --write")


if __name__ == "__main__":
    sys.exit(run_command(main))
