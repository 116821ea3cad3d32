import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiment_core_utils.primitives.paths import REPOSITORY
from tests.tiny_language_models import save_checkpoint, tiny_llama

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


def run(*arguments: object, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *launcher, str(DRIVER), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_a_grid_ends_with_a_table_and_says_where_it_is(config_file: Path, tmp_path: Path) -> None:
    done = run("--config", config_file, "--output_dir", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 experiments of this grid are saved (2 measured now), 0 combinations left out, 0 failed" in done.stdout
    assert done.stdout.endswith(f"table of all experiments: {tmp_path / 'text_generation_results.csv'}\n")
    (_, second) = json.loads((tmp_path / "text_generation_results.json").read_text())
    planned = run("--config", config_file, "--output_dir", tmp_path, "--set", "cycle_id=[2, 3]", "--dry_run")
    assert planned.stdout.splitlines() == [
        f"1/2 cycle_id=2: done before, as {second}",
        "2/2 cycle_id=3: due",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "nowhere.yaml"], "error: nowhere.yaml cannot be read: "),
        (["--set", "fp_precison=float32"], "error: fp_precison: there is no such key; known are "),
        (["--model_name", ""], "error: model_name is empty; "),
        (["--model_name", "nowhere"], "error: there is no model folder nowhere; "),
        (["--max_output_tokens", "many"], "error: max_output_tokens: "),
        (["--size", "3"], "error: unrecognized arguments: --size 3; see --help"),
    ],
)
def test_what_is_wrong_is_one_line_and_comes_before_any_model(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(message) and done.stderr.count("\n") == 1 and not done.stdout


def test_two_processes_come_to_what_one_comes_to(config_file: Path, tmp_path: Path) -> None:
    common = ("--config", config_file, "--set", "cycle_id=1", "--set", "save_outputs=true", "--output_dir")
    assert run(*common, tmp_path / "one").returncode == 0
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = run(*common, tmp_path / "two", "--set", "track_energy=true", launcher=launcher)
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
    assert two["caveats"] == ["2 processes share the CPU cores: times are not those of one alone"]
    found = {path.name.partition("_6_")[2] for path in (tmp_path / "two").rglob("*_6_*")}
    assert found == {f"local_energy_results_process_{rank}.json" for rank in (0, 1)}


def test_a_killed_grid_is_finished_by_the_same_command(config_file: Path, tmp_path: Path) -> None:
    arguments = ("--config", config_file, "--output_dir", tmp_path, "--set", "cycle_id=[1, 2, 3]")
    results = tmp_path / "text_generation_results.json"
    started = subprocess.Popen(
        [sys.executable, str(DRIVER), *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not results.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    started.kill()
    started.wait()
    before = set(json.loads(results.read_text()))
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    saved = json.loads(results.read_text())
    assert before < set(saved) or len(before) == 3
    assert sorted(each["experiment_variables"]["cycle_id"] for each in saved.values()) == [1, 2, 3]
    assert len((tmp_path / "text_generation_results.csv").read_text().splitlines()) == 4
