#!/usr/bin/env bash
# Profiles OLMoE-1B-7B: experts of a token and their mass, on questions without pictures.
# Usage: scripts/real_models/olmoe_1b_7b.sh FOLDER [FLAG ...]; PYTHON, MODEL, TASKS, KNOBS and REVISION as of profile_hub_model.sh.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../profile_hub_model.sh" \
    allenai/OLMoE-1B-7B-0125-Instruct "reference_questions reference_questions_choice" \
    "--top_k_list 8 4 2 --expert_mass_list 1 0.8" "$@"
