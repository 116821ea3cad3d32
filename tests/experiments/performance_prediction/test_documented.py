"""The document against the code: every column, flag and algorithm is in it, and nothing else is in the tables."""

import re
from argparse import _SubParsersAction

from experiment_core_utils.primitives.files import REPOSITORY
from experiments.performance_prediction.algorithms.convolution import ALGORITHMS
from experiments.performance_prediction.networks.registry import MODELS
from experiments.performance_prediction.predict import build_parser as predict_parser
from experiments.performance_prediction.profiling.config import build_parser
from experiments.performance_prediction.profiling.tables import LAYER_COLUMNS, OVERALL_COLUMNS

TEXT = (REPOSITORY / "docs" / "performance_prediction.md").read_text(encoding="utf-8")


def first_cells(heading: str) -> set[str]:
    """What the first cells of a section's tables name in backticks."""
    section = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert section, heading
    cells = re.findall(r"^\| (`[^|]*) \|", section[1], re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_every_column_is_documented_and_no_other() -> None:
    assert first_cells("Overall: a row an input size") == set(OVERALL_COLUMNS)
    assert first_cells("Layers: a row for each convolution and size") == set(LAYER_COLUMNS)


def test_every_flag_is_documented() -> None:
    flags = {flag for action in build_parser()._actions for flag in action.option_strings} - {"-h", "--help"}
    assert {name for name in first_cells("Flags") if re.fullmatch("--[a-z-]+", name)} == flags


def test_every_flag_of_predict_is_documented() -> None:
    commands = next(action for action in predict_parser()._actions if isinstance(action, _SubParsersAction)).choices
    flags = {name for each in commands.values() for action in each._actions for name in action.option_strings}
    documented = {name for name in first_cells("Prediction") if name.startswith("--")}
    assert documented == flags - {"-h", "--help"}


def test_every_model_and_algorithm_is_documented() -> None:
    assert first_cells("Models and algorithms") == set(ALGORITHMS)
    assert all(f"`{name}`" in TEXT for name in MODELS)
