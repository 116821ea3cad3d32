#!/usr/bin/env bash
# Profiles SmolVLM2-2.2B-Instruct: vision tokens and kept image tokens.
# Usage: scripts/real_models/smolvlm2_2_2b.sh FOLDER [FLAG ...]; PYTHON, MODEL, TASKS, KNOBS and REVISION as of profile_hub_model.sh.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../profile_hub_model.sh" \
    HuggingFaceTB/SmolVLM2-2.2B-Instruct "coco_2014_vqa text_vqa okvqa science_qa_img doc_qa" \
    "--vision_fraction_list 1 0.5 0.25 --visual_token_keep_list 1 0.5" "$@"
