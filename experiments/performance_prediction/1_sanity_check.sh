#!/usr/bin/env bash
# Stage 1: whether a model works with an algorithm, at one input size.
# Usage: 1_sanity_check.sh MODEL ALGORITHM GPU [FLAG_OF_run_profile.py ...], such as: 1_sanity_check.sh vgg16 "implicit gemm" h100
set -euo pipefail
folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec "$folder/submit_stage.sh" 1_sanity 00:15:00 --test "$@"
