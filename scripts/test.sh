#!/usr/bin/env bash
# Lint, types, the documentation and the whole test suite, in the same environment as quickstart.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh requirements-dev.txt

export HF_HUB_OFFLINE=1
ruff check .
lint-imports --no-cache --no-logo
# Beside mypy, which takes one core: the workers, and the processes that tests start, then find all modules compiled.
# What fails here fails, and is shown, in the run itself.
# Behind it come the documentation's links, anchors and generated pages.
{ python -m pytest --collect-only -qq >/dev/null || true; NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet; } &
beside=$!
mypy
wait "$beside"
# Two workers, a file to one of them: some tests start processes of their own. The order is that of tests/conftest.py, the
# longest files first; xdist's own begins with the files of most tests and leaves the longest for the end.
python -m pytest -n "${TEST_WORKERS:-2}" --dist loadfile --no-loadscope-reorder "$@"
