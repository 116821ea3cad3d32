"""A model's path that is a folder of models."""

import logging
from pathlib import Path

import pytest

from experiment_core_utils.config.parts import only_model_in
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.config.text import validated
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import EMBEDDED_MODEL


def test_the_only_model_in_a_folder_is_taken_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    inside = tmp_path / "one"
    inside.mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "README.md").write_text("config.json")
    assert only_model_in(str(tmp_path)) == str(tmp_path)
    (inside / "config.json").write_text("{}")
    with caplog.at_level(logging.WARNING):
        assert parse_config(["--model_path", str(tmp_path)]).model.model_path == str(inside)
        assert validated({"model_name": str(tmp_path)}).model_name == str(inside)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path} contains one model, which is taken: {inside}"
    ]
    # A folder that is a model, the name of a model on the hub, and what is not there stay as they are.
    assert only_model_in(str(inside)) == str(inside)
    for name in ("allenai/MolmoE-1B-0924", str(tmp_path / "absent"), str(tmp_path / "notes" / "README.md"), "a\0b"):
        assert only_model_in(name) == name


def test_several_models_in_a_folder_are_listed(tmp_path: Path) -> None:
    for name, file in (("b", "config.json"), ("a", "config.yaml"), ("c", "weights.bin")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
    said = rf"{tmp_path} contains 2 models; give one of {tmp_path / 'a'}, {tmp_path / 'b'}$"
    with pytest.raises(ConfigurationError, match=said):
        parse_config(["--model_path", str(tmp_path)])
    with pytest.raises(ConfigurationError, match=said):
        validated({"model_name": str(tmp_path)})


def test_the_folder_of_the_embedded_model_contains_it_alone() -> None:
    assert only_model_in(str(EMBEDDED_MODEL.parent)) == str(EMBEDDED_MODEL)
