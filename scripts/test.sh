#!/usr/bin/env bash
# Lint, types and the whole test suite, in the same environment as quickstart.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh requirements-dev.txt

export HF_HUB_OFFLINE=1
ruff check .
mypy
python -m pytest "$@"
