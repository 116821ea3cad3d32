#!/usr/bin/env bash
# Profiles one dataset, the embedded one unless another is named, on whatever this machine has.
# Usage: run_combined_profiling.sh [DATASET ...] [-- FLAG_OF_acc_lat_profiling.py ...]; see docs/sweeps.md
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# shellcheck source=scripts/find_python.sh
. "$root/scripts/find_python.sh"
export DATASETS=${DATASETS:-reference_vqa}
exec "$python" "$root/experiments/core_exp/multi_datasets.py" --output_dir results/core_exp "$@"
