#!/usr/bin/env bash
# Profiles GPT-OSS-20B: experts of a token and limits of an answer, on questions without pictures.
# Usage: scripts/real_models/gpt_oss_20b.sh FOLDER [FLAG ...]; PYTHON, MODEL, TASKS, KNOBS and REVISION as of profile_hub_model.sh.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../profile_hub_model.sh" \
    openai/gpt-oss-20b "reference_questions reference_questions_choice" \
    "--top_k_list 4 2 --answer_limit_list 256 2048 --max_new_tokens 2048" "$@"
