#!/usr/bin/env bash
# How far a run has come, from another terminal: settings done, failed and left, the one at work, the time left.
# Usage: scripts/check_status.sh RESULTS_DIR
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/find_python.sh
. "$root/scripts/find_python.sh"
if ! "$python" -c 'import sys; from importlib.util import find_spec; sys.exit(find_spec("pydantic") is None)' 2>/dev/null; then
    echo "error: $python is missing or lacks the packages of requirements.txt; run bash scripts/quickstart.sh once, which" \
        "installs them into .venv, or set PYTHON to a Python that has them" >&2
    exit 2
fi
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m experiment_core_utils.planning.status "$@"
