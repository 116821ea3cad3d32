from pathlib import Path

import pytest

from experiment_core_utils.models.common.checkpoint_files import loaded_bytes


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"model-00001-of-00002.safetensors": 3, "model-00002-of-00002.safetensors": 4, "pytorch_model.bin": 9}, 7),
        # Mistral's layout: the same weights once more.
        ({"model.safetensors": 5, "consolidated.safetensors": 5}, 5),
        ({"pytorch_model.bin": 9}, 9),
    ],
)
def test_copies_of_weights_are_not_counted(tmp_path: Path, files: dict[str, int], expected: int) -> None:
    for name, size in files.items():
        (tmp_path / name).write_bytes(b"x" * size)
    assert loaded_bytes(tmp_path) == expected
