"""Facts of the machine and the checkout."""

import re
import sys

import pytest
import torch

from experiment_core_utils.meters.host_facts import command_line, git_commit, hardware_info, package_version


def test_the_commit_is_a_hash_that_says_whether_files_differ() -> None:
    commit = git_commit()
    assert commit is None or re.fullmatch(r"[0-9a-f]{40}(\+changes)?", commit)


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert git_commit() is None


def test_a_package_that_is_not_there_has_no_version() -> None:
    # The name of its build may stand behind it, or not.
    assert str(package_version("torch")).partition("+")[0] == torch.__version__.partition("+")[0]
    assert package_version("no-such-package") is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_each_gpu_says_what_it_is() -> None:
    found = hardware_info()
    for gpu, name in zip(found["gpus"], found["gpu_names"], strict=True):
        assert gpu["name"] == name and gpu["uuid"].startswith("GPU-")
        assert gpu["power_limit_w"] is not None or "power limit" in gpu["reason"]


def test_passwords_of_servers_are_not_in_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = "--endpoint http://me:secret@h --seed 1"
    monkeypatch.setattr(sys, "argv", ["run", "--endpoint", "a=http://me:secret@h/v1?key=secret", "--run", sides])
    assert command_line().endswith(" run --endpoint a=http://h/v1 --run '--endpoint http://h --seed 1'")


def test_a_path_that_is_not_utf8_is_escaped_in_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--output_dir", "a \udcff"])
    assert command_line().endswith("run.py --output_dir 'a \\udcff'")
    assert command_line().encode()
