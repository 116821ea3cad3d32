"""A model that two processes share gives what the whole model gives; a run of it has the results of one process."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from experiment_core_utils.b_model_loader import find_model
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.pipeline import run_profiling
from experiment_core_utils.planning.dry_run import describe_plan
from experiment_core_utils.primitives.device import choose_device
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import REPOSITORY
from tests.models.tiny_checkpoints import write_checkpoint
from tests.processes.forked_runs import of_rank

GRID = ["--top_k_list", "1", "2", "--num_active_blocks_list", "2", "--num_samples", "3", "--num_runs_per_sample", "1",
        "--num_warmup_runs", "0", "--max_repeats", "0", "--num_threads", "1", "--max_new_tokens", "4",
        "--device", "cpu"]  # fmt: skip


@pytest.fixture(scope="module")
def olmoe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3 blocks with 4 experts, 4 heads of queries and 2 of keys and values."""
    return write_checkpoint("olmoe", tmp_path_factory.mktemp("olmoe"))


def in_two_processes(port: int, command: Sequence[str], exit_code: int = 0) -> list[str]:
    """What each of two processes of one machine prints; both must end with the exit code."""
    common = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", *command],
            env=common | of_rank(rank, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    printed = [each.communicate(timeout=240)[0] for each in started]
    assert [each.returncode for each in started] == [exit_code] * 2, "\n".join(printed)
    return printed


def test_every_call_gives_what_the_whole_model_gives(olmoe: Path, tmp_path: Path) -> None:
    in_two_processes(29571, ["tests.processes.shared_model", str(olmoe), str(tmp_path / "done")])
    assert (tmp_path / "done").read_text() == "done"


def test_a_run_has_the_results_of_one_process(olmoe: Path, tmp_path: Path) -> None:
    flags = ["--model_path", str(olmoe), *GRID]
    shared = [*flags, "--tensor_parallel", "2", "--output_dir", str(tmp_path / "shared")]
    printed = in_two_processes(29572, ["knob_profiler", "profile", *shared])
    assert "3 settings in" in printed[0] and "settings" not in printed[1]
    whole = run_profiling(parse_config([*flags, "--execution", "eager", "--output_dir", str(tmp_path / "whole")]))
    for expected in (result.content() for result in whole.results):
        name = f"*topk{expected['top_k']}_blocks{expected['num_active_blocks']}.json"
        (path,) = (tmp_path / "shared").glob(name)
        found: dict[str, Any] = json.loads(path.read_text())
        assert found["provenance"]["model"]["tensor_parallel"] == 2
        assert found["provenance"]["experimental_variables"]["tensor_parallel"] == 2
        for key in ("sample_id", "pred"):
            assert [each[key] for each in found["per_sample_results"]] == [
                each[key] for each in expected["per_sample_results"]
            ]
        for key in ("experts_per_token", "blocks_run", "cache_layers"):
            assert found["realised"][key] == expected["realised"][key]
        # This process has a part of the model, and sees its own memory.
        assert found["memory"]["process_rss_bytes"] > 0
        for name in ("memory", "hardware_utilisation"):
            reason = "reason" if name == "memory" else "utilisation_reason"
            assert found[name][reason] == expected[name][reason] is not None
        assert found["fingerprint"] != expected["fingerprint"]


def test_weights_that_transformers_divides_wrongly_are_no_fault_of_the_checkpoint(tmp_path: Path) -> None:
    """Transformers 5.23 turns the experts of Qwen3-VL-MoE after it has divided them."""
    folder = write_checkpoint("qwen3_vl_moe", tmp_path)
    flags = ["--model_path", str(folder), *GRID, "--tensor_parallel", "2", "--output_dir", str(tmp_path / "shared")]
    printed = in_two_processes(29573, ["knob_profiler", "profile", *flags], exit_code=2)
    assert "error: --tensor_parallel 2: transformers divides the weights of this model wrongly, or those" in printed[0]
    assert "experts.down_proj', torch.Size([4, 8, 32]), torch.Size([4, 32, 8]))" in printed[0]
    assert printed[0].rstrip().endswith("; give --device_map auto, which does not divide them")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--random_weights",), "random weights are made by each process as a whole; drop --random_weights"),
        ((), "it needs 2 processes; launch torchrun --nproc-per-node=2 -m knob_profiler profile"),
    ],
)
def test_what_cannot_be_shared_is_refused(
    olmoe: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: bool(flags))
    config = parse_config(["--model_path", str(olmoe), *GRID, "--tensor_parallel", "2", *flags])
    with pytest.raises(ConfigurationError, match=f"^--tensor_parallel 2: {message}$"):
        find_model(str(olmoe)).load(config.model, choose_device("cpu"))


def test_so_many_processes_are_launched(olmoe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_config(["--model_path", str(olmoe), *GRID, "--tensor_parallel", "2"])
    with pytest.raises(ConfigurationError, match="^2 processes are to share the model, and 1 were launched; launch"):
        run_profiling(config)
    text = describe_plan(config).text
    assert "whole: 3 of 3 settings" in text and " a process, 2 processes that share the model\n" in text
    assert re.search(r"^memory: of the 2 processes together; of the weights \(0\.\d+ MiB\) each has 0\.\d", text, re.M)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="plans in one process; leave torchrun out"):
        describe_plan(config)


@pytest.mark.parametrize("other", [("--device_map", "auto"), ("--sample_timeout", "3")])
def test_what_does_not_go_together_is_refused_at_the_door(other: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError, match="drop (one|it)$"):
        parse_config(["--tensor_parallel", "2", *other])
