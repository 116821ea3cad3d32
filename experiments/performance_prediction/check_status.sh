#!/usr/bin/env bash
# How far the stages have come: a line for each combination with its sizes measured, not measurable and left.
# Usage: check_status.sh [RESULTS] (default results)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# shellcheck source=scripts/find_python.sh
. "$root/scripts/find_python.sh"
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} "$python" -m experiments.performance_prediction.profile_status "${1:-results}"
if command -v squeue >/dev/null; then squeue --me --format="%.10i %.40j %.8T %.10M %R"; fi
