"""Where the state of runs is kept."""

from pathlib import Path

import pytest

from experiment_core_utils.primitives.files import state_folder


def test_state_goes_where_it_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place below a file can be made by nobody, not even by root."""
    (tmp_path / "file").write_text("")
    closed = tmp_path / "file" / "persistent_progress_trackers"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert state_folder(tmp_path / "r", tmp_path / "open") == tmp_path / "open"
    users = Path("inference_knob_profiler") / "persistent_progress_trackers"
    assert state_folder(tmp_path / "r", closed) == tmp_path / "state" / users
    installed = state_folder(tmp_path / "r", tmp_path / "site-packages" / "open", in_checkout=False)
    assert installed == tmp_path / "state" / "inference_knob_profiler" / "open"
    monkeypatch.setenv("XDG_STATE_HOME", "")
    assert state_folder(tmp_path / "r", closed) == tmp_path / "home" / ".local" / "state" / users
    for home in (str(tmp_path / "file"), ""):
        monkeypatch.setenv("HOME", home)
        assert state_folder(tmp_path / "r", closed) == tmp_path / "r" / ".persistent_progress_trackers"
