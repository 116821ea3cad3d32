"""accelerate's own launch over two machines, which are two network namespaces, or two addresses where those are not."""

import json
import os
import subprocess
import sys
from pathlib import Path

from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.pipeline import run_profiling
from experiment_core_utils.primitives.files import REPOSITORY

NOT_ALLOWED = 77
DRIVER = REPOSITORY / "experiments" / "core_exp" / "acc_lat_profiling.py"
# What a machine runs; `--multi_gpu` is accelerate's word for several processes, also where there is no GPU.
LAUNCH = (
    f'exec {sys.executable} -m accelerate.commands.launch --multi_gpu --num_machines 2 --machine_rank "$MACHINE_RANK" '
    '--main_process_ip "$MAIN_IP" --main_process_port 29541 --num_processes 2 "$@"'
)


def test_two_machines_give_the_answers_of_one_process(tiny_checkpoint: Path, tmp_path: Path) -> None:
    flags = [
        "--model_path", str(tiny_checkpoint), "--tier_list", "low", "--top_k_list", "4", "--num_active_blocks_list",
        "4", "--num_samples", "5", "--num_runs_per_sample", "1", "--max_new_tokens", "3", "--num_threads", "1",
        "--num_warmup_runs", "0", "--max_repeats", "0", "--no_reference",
    ]  # fmt: skip
    (one,) = run_profiling(parse_config([*flags, "--output_dir", str(tmp_path / "one")])).results
    single = one.content()
    code, log = launch_on_two_machines(*flags, "--output_dir", str(tmp_path / "two"), "--worker_timeout", "120")
    assert code == 0, log
    assert log.count("table of settings") == 1
    (path,) = (tmp_path / "two").glob("*blocks4.json")
    double = json.loads(path.read_text())
    assert double["provenance"]["num_processes"] == 2
    for key in ("accuracy", "accuracy_std", "accuracy_ci95", "sample_ids", "failed_samples"):
        assert json.dumps(double[key]) == json.dumps(single[key])
    for key in ("sample_id", "pred", "accuracy", "prompt_tokens", "output_tokens"):
        assert [s[key] for s in double["per_sample_results"]] == [s[key] for s in single["per_sample_results"]]


def launch_on_two_machines(*arguments: str) -> tuple[int, str]:
    """The exit code of the launch, and what the first machine printed."""
    command = ["bash", "-c", LAUNCH, "launch", str(DRIVER), *arguments]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "MAIN_IP": "10.77.0.1"}
    script = Path(__file__).with_name("two_machines.sh")
    done = subprocess.run(
        ["bash", str(script), *command], capture_output=True, text=True, timeout=240, env=environment, cwd="/"
    )
    if done.returncode != NOT_ALLOWED:
        return done.returncode, done.stdout + done.stderr
    machines = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            text=True,
            env={**environment, "MAIN_IP": "127.0.0.2", "GLOO_SOCKET_IFNAME": "lo", "MACHINE_RANK": str(rank)},
            cwd="/",
        )
        for rank in (0, 1)
    ]
    log = machines[0].communicate(timeout=240)[0]
    return max(abs(machine.wait(timeout=60)) for machine in machines), log
