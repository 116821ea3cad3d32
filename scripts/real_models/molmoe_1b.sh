#!/usr/bin/env bash
# Profiles MolmoE-1B: vision tokens, kept image tokens and experts of a token.
# Usage: scripts/real_models/molmoe_1b.sh FOLDER [FLAG ...]; PYTHON, MODEL, TASKS, KNOBS and REVISION as of profile_hub_model.sh.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../profile_hub_model.sh" \
    allenai/MolmoE-1B-0924 "coco_2014_vqa text_vqa okvqa science_qa_img doc_qa" \
    "--vision_fraction_list 1 0.5 0.25 --top_k_list 8 4 --visual_token_keep_list 1 0.5" "$@"
