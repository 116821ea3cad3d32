#!/usr/bin/env bash
# Profiles Molmo2-4B: vision tokens. Its processor needs torchvision (the extra vision).
# Usage: scripts/real_models/molmo2_4b.sh FOLDER [FLAG ...]; PYTHON, MODEL, TASKS, KNOBS and REVISION as of profile_hub_model.sh.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../profile_hub_model.sh" \
    allenai/Molmo2-4B "coco_2014_vqa text_vqa okvqa science_qa_img doc_qa" \
    "--vision_fraction_list 1 0.5 0.25" "$@"
