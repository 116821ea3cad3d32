#!/usr/bin/env bash
# Stage 3: 100 input sizes.
# Usage: 3_full_run.sh MODEL ALGORITHM GPU [FLAG_OF_run_profile.py ...], such as: 3_full_run.sh vgg16 "implicit gemm" h100
set -euo pipefail
folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec "$folder/submit_stage.sh" 3_full 08:00:00 "" "$@"
