#!/usr/bin/env bash
# Profiles Qwen3-VL-30B-A3B-Instruct: vision tokens, kept image tokens and experts of a token.
# Usage: scripts/real_models/qwen3_vl_30b_a3b.sh FOLDER [FLAG ...]; PYTHON, MODEL, TASKS, KNOBS and REVISION as of profile_hub_model.sh.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../profile_hub_model.sh" \
    Qwen/Qwen3-VL-30B-A3B-Instruct "coco_2014_vqa text_vqa okvqa science_qa_img doc_qa" \
    "--vision_fraction_list 1 0.5 0.25 --visual_token_keep_list 1 0.5 --top_k_list 8 4" "$@"
