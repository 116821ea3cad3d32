#!/usr/bin/env bash
# From a fresh clone to results: makes .venv, installs requirements.txt, profiles the embedded model on 26 questions
# about texts in pictures and 26 about prices that the model has to know, so that each knob shows a sure effect.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh requirements.txt

export HF_HUB_OFFLINE=1
output_dir=${OUTPUT_DIR:-results/quickstart}
# One process needs no launcher, which would answer Ctrl-C with a traceback of its own.
set -x
knobprof profile --dataset_name reference_mixed --ids $(seq 1 20 501) $(seq 4 20 504) \
    --tier_list low own --top_k_list 2 8 --num_active_blocks_list 13 16 \
    --num_runs_per_sample 1 --max_warmup_runs 3 --output_dir "$output_dir"
{ set +x; } 2>/dev/null
echo "results: $output_dir (one JSON for each setting, and a CSV of all)"
