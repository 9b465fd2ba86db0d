#!/usr/bin/env bash
# Run a command as if on another x86 CPU: torch, oneDNN and numba see its instructions alone.
#
#   tools/as_cpu.sh avx2 COMMAND…          no AVX-512: most laptops, and older servers
#   tools/as_cpu.sh portable COMMAND…      the least of x86-64, which stands for any CPU that nothing is known of
#   tools/as_cpu.sh avx2 .venv/bin/python -m pytest tests/unit/engine/attention tests/unit/engine/model
#
# Kernels are compiled for it the first time, which takes a minute, and kept beside those of this CPU.
set -euo pipefail

kind=${1:-}
case $kind in
avx2)
    export ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 NUMBA_CPU_NAME=haswell
    export NUMBA_CPU_FEATURES=+avx2,+fma,+f16c,+bmi,+bmi2,+avx,+sse4.2,+popcnt,+lzcnt,+movbe,+cx16,+xsave
    ;;
portable)
    export ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 NUMBA_CPU_NAME=x86-64 NUMBA_CPU_FEATURES=
    ;;
*)
    echo "as_cpu: $kind is none of avx2, portable" >&2
    exit 2
    ;;
esac
shift
exec "$@"
