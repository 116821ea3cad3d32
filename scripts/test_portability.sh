#!/usr/bin/env bash
# Runs tests as on an older processor, or one of another vendor: without AVX-512, and with AVX2 and FMA only where a library
# cannot do without. Floats are then summed in another order, so that a test which compares two computations bit for bit
# fails here. scripts/test.sh does not call it: the numeric tests take as long again as they do there.
# Usage: bash scripts/test_portability.sh [what pytest takes]; without arguments it runs the tests that compute with models.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh requirements-dev.txt

export HF_HUB_OFFLINE=1
export ATEN_CPU_CAPABILITY=default                                    # torch's own kernels
export MKL_ENABLE_INSTRUCTIONS=AVX2                                   # torch's matrix products; AMD has another path
export ONEDNN_MAX_CPU_ISA=AVX2                                        # torch's convolutions
export OPENBLAS_CORETYPE=Nehalem                                      # NumPy's matrix products
export NPY_DISABLE_CPU_FEATURES="X86_V4 AVX512_ICL AVX512_SPR"        # NumPy's other operations
export GLIBC_TUNABLES=glibc.cpu.hwcaps=-AVX512F,-AVX2,-FMA            # exp, log and the like of Python's math
[ "$(uname -m)" != x86_64 ] || export CXX="${CXX:-g++} -mno-avx512f"  # the kernels that are compiled here

# What a library does not know it ignores: so each reports what it took.
python - <<'PYTHON'
import sys

import torch
from numpy._core._multiarray_umath import __cpu_features__

found = torch.backends.cpu.get_cpu_capability(), [name for name in ("X86_V4", "AVX512_ICL") if __cpu_features__.get(name)]
print("torch's kernels: {}; NumPy's beyond AVX2: {}".format(*found))
sys.exit(found not in (("DEFAULT", []), ("NO AVX", [])) and "error: torch or NumPy did not take the older processor")
PYTHON
if [ "$(uname -m)" = x86_64 ] && python -c 'import sys, torch; sys.exit(not torch.backends.mkl.is_available())'; then
    product='import torch; torch.ones(64, 64) @ torch.ones(64, 64)'
    MKL_VERBOSE=1 python -c "$product" | grep -m1 -o 'Intel(R) [A-Za-z0-9() -]* enabled processors' || true
fi

[ "$#" -gt 0 ] || set -- tests/models tests/experiments tests/primitives tests/test_b_model_loader.py
exec python -m pytest -n "${TEST_WORKERS:-2}" --dist loadfile --no-loadscope-reorder "$@"
