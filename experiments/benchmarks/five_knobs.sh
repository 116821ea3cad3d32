#!/usr/bin/env bash
# What docs/core_exp/five_knobs.md is about: six tasks by the embedded model, and the cost of MolmoE-1B's shape, on a GPU.
# experiments/benchmarks/five_knobs.sh ACCURACY COST [FIGURES]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
accuracy=$1 cost=$2 figures=${3:-results/five_knobs}
profile=(python experiments/core_exp/acc_lat_profiling.py --max_warmup_runs 3)
grid=(--visual_token_keep_list 1 0.5 --top_k_list 8 4 --num_active_blocks_list 16 12 --sampling_strategy full)
alone=(--tier_list own --top_k_list 8)

mkdir -p "$accuracy"
# Five sets of twelve blocks, block 0 among them.
python - "$accuracy" <<'PY'
import json, random, sys
draw = random.Random(20261127)
for number in range(5):
    with open(f"{sys.argv[1]}/blocks{number}.json", "w") as file:
        json.dump({"12": [0, *sorted(draw.sample(range(1, 16), 11))]}, file)
PY
for task in vqa knowledge choice captions counting reading; do
    asked=("${profile[@]}" --dataset_name "reference_$task" --num_samples 200 --precision float32 --num_runs_per_sample 1)
    all=("${asked[@]}" --num_latency_samples 200)
    "${all[@]}" --tier_list low medium high own "${grid[@]}" --output_dir "$accuracy/grid/$task"
    for rule in random norm divprune; do
        "${all[@]}" "${alone[@]}" --num_active_blocks_list 16 --visual_token_keep_list 0.5 --visual_token_keep_rule "$rule" \
            --output_dir "$accuracy/keep_$rule/$task"
    done
    for number in 0 1 2 3 4; do
        "${all[@]}" "${alone[@]}" --num_active_blocks_list 12 --block_sets_file "$accuracy/blocks$number.json" \
            --output_dir "$accuracy/blocks_$number/$task"
    done
    # The modules answer; in batches.
    "${asked[@]}" --num_latency_samples 1 --accuracy_batch_size 32 "${alone[@]}" --num_active_blocks_list 16 \
        --expert_mass_list 1 0.8 0.6 0.4 --output_dir "$accuracy/mass/$task"
done

python scripts/make_random_checkpoint.py --output "$cost/molmoe_1b"
asked=("${profile[@]}" --model_path "$cost/molmoe_1b" --random_weights --dataset_name reference_vqa --ignore_eos --max_new_tokens 32)
energy=(--num_samples 16 --num_runs_per_sample 1 --energy required)
"${asked[@]}" --tier_list low medium high own "${grid[@]}" --num_samples 24 --num_runs_per_sample 2 --output_dir "$cost/grid"
"${asked[@]}" --tier_list own "${grid[@]}" "${energy[@]}" --output_dir "$cost/energy_own"
"${asked[@]}" --tier_list low medium high --top_k_list 8 --num_active_blocks_list 16 "${energy[@]}" --output_dir "$cost/energy_tiers"
"${asked[@]}" "${alone[@]}" --num_active_blocks_list 16 --expert_mass_list 1 0.3 0.2 0.1 --num_samples 8 --num_runs_per_sample 1 \
    --output_dir "$cost/mass"

python -m experiments.benchmarks.five_knobs "$accuracy" "$cost" --output_dir "$figures"
