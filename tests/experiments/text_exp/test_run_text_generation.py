"""The text driver as a process: what it prints, refuses and leaves, alone, as two processes, and killed."""

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from experiment_core_utils.primitives.files import REPOSITORY
from tests.processes.forked_runs import KILLED, Run, RunServer
from tests.tiny_models.tiny_language_models import save_checkpoint, tiny_llama

DRIVER = REPOSITORY / "experiments" / "text_exp" / "run_text_generation.py"


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    checkpoint = save_checkpoint(tiny_llama(), folder / "model")
    (folder / "prompts.txt").write_text("\n".join(f"question number {number}" for number in range(7)))
    path = folder / "grid.yaml"
    path.write_text(
        f"model_name: {checkpoint}\nprompts: {{path: {folder / 'prompts.txt'}}}\nmax_output_tokens: 5\ndevice: cpu\n"
        "num_threads: 1\ntrack_energy: false\nnum_warmup_batches: 0\ncycle_id: [1, 2]\n"
    )
    return path


@dataclass(frozen=True)
class Done:
    """How a run of the driver ended, and what it printed."""

    code: int
    out: str
    errors: str


@dataclass(frozen=True)
class TextDriver:
    """Runs of the driver, each a process, one after the other."""

    server: RunServer
    folder: Path

    def run(self, *arguments: object, **kind: Any) -> Done:
        log, errors = self.folder / "log", self.folder / "errors"
        given = Run([*map(str, arguments)], str(log), program=DRIVER.name, errors=str(errors), **kind)
        (ended,) = self.server.run(given)
        return Done(ended.code, log.read_text(), errors.read_text())


@pytest.fixture
def driver(run_server: RunServer, tmp_path_factory: pytest.TempPathFactory) -> TextDriver:
    return TextDriver(run_server, tmp_path_factory.mktemp("driver"))


def test_a_grid_ends_with_a_table_and_says_where_it_is(config_file: Path, driver: TextDriver, tmp_path: Path) -> None:
    done = driver.run("--config", config_file, "--output_dir", tmp_path)
    assert done.code == 0, done.errors
    assert "2 experiments of this grid saved (2 measured now), 0 combinations left out, 0 failed" in done.out
    assert done.out.endswith(f"table of all experiments: {tmp_path / 'text_generation_results.csv'}\n")
    (_, second) = json.loads((tmp_path / "text_generation_results.json").read_text())
    planned = driver.run("--config", config_file, "--output_dir", tmp_path, "--set", "cycle_id=[2, 3]", "--dry_run")
    done_before, due, prompt, ids = planned.out.splitlines()
    assert (done_before, due) == (f"1/2 cycle_id=2: done before, as {second}", "2/2 cycle_id=3: due")
    assert prompt.startswith('prompt of sample 0 (chat_template none): "') and ids.startswith("ids: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "nowhere.yaml"], "error: nowhere.yaml cannot be read: "),
        (
            ["--set", "fp_precison=float32"],
            "error: fp_precison: there is no such key (did you mean fp_precision?); ",
        ),
        (["--model_name", ""], "error: model_name is empty; "),
        (["--model_name", "nowhere"], "error: there is no model folder nowhere; "),
        (["--max_output_tokens", "many"], "error: max_output_tokens: "),
        (["--size", "3"], "error: unrecognized arguments: --size 3; see --help"),
    ],
)
def test_what_is_wrong_is_one_line_and_comes_before_any_model(
    arguments: list[str], message: str, driver: TextDriver
) -> None:
    done = driver.run(*arguments)
    assert done.code == 2
    assert done.errors.startswith(message) and done.errors.count("\n") == 1 and not done.out


def test_two_processes_come_to_what_one_comes_to(config_file: Path, driver: TextDriver, tmp_path: Path) -> None:
    common = ("--config", config_file, "--set", "cycle_id=1", "--set", "save_outputs=true", "--output_dir")
    assert driver.run(*common, tmp_path / "one").code == 0
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", DRIVER]
    command = [*launcher, *common, tmp_path / "two", "--set", "track_energy=true"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    (one,), (two,) = (
        json.loads((tmp_path / name / "text_generation_results.json").read_text()).values() for name in ("one", "two")
    )
    for key in ("num_prompts", "total_input_tokens", "total_output_tokens", "avg_output_tokens_per_prompt"):
        assert one["inference_metrics"][key] == two["inference_metrics"][key]
    (one_text,), (two_text,) = (
        [path.read_text() for path in (tmp_path / name).rglob("*_8_text_output.json")] for name in ("one", "two")
    )
    assert one_text == two_text
    assert two["experiment_setup"]["distributed_config"]["num_processes"] == 2
    energy = two["global_energy_results"]
    assert (energy["num_processes"], energy["num_tracking_processes"]) == (2, 1) and energy["total_energy_kwh"] > 0
    shared, *of_energy, cut = two["caveats"]
    assert cut.startswith("answers: ") and "were cut at the limit of 5 tokens" in cut
    assert shared == "2 processes share the CPU cores: times are not those of one process alone"
    # Where the CPU's counters cannot be read.
    assert of_energy in ([], ["energy: estimated by codecarbon_estimate, not measured"])
    found = {path.name.partition("_6_")[2] for path in (tmp_path / "two").rglob("*_6_*")}
    assert found == {f"local_energy_results_process_{rank}.json" for rank in (0, 1)}


def test_a_killed_grid_is_finished_by_the_same_command(config_file: Path, driver: TextDriver, tmp_path: Path) -> None:
    arguments = ("--config", config_file, "--output_dir", tmp_path, "--set", "cycle_id=[1, 2, 3]")
    results = tmp_path / "text_generation_results.json"
    assert driver.run(*arguments, signal_when=(str(results), signal.SIGKILL)).code in (KILLED, 0)
    before = set(json.loads(results.read_text()))
    done = driver.run(*arguments)
    assert done.code == 0, done.errors
    saved = json.loads(results.read_text())
    assert before < set(saved) or len(before) == 3
    assert sorted(each["experiment_variables"]["cycle_id"] for each in saved.values()) == [1, 2, 3]
    assert len((tmp_path / "text_generation_results.csv").read_text().splitlines()) == 4
