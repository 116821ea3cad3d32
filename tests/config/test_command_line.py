"""What the help of a command says, and which words a command refuses."""

import re
from pathlib import Path
from typing import Annotated

import pytest

from experiment_core_utils.config.command_line import OneLineParser, add_flags
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import REPOSITORY
from experiment_core_utils.primitives.flag_fields import FilePath, FolderPath, Fraction, Listed, Metavar, Part


def test_help_ends_in_the_default_unless_its_text_says_it() -> None:
    parser = OneLineParser(prog="made.py", description="First line.\n\n    an example")
    parser.add_argument("--rounds", type=int, default=0, help="number of rounds")
    parser.add_argument("--output", help="file to write")
    parser.add_argument("--fast", action="store_true", help="leave out the rest")
    parser.add_argument("--metric", default="em", help="metric (default: the task's own)")
    lines = [" ".join(line.split()) for line in parser.format_help().splitlines()]
    assert "\n    an example\n" in parser.format_help()
    assert lines[-4:] == [
        "--rounds N number of rounds (default: 0)",
        "--output OUTPUT file to write",
        "--fast leave out the rest",
        "--metric METRIC metric (default: the task's own)",
    ]


def test_help_ends_in_examples_also_of_a_subcommand() -> None:
    parser = OneLineParser(prog="made.py", examples=("made.py build a", "made.py build b"))
    build = parser.add_subparsers().add_parser("build", examples=("made.py build a",))
    assert parser.format_help().endswith("\n\nexamples:\n  made.py build a\n  made.py build b\n")
    assert build.format_help().endswith("\n\nexamples:\n  made.py build a\n")


def test_a_flag_says_what_its_field_expects() -> None:
    class Made(Part):
        wait: Annotated[float, Metavar("SECONDS")] | None = None
        shares: Listed[Fraction] | None = None
        folder: FolderPath | None = None
        count: int | None = None
        file: FilePath | None = None

    parser = OneLineParser(prog="made.py")
    add_flags(parser, Made, "made")
    lines = [line.strip() for line in parser.format_help().partition("made:\n")[2].splitlines()]
    assert lines == [
        "--wait SECONDS", "--shares FRACTION [FRACTION ...]", "--folder DIR", "--count N", "--file PATH"
    ]  # fmt: skip


def test_a_command_that_is_missing_is_written_before_flags() -> None:
    parser = OneLineParser(prog="made.py")
    parser.add_subparsers(metavar="COMMAND", required=True).add_parser("build")
    for words in (["--seed", "1"], ["--seed=1"]):
        with pytest.raises(ConfigurationError, match=rf"; write the command before {words[0]}; see --help$"):
            parser.parse_args(words)


def test_a_flag_that_resembles_none_may_be_of_a_knob_of_your_own() -> None:
    parser = OneLineParser(prog="made.py")
    parser.add_argument("--top_k_list", nargs="+")
    parser.add_argument("--knob_module")
    for words, said in (
        (["--head_fraction_list", "1"], "1; a flag of a knob of your own needs --knob_module, too; see --help"),
        (["--topk", "1"], "1 (did you mean --top_k_list?); see --help"),
        (
            ["--head_fraction_list", "1", "--knob_module", "made.py"],
            "unrecognized arguments: --head_fraction_list 1; see --help",
        ),
    ):
        with pytest.raises(ConfigurationError) as raised:
            parser.parse_args(words)
        assert str(raised.value).endswith(said)


def test_an_empty_path_is_refused_also_by_a_subcommand() -> None:
    parser = OneLineParser(prog="made.py")
    commands = parser.add_subparsers(dest="command")
    build = commands.add_parser("build")
    build.add_argument("results", type=Path, nargs="+")
    build.add_argument_group("output").add_argument("--output_dir", type=Path)
    given = parser.parse_args(["build", ".", "a b", "--output_dir", "made"])
    assert (given.results, given.output_dir) == ([Path("."), Path("a b")], Path("made"))
    with pytest.raises(ConfigurationError, match=r"argument --output_dir: a path is missing; write \. for the current"):
        parser.parse_args(["build", "a", "--output_dir", ""])
    with pytest.raises(ConfigurationError, match=r"argument results: a path is missing; write \. for the current"):
        parser.parse_args(["build", "a", ""])


def parser_with_lists() -> OneLineParser:
    parser = OneLineParser(prog="made.py")
    parser.add_argument("--num_samples", type=int)
    parser.add_argument("--configs", nargs="+")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("-o", "--output")
    return parser


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--num_sample 3", "unrecognized arguments: --num_sample 3 (did you mean --num_samples?); see --help"),
        ("--num_sample=3", "unrecognized arguments: --num_sample=3 (did you mean --num_samples?); see --help"),
        ("--config x.yaml", "unrecognized arguments: --config x.yaml (did you mean --configs?); see --help"),
        ("--num_samples 3 --num_samples=3", "--num_samples is given twice; give it once; see --help"),
        ("--configs a --fast --configs b", "--configs is given twice; give it once with all its values; see --help"),
        ("--fast --fast", "--fast is given twice; give it once; see --help"),
        ("-o a --output b", "--output is given twice; give it once; see --help"),
    ],
)
def test_a_flag_is_written_in_full_and_given_once(words: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        parser_with_lists().parse_args(words.split())
    assert str(raised.value) == said


def test_flags_that_gather_and_words_after_two_dashes_may_repeat() -> None:
    parser = parser_with_lists()
    parser.add_argument("names", nargs="*")
    given = parser.parse_args(["--set", "a=1", "--set", "b=2", "--fast", "--", "--fast", "--fast"])
    assert (given.set, given.fast, given.names) == (["a=1", "b=2"], True, ["--fast", "--fast"])


def test_a_missing_flag_that_is_misspelt_is_named() -> None:
    parser = OneLineParser(prog="made.py")
    build = parser.add_subparsers(dest="command").add_parser("build")
    build.add_argument("--output_dir", required=True)
    build.add_argument("--seed")
    for words, said in (
        (["build", "--outputdir=x"], r"required: --output_dir; --outputdir is unknown \(did you mean --output_dir\?\)"),
        (["build", "--seed", "1"], "required: --output_dir; see"),
        (["build", "--output_dir", "a", "--seed", "1", "--seed", "2"], "^--seed is given twice; give it once"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            parser.parse_args(words)


def test_every_command_of_the_project_has_a_parser_of_this_kind() -> None:
    sources = [
        path
        for folder in ("experiment_core_utils", "experiments", "knob_profiler", "scripts")
        for path in (REPOSITORY / folder).rglob("*.py")
    ]
    plain = [
        path.name
        for path in sources
        if re.search(r"(?<!class OneLineParser\()argparse\.ArgumentParser\(", path.read_text())
    ]
    abbreviating = [path.name for path in sources if "allow_abbrev=True" in path.read_text()]
    assert (plain, abbreviating) == ([], [])
