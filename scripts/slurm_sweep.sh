#!/usr/bin/env bash
# A sweep over the nodes of a Slurm job, one launcher a node; stops before the time limit and goes on in a new turn.
# Usage, from the project's folder: sbatch --nodes=2 --gpus-per-node=4 --time=12:00:00 scripts/slurm_sweep.sh FLAG ...
# (the flags of experiments/core_exp/acc_lat_profiling.py; --output_dir on a file system that all nodes see).
# Variables: PYTHON, MASTER_PORT, MAX_TURNS (default 20: how often the job may be queued again). See docs/sweeps.md
#SBATCH --job-name=knob_sweep
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@180
set -euo pipefail

# Slurm runs a copy of this file elsewhere, so the project is found by where the job was submitted.
root=${SLURM_SUBMIT_DIR:-$PWD}
driver=$root/experiments/core_exp/acc_lat_profiling.py
if [ -z "${SLURM_JOB_ID:-}" ] || [ ! -f "$driver" ]; then
    echo "error: no Slurm job, or not submitted from the project's folder; run: sbatch scripts/slurm_sweep.sh FLAG ..." >&2
    exit 2
fi
# shellcheck source=scripts/find_python.sh
. "$root/scripts/find_python.sh"

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts[0]}
# Jobs that share a node must not share a port; below the ports that systems hand out by themselves.
export MASTER_PORT=${MASTER_PORT:-$((12000 + SLURM_JOB_ID % 20000))}
nodes=${#hosts[@]}
gpus=${SLURM_GPUS_ON_NODE:-0}
processes=$((nodes * (gpus > 0 ? gpus : 1)))

# The rank is each node's own: it is filled in there.
if [ "$gpus" -eq 0 ]; then
    # On CPUs accelerate starts a single process whatever is requested; torchrun starts one on each node.
    launch=("$python" -m torch.distributed.run --nnodes="$nodes" --nproc-per-node=1 --node-rank=@NODE_RANK@
        --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT")
else
    launch=("$python" -m accelerate.commands.launch --num_machines "$nodes" --num_processes "$processes"
        --machine_rank @NODE_RANK@ --main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT"
        --mixed_precision no --dynamo_backend no)
    if [ "$processes" -gt 1 ]; then launch+=(--multi_gpu); fi
fi
launch+=("$driver" --num_processes "$processes" "$@")

out_of_time=
# shellcheck disable=SC2329  # called by the trap
stop_before_the_limit() {
    echo "the time limit is near: stopping after the sample at work" >&2
    out_of_time=yes
    # To the steps, not to this shell. srun itself would end the tasks at once on a signal to terminate.
    scancel --signal=TERM "$SLURM_JOB_ID"
}
trap stop_before_the_limit USR1
# Slurm sends this one to the steps as well; this shell waits for them.
trap 'echo "terminated by Slurm" >&2' TERM

echo "turn $((${SLURM_RESTART_COUNT:-0} + 1)) of job $SLURM_JOB_ID: $nodes nodes, $processes processes, $(date)"
# shellcheck disable=SC2016  # each node fills in its own
srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --kill-on-bad-exit=0 \
    bash -c 'exec "${@//@NODE_RANK@/$SLURM_NODEID}"' launch "${launch[@]}" &
step=$!
# A trap interrupts `wait`; the step's own exit code comes only once it is gone.
while :; do
    code=0
    wait "$step" || code=$?
    kill -0 "$step" 2>/dev/null || break
done

if [ -n "$out_of_time" ] && [ "$code" -ne 0 ]; then
    if [ "${SLURM_RESTART_COUNT:-0}" -ge "$((${MAX_TURNS:-20} - 1))" ]; then
        echo "not queued again: ${MAX_TURNS:-20} turns are over (MAX_TURNS); submit it once more to go on" >&2
        exit "$code"
    fi
    echo "queued again: the next turn goes on from here" >&2
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
