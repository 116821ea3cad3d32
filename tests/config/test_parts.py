"""A model's path that is a folder of models, and the number format of accelerate's launcher."""

import logging
from pathlib import Path

import pytest

from experiment_core_utils.config.parts import _say_launched_format, only_model_in, say_only_model
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.config.text import published_form, validated
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
        # Not before it is known that it can be measured, and once.
        assert not caplog.records
        for model in (str(inside), str(inside), str(tmp_path / "other")):
            say_only_model(model)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path} contains one model, which is taken: {inside}"
    ]
    # A folder that is a model, the name of a model on the hub, and what is not there stay as they are.
    assert only_model_in(str(inside)) == str(inside)
    for name in ("allenai/MolmoE-1B-0924", str(tmp_path / "absent"), str(tmp_path / "notes" / "README.md"), "a\0b"):
        assert only_model_in(name) == name


def test_several_models_in_a_folder_are_listed(tmp_path: Path) -> None:
    for name, file in (("b", "config.json"), ("a", "config.json"), ("c", "weights.bin")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
    said = rf"{tmp_path} contains 2 models; give one of {tmp_path / 'a'}, {tmp_path / 'b'}$"
    with pytest.raises(ConfigurationError, match=said):
        parse_config(["--model_path", str(tmp_path)])
    with pytest.raises(ConfigurationError, match=said):
        validated({"model_name": str(tmp_path)})


def test_the_folder_of_the_embedded_model_contains_it_alone() -> None:
    assert only_model_in(str(EMBEDDED_MODEL.parent)) == str(EMBEDDED_MODEL)


@pytest.mark.parametrize(("launched", "precision"), [("bf16", "bfloat16"), ("fp16", "float16"), ("BF16", "bfloat16")])
def test_the_launchers_mixed_precision_is_what_is_measured(
    launched: str, precision: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    _say_launched_format.cache_clear()
    assert parse_config([]).model.precision == precision
    assert [each.getMessage() for each in caplog.records] == [
        f"accelerate launch --mixed_precision {launched.lower()} is measured as --precision {precision}"
    ]
    assert parse_config(["--precision", precision]).model.precision == precision
    with pytest.raises(ConfigurationError, match=f"^accelerate launch --mixed_precision {launched.lower()} and --prec"):
        parse_config(["--precision", "float32"])
    text = validated({"num_input_prompts": 3})
    assert text.mixed_precision == launched.lower() == validated(published_form(num_input_prompts=3)).mixed_precision
    for own in ("no", False):
        with pytest.raises(ConfigurationError, match="and mixed_precision no contradict each other; drop one"):
            validated({"mixed_precision": own})


def test_the_launchers_no_leaves_all_as_it_is_and_other_formats_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert (parse_config([]).model.precision, validated({}).mixed_precision) == ("auto", "no")
    assert validated({"mixed_precision": "bf16"}).mixed_precision == "bf16"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    for refused in (lambda: parse_config([]), lambda: validated({})):
        with pytest.raises(ConfigurationError, match="fp8 cannot be measured; give bf16, fp16 or no"):
            refused()
