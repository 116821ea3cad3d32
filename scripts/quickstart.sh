#!/usr/bin/env bash
# From a fresh clone to results: makes .venv, installs requirements.txt, profiles the embedded model on the embedded task.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh requirements.txt

export HF_HUB_OFFLINE=1
output_dir=${OUTPUT_DIR:-results/quickstart}
# One process needs no launcher, which would answer Ctrl-C with a traceback of its own.
set -x
knobprof profile --tier_list low medium high --top_k_list 4 8 --num_active_blocks_list 12 16 \
    --num_samples 16 --num_runs_per_sample 2 --max_warmup_runs 3 --output_dir "$output_dir"
{ set +x; } 2>/dev/null
echo "results: $output_dir (one JSON for each setting, and a CSV of all)"
