"""What the help of a command says."""

from pathlib import Path

import pytest

from experiment_core_utils.config.command_line import DocstringHelp, OneLineParser
from experiment_core_utils.primitives.errors import ConfigurationError


@pytest.mark.parametrize("options", [{}, {"formatter_class": DocstringHelp}])
def test_help_ends_in_the_default_unless_its_text_says_it(options: dict[str, type]) -> None:
    parser = OneLineParser(prog="made.py", **options)
    parser.add_argument("--rounds", type=int, default=0, help="number of rounds")
    parser.add_argument("--output", help="file to write")
    parser.add_argument("--fast", action="store_true", help="leave out the rest")
    parser.add_argument("--metric", default="em", help="metric (default: the task's own)")
    lines = [" ".join(line.split()) for line in parser.format_help().splitlines()]
    assert lines[-4:] == [
        "--rounds ROUNDS number of rounds (default: 0)",
        "--output OUTPUT file to write",
        "--fast leave out the rest",
        "--metric METRIC metric (default: the task's own)",
    ]


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
