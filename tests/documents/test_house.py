"""The figures of the house may only fall; what they count is shown on a small module."""

import ast
import json
from pathlib import Path

from tests.documents.house import FIGURES, bound_names, figures, num_only_see, room_of

MODULE = '''
def rows(given, frame):
    """See `frame`."""
    found = [each for each in given]
    with frame as own:
        return found
'''


def test_no_figure_has_risen() -> None:
    limits, now = json.loads(FIGURES.read_text(encoding="utf-8")), figures()
    assert {name: number for name, number in now.items() if number > limits.get(name, 0)} == {}


def test_what_is_counted() -> None:
    module = ast.parse(MODULE)
    assert sorted(bound_names(module)) == ["each", "found", "frame", "given", "own"]
    assert num_only_see(module) == 1
    assert num_only_see(ast.parse('def f():\n    """See `g`.\n\n    It is slow.\n    """')) == 0
    assert room_of(Path("experiment_core_utils/models/hf/adapter.py")) == "experiment_core_utils/models"
    assert room_of(Path("experiment_core_utils/pipeline.py")) == "experiment_core_utils"
    assert room_of(Path("tests/models/test_x.py")) == "tests" and room_of(Path("conftest.py")) == "."
