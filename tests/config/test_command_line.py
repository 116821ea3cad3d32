"""What the help of a command says."""

import pytest

from experiment_core_utils.config.command_line import DocstringHelp, OneLineParser


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
