#!/usr/bin/env bash
# Six models with every algorithm at some input sizes on one GPU; what is refused falls back and is recorded.
# Usage: h200_run.sh OUT [--sizes SIZE ...]   (default 224 448)
# Times and layers of all first, without energy: about a minute a size on an H200. Then energy of five algorithms, about
# two seconds for each network, algorithm and size: a minute a size. What was stopped goes on with the same command.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# shellcheck source=scripts/find_python.sh
. "$root/scripts/find_python.sh"
if [ "$#" -lt 1 ]; then
    echo "error: a folder for the results is needed: h200_run.sh OUT [--sizes SIZE ...]" >&2
    exit 2
fi
out=$1
shift
sizes=(--sizes 224 448)
if [ "$#" -gt 0 ]; then sizes=("$@"); fi
code=0
profile() {
    "$python" "$root/experiments/performance_prediction/run_profile.py" --device cuda --on-unsupported fallback \
        --warmup 3 --measure 5 --model all "$@" "${sizes[@]}" || code=$?
    if [ "$code" -eq 130 ]; then exit 130; fi # stopped by Ctrl-C: the next part is not begun
}
profile --algorithm all --energy off --output-dir "$out/times"
profile --algorithm gemm "implicit gemm" "implicit precomp gemm" "winograd nonfused" torch \
    --energy optional --energy-window 0.4 --output-dir "$out/energy"
exit "$code"
