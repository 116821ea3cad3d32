#!/usr/bin/env bash
# The data of the predictor: sampled layers and eight networks with every algorithm, sizes one after another.
# Usage: h200_layers.sh OUT   (SIZES and LAYER_SIZES change the inputs, PROFILE_FLAGS adds flags)
# About 8 minutes on an H200. What was stopped goes on with the same command.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# shellcheck source=scripts/find_python.sh
. "$root/scripts/find_python.sh"
if [ "$#" -ne 1 ]; then
    echo "error: a folder for the results is needed: h200_layers.sh OUT" >&2
    exit 2
fi
out=$1
read -ra sizes <<<"${SIZES:-224 448 320 272}"
read -ra layer_sizes <<<"${LAYER_SIZES:-224 400}"
read -ra flags <<<"${PROFILE_FLAGS:---device cuda}"
code=0
profile() {
    "$python" "$root/experiments/performance_prediction/run_profile.py" --on-unsupported fallback --warmup 3 \
        --measure 5 --energy off --output-dir "$out" --algorithm all "${flags[@]}" "$@" || code=$?
    if [ "$code" -eq 130 ]; then exit 130; fi # stopped by Ctrl-C: the next sizes are not begun
}
for place in "${!sizes[@]}"; do
    if [ "$place" -lt "${#layer_sizes[@]}" ]; then
        profile --model sampled_layers --sizes "${layer_sizes[$place]}"
    fi
    profile --model all --sizes "${sizes[$place]}"
done
exit "$code"
