"""States are recorded with what the grid was measured with, and anything else is refused."""

from pathlib import Path

import pytest

from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.controller.training_jobs import refuse_other_source
from tests.experiments.hand_made_sweep import result, setting, write


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    """Of the split `validation` of `signs`, with the model `folder/tiny`."""
    return write(tmp_path / "grid", result(setting()))


def test_the_same_split_and_model_in_another_place_are_taken(grid: Path) -> None:
    refuse_other_source([grid], {"signs": "validation", "elsewhere": "test"}, "/other/place/tiny")
    refuse_other_source([grid], {}, "tiny")


def test_another_split_is_refused(grid: Path) -> None:
    with pytest.raises(ConfigurationError, match="split validation of signs, and train is read now; give --split val"):
        refuse_other_source([grid], {"signs": "train"}, "folder/tiny")


def test_another_model_is_refused(grid: Path) -> None:
    with pytest.raises(ConfigurationError, match="model folder/tiny, and the states of folder/small; give the grid's"):
        refuse_other_source([grid], {"signs": "validation"}, "folder/small")
