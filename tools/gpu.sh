#!/usr/bin/env bash
# Benchmarks and tests of the GPU path, in parts (docs/gpu.md). Without a GPU it says so in one line, and succeeds.
#
#   TANDEM_PYTHON=python3   an interpreter that has torch (default that of TANDEM_VENV)
#   tools/gpu.sh ARGS…      for benchmarks/gpu (--part, --minutes, --out, --dry-run, --help)
#
# Nothing is installed, for a machine with a GPU may have no way to: what kit/ has (tools/gpu_pack.sh) is unpacked into a
# folder of its own, which is also Triton's cache (TRITON_CACHE_DIR, unless that is set). Figures come before tests; the
# exit status is 1 if anything failed.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)

python=${TANDEM_PYTHON:-${TANDEM_VENV:-$here/.venv}/bin/python}
"$python" -c 'import torch' 2>/dev/null || {
    echo "gpu: $python has no torch: run TANDEM_TORCH=cuda make setup, or set TANDEM_PYTHON" >&2
    exit 1
}
path="$here/engine:$here/services:$here/operator:$here/lab:$here/tests/support:$here/benchmarks"
site=${TMPDIR:-/tmp}/tandem-kit
has_packages() { "$python" -c 'import msgspec, zmq, llguidance, nixl' 2>/dev/null; }
if [ -e "$here/kit/manifest.json" ]; then
    # A kit for another Python is of no use, and not needed where its packages are installed.
    if unpacked=$(TANDEM_PYTHON="$python" "$here/tools/gpu_unpack.sh" "$here/kit" "$site"); then
        has_packages || path=$unpacked
        [ ! -d "$site/triton-cache" ] || export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$site/triton-cache}"
    else
        has_packages || exit 1
    fi
fi
PYTHONPATH="$path${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m gpu "$@"
