"""The Slurm script under stand-ins for Slurm's commands that write down their arguments, node by node."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser

from experiment_core_utils.primitives.files import REPOSITORY

SCRIPT = REPOSITORY / "scripts" / "slurm_sweep.sh"
DRIVER = REPOSITORY / "experiments" / "core_exp" / "acc_lat_profiling.py"

# The real srun starts the nodes at the same time; one after the other is easier to read.
STUBS = {
    "scontrol": """
        echo "scontrol $*" >> "$STUB_LOG"
        if [ "$1 $2" = "show hostnames" ]; then printf 'gpu-7\\ngpu-9\\n' | head -n "$STUB_NODES"; fi""",
    "srun": """
        while [ "$1" != bash ]; do echo "srun $1" >> "$STUB_LOG"; shift; done
        for node in $(seq 0 $((STUB_NODES - 1))); do SLURM_NODEID=$node "$@" || exit; done""",
    "scancel": """
        echo "scancel $*" >> "$STUB_LOG"
        kill -TERM "$(cat "$STUB_LOG.step")" """,
    "python": """
        echo "node $SLURM_NODEID: $*" >> "$STUB_LOG"
        case " $* " in
            *" --fail "*) exit 1 ;;
            *" --long "*)
                trap 'echo "stopped cleanly" >> "$STUB_LOG"; exit 130' TERM
                echo $$ > "$STUB_LOG.step"
                while :; do sleep 0.05; done ;;
        esac""",
}


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a job of two nodes with four GPUs each, on a machine without Slurm."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, body in STUBS.items():
        stub = folder / name
        stub.write_text(f"#!/usr/bin/env bash\nset -eu\n{body}\n")
        stub.chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MASTER_"))}
    return inherited | {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHON": str(folder / "python"),
        "STUB_LOG": str(tmp_path / "log"),
        "STUB_NODES": "2",
        "SLURM_JOB_ID": "41234",
        "SLURM_JOB_NODELIST": "gpu-[7,9]",
        "SLURM_SUBMIT_DIR": str(REPOSITORY),
        "SLURM_GPUS_ON_NODE": "4",
    }


def sweep(environment: dict[str, str], *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", str(SCRIPT), *flags], env=environment, capture_output=True, text=True, timeout=30)


def log(environment: dict[str, str]) -> list[str]:
    return Path(environment["STUB_LOG"]).read_text().splitlines()


def of_nodes(environment: dict[str, str]) -> list[str]:
    return [line for line in log(environment) if line.startswith("node")]


def test_each_node_starts_accelerate_with_its_rank_and_the_first_as_the_main_one(slurm: dict[str, str]) -> None:
    done = sweep(slurm, "--output_dir", "a folder", "--num_samples", "8")
    assert done.returncode == 0, done.stderr
    # 12000 + 41234 mod 20000 = 13234; 2 nodes of 4 GPUs = 8 processes.
    launched = [
        f"node {node}: -m accelerate.commands.launch --num_machines 2 --num_processes 8 --machine_rank {node} "
        "--main_process_ip gpu-7 --main_process_port 13234 --mixed_precision no --dynamo_backend no --multi_gpu "
        f"{DRIVER} --num_processes 8 --output_dir a folder --num_samples 8"
        for node in (0, 1)
    ]
    assert of_nodes(slurm) == launched
    assert {"srun --nodes=2", "srun --ntasks=2", "srun --ntasks-per-node=1"} <= set(log(slurm))
    assert "scontrol show hostnames gpu-[7,9]" in log(slurm)
    assert "turn 1 of job 41234: 2 nodes, 8 processes" in done.stdout


def test_accelerate_understands_the_command(slurm: dict[str, str]) -> None:
    assert sweep(slurm, "--num_samples", "8").returncode == 0
    arguments = of_nodes(slurm)[1].split("accelerate.commands.launch ")[1].split()
    parsed = launch_command_parser().parse_args(arguments)
    assert (parsed.multi_gpu, parsed.num_machines, parsed.num_processes, parsed.machine_rank) == (True, 2, 8, 1)
    assert (parsed.main_process_ip, parsed.main_process_port) == ("gpu-7", 13234)
    assert parsed.training_script == str(DRIVER)
    assert parsed.training_script_args == ["--num_processes", "8", "--num_samples", "8"]


def test_a_sweep_over_two_nodes_without_gpus_measures_everything(
    slurm: dict[str, str], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    # Both nodes are this machine; here the stand-in starts them at the same time.
    srun = Path(slurm["PYTHON"]).with_name("srun")
    srun.write_text(
        '#!/usr/bin/env bash\nset -eu\nwhile [ "$1" != bash ]; do shift; done\n'
        'SLURM_NODEID=0 "$@" & first=$!\nSLURM_NODEID=1 "$@" & second=$!\nwait "$first"; wait "$second"\n'
    )
    scontrol = Path(slurm["PYTHON"]).with_name("scontrol")
    scontrol.write_text("#!/usr/bin/env bash\nprintf 'localhost\\nlocalhost\\n'\n")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    environment = slurm | {
        "PYTHON": sys.executable, "MASTER_PORT": port, "SLURM_GPUS_ON_NODE": "0", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    flags = ["--model_path", str(tiny_checkpoint), "--output_dir", str(tmp_path / "out"), "--num_samples", "4",
             "--tier_list", "low", "--top_k_list", "4", "--num_active_blocks_list", "4", "--num_runs_per_sample", "1",
             "--num_warmup_runs", "0", "--max_new_tokens", "2", "--max_repeats", "0",
             "--no_reference",
             "--num_threads", "1"]  # fmt: skip
    done = subprocess.run(
        ["bash", str(SCRIPT), *flags], env=environment, capture_output=True, text=True, timeout=300
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "out").glob("reference-vqa_*.json")
    result = json.loads(path.read_text())
    assert (result["num_samples"], result["provenance"]["num_processes"]) == (4, 2)


def test_one_gpu_alone_is_one_process(slurm: dict[str, str]) -> None:
    assert sweep(slurm | {"STUB_NODES": "1", "SLURM_GPUS_ON_NODE": "1", "MASTER_PORT": "5"}).returncode == 0
    (line,) = of_nodes(slurm)
    assert "--num_processes 1 --machine_rank 0 --main_process_ip gpu-7 --main_process_port 5 " in line
    assert "--multi_gpu" not in line


def test_nodes_without_gpus_start_torchrun(slurm: dict[str, str]) -> None:
    del slurm["SLURM_GPUS_ON_NODE"]
    assert sweep(slurm).returncode == 0
    assert of_nodes(slurm) == [
        f"node {node}: -m torch.distributed.run --nnodes=2 --nproc-per-node=1 --node-rank={node} "
        f"--master-addr=gpu-7 --master-port=13234 {DRIVER} --num_processes 2"
        for node in (0, 1)
    ]


def test_the_exit_code_is_the_sweeps_and_a_failure_is_not_queued_again(slurm: dict[str, str]) -> None:
    assert sweep(slurm, "--fail").returncode == 1
    assert not any("requeue" in line for line in log(slurm))


@pytest.mark.parametrize(("turns", "is_queued"), [("0", True), ("19", False)])
def test_near_the_limit_the_step_is_stopped_and_the_job_queued_again(
    slurm: dict[str, str], turns: str, is_queued: bool
) -> None:
    # 20 turns are allowed; the one after 19 restarts is the 20th.
    environment = slurm | {"SLURM_RESTART_COUNT": turns}
    with subprocess.Popen(["bash", str(SCRIPT), "--long"], env=environment, stderr=subprocess.PIPE, text=True) as job:
        while not Path(environment["STUB_LOG"] + ".step").exists():
            time.sleep(0.02)
        # The file is made before its content is written.
        time.sleep(0.2)
        job.send_signal(signal.SIGUSR1)
        _, output = job.communicate(timeout=30)
    assert job.returncode == 130
    assert "scancel --signal=TERM 41234" in log(slurm)
    assert "stopped cleanly" in log(slurm)
    assert ("scontrol requeue 41234" in log(slurm)) is is_queued
    assert ("not queued again" in output) is not is_queued


def test_outside_a_job_one_line_says_how_to_submit(slurm: dict[str, str]) -> None:
    del slurm["SLURM_JOB_ID"]
    done = sweep(slurm)
    assert done.returncode == 2
    assert done.stderr == (
        "error: no Slurm job, or not submitted from the project's folder; run: sbatch scripts/slurm_sweep.sh FLAG ...\n"
    )


def test_a_job_requests_a_signal_before_the_limit_and_may_be_queued_again() -> None:
    requested = [line for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"#SBATCH --requeue", "#SBATCH --signal=B:USR1@180", "#SBATCH --ntasks-per-node=1"} <= set(requested)
