# shellcheck shell=bash
# Sourced by the shell scripts: sets `python` to $PYTHON, else that of an active or of this project's environment.
# Usage: root=FOLDER_OF_THE_PROJECT; . "$root/scripts/find_python.sh"
python=${PYTHON:-}
if [ -z "$python" ]; then
    python=python3
    if [ -z "${VIRTUAL_ENV:-}" ] && [ -x "${root:?}/.venv/bin/python" ]; then
        python=$root/.venv/bin/python
    fi
fi
