#!/usr/bin/env bash
# Profiles the published datasets, or those named, one after the other on a machine with H100 GPUs.
# Usage: run_multi_datasets_h100.sh [DATASET ...] [-- FLAG_OF_acc_lat_profiling.py ...]; see docs/sweeps.md
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# shellcheck source=scripts/find_python.sh
. "$root/scripts/find_python.sh"
exec "$python" "$root/experiments/core_exp/multi_datasets.py" --output_dir results/core_exp_h100 "$@"
