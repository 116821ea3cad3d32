"""A crew is as many processes as were launched; `tests/processes/shared_model.py` tries what one says and does."""

import pytest
import torch

from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.in_step import join_crew


@pytest.mark.parametrize(("launched", "size"), [(None, 2), ("2", 3)])
def test_another_number_of_processes_is_refused(
    monkeypatch: pytest.MonkeyPatch, launched: str | None, size: int
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if launched is not None:
        monkeypatch.setenv("WORLD_SIZE", launched)
    message = f"^{size} processes are to share the model, and {launched or 1} were launched; launch so many$"
    with pytest.raises(ConfigurationError, match=message):
        join_crew(size, torch.device("cpu"), 1.0, "launch so many")
