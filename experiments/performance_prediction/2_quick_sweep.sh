#!/usr/bin/env bash
# Stage 2: 10 input sizes, to see that times grow with the size.
# Usage: 2_quick_sweep.sh MODEL ALGORITHM GPU [FLAG_OF_run_profile.py ...], such as: 2_quick_sweep.sh vgg16 "implicit gemm" h100
set -euo pipefail
folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec "$folder/submit_stage.sh" 2_quick 01:30:00 --quick "$@"
