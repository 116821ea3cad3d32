#!/usr/bin/env bash
# One stage of profiling: submitted to Slurm where sbatch is there, run here otherwise. Called by the three stages.
# Usage: submit_stage.sh STAGE TIME_LIMIT FLAG MODEL ALGORITHM GPU [FLAG_OF_run_profile.py ...]
# GPU: l40s, h100, v100, or the label of what is there (run_profile.py --check-cuda); cpu runs without one.
# Variables: PYTHON, RESULTS (default results), CONSTRAINT (default gpuGPU); sbatch reads SBATCH_PARTITION and the like.
set -euo pipefail
folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$folder/../.." && pwd)
# shellcheck source=scripts/find_python.sh
. "$root/scripts/find_python.sh"

if [ "$#" -lt 6 ]; then
    echo "error: MODEL ALGORITHM GPU are needed, such as: vgg16 gemm h100" >&2
    echo "models: $("$python" "$folder/run_profile.py" --list-models | cut -d' ' -f1 | paste -sd' ')" >&2
    echo "algorithms: $("$python" "$folder/run_profile.py" --list-algorithms | paste -sd, | sed 's/,/, /g')" >&2
    exit 2
fi
stage=$1 time_limit=$2 flag=$3 model=$4 algorithm=$5 gpu=${6,,}
shift 6

results=${RESULTS:-results}
name=${model}_${algorithm// /_}_$gpu
output=$results/$stage/$name
command=("$python" "$folder/run_profile.py" --model "$model" --algorithm "$algorithm" --output-dir "$results")
if [ -n "$flag" ]; then command+=("$flag"); fi
if [ "$gpu" = cpu ]; then command+=(--device cpu); else command+=(--device cuda --gpu "$gpu"); fi
command+=("$@")
mkdir -p "$output"

if ! command -v sbatch >/dev/null; then
    echo "no sbatch: running here, output also in $output/here.out"
    "${command[@]}" 2>&1 | tee -i "$output/here.out"
    exit
fi
request=(--job-name="$name" --output="$output/%j.out" --time="$time_limit" --ntasks=1)
if [ "$gpu" != cpu ]; then request+=(--gres=gpu:1 --constraint="${CONSTRAINT:-gpu$gpu}"); fi
printf -v line '%q ' "${command[@]}"
sbatch "${request[@]}" --wrap="exec $line"
echo "output: $output"
