#!/usr/bin/env bash
# The tests that need a GPU, by the Python that is there (PYTHON, default python3); nothing is installed.
# Usage: scripts/test_gpu.sh [--quick | PART ...]; without a part all of them, one after the other, each at most 9 minutes.
# --quick runs all but the part runs at once, with a worker for each core. These parts, started beside each other with 14
# workers in all, took 286 s on 16 cores and an H200 (commit 37cd6ad8).
# Each file has a process of its own: a device-side assert in one cannot fail the tests of another.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

files_of() {
    case $1 in
        kernels) echo tests/engines tests/models/molmoe/test_prefix_traces.py \
            tests/experiments/controller/running/test_paused_stages.py \
            tests/experiments/benchmarks/kernels/test_tune.py tests/experiments/benchmarks/kernels/test_harness.py ;;
        graphs) echo tests/models/hf/test_graphed_stages.py \
            tests/models/hf/test_static_cache_decode.py tests/experiments/benchmarks/kernels/test_engine_proof.py ;;
        devices) echo tests/primitives/test_device.py tests/meters/test_main.py tests/meters/test_host_facts.py \
            tests/models/test_text_model.py tests/test_f_experiment_info.py \
            tests/experiments/performance_prediction/test_run_profile.py \
            tests/experiments/performance_prediction/profiling/test_layer_timer.py \
            tests/experiments/performance_prediction/algorithms/test_engines.py ;;
        runs) echo tests/gpu ;;
        --quick) files_of kernels && files_of graphs && files_of devices ;;
        *) return 1 ;;
    esac
}

# Like this, because a file that is only skipped must not count as one that passed.
run_file() {
    "${PYTHON:-python3}" -m pytest -q -p no:cacheprovider "$1" >"$2" 2>&1
    local code=$?
    tail -n 1 "$2" | sed "s|^|$1: |"
    [ "$code" = 0 ] || { [ "$code" = 5 ] && return; sed "s|^|    |" "$2" | tail -n 40; touch "$3"; }
}
export -f run_file

"${PYTHON:-python3}" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
    echo "error: ${PYTHON:-python3} has no torch that sees a GPU; set PYTHON to one that has" >&2
    exit 2
}
export HF_HUB_OFFLINE=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
for part in "${@:-}"; do
    for name in ${part:-kernels graphs devices runs}; do
        files=$(files_of "$name") || { echo "error: no part $name; there are kernels, graphs, devices, runs and --quick" >&2; exit 2; }
        SECONDS=0
        # Files of the runs measure times: one at a time.
        case $name in runs) together=1 ;; --quick) together=${TEST_WORKERS:-$(nproc)} ;; *) together=${TEST_WORKERS:-4} ;; esac
        # shellcheck disable=SC2086
        find $files -name 'test_*.py' | sort | xargs -P "$together" -I{} bash -c \
            'run_file "$1" "$2/$(echo "$1" | tr / _)" "$2/failed"' _ {} "$logs"
        echo "part $name: $SECONDS s"
    done
done
[ ! -e "$logs/failed" ]
