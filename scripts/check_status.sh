#!/usr/bin/env bash
# How far a run has come, from another terminal: settings done, failed and left, the one at work, the time left.
# Usage: scripts/check_status.sh RESULTS_DIR
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/find_python.sh
. "$root/scripts/find_python.sh"
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m experiment_core_utils.sweep.status "$@"
