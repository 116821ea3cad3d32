"""What transformers says of a package that it lacks names the extra that has it."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import AutoImageProcessor, AutoModel, TimmWrapperConfig

from experiment_core_utils.models.common.vendor_errors import vendor_errors_named
from experiment_core_utils.primitives.errors import ConfigurationError

ADVICE = r"; run: pip install {} \(or install this package with its extra \[vision\]\); give another$"


@pytest.mark.skipif(find_spec("timm") is not None, reason="timm is installed")
def test_a_tower_of_timm() -> None:
    with (
        pytest.raises(ConfigurationError, match=r"requires the timm library .*" + ADVICE.format("timm")) as caught,
        vendor_errors_named("it cannot be built", "; give another"),
    ):
        AutoModel.from_config(TimmWrapperConfig())
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed")
def test_an_image_processor_of_torchvision(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "Molmo2ImageProcessor"}))
    with (
        pytest.raises(ConfigurationError, match=r"orchvision.*" + ADVICE.format("torchvision")),
        vendor_errors_named("it cannot be read", "; give another"),
    ):
        AutoImageProcessor.from_pretrained(tmp_path, local_files_only=True)


def test_other_errors_are_as_before() -> None:
    with (
        pytest.raises(ConfigurationError, match=r"^it cannot be read: no timms here; give another$"),
        vendor_errors_named("it cannot be read", "; give another"),
    ):
        raise ValueError("no timms here")
