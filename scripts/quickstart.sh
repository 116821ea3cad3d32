#!/usr/bin/env bash
# From a fresh clone to results: makes .venv, installs requirements.txt, profiles the embedded model at 4 settings on
# questions of two types, of which one is answered as well from a small picture.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh requirements.txt

export HF_HUB_OFFLINE=1
output_dir=${OUTPUT_DIR:-results/quickstart}
settings=(--tier_list low own --top_k_list 4 8 --num_active_blocks_list 16)
run=(--num_runs_per_sample 1 --max_warmup_runs 3 --output_dir "$output_dir")
# One process needs no launcher, which would answer Ctrl-C with a traceback of its own.
echo "knobprof profile --dataset_name reference_vqa --ids \$(python scripts/quickstart_questions.py) ${settings[*]} ${run[*]}"
ids=$(python scripts/quickstart_questions.py)
# shellcheck disable=SC2086  # each id is a word
knobprof profile --dataset_name reference_vqa --ids $ids "${settings[@]}" "${run[@]}"
echo "results: $output_dir (one JSON for each setting, and a CSV of all)"
