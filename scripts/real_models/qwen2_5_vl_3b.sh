#!/usr/bin/env bash
# Profiles Qwen2.5-VL-3B-Instruct: vision tokens and kept image tokens.
# Usage: scripts/real_models/qwen2_5_vl_3b.sh FOLDER [FLAG ...]; PYTHON, MODEL, TASKS, KNOBS and REVISION as of profile_hub_model.sh.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../profile_hub_model.sh" \
    Qwen/Qwen2.5-VL-3B-Instruct "coco_2014_vqa text_vqa okvqa science_qa_img doc_qa" \
    "--vision_fraction_list 1 0.5 0.25 --visual_token_keep_list 1 0.5" "$@"
